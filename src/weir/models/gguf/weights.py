"""Weights of GGUF files: finds the tensors of each parameter of a model, and reads them.

`plan_fillings` gives one `Filling` for each parameter of a model without weights. It refuses a file
that lacks the numbers of a parameter, a file with tensors that nothing reads, and tensors whose
shape differs from the configuration. So no parameter ever keeps the random numbers of
transformers' initialization.

The names come from the package gguf, which knows what llama.cpp's converter calls each module. For
some architectures, the converter also changes the order or the values of tensors. `LAYOUTS` and the
functions below describe these changes and undo them.
"""

from __future__ import annotations

import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

from weir.errors import WeirError, describe_missing
from weir.models.gguf.config import CONFIG_TENSORS
from weir.models.gguf.header import GGUFHeader, TensorInfo, list_some

TOGETHER = 1 << 20
"""Numbers that are dequantized at a time: their copy in float32 takes 4 MB."""
COMPUTED = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?")
"""Names of rotary frequencies that old converters stored; they follow from the configuration."""


@dataclass(frozen=True)
class TensorLayout:
    """Changes that llama.cpp's converter makes to the tensors of an architecture.

    Attributes:
        paired: whether the rows of query and key projections are ordered so that the two numbers
            that a rotation mixes are next to each other; in transformers, they are half a head
            apart.
        shifted_norms: whether norms are stored with 1 added.
        fused: how transformers orders the rows of a fused query-key-value projection, where the
            file has all queries first: "head" for query, key and value of each head together,
            "group" for the queries of a KV head and then its key and value; "" for none.
        transposed: pattern of the names of weights that transformers stores as [inputs, outputs];
            "" for none.
        optional: whether files may lack biases. As in llama.cpp, biases that no layer has count as
            0.
    """

    paired: bool = False
    shifted_norms: bool = False
    fused: str = ""
    transposed: str = ""
    optional: bool = False


_PLAIN = TensorLayout()
_OPTIONAL, _PAIRED = TensorLayout(optional=True), TensorLayout(paired=True, optional=True)
_SHIFTED = TensorLayout(shifted_norms=True)
LAYOUTS: Mapping[str, TensorLayout] = {
    "llama": _PAIRED,
    "mistral3": _PAIRED,
    "arcee": _PAIRED,
    "granite": _PAIRED,
    "granitemoe": _PAIRED,
    "olmo": _PAIRED,
    "smollm3": _PAIRED,
    "gemma": _SHIFTED,
    "gemma2": _SHIFTED,
    "gemma3": _SHIFTED,
    "nemotron": TensorLayout(shifted_norms=True, optional=True),
    "bloom": TensorLayout(fused="head"),
    "gptneox": TensorLayout(fused="head"),
    "falcon": TensorLayout(fused="group"),
    "gpt-oss": TensorLayout(transposed=r"\.experts\.(gate_up|down)_proj$"),
    **dict.fromkeys(("mpt", "phi2", "phi3", "starcoder2"), _PLAIN),
    **dict.fromkeys(
        "exaone4 olmo2 olmoe qwen2 qwen2moe qwen3 qwen3moe seed_oss stablelm".split(), _OPTIONAL
    ),
}
"""The layout of each architecture that can be read, by the architecture's name in GGUF files."""

OWN_NAMES = {
    # Bloom's and Falcon's modules have a prefix that the package gguf does not know.
    r"transformer\.(word_embeddings_layernorm)": "token_embd_norm",
    r"transformer\.h\.(\d+)\.post_attention_layernorm": "blk.{}.ffn_norm",
    r"model\.layers\.(\d+)\.block_sparse_moe\.router(?:\.layer)?": "blk.{}.ffn_gate_inp",
    r"model\.layers\.(\d+)\.block_sparse_moe\.(?:experts\.down_proj|output_linear)": (
        "blk.{}.ffn_down_exps"
    ),
    r"model\.layers\.(\d+)\.mlp\.experts\.down_proj": "blk.{}.ffn_down_exps",
}
"""Patterns of the names of modules that the package gguf does not know, and the names that files
give these modules.
"""
_JOINED = {
    r"(?:.*\.)?layers\.(\d+)\..*\b(?:experts\.gate_up_proj|block_sparse_moe\.input_linear)": (
        "blk.{}.ffn_gate_exps",
        "blk.{}.ffn_up_exps",
    ),
    r"(?:.*\.)?layers\.(\d+)\.shared_mlp\.input_linear": (
        "blk.{}.ffn_gate_shexp",
        "blk.{}.ffn_up_shexp",
    ),
    r"(?:.*\.)?layers\.(\d+)\.mlp\.gate_up_proj": ("blk.{}.ffn_gate", "blk.{}.ffn_up"),
}
"""Patterns of the names of modules that join gate and up projection, and the names of the two
tensors that files have instead.
"""
_BIASES = re.compile(r"blk\.\d+\.((?:attn_(?:q|k|v|output)|ffn_(?:gate|up|down))\.bias)")
_QKV = ("attn_q", "attn_k", "attn_v")
_HEAD_NORMS = re.compile(r"model\.layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.(\d+)")
"""StableLM's norms, one for each head, which files store as one tensor."""


@dataclass(frozen=True)
class Filling:
    """How the numbers of one parameter are read from a file.

    Attributes:
        shape: the parameter's shape.
        tensors: the tensors that hold its numbers. Their rows, concatenated, are the rows of the
            parameter. Without tensors, all numbers are 0.
        columns: how many numbers a row has.
        order: for each row of the parameter, its place among the rows of the tensors; None for the
            same order.
        less: a number that is subtracted from every number.
        transposed: whether the last two dimensions of the parameter are swapped after reading.
    """

    shape: torch.Size
    tensors: tuple[TensorInfo, ...]
    columns: int
    order: Tensor | None = None
    less: float = 0.0
    transposed: bool = False

    @property
    def kind(self) -> str:
        """Name of the tensors' ggml type; "" if there are no tensors, their types differ, or rows
        cannot be moved as bytes.
        """
        kinds = {(tensor.type, tensor.shape[0]) for tensor in self.tensors}
        alike = len(kinds) == 1 and self.tensors[0].shape[0] == self.columns
        if not alike or self.less or self.transposed:
            return ""
        return _type_of(self.tensors[0]).name

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the file."""
        return sum(math.prod(_raw_shape(tensor)) for tensor in self.tensors)

    def raw_parts(self, most: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the rows of the parameter, in its order, as the bytes that the file has for them.

        A part has at most `most` rows. For each part, yields the index of its first row, and its
        bytes [rows, bytes of a row].
        """
        rows = self.shape.numel() // self.columns
        if self.order is None and len(self.tensors) == 1:
            for start in range(0, rows, most):
                yield start, _read_rows(self.tensors[0], start, min(rows, start + most))
            return
        whole = [_read_rows(tensor, 0, _raw_shape(tensor)[0]) for tensor in self.tensors]
        stored = whole[0] if len(whole) == 1 else np.concatenate(whole)
        order = torch.arange(rows) if self.order is None else self.order
        for start in range(0, rows, most):
            yield start, stored[order[start : start + most].numpy()]

    def read(self, dtype: torch.dtype) -> Tensor:
        """Read the numbers in a dtype: dequantized to float32, and rounded from there."""
        if not self.tensors:
            return torch.zeros(self.shape, dtype=dtype)
        rows = self.shape.numel() // self.columns
        out = torch.empty(rows, self.columns, dtype=dtype)
        place = None
        if self.order is not None:
            stored = sum(math.prod(t.shape) for t in self.tensors) // self.columns
            place = torch.full((stored,), -1)
            place[self.order] = torch.arange(rows)
        start = 0
        for tensor in self.tensors:
            for numbers in _dequantized(tensor, self.columns):
                if self.less:
                    numbers -= self.less
                there = slice(start, start + len(numbers))
                if place is None:
                    out[there] = torch.from_numpy(numbers)
                else:
                    to, given = place[there], torch.from_numpy(numbers)
                    out[to[to >= 0]] = given[to >= 0].to(dtype)
                start = there.stop
        if self.transposed:
            *outer, inputs, outputs = self.shape
            return out.view(*outer, outputs, inputs).transpose(-1, -2).contiguous()
        return out.view(self.shape)


def check_readable(header: GGUFHeader) -> None:
    """Refuse a file whose weights cannot be read, before anything is built for them.

    Raises WeirError if the package gguf is missing or does not know a tensor's type, if a tensor's
    rows cannot be divided into blocks of its type, or if a file ends before its weights do.
    """
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
    except ImportError:
        raise WeirError(describe_missing("reading GGUF files", "gguf")) from None
    # Types that are not readable are left out here, and refused below with a tensor's name.
    readable = {}
    for number in {tensor.type for tensor in header.tensors}:
        with suppress(ValueError, KeyError, NotImplementedError):
            kind = GGMLQuantizationType(number)
            with np.errstate(all="ignore"):
                dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            readable[number] = kind.name
    sizes = {path: path.stat().st_size for path in header.paths}
    for tensor in header.tensors:
        if tensor.type not in readable:
            called = next((k.name for k in GGMLQuantizationType if k == tensor.type), None)
            raise WeirError(
                f"{tensor.path} stores {tensor.name} as {called or f'type {tensor.type}'}, which "
                "the package gguf cannot read. Use the model in another quantization, such as "
                "Q4_K_M, Q8_0 or F16."
            )
        numbers = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)][0]
        if tensor.shape[0] % numbers:
            raise WeirError(
                f"{tensor.path} stores {tensor.name} in rows of {tensor.shape[0]:,} numbers, "
                f"which cannot be divided into blocks of {numbers} ({readable[tensor.type]}). "
                "Download it again."
            )
        rows, nbytes = _raw_shape(tensor)
        if (end := tensor.at + rows * nbytes) > sizes[tensor.path]:
            raise WeirError(
                f"{tensor.path} is cut off: {tensor.name} ends at byte {end:,}, but the file has "
                f"only {sizes[tensor.path]:,} bytes. Download it again."
            )


def plan_fillings(model: PreTrainedModel, header: GGUFHeader) -> dict[str, Filling]:
    """Find the tensors of each parameter and stored buffer of a model without weights, by name.

    A parameter that several modules share, such as the weight of a tied head, is listed once.

    Raises WeirError if the architecture is unknown, if the file lacks a tensor or holds one that
    nothing reads, or if a tensor has another shape than the model's configuration says.
    """
    found = _Plan(model, header).fillings()
    used = {tensor.name for filling in found.values() for tensor in filling.tensors}
    left = [
        tensor.name
        for tensor in header.tensors
        if tensor.name not in used
        and tensor.name not in CONFIG_TENSORS
        and not COMPUTED.fullmatch(tensor.name)
    ]
    if left:
        raise WeirError(
            f"{header.path} holds {len(left):,} tensor{'s' * (len(left) > 1)} that weir does not "
            f"know how to use: {list_some(left)}. Without {'them' if len(left) > 1 else 'it'} a "
            f"model of the type {model.config.model_type!r} would answer wrongly. Use another file "
            "of the model, or its safetensors folder."
        )
    return found


@dataclass
class _Plan:
    """The search for the tensors of one model."""

    model: PreTrainedModel
    header: GGUFHeader
    tensors: dict[str, TensorInfo] = field(init=False)
    layout: TensorLayout = field(init=False)
    config: Any = field(init=False)
    name_of: Callable[[str], str | None] = field(init=False)

    def __post_init__(self) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        architecture = self.header.architecture
        known = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        if architecture not in LAYOUTS or architecture not in known:
            raise WeirError(
                f"{self.header.path} has a model of the architecture {architecture!r}, whose "
                f"weights weir cannot read. It can read {', '.join(sorted(LAYOUTS))}."
            )
        self.layout = LAYOUTS[architecture]
        self.tensors = {tensor.name: tensor for tensor in self.header.tensors}
        self.config = self.model.config.get_text_config(decoder=True)
        layers = self.config.num_hidden_layers
        self.name_of = get_tensor_name_map(known[architecture], layers).get_name

    def fillings(self) -> dict[str, Filling]:
        found: dict[str, Filling] = {}
        missing: dict[str, str] = {}
        for name, parameter in _stored(self.model):
            wanted = self.names(name, parameter.shape)
            absent = [each for each in wanted if each not in self.tensors]
            if absent and self.is_zero(wanted[0]):
                found[name] = Filling(parameter.shape, (), parameter.shape[-1])
                continue
            if absent or not wanted:
                for each in absent or [f"one for {name}"]:
                    missing.setdefault(each, f"{each} (for {name})" if absent else each)
                continue
            found[name] = self.filling(name, parameter.shape, wanted)
        if missing:
            raise WeirError(
                f"{self.header.path} lacks {len(missing):,} of the tensors that its model needs: "
                f"{list_some(list(missing.values()))}. Download the file again, or use another "
                "file of the model."
            )
        return found

    def names(self, name: str, shape: torch.Size) -> list[str]:
        """Return the names of the tensors that a parameter needs; empty if weir knows none."""
        module, suffix = _split(name)
        for pattern, parts in _JOINED.items():
            if match := re.fullmatch(pattern, module):
                joined = [part.format(match[1]) + suffix for part in parts]
                if joined[0] in self.tensors or "experts" in module or "input_linear" in module:
                    return joined
        if match := _HEAD_NORMS.fullmatch(module):
            return [f"blk.{match[1]}.attn_{match[2]}_norm{suffix}"]
        called = self.called(module)
        if called is None:
            return []
        own = called + suffix
        if own in self.tensors:
            return [own]
        layer, _, part = called.rpartition(".")
        fused = f"{layer}.attn_qkv{suffix}"
        if part in _QKV and fused in self.tensors:
            return [fused]
        apart = [f"{layer}.{each}{suffix}" for each in _QKV]
        if part == "attn_qkv" and any(each in self.tensors for each in apart):
            return apart
        return [own]

    def is_zero(self, name: str) -> bool:
        """Return whether a tensor is a bias that no layer of the file has, and so counts as 0."""
        match = _BIASES.fullmatch(name) if self.layout.optional else None
        return match is not None and not any(
            other is not None and other[1] == match[1]
            for other in map(_BIASES.fullmatch, self.tensors)
        )

    def called(self, module: str) -> str | None:
        """Return the name of a module in files, without a suffix; None if it is unknown."""
        for pattern, called in OWN_NAMES.items():
            if match := re.fullmatch(pattern, module):
                return called.format(match[1])
        return self.name_of(module)

    def filling(self, name: str, shape: torch.Size, names: Sequence[str]) -> Filling:
        tensors = tuple(self.tensors[each] for each in names)
        transposed = bool(self.layout.transposed and re.search(self.layout.transposed, name))
        less = 1.0 if self.layout.shifted_norms and names[0].endswith("norm.weight") else 0.0
        stored = (*shape[:-2], shape[-1], shape[-2]) if transposed else tuple(shape)
        called, order = names[0], None
        if len(names) == 2:  # gate and up
            half = list(stored)
            experts = len(half) - 2 if len(half) > 1 and not _is_bias(name) else len(half) - 1
            half[experts] //= 2
            self.check(name, tensors, [tuple(half)] * 2)
            outer, inner = math.prod(stored[:experts]), half[experts]
            order = torch.arange(2 * outer * inner).view(2, outer, inner)
            # gpt-oss interleaves gate and up; all others have the whole gate first.
            by = (1, 2, 0) if self.config.model_type == "gpt_oss" else (1, 0, 2)
            order = order.permute(by).flatten()
            columns = math.prod(stored[experts + 1 :])
            return Filling(shape, tensors, columns, order, less, transposed)
        if len(names) == 3:  # queries, keys and values, which the model fuses
            rows = [math.prod(tensor.shape[1:]) for tensor in tensors]
            if len(stored) == 1:
                rows = [tensor.shape[0] for tensor in tensors]
            if sum(rows) != stored[0]:
                rows = [stored[0]] * 3  # refused below, with both shapes
            self.check(name, tensors, [(n, *stored[1:]) for n in rows])
            return Filling(shape, tensors, math.prod(stored[1:]))
        if match := _HEAD_NORMS.fullmatch(_split(name)[0]):
            prefix = name[: name.rindex(".norms.") + len(".norms.")]
            heads = sum(each.startswith(prefix) for each, _ in self.model.named_parameters())
            self.check(name, tensors, [(heads, *stored)])
            return Filling(shape, tensors, stored[-1], torch.tensor([int(match[3])]))
        fused = called.endswith(("attn_qkv.weight", "attn_qkv.bias"))
        part = (self.called(_split(name)[0]) or "").rpartition(".")[2]
        if fused and part in _QKV:
            rows = self.projections(name)
            self.check(name, tensors, [(sum(rows), *stored[1:])])
            start = sum(rows[: _QKV.index(part)])
            order = torch.arange(start, start + stored[0])
            return Filling(shape, tensors, math.prod(stored[1:]), order)
        self.check(name, tensors, [stored])
        if fused and self.layout.fused:
            order = self.fused_order(stored[0])
        elif self.layout.paired and part in _QKV[:2]:
            heads = self.config.num_attention_heads
            if part == "attn_k":
                heads = getattr(self.config, "num_key_value_heads", None) or heads
            order = torch.arange(stored[0]).view(heads, -1, 2).transpose(1, 2).flatten()
        columns = math.prod(stored[1:]) if order is not None else stored[-1] if stored else 1
        return Filling(shape, tensors, columns, order, less, transposed)

    def projections(self, name: str) -> list[int]:
        """Return the numbers of outputs of the query, key and value projections of a layer, given
        the name of a parameter of one of them.
        """
        around, _, attribute = name.rpartition(".")
        attention: Any = self.model.get_submodule(around.rpartition(".")[0])
        own = around.rpartition(".")[2]
        names = [own.replace(own[0], letter, 1) for letter in "qkv"]
        return [getattr(getattr(attention, each), attribute).shape[0] for each in names]

    def fused_order(self, rows: int) -> Tensor:
        """Return the order of a fused projection's rows, according to `TensorLayout.fused`."""
        heads = self.config.num_attention_heads
        groups = heads
        if self.layout.fused == "group":
            if self.config.new_decoder_architecture:
                groups = self.config.num_kv_heads
            elif self.config.multi_query:
                groups = 1
        size = rows // (heads + 2 * groups)
        sizes = [heads * size, groups * size, groups * size]
        parts = torch.arange(rows).split(sizes)
        return torch.cat([part.view(groups, -1) for part in parts], dim=1).flatten()

    def check(
        self, name: str, tensors: Sequence[TensorInfo], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        """Refuse tensors of other shapes (WeirError); dimensions of 1 do not count."""
        for tensor, shape in zip(tensors, shapes, strict=True):
            given = tuple(reversed(tensor.shape))
            if [n for n in given if n != 1] != [n for n in shape if n != 1]:
                raise WeirError(
                    f"{tensor.path} stores {tensor.name} with the shape {list(given)}, but {name} "
                    f"needs {list(shape)} according to the file's fields. Download the file "
                    "again, or use another file of the model."
                )


def make_empty(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Make a model whose parameters are on the device `meta`, and whose buffers are real.

    Buffers that are not saved, such as rotary frequencies, are computed by the modules that own
    them, and need no weights.
    """
    thread = threading.get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        # A parameter that is already on `meta` was registered before under another name, like the
        # weight of a tied head.
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle: Any = register_module_parameter_registration_hook(on_meta)
    try:
        return make()
    finally:
        handle.remove()


def fill(model: nn.Module, values: Iterable[tuple[str, Tensor]]) -> None:
    """Put values into a model without weights, by name, into every module that shares the
    parameter.
    """
    holders: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, held in (*module._parameters.items(), *module._buffers.items()):
            if held is not None:
                holders[id(held)].append((module, name))
    for name, value in values:
        where, _, own = name.rpartition(".")
        before = getattr(model.get_submodule(where), own)
        if isinstance(before, nn.Parameter):
            value = nn.Parameter(value, before.requires_grad)
        for module, attribute in holders[id(before)]:
            setattr(module, attribute, value)


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model and the buffers that are saved with it, each once."""
    yield from model.named_parameters()
    for where, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{where}.{name}".removeprefix("."), buffer


def _split(name: str) -> tuple[str, str]:
    """Split a parameter's name into the module's name and the suffix that files use."""
    for suffix, theirs in ((".weight", ".weight"), (".bias", ".bias"), ("_bias", ".bias")):
        if name.endswith(suffix):
            return name.removesuffix(suffix), theirs
    return name, ".weight"


def _is_bias(name: str) -> bool:
    return _split(name)[1] == ".bias"


def _type_of(tensor: TensorInfo) -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(tensor.type)


def _raw_shape(tensor: TensorInfo) -> tuple[int, int]:
    """Return how many rows a tensor has in its file, and the bytes of each."""
    from gguf import GGML_QUANT_SIZES

    numbers, nbytes = GGML_QUANT_SIZES[_type_of(tensor)]
    return math.prod(tensor.shape[1:]), tensor.shape[0] // numbers * nbytes


def _read_rows(tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
    """Read some rows of a tensor: uint8 [rows, bytes].

    They are read, not mapped, because pages of a mapped file would count as memory of the process.
    """
    nbytes = _raw_shape(tensor)[1]
    count = (stop - start) * nbytes
    data = np.fromfile(tensor.path, np.uint8, count, offset=tensor.at + start * nbytes)
    if data.size < count:
        raise WeirError(
            f"{tensor.path} is cut off: it ends within {tensor.name}. Download it again."
        )
    return data.reshape(-1, nbytes)


def _dequantized(tensor: TensorInfo, columns: int) -> Iterator[np.ndarray]:
    """Yield a tensor's numbers in float32 [rows, columns], some rows at a time."""
    from gguf import dequantize

    rows, _ = _raw_shape(tensor)
    step = max(1, TOGETHER // max(1, tensor.shape[0]))
    for start in range(0, rows, step):
        raw = _read_rows(tensor, start, min(rows, start + step))
        # Float32 numbers are a view of `raw`. Nothing else uses it, so callers can change them in
        # place.
        yield dequantize(raw, _type_of(tensor)).reshape(-1, columns)
