"""The options of every command that loads a model, in one place: how it is loaded, and from where.

A command that is marked with `loads_model` has them among its own, and gets those that were given
as one dictionary, the arguments of `weir.load`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir.cli.common import messages, say, waiting
from weir.cli.runtime import freeze_imports
from weir.errors import WeirError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OPTIONS: dict[str, Any] = {
    "dtype": Annotated[
        str | None,
        typer.Option(
            help="Of weights, keys and values: auto, float32, bfloat16, float16 or float64 "
            "[default: auto]"
        ),
    ],
    "device": Annotated[
        str | None,
        typer.Option(help="Where the model lives: cpu, cuda:1 [default: a GPU if there is one]"),
    ],
    "device_map": Annotated[
        str | None,
        typer.Option(help="In place of --device: auto spreads the model; needs accelerate."),
    ],
    "weights": Annotated[
        str | None,
        typer.Option(
            help="int8 or int4: linear layers in so few bits; needs torchao [default: as saved]"
        ),
    ],
    "revision": Annotated[str | None, typer.Option(help="Of a Hub id: the branch, tag or commit.")],
    "trust_remote_code": Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model brings.")
    ],
}
"""By the names that `weir.load` has for them."""

Loading = dict[str, Any]
"""Arguments of `weir.load` that somebody gave."""


def loads_model(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options that say how a model is loaded, behind its own.

    It has a parameter `loading` for what was given of them, in a `Loading`.

    Args:
        names: of `OPTIONS`; none for all.
    """
    wanted = {name: OPTIONS[name] for name in names or OPTIONS}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**given: Any) -> Any:
            values = {name: given.pop(name, None) for name in wanted}
            return function(**given, loading={k: v for k, v in values.items() if v})

        own = inspect.signature(function, eval_str=True).parameters.values()
        kept = [it.replace(kind=it.KEYWORD_ONLY) for it in own if it.name != "loading"]
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if name == "trust_remote_code" else None,
                annotation=annotation,
            )
            for name, annotation in wanted.items()
        ]
        # Typer reads both; `wraps` would have it read those of the function.
        command.__signature__ = inspect.Signature([*kept, *more])  # type: ignore[attr-defined]
        command.__annotations__ = {it.name: it.annotation for it in (*kept, *more)}
        del command.__wrapped__
        return command

    return decorate


def load_model(
    name: str, loading: Loading | None = None, *, encoders: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`weir.load`, which takes a while and says so.

    Args:
        name: of the model.
        loading: how.
        encoders: an encoder will do as well.

    Raises:
        WeirError: as `load`, or weights of few bits are asked of an encoder.
    """
    loading = loading or {}
    with waiting(f"loading {name}"):
        from transformers.utils.logging import disable_progress_bar

        from weir.models import from_where, is_encoder, is_local, load, load_encoder

        read: Callable[..., tuple[PreTrainedModel, PreTrainedTokenizerBase]] = load
        if encoders and is_encoder(name, **from_where(loading)):
            if "weights" in loading:
                raise WeirError("--weights is for models that stream, and this one is an encoder")
            read = load_encoder
        if is_local(name):
            disable_progress_bar()
            loaded = read(name, **loading)
            freeze_imports()
            return loaded
    if messages().is_terminal:
        say(f"fetching {name} from the Hugging Face Hub")  # which shows bars of its own
    loaded = read(name, **loading)
    freeze_imports()
    return loaded
