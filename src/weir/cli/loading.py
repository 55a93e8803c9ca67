"""Options of every command that loads a model.

The decorator `loads_model` adds the options to a command. The command gets a dictionary of the
options that were typed, which it can pass to `weir.load` as arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from weir.cli.common import messages, say, waiting
from weir.cli.runtime import freeze_imports
from weir.errors import WeirError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OPTIONS: dict[str, Any] = {
    "dtype": Annotated[
        str | None,
        Option(
            help="Dtype of weights, keys and values: auto, float32, bfloat16, float16 or float64. "
            "For a .gguf file, naming a dtype without --weights dequantizes the weights "
            "[default: auto]"
        ),
    ],
    "device": Annotated[
        str | None,
        Option(help="Device of the model, such as cpu or cuda:1 [default: a GPU if there is one]"),
    ],
    "device_map": Annotated[
        str | None,
        Option(
            help="Instead of --device; auto spreads the model over devices, and needs accelerate."
        ),
    ],
    "weights": Annotated[
        str | None,
        Option(
            help="Format of the weights. q8_0, q4_0 or q4_1: quantize linear layers. gguf: keep a "
            "GGUF file's blocks. int8 or int4: quantize with torchao. [default: as saved; "
            "for a .gguf file, gguf if the model is on a CPU, no --dtype or --device-map is given, "
            "and weir's kernels can multiply its blocks]"
        ),
    ],
    "revision": Annotated[str | None, Option(help="Branch, tag or commit of a Hub id.")],
    "trust_remote_code": Annotated[
        bool, Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ],
}
"""The options, by the name of the parameter of `weir.load`."""

Loading = dict[str, Any]
"""The arguments of `weir.load` that were typed as options, by name."""


def loads_model(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options with these names, or all `OPTIONS`, to a command after its other options.

    The command's parameter `loading` gets the options that were typed.
    """
    wanted = {name: OPTIONS[name] for name in names or OPTIONS}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**given: Any) -> Any:
            values = {name: given.pop(name, None) for name in wanted}
            return function(**given, loading={k: v for k, v in values.items() if v})

        own = inspect.signature(function, eval_str=True).parameters.values()
        kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name != "loading"]
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if name == "trust_remote_code" else None,
                annotation=annotation,
            )
            for name, annotation in wanted.items()
        ]
        # Typer reads these attributes. After `wraps`, they would describe the decorated function,
        # which has a parameter `loading` instead of the options.
        command.__signature__ = inspect.Signature([*kept, *more])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (*kept, *more)}
        del command.__wrapped__
        return command

    return decorate


def load_model(
    name: str, loading: Loading | None = None, *, encoders: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Call `weir.load` and show progress. With `encoders`, encoders are accepted too."""
    loading = loading or {}
    with waiting(f"loading {name}"):
        from transformers.utils.logging import disable_progress_bar

        from weir.loading import from_where, is_encoder, is_gguf, is_local, load, load_encoder

        read: Callable[..., tuple[PreTrainedModel, PreTrainedTokenizerBase]] = load
        if encoders and is_encoder(name, **from_where(loading)):
            if "weights" in loading:
                raise WeirError(
                    f"--weights is only for models that generate text, and {name} is an encoder. "
                    "Leave out --weights."
                )
            read = load_encoder
        # Loading a GGUF file shows a progress bar. A terminal cannot show it together with the
        # line of `waiting`, so the file is loaded after this block.
        barred = is_gguf(name) and messages().is_interactive
        if (local := is_local(name)) and not barred:
            disable_progress_bar()
            loaded = read(name, **loading)
    if not local and messages().is_terminal:  # the Hub shows its own bars
        say(f"fetching {name} from the Hugging Face Hub")
    if barred or not local:
        loaded = read(name, **loading)
    freeze_imports()
    return loaded
