"""Weights in GGUF's blocks of 32 numbers: `weir.load(name, weights="q8_0")`, or as a file has them.

A block is 32 codes of 8 or 4 bits and what a step is worth, in float16; with "q4_1" also what the
code 0 stands for. On a CPU with AVX2 or VNNI a product of any number of rows multiplies the codes
as they are (`weir.kernels.linear_blocks`), after rounding the rows to 8 bits, block by block.
Elsewhere each product writes the weight out. Knows nothing about caches.

Format: block_q8_0, block_q4_0, block_q4_1 and block_q4_K of the ggml project.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weir import kernels
from weir.errors import WeirError
from weir.kernels import BLOCK, PANEL
from weir.models.gguf import read_header

BLOCK_FORMATS = {"q8_0": (8, False), "q4_0": (4, False), "q4_1": (4, True)}
"""Bits of a code, and whether blocks have a minimum, by the name of the format in GGUF."""
STORED_FORMATS = {"Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1", "Q4_K": "q4_1"}
"""The types of a GGUF file that are multiplied as they are, and the format that they lie in."""
TOGETHER = 32 * PANEL
"""Outputs of a weight that are put into blocks at a time."""
COMPARED = 8
"""One block in so many is compared to see in which order a file has a weight's outputs."""
AS_STORED = "gguf"
"""`weights=` for the blocks of the file that a model was loaded from."""


class Blocks:
    """A weight [outputs, inputs] in blocks.

    Attributes:
        codes: uint8 [panels, blocks, 512 or 256], as the kernel reads them.
        scales: the bits of float16 as int16 [panels, blocks, 1 or 2, 16], which `to(dtype)` leaves
            alone: what a step is worth and, if blocks have one, the minimum.
        outputs: without those that fill the last panel.

    Args:
        codes: [outputs, inputs], uint8.
        scales: float16 [outputs, blocks, 1 or 2].
        bits: of a code.
    """

    def __init__(self, codes: Tensor, scales: Tensor, bits: int) -> None:
        self.outputs, inputs = codes.shape
        spare = -self.outputs % PANEL
        codes = nn.functional.pad(codes, (0, 0, 0, spare))
        scales = nn.functional.pad(scales, (0, 0, 0, 0, 0, spare))
        # Four codes at a time, which are moved and packed as one number.
        quads = codes.contiguous().view(torch.int32)
        quads = quads.view(-1, PANEL, inputs // BLOCK, BLOCK // 4).permute(0, 2, 3, 1)
        if bits == 4:
            quads = quads[:, :, :4] | quads[:, :, 4:] << 4
        self.codes = quads.flatten(2).contiguous().view(torch.uint8)
        panels = scales.view(-1, PANEL, *scales.shape[1:]).permute(0, 2, 3, 1)
        self.scales = panels.contiguous().view(torch.int16)

    @classmethod
    def quantize(cls, weight: Tensor, kind: str) -> Blocks:
        """Quantize a weight [outputs, inputs] to one of `BLOCK_FORMATS`, as ggml's reference does,
        but that codes are of the rounded scale.
        """
        return cls._by_parts(weight.detach(), lambda part: cls._quantize(part, kind))

    @classmethod
    def _by_parts(cls, rows: Tensor, make: Callable[[Tensor], Blocks]) -> Blocks:
        """Make blocks of some rows at a time, which stay in the processor's caches."""
        parts = [make(part) for part in rows.split(TOGETHER)]
        found = object.__new__(cls)
        found.outputs = len(rows)
        found.codes = torch.cat([part.codes for part in parts])
        found.scales = torch.cat([part.scales for part in parts])
        return found

    @classmethod
    def _quantize(cls, weight: Tensor, kind: str) -> Blocks:
        bits, minima = BLOCK_FORMATS[kind]
        parts = weight.float().unflatten(1, (-1, BLOCK))
        zero, most = 0 if minima else 1 << (bits - 1), (1 << bits) - 1
        if minima:
            least = parts.amin(dim=2)
            scales = torch.stack([(parts.amax(dim=2) - least) / most, least], dim=2).half()
            parts = parts - scales[..., 1:].float()
        elif bits == 8:
            scales = (parts.abs().amax(dim=2, keepdim=True) / 127).half()
        else:  # the largest number is the code 0, which lies further from the zero than 15
            largest = parts.gather(2, parts.abs().argmax(dim=2, keepdim=True))
            scales = (largest / -zero).half()
        step = scales[..., :1].float()
        codes = torch.where(step != 0, parts / step, 0.0).round() + zero
        codes = codes.clamp(1 if bits == 8 else 0, most).to(torch.uint8)
        return cls(codes.flatten(1), scales, bits)

    @classmethod
    def read(cls, data: np.ndarray, kind: str) -> Blocks:
        """Read a tensor of a GGUF file.

        Args:
            data: its bytes [outputs, bytes of a line], uint8.
            kind: one of `STORED_FORMATS`.
        """
        return cls._by_parts(torch.from_numpy(data), lambda part: cls._read(part, kind))

    @classmethod
    def _read(cls, raw: Tensor, kind: str) -> Blocks:
        if kind == "Q4_K":
            return cls._read_super_blocks(raw)
        bits, minima = BLOCK_FORMATS[STORED_FORMATS[kind]]
        before = 4 if minima else 2
        parts = raw.unflatten(1, (-1, before + BLOCK * bits // 8))
        scales = parts[..., :before].contiguous().view(torch.float16)
        stored = parts[..., before:]
        if bits == 8:  # from -128 to 127 to what is 128 more
            return cls((stored ^ 128).flatten(1), scales, bits)
        return cls(torch.cat([stored & 15, stored >> 4], dim=2).flatten(1), scales, bits)

    @classmethod
    def _read_super_blocks(cls, raw: Tensor) -> Blocks:
        """Read Q4_K: eight blocks share two scales of their scales and minima, of 6 bits each.
        Their products are rounded to float16.
        """
        parts = raw.unflatten(1, (-1, 144))
        both = parts[..., :4].contiguous().view(torch.float16).float()
        packed = parts[..., 4:16].unflatten(2, (3, 4))
        low, least, high = packed.unbind(2)
        scale = torch.cat([low & 63, high & 15 | low >> 2 & 48], dim=2)
        minimum = torch.cat([least & 63, high >> 4 | least >> 2 & 48], dim=2)
        scales = torch.stack([both[..., :1] * scale, -both[..., 1:] * minimum], dim=3).half()
        codes = parts[..., 16:].unflatten(2, (4, BLOCK))
        codes = torch.stack([codes & 15, codes >> 4], dim=3)
        return cls(codes.flatten(1), scales.flatten(1, 2), 4)

    def rows(self, which: Tensor | None = None) -> Tensor:
        """Return some outputs, or all, in float32 [outputs, inputs]."""
        return write_out(self.codes, self.scales, self.outputs, which)

    def reordered(self, order: Tensor) -> Blocks:
        """Return the blocks of outputs in another order."""
        found = object.__new__(Blocks)
        found.outputs = self.outputs
        for name in ("codes", "scales"):
            panels = getattr(self, name)
            lines = panels.unflatten(2, (-1, PANEL, 4)) if name == "codes" else panels[..., None]
            lines = lines.movedim(3, 1).flatten(0, 1)
            spare = torch.arange(self.outputs, lines.shape[0])
            lines = lines[torch.cat([order, spare])].unflatten(0, (-1, PANEL)).movedim(1, 3)
            setattr(found, name, lines.reshape(panels.shape).contiguous())
        return found


def write_out(codes: Tensor, scales: Tensor, outputs: int, which: Tensor | None = None) -> Tensor:
    """Return rows of a weight in blocks as float32 [rows, inputs]; see `Blocks`."""
    bits = codes.shape[2] // 64
    quads = codes.unflatten(2, (-1, PANEL, 4)).movedim(3, 1)  # [panels, 16, blocks, groups, 4]
    steps = scales.view(torch.float16).movedim(3, 1)
    if which is None:
        quads, steps = (t.flatten(0, 1)[:outputs] for t in (quads, steps))
    else:
        panel, line = which // PANEL, which % PANEL
        quads, steps = quads[panel, line], steps[panel, line]
    if bits == 4:
        quads = torch.cat([quads & 15, quads >> 4], dim=2)
    numbers, steps = quads.flatten(2).float(), steps.float()
    if steps.shape[2] == 1:
        numbers -= 1 << (bits - 1)
    numbers *= steps[:, :, :1]
    if steps.shape[2] == 2:
        numbers += steps[:, :, 1:]
    return numbers.flatten(1)


class _InBlocks(nn.Module):
    """Base of layers with a weight in blocks; `weight` is written out when it is read."""

    codes: Tensor
    scales: Tensor
    kept_dtype: torch.dtype
    outputs: int

    def take(self, blocks: Blocks, dtype: torch.dtype) -> None:
        """Replace the layer's weight."""
        del self._parameters["weight"]
        self.register_buffer("codes", blocks.codes)
        self.register_buffer("scales", blocks.scales)
        self.kept_dtype, self.outputs = dtype, blocks.outputs

    @property
    def weight(self) -> Tensor:
        """The weight written out, in the model's dtype."""
        return write_out(self.codes, self.scales, self.outputs).to(self.kept_dtype)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.kept_dtype = fn(torch.empty(0, dtype=self.kept_dtype)).dtype
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save the weight as any model has it, so that `save_pretrained` makes an ordinary one."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("codes", "scales"):
            del destination[prefix + name]
        destination[prefix + "weight"] = self.weight


def has_block_weights(model: nn.Module) -> bool:
    """Return whether any weight of a model is held in blocks, where its numbers are rounded."""
    return any(isinstance(module, _InBlocks) for module in model.modules())


class BlockLinear(_InBlocks, nn.Linear):  # type: ignore[override]  # read only
    """Linear layer with a weight in blocks."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply as `nn.Linear` does: [..., in_features] to [..., out_features]."""
        if torch.compiler.is_compiling():
            out = _by_kernel(input, self.codes, self.scales, self.out_features)
        else:
            kernel = kernels.linear_blocks(input)
            if kernel is None or not self.codes.is_cpu:
                return nn.functional.linear(input, self.weight.to(input.dtype), self.bias)
            out = kernel(input, self.codes, self.scales, self.out_features)
        return out if self.bias is None else out + self.bias


class BlockEmbedding(_InBlocks, nn.Embedding):  # type: ignore[override]  # read only
    """Embedding whose table is in blocks, which it may share with the head."""

    def forward(self, input: Tensor) -> Tensor:
        """Look up as `nn.Embedding` does: ids [...] to [..., embedding_dim], times a scale if the
        embedding has one.
        """
        rows = write_out(self.codes, self.scales, self.num_embeddings, input.flatten())
        return _scaled(self, rows.to(self.kept_dtype)).view(*input.shape, -1)


def _scaled(embedding: nn.Module, rows: Tensor) -> Tensor:
    """Multiply rows of a table as Gemma's `ScaledWordEmbedding` does, and some others."""
    scale = getattr(embedding, "embed_scale", None)
    return rows if scale is None else rows * torch.as_tensor(scale).to(rows)


def _looks_up(embedding: Any) -> bool:
    """Return whether an embedding does what a `BlockEmbedding` does; some rows are looked up."""
    plain = type(embedding) is nn.Embedding
    if plain or not isinstance(embedding, nn.Embedding) or not hasattr(embedding, "embed_scale"):
        return plain
    if embedding.weight.is_meta:
        return True
    ids = torch.arange(min(4, embedding.num_embeddings), device=embedding.weight.device)
    with torch.no_grad():
        return torch.equal(embedding(ids), _scaled(embedding, embedding.weight[ids]))


def fits_blocks(module: nn.Module) -> bool:
    """Return whether a linear layer's weight can lie in blocks."""
    return isinstance(module, nn.Linear) and not module.in_features % BLOCK


def put_blocks(
    model: PreTrainedModel, names: Iterable[str], kind: str, kinds: Mapping[str, str] | None = None
) -> None:
    """Quantize linear layers, and the embedding if it is the head's table; the head to 8 bits.

    Args:
        model: any model.
        names: of the layers.
        kind: one of `BLOCK_FORMATS`.
        kinds: other formats of some of them.
    """
    head, embedding = model.get_output_embeddings(), cast(Any, model.get_input_embeddings())
    kinds, name_there = kinds or {}, _name_of(model, embedding)
    tied = head is not None and head.weight is embedding.weight
    table = None
    if (tied or name_there in kinds) and _looks_up(embedding):
        table = Blocks.quantize(embedding.weight, kinds.get(name_there, "q8_0"))
        _put(embedding, table)
    for name in names:
        module: Any = model.get_submodule(name)
        shared = table if tied and module is head else None
        own = kinds.get(name, "q8_0" if module is head else kind)
        _put(module, shared or Blocks.quantize(module.weight, own))


def stored_formats(model: PreTrainedModel, path: Path) -> dict[str, str]:
    """Return the format of each weight that `put_stored_blocks` takes from a file, by name."""
    return {name: STORED_FORMATS[kind] for name, kind, *_ in _stored_tensors(model, path)}


def put_stored_blocks(model: PreTrainedModel, names: Iterable[str], path: Path) -> None:
    """Give linear layers, and the embedding, the blocks of the file the model was loaded from.

    A weight that the file stores otherwise, as Q6_K, is quantized to 8 bits.

    Args:
        model: as `weir.load` made it from the file.
        names: of the linear layers.
        path: the file.
    """
    stored = dict(_read_file(model, path))
    embedding: Any = model.get_input_embeddings()
    table = stored.get(_name_of(model, embedding))
    for name in names:
        module: Any = model.get_submodule(name)
        blocks = stored.get(name, table if module is model.get_output_embeddings() else None)
        found = None if blocks is None else _matching(model, blocks, module.weight)
        _put(module, found or Blocks.quantize(module.weight, "q8_0"))
    if table is not None and _looks_up(embedding):
        found = _matching(model, table, embedding.weight)
        if found is not None:
            head = model.get_output_embeddings()
            if isinstance(head, BlockLinear) and torch.equal(head.codes, found.codes):
                found.codes, found.scales = head.codes, head.scales
            _put(embedding, found)


def _put(module: nn.Module, blocks: Blocks) -> None:
    assert isinstance(module, nn.Linear | nn.Embedding)
    dtype, linear = module.weight.dtype, isinstance(module, nn.Linear)
    vars(module).pop("forward", None)  # a copy may hold its old class's forward
    module.__class__ = BlockLinear if linear else BlockEmbedding
    assert isinstance(module, _InBlocks)
    module.take(blocks, dtype)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _stored_tensors(model: PreTrainedModel, path: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield the modules whose weights a file stores in blocks that can be multiplied, each with the
    name of its type, bytes of a line, and where in the file it begins.
    """
    from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map

    header = read_header(path)
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    names = get_tensor_name_map(arch, layers)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    for name, module in model.named_modules():
        called = names.get_name(name) if isinstance(module, nn.Linear | nn.Embedding) else None
        tensor = tensors.get(f"{called}.weight")
        if tensor is None or len(tensor.shape) != 2:
            continue
        kind = GGMLQuantizationType(tensor.type)
        if kind.name in STORED_FORMATS:
            block, size = GGML_QUANT_SIZES[kind]
            yield name, kind.name, tensor.shape[0] // block * size, header.data_at + tensor.offset


def _read_file(model: PreTrainedModel, path: Path) -> Iterator[tuple[str, Blocks]]:
    """Yield the modules whose weights a file stores in blocks, and these."""
    for name, kind, line, start in _stored_tensors(model, path):
        module: Any = model.get_submodule(name)
        count = line * module.weight.shape[0]
        data = np.fromfile(path, np.uint8, count, offset=start)
        if data.size == count:
            yield name, Blocks.read(data.reshape(-1, line), kind)


def _matching(model: PreTrainedModel, blocks: Blocks, weight: Tensor) -> Blocks | None:
    """Return the blocks in the order of a weight's outputs; None if they are another weight's.

    For some architectures GGUF pairs the rotated numbers of a head side by side, and transformers
    half a head apart.
    """
    config = model.config.get_text_config(decoder=True)
    if weight.shape != (blocks.outputs, blocks.codes.shape[1] * BLOCK):
        return None
    wanted = weight.detach().unflatten(1, (-1, BLOCK))[:, ::COMPARED].float()
    exact = max(torch.finfo(weight.dtype).eps, torch.finfo(torch.float16).eps)
    limit = exact * wanted.abs().amax()
    parts = blocks.codes[:, ::COMPARED], blocks.scales[:, ::COMPARED]
    numbers = write_out(*parts, blocks.outputs).view_as(wanted)
    outputs = torch.arange(blocks.outputs)
    orders = [outputs]
    for heads in {config.num_attention_heads, config.num_key_value_heads}:
        if blocks.outputs % (2 * heads) == 0:
            orders.append(outputs.view(heads, -1, 2).transpose(1, 2).flatten())
    for order in orders:
        if (numbers[order] - wanted).abs().amax() <= limit:
            return blocks if order is outputs else blocks.reordered(order)
    return None


def warn_without_kernel(model: PreTrainedModel) -> None:
    """Warn where products of blocks are slower than those of plain weights."""
    if kernels.linear_blocks(torch.empty(1, BLOCK, device=model.device)) is None:
        warnings.warn(
            "weights in blocks are written out for every product here, which is slow: their kernel "
            "needs numba and a processor with AVX2; without weights= it is faster",
            stacklevel=4,
        )


def check_stored(path: Path | None, name: str) -> Path:
    """Return the file whose blocks are wanted (WeirError if the model is not from one)."""
    if path is None:
        raise WeirError(
            f'weights="{AS_STORED}" keeps the blocks of a GGUF file, and {name} is none; take '
            f"{', '.join(BLOCK_FORMATS)}, int8 or int4"
        )
    return path


def _kernel(x: Tensor, codes: Tensor, scales: Tensor, outputs: int) -> Tensor:
    """Call weir's kernel from within a compiled program."""
    kernel = kernels.linear_blocks(x)
    if kernel is None:
        return nn.functional.linear(x, write_out(codes, scales, outputs).to(x.dtype))
    out: Tensor = kernel(x, codes, scales, outputs)
    return out


_by_kernel = kernels.register_kernel(
    "linear_blocks",
    "(Tensor x, Tensor codes, Tensor scales, int outputs) -> Tensor",
    _kernel,
    lambda x, codes, scales, outputs: x.new_empty(*x.shape[:-1], outputs),
)
