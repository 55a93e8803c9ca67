"""Layers with weights in GGUF's blocks of 32 numbers.

`weir.load(name, weights="q8_0")` quantizes weights to such blocks, and `weights="gguf"` keeps the
blocks of a file.

`weir.native.block_formats` describes the memory layout of each type. On a CPU with AVX2 or VNNI, if
numba is installed, a product of any number of rows multiplies the codes directly
(`native.kernels.linear_blocks`), after rounding the rows to 8 bits, block by block; for weights of
16 bits, rows are not rounded. Otherwise, each product dequantizes the weight. This module does not
use caches.

Format: the types of the ggml project.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weir.errors import WeirError
from weir.native import dispatch
from weir.native.block_formats import BLOCK, BLOCK_TYPES, PANEL, QUADS, SHARED, BlockFormat
from weir.native.block_types import Parts, take_apart

BLOCK_FORMATS = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}
"""Types that weights can be quantized to, by their names in `weights=`."""
STORED_FORMATS = tuple(BLOCK_TYPES)
"""Types of a GGUF file that are multiplied without conversion."""
TOGETHER = 32 * PANEL
"""Number of outputs of a weight that are quantized to blocks, or read from a file without a kernel,
at a time.
"""
LINEAR = ("Linear", "FalconLinear")
"""Names of classes that compute the same as `nn.Linear`; others are not quantized."""
AS_STORED = "gguf"
"""The value of `weights=` that keeps the blocks of the model's file."""


class Blocks:
    """A weight [outputs, inputs] in blocks.

    Attributes:
        kind: the type of the blocks, one of `BLOCK_TYPES`.
        outputs: number of outputs, without those that fill up the last panel.
        codes: uint8 [panels, blocks, bytes], as the kernel reads them.
        scales: the float16 scales and minima, and the factors of 8 bits. Their bytes are stored as
            int16 [panels, units, bytes of a unit / 32, 16], because `to(dtype)` does not change
            int16.

    Args:
        kind: see the attribute.
        outputs, inputs: sizes; `inputs` is a multiple of the numbers in a unit of the type.
        device: of the tensors, which are not filled yet.
    """

    def __init__(
        self, kind: str, outputs: int, inputs: int, device: torch.device | str = "cpu"
    ) -> None:
        form = BLOCK_TYPES[kind]
        self.kind, self.outputs = kind, outputs
        panels, blocks = -(-outputs // PANEL), inputs // BLOCK
        self.codes = torch.empty(panels, blocks, form.code_bytes, dtype=torch.uint8, device=device)
        units = blocks // form.unit_blocks, form.scale_bytes // (2 * PANEL)
        self.scales = torch.empty(panels, *units, PANEL, dtype=torch.int16, device=device)

    @classmethod
    def quantize(cls, weight: Tensor, kind: str) -> Blocks:
        """Quantize a weight [outputs, inputs] to one of `BLOCK_FORMATS`, like ggml's reference,
        except that codes are computed from the rounded scale and minimum. On the device `meta`, any
        type is accepted, and only sizes are set.
        """
        kind = BLOCK_FORMATS.get(kind, kind)
        found = cls(kind, weight.shape[0], weight.shape[1], weight.device)
        if not weight.is_meta:
            for first in range(0, found.outputs, TOGETHER):
                found.put(first, _quantize(weight.detach()[first : first + TOGETHER], kind))
        return found

    def fill(self, first: int, data: np.ndarray) -> None:
        """Read some outputs from a GGUF file.

        Args:
            first: the number of the first output, a multiple of `PANEL`.
            data: the bytes of the outputs [outputs, bytes of one output], uint8. The number of
                outputs is a multiple of `PANEL`, except in the last call.
        """
        pack = dispatch.pack_blocks(torch.device("cpu"))
        if pack is not None and pack(self.kind, data, self.codes, self.scales, first // PANEL):
            return
        for start in range(0, len(data), TOGETHER):
            part = torch.from_numpy(np.ascontiguousarray(data[start : start + TOGETHER]))
            self.put(first + start, take_apart(part, self.kind))

    def put(self, first: int, parts: Parts) -> None:
        """Set some outputs, from the number `first` on."""
        form, spare = BLOCK_TYPES[self.kind], -len(parts.codes) % PANEL
        codes, heads, factors = (
            None if t is None else nn.functional.pad(t, (*[0, 0] * (t.ndim - 1), 0, spare))
            for t in parts
        )
        assert codes is not None
        assert heads is not None
        start = first // PANEL
        stop = start + len(codes) // PANEL
        if form.number:
            numbers = codes.view(torch.int16).view(stop - start, PANEL, -1, BLOCK)
            numbers = numbers.permute(0, 2, 3, 1).flatten(2).contiguous()
            self.codes[start:stop] = numbers.view(torch.uint8)
            return
        codes = codes.unflatten(1, (-1, QUADS, 4))
        vectors = []
        below = 0
        for plane, bits in enumerate(form.planes):
            own = codes >> below & ((1 << bits) - 1)
            found = [torch.zeros_like(own[:, :, 0]) for _ in range(bits)]
            for group in range(QUADS):
                vector, up = form.place_of(plane, group)
                found[vector] |= own[:, :, group] << up
            vectors += found
            below += bits
        # Four codes are moved at a time, as one number.
        quads = torch.stack(vectors, dim=2).view(torch.int32)
        quads = quads.view(-1, PANEL, *quads.shape[1:3]).permute(0, 2, 3, 1)
        self.codes[start:stop] = quads.flatten(2).contiguous().view(torch.uint8)
        lines = heads.view(-1, PANEL, *heads.shape[1:]).permute(0, 2, 3, 1)
        self.scales[start:stop, :, : form.heads] = lines.contiguous().view(torch.int16)
        if factors is not None:
            lines = factors.view(-1, PANEL, *factors.shape[1:]).permute(0, 2, 3, 1).contiguous()
            lines = lines.unflatten(1, (-1, SHARED)).flatten(2).view(torch.int16)
            self.scales[start:stop, :, form.heads :] = lines.unflatten(2, (-1, PANEL))

    def rows(self, which: Tensor | None = None) -> Tensor:
        """Return some outputs, or all, in float32 [outputs, inputs]."""
        return write_out(self.codes, self.scales, self.kind, self.outputs, which)


def _quantize(weight: Tensor, kind: str) -> Parts:
    form = BLOCK_TYPES[kind]
    parts = weight.float().unflatten(1, (-1, BLOCK))
    zero, most = form.zero, (1 << form.bits) - 1
    if form.minima:
        least = parts.amin(dim=2)
        scales = torch.stack([(parts.amax(dim=2) - least) / most, least], dim=2).half()
        parts = parts - scales[..., 1:].float()
    elif form.bits == 8:
        scales = (parts.abs().amax(dim=2, keepdim=True) / 127).half()
    else:
        # The number with the largest absolute value gets the code 0, which is 8 codes away from
        # `zero`; the code 15 is only 7 away.
        largest = parts.gather(2, parts.abs().argmax(dim=2, keepdim=True))
        scales = (largest / -zero).half()
    step = scales[..., :1].float()
    codes = torch.where(step != 0, parts / step, 0.0).round() + zero
    codes = codes.clamp(1 if form.bits == 8 else 0, most).to(torch.uint8)
    return Parts(codes.flatten(1), scales)


def write_out(
    codes: Tensor, scales: Tensor, kind: str, outputs: int, which: Tensor | None = None
) -> Tensor:
    """Dequantize rows of a weight in blocks to float32 [rows, inputs]; see `Blocks`."""
    form = BLOCK_TYPES[kind]
    if form.number:
        stored = torch.float16 if form.number == "half" else torch.bfloat16
        halves = codes.view(stored).unflatten(2, (BLOCK, PANEL)).movedim(3, 1)
        rows = halves.flatten(0, 1)[:outputs] if which is None else halves[_lines(which)]
        return rows.flatten(1).float()
    quads = codes.unflatten(2, (-1, PANEL, 4)).movedim(3, 1)  # [panels, 16, blocks, vectors, 4]
    heads = scales[:, :, : form.heads].view(torch.float16).movedim(3, 1)
    taken = [quads, heads]
    if form.shared:
        small = scales[:, :, form.heads :].flatten(2).view(torch.uint8)
        taken.append(small.unflatten(2, (SHARED, -1, form.heads, PANEL)).movedim(5, 1))
    if which is None:
        taken = [t.flatten(0, 1)[:outputs] for t in taken]
    else:
        taken = [t[_lines(which)] for t in taken]
    quads, heads = taken[:2]
    numbers = _values_of(quads, form).unflatten(2, (-1, form.per)).float() - form.zero
    heads = heads.float()
    scale, least = heads[..., :1, None], heads[..., 1:, None]
    if form.shared:
        factors = taken[2].view(torch.int8)[..., 0].float() * form.unit
        scale = (scale * factors).flatten(1, 2)[..., None]
        if form.minima:
            least = -(least * taken[2][..., 1].float()).flatten(1, 2)[..., None]
    numbers *= scale
    if form.minima:
        numbers += least
    return numbers.flatten(1)


def _lines(which: Tensor) -> tuple[Tensor, Tensor]:
    """Return the panels of outputs, and their places in the panels."""
    return which // PANEL, which % PANEL


def _values_of(quads: Tensor, form: BlockFormat) -> Tensor:
    """Return the values of codes [rows, blocks, vectors, 4] in their order, [rows, blocks, 32]."""
    planes, table = _places(form, quads.device)
    codes, below = None, 0
    for bits, (at, ups) in zip(form.planes, planes, strict=True):
        found = (quads[:, :, at] >> ups & ((1 << bits) - 1)) << below
        codes = found if codes is None else codes | found
        below += bits
    assert codes is not None
    return table[codes.flatten(2).int()] if form.table else codes.flatten(2)


@lru_cache
def _places(form: BlockFormat, device: torch.device) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return for each plane the vector of each group [8] and the shift of its bits [8, 1], and the
    table of a format.
    """
    planes, before = [], 0
    with torch.inference_mode(False):
        for plane, bits in enumerate(form.planes):
            places = [form.place_of(plane, group) for group in range(QUADS)]
            at = torch.tensor([before + vector for vector, _ in places], device=device)
            ups = torch.tensor([[up] for _, up in places], dtype=torch.uint8, device=device)
            planes.append((at, ups))
            before += bits
        return planes, torch.tensor(form.table, dtype=torch.uint8, device=device)


class _InBlocks(nn.Module):
    """Base of layers with a weight in blocks; reading `weight` dequantizes it."""

    codes: Tensor
    scales: Tensor
    kind: str
    kept_dtype: torch.dtype
    outputs: int

    def take(self, blocks: Blocks, dtype: torch.dtype) -> None:
        """Replace the layer's weight."""
        del self._parameters["weight"]
        self.register_buffer("codes", blocks.codes)
        self.register_buffer("scales", blocks.scales)
        self.kind, self.kept_dtype, self.outputs = blocks.kind, dtype, blocks.outputs

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, in the model's dtype."""
        return self.dequantized()

    def dequantized(self) -> Tensor:
        """Return the dequantized weight [outputs, inputs], in the model's dtype."""
        return write_out(self.codes, self.scales, self.kind, self.outputs).to(self.kept_dtype)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.kept_dtype = fn(torch.empty(0, dtype=self.kept_dtype)).dtype
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save the dequantized weight, so that `save_pretrained` writes an ordinary model."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("codes", "scales"):
            del destination[prefix + name]
        destination[prefix + "weight"] = self.weight


def describe_weights(model: PreTrainedModel) -> tuple[int, str]:
    """Return the number of a model's weights, and the type in which most of their bytes are stored:
    a type of blocks such as `Q4_1`, or a dtype.
    """
    numbers: dict[int, int] = {}
    stored: Counter[str] = Counter()
    for weight in model.parameters():
        numbers[id(weight)] = weight.numel()
        stored[str(weight.dtype).removeprefix("torch.")] += weight.nbytes
    for module in model.modules():
        if (
            isinstance(module, _InBlocks) and id(module.codes) not in numbers
        ):  # tied ones count once
            numbers[id(module.codes)] = module.outputs * module.codes.shape[1] * BLOCK
            stored[module.kind] += module.codes.nbytes + module.scales.nbytes
    return sum(numbers.values()), stored.most_common(1)[0][0]


def has_block_weights(model: nn.Module) -> bool:
    """Return whether any weight of a model is in blocks."""
    return any(isinstance(module, _InBlocks) for module in model.modules())


class BlockLinear(_InBlocks, nn.Linear):  # type: ignore[override]  # read only
    """Linear layer with a weight in blocks."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply as `nn.Linear` does: [..., in_features] to [..., out_features]."""
        kernel = dispatch.linear_blocks(input)
        if kernel is None or not self.codes.is_cpu:
            return nn.functional.linear(input, self.weight.to(input.dtype), self.bias)
        out: Tensor = kernel(input, self.codes, self.scales, self.out_features, self.kind)
        return out if self.bias is None else out + self.bias


class BlockEmbedding(_InBlocks, nn.Embedding):  # type: ignore[override]  # read only
    """Embedding whose table is in blocks; it can share the table with the head."""

    def forward(self, input: Tensor) -> Tensor:
        """Look up as `nn.Embedding` does: ids [...] to [..., embedding_dim], times a scale if the
        embedding has one.
        """
        which, rows = input.flatten(), None
        kernel = dispatch.block_rows(which, self.codes)
        if kernel is not None:
            rows = kernel(which, self.codes, self.scales, self.num_embeddings, self.kind)
        if rows is None:  # without a kernel, or if an id is not in the table
            # `write_out` would accept negative ids, and those of the outputs that fill up the last
            # panel. This look-up, in a table that takes no memory, refuses them as PyTorch does.
            table = self.scales.new_zeros(1, 1).expand(self.num_embeddings, 1)
            nn.functional.embedding(which, table)
            rows = write_out(self.codes, self.scales, self.kind, self.num_embeddings, which)
        return _scaled(self, rows.to(self.kept_dtype)).view(*input.shape, -1)


def _scaled(embedding: nn.Module, rows: Tensor) -> Tensor:
    """Multiply rows of an embedding's table by its scale, if it has one, as Gemma's does."""
    scale = getattr(embedding, "embed_scale", None)
    return rows if scale is None else rows * torch.as_tensor(scale).to(rows)


def looks_up(embedding: Any) -> bool:
    """Return whether an embedding computes the same as a `BlockEmbedding`.

    PyTorch's own class does, unless it has a `max_norm`. An embedding with a scale is tried on a
    few rows.
    """
    plain = type(embedding) is nn.Embedding and embedding.max_norm is None
    if plain or not isinstance(embedding, nn.Embedding) or not hasattr(embedding, "embed_scale"):
        return plain
    if torch.as_tensor(embedding.embed_scale).is_meta:  # a skeleton, which computes nothing
        return True
    weight = embedding.weight
    device = torch.device("cpu") if weight.is_meta else weight.device
    probe = copy.copy(embedding)  # with a small table, because the real one may not be loaded yet
    table = torch.linspace(-1, 1, 4 * embedding.embedding_dim, dtype=weight.dtype, device=device)
    probe._parameters = {"weight": nn.Parameter(table.view(4, -1), requires_grad=False)}
    probe.padding_idx = None
    with torch.no_grad():
        ids = torch.arange(4, device=device)
        return torch.equal(probe(ids), _scaled(embedding, probe.weight))


def fits_blocks(module: nn.Module) -> bool:
    """Return whether a linear layer's weight can be stored in blocks that do not share scales."""
    return isinstance(module, nn.Linear) and not module.in_features % BLOCK


def put_blocks(model: PreTrainedModel, names: Iterable[str], kind: str) -> None:
    """Quantize linear layers, and also the embedding if the head shares its table and blocks can do
    what it computes (`looks_up`). The head and the embedding get 8 bits.

    Args:
        model: any model.
        names: of the layers.
        kind: one of `BLOCK_FORMATS`.
    """
    head, embedding = model.get_output_embeddings(), cast(Any, model.get_input_embeddings())
    tied = head is not None and head.weight is embedding.weight
    table = None
    if tied and looks_up(embedding):
        table = Blocks.quantize(embedding.weight, "q8_0")
        put(embedding, table)
    for name in names:
        module: Any = model.get_submodule(name)
        shared = table if tied and module is head else None
        own = "q8_0" if module is head else kind
        put(module, shared or Blocks.quantize(module.weight, own))


def put(module: nn.Module, blocks: Blocks) -> None:
    """Replace the weight of a linear layer or an embedding by blocks."""
    assert isinstance(module, nn.Linear | nn.Embedding)
    dtype, linear = module.weight.dtype, isinstance(module, nn.Linear)
    vars(module).pop("forward", None)  # a copy may have its old class's forward
    module.__class__ = BlockLinear if linear else BlockEmbedding
    assert isinstance(module, _InBlocks)
    module.take(blocks, dtype)


def warn_without_kernel(model: PreTrainedModel) -> None:
    """Warn if no kernel multiplies blocks, so that they are slower than plain weights."""
    if dispatch.linear_blocks(torch.empty(1, BLOCK, device=model.device)) is None:
        warnings.warn(
            "on this machine, weights in blocks are dequantized for every product, which is slow. "
            "The kernel that multiplies blocks directly needs numba and a processor with AVX2. "
            "Leave out weights= to go faster.",
            stacklevel=4,
        )


def check_stored(path: Path | None, name: str) -> Path:
    """Return the path of a model's GGUF file; WeirError if it is None."""
    if path is None:
        raise WeirError(
            f'weights="{AS_STORED}" keeps the blocks of a GGUF file, but {name} is not one. Use '
            f"{', '.join(BLOCK_FORMATS)}, int8 or int4."
        )
    return path
