"""Find out where a block of the KV cache stores each number of each key.

Attention backends store keys in different orders. Instead of knowing all of these, the worker
writes numbered keys into a scratch block, looks up where the numbers are, and describes their order
by strides. A backend that does not store keys unchanged is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weir_vllm.errors import StreamError

DIGIT = 64
"""Numbers are written in digits of this base, which bfloat16 and float16 represent exactly."""


@dataclass(frozen=True)
class BlockLayout:
    """Where a block stores keys: an offset, and strides in a flat copy of the block.

    Attributes:
        axis: the axis of the cache that counts blocks.
        offset: where the first number is.
        shape: five lengths: heads, two whose product is the tokens, and two whose product is the
            dimensions.
        stride: the stride of each of these.
    """

    axis: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view_keys(self, blocks: torch.Tensor) -> torch.Tensor:
        """View the keys in flat copies of blocks, in the order of `shape`."""
        assert blocks.is_contiguous()
        lead = blocks.shape[:-1]
        return blocks.as_strided(
            (*lead, *self.shape),
            (*blocks.stride()[:-1], *self.stride),
            blocks.storage_offset() + self.offset,
        )


def find_layout(layer: Any, cache: torch.Tensor, block: int, count: int, size: int) -> BlockLayout:
    """Find out how the backend of a layer lays out keys, with the help of a scratch block.

    Args:
        layer: vLLM's attention layer.
        cache: its KV cache.
        block: a scratch block, which is overwritten.
        count: the number of blocks in the cache.
        size: tokens of a block.

    Raises:
        StreamError: the backend does not store keys unchanged, or its order cannot be described.
    """
    heads, width = layer.num_kv_heads, layer.head_size
    axes = [axis for axis, length in enumerate(cache.shape) if length == count]
    name = layer.attn_backend.get_name()
    if len(axes) != 1:
        raise StreamError(
            f"the KV cache of {name} has the shape {tuple(cache.shape)}, in which weir-vllm "
            f"cannot find the axis of its {count} blocks"
        )
    (axis,) = axes
    total = size * heads * width
    numbers = torch.arange(total, device=cache.device).view(size, heads, width)
    slots = block * size + torch.arange(size, device=cache.device)
    read = torch.zeros_like(cache.select(axis, block), dtype=torch.long).flatten()
    power = 1
    while power < total:
        digits = (numbers // power) % DIGIT
        keys = (digits + 1).to(layer_dtype(layer, cache))
        # Both tensors are contiguous, as kernels expect the numbers of a token.
        layer.impl.do_kv_cache_update(layer, keys, torch.zeros_like(keys), cache, slots)
        seen = cache.select(axis, block).flatten()
        where = seen != 0
        found = seen.double().round().long()
        read += torch.where(where, (found - 1) * power, 0)
        power *= DIGIT
    cache.select(axis, block).zero_()
    places = where.nonzero().flatten()
    offsets = torch.full((total,), -1, device=cache.device)
    if len(places) == total and read[places].min() >= 0 and read[places].max() < total:
        offsets[read[places]] = places
    if (offsets < 0).any():
        raise StreamError(
            f"a block of {name} does not store keys unchanged, so weir-vllm cannot rotate sinks "
            "in it. Use another --attention-backend."
        )
    offsets = offsets.view(size, heads, width).transpose(0, 1)
    for inner in (size, 32, 16, 8):
        for pair in (1, 2, 4):
            if size % inner or width % pair:
                continue
            split = offsets.reshape(heads, size // inner, inner, width // pair, pair)
            if (described := _as_strides(split)) is not None:
                return BlockLayout(axis, *described)
    raise StreamError(
        f"the keys in a block of {name} are in an order that weir-vllm does not know. Use another "
        "--attention-backend."
    )


def layer_dtype(layer: Any, cache: torch.Tensor) -> torch.dtype:
    """Return the precision of the keys that a layer writes."""
    return cache.dtype if cache.dtype.is_floating_point else layer.kv_cache_torch_dtype


def _as_strides(offsets: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Return offsets as a base, shape and strides, or None if strides cannot describe them."""
    origin = int(offsets.flatten()[0])
    made = torch.full_like(offsets, origin)
    strides = []
    for axis, length in enumerate(offsets.shape):
        step = 0
        if length > 1:
            step = int(offsets.movedim(axis, 0)[1].flatten()[0]) - origin
        strides.append(step)
        shape = [1] * offsets.dim()
        shape[axis] = length
        made = made + step * torch.arange(length, device=offsets.device).view(shape)
    if not torch.equal(made, offsets):
        return None
    return origin, tuple(offsets.shape), tuple(strides)
