"""Positions: rotary embeddings at any place of an endless stream, ALiBi, and the rolling frame.

The *rolling frame* implements StreamingLLM's "positions inside the cache" (Xiao et al. 2024,
section 3.2) without rotating every key again. The newest tokens (the run) keep their positions in
the stream, and older tokens (the front) are shifted until the newest of them directly precedes the
run: at each fold their keys are rotated from unshifted copies (masters). Angles are reduced to one
turn in float64, so position 4,000,000 is as exact as position 0.

Models with *three axes* (Qwen2-VL's M-RoPE: Wang et al. 2024, section 2.1) rotate some pairs of
dimensions by a position in time, and others by height and width. For a text token, all three are
the same. Each token has a *span*: a position and an extent. For a text token, these are its own
position and 1. For a patch of an image, they are the position where the image begins, and the
extent of the image. A shift is the same on all axes, so it preserves the geometry of an image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from weir import kernels
from weir.slab.attention import at_least_float32


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding, half-split, over the first dimensions of a head.

    Attributes:
        frequencies: radians per position [rotary_dim / 2], float64.
        scaling: factor of rotated queries and keys (YaRN's attention factor); 1 for plain RoPE.
        sections: for a model with three axes, the numbers of consecutive frequencies that belong
            to time, height, width, time and so on; None for one axis.
    """

    frequencies: Tensor
    scaling: float = 1.0
    sections: tuple[int, ...] | None = None
    _memo: list[tuple[Tensor, Rotation]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @cached_property
    def _per_turn(self) -> Tensor:
        """Full turns per position [rotary_dim / 2], float64."""
        return self.frequencies / (2 * math.pi)

    @cached_property
    def _axes(self) -> Tensor:
        """The axis of each pair of a model with three axes [rotary_dim / 2], int64."""
        count = torch.tensor(self.sections)
        return (torch.arange(len(count)) % 3).repeat_interleave(count)

    def rotation_at(self, positions: Tensor) -> Rotation:
        """Compute the rotations to `positions` [...]."""
        angles = self._angles(positions[..., None])
        return Rotation(angles.cos(), angles.sin())

    def tables(self, positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Compute scaled cosines and sines for a model that applies its rotary embedding itself.

        Positions are [...], for three axes also [batch, length, 3]; `width` is rotary_dim / 2, or
        rotary_dim with both halves alike, as most models expect it. Returns two [..., width],
        float32.
        """
        if self.sections is not None and positions.ndim == 3:
            positions = positions[..., self._axes.to(positions.device)]
        else:
            positions = positions[..., None]
        angles = self._angles(positions)
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        if width == cos.shape[-1]:
            return cos, sin
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)

    def _angles(self, positions: Tensor) -> Tensor:
        """Compute angles of positions [..., 1 or rotary_dim / 2], float32, within half a turn."""
        turns = positions.to(torch.float64) * self._per_turn.to(positions.device)
        # After reduction in float64, float32 is enough for sines. Subtracting the whole turns is
        # exact, and much faster than a remainder.
        return turns.sub_(turns.round()).to(torch.float32).mul_(2 * math.pi)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate and scale queries or keys [batch, heads, n, dim] to `positions` [batch, 1 or
        heads, n].

        In one call of the model, all layers give the same tensor of positions, so its rotation is
        computed once.
        """
        for known, turn in self._memo:
            if known is positions:
                return turn.apply(x)
        turn = self.rotation_at(positions)
        if self.scaling != 1:
            turn = Rotation(turn.cos * self.scaling, turn.sin * self.scaling)
        self._memo[:] = [(positions, turn)]
        return turn.apply(x)

    def move(self, keys: Tensor, by: Tensor, out: Tensor | None = None) -> Tensor:
        """Shift rotated keys [batch, heads, n, dim] by `by` positions [batch or 1, heads or 1, n].

        `out` is the tensor to write to, which must not share memory with the others; None for a new
        one.
        """
        turned = kernels.rotate_keys(keys)
        if turned is not None and (out is None or out.dtype == keys.dtype):
            # If a model is on several devices, its frequencies are on one of them.
            return turned(keys, by, self._per_turn.to(keys.device), out)
        moved = self.rotation_at(by).apply(keys)
        return moved if out is None else out.copy_(moved)


class Rotation(NamedTuple):
    """Rotations of the pairs (i, i + half) of a head's first dimensions.

    Attributes:
        cos, sin: of each pair [batch, 1 or heads, n, rotary_dim / 2], float32.
    """

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotate queries or keys [batch, heads, n, dim], in float32 or float64."""
        half = self.cos.shape[-1]
        wide = at_least_float32(x)
        one, two = wide[..., :half], wide[..., half : 2 * half]
        turned = torch.empty_like(x)
        first, second = turned[..., :half], turned[..., half : 2 * half]
        if x.dtype == wide.dtype and not torch.compiler.is_compiling():
            torch.mul(one, self.cos, out=first).addcmul_(two, self.sin, value=-1)
            torch.mul(two, self.cos, out=second).addcmul_(one, self.sin)
        else:
            first.copy_(torch.addcmul(one * self.cos, two, self.sin, value=-1))
            second.copy_(torch.addcmul(two * self.cos, one, self.sin))
        turned[..., 2 * half :] = x[..., 2 * half :]
        return turned


def rotation_tables(
    rotaries: Mapping[str | None, Rotary], kind: str | None, positions: Tensor, width: int
) -> tuple[Tensor, Tensor] | None:
    """Compute `Rotary.tables` for the layers of one type; None if no layer has a rotary embedding.

    A type without a rotary embedding of its own uses the first one.
    """
    if not rotaries:
        return None
    rotary = rotaries.get(kind) or next(iter(rotaries.values()))
    return rotary.tables(positions, width)


@dataclass(frozen=True)
class Alibi:
    """Attention with linear biases (Press, Smith and Lewis 2022): logits fall with distance.

    Attributes:
        slopes: decrease per position, for each query head [heads], float32.
        rounding: dtype in which the model computes slope times position, counted from the first
            token of its cache; None if it does not round, so that only distances matter.
        factor: factor of that product.
    """

    slopes: Tensor
    rounding: torch.dtype | None = None
    factor: float = 1.0

    def bias(
        self, places: Tensor, kv_heads: int, first: Tensor | int, newest: Tensor | int
    ) -> Tensor:
        """Compute the bias [batch or 1, kv_heads, group, 1, slots], float32, of slots at `places`.

        `places` is [batch or 1, kv_heads or 1, slots], int64, and must broadcast with `first` and
        `newest`. `first` is the position of the cache's first token, which only `rounding` needs.
        `newest` is a position near the queries.
        """
        slopes = self.slopes.to(places.device).view(kv_heads, -1)[None, :, :, None, None]
        if self.rounding is None:
            # The softmax ignores a constant. Counted from a position nearby, the bias of the newest
            # slots is exact at any length of the stream.
            near = (places - newest)[:, :, None, None]
            return slopes * near.to(torch.float32) * self.factor
        index = (places - first)[:, :, None, None]
        product = slopes.to(self.rounding) * index.to(self.rounding)
        return product.to(torch.float32) * self.factor


def roll_positions(positions: Tensor, first_of_run: Tensor) -> Tensor:
    """Compute the positions of front tokens in the rolling frame.

    `positions` in the stream are [batch, kv_heads, front], int64, -1 for empty slots; the run
    begins at `first_of_run` [batch]. Returns consecutive positions in the order of the stream, the
    last directly before the run; slots with the same token share a position, and positions of empty
    slots are undefined.
    """
    if bool((positions[:, :, 1:] > positions[:, :, :-1]).all()):
        # Most pools keep their slots in order, and this is several times as fast as sorting.
        before_last = torch.arange(positions.shape[2] - 1, -1, -1, device=positions.device)
        return (first_of_run[:, None, None] - 1 - before_last).expand_as(positions)
    ordered, order = positions.sort(dim=2)
    new = torch.ones_like(ordered)
    new[:, :, 1:] = (ordered[:, :, 1:] != ordered[:, :, :-1]).long()
    rank = new.cumsum(dim=2)
    frame = first_of_run[:, None, None] - 1 - (rank[:, :, -1:] - rank)
    return torch.empty_like(frame).scatter_(2, order, frame)


def shift_spans(positions: Tensor, spans: Tensor, begin: Tensor) -> Tensor:
    """Compute the shifts of front tokens in the rolling frame on three axes [batch, kv_heads,
    front].

    The distance from a token to the run is the extent of the token, or of the image that it is a
    part of, plus the extents of all text tokens and images between it and the run. An image counts
    in full while one of its patches is held. For text only, the shifts lead to the positions of
    `roll_positions`. The shift is 0 for patches of the image with which the run begins, and
    undefined for empty slots. `spans` are [batch, kv_heads, front, 2], int64; the run begins at
    `begin` [batch] on the axes.
    """
    empty = positions < 0
    first, reach = spans[..., 0].masked_fill(empty, -1), spans[..., 1].masked_fill(empty, 0)
    ordered, order = first.sort(dim=2, stable=True)
    last = begin[:, None, None].expand(*ordered.shape[:2], 1)
    after = torch.cat([ordered[:, :, 1:], last], dim=2)
    # Patches of one image have the same begin, so only the last of them counts.
    covered = torch.minimum(reach.gather(2, order), after - ordered).clamp_min(0)
    between = covered.flip(2).cumsum(dim=2).flip(2)
    shift = last - between - ordered
    return torch.empty_like(shift).scatter_(2, order, shift)


@dataclass(frozen=True)
class LayerPositions:
    """Positional encoding of a layer.

    Attributes:
        rotary: rotary embedding; None for none.
        alibi: linear biases; None for none.
        window: number of newest tokens that a query sees (sliding window); None for all.
        rolling: whether positions are inside the cache, not in the stream.
        placed: whether queries and keys arrive rotated to their positions in the stream; otherwise
            the layer rotates them.
    """

    rotary: Rotary | None = None
    alibi: Alibi | None = None
    window: int | None = None
    rolling: bool = True
    placed: bool = False
