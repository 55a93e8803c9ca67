"""Positions: rotary embeddings at any place of an endless stream, ALiBi, and the rolling frame.

Knows nothing about caches or models; `models` reads a model's frequencies and slopes.

The *rolling frame* is StreamingLLM's "positions inside the cache" (Xiao et al. 2024, section 3.2)
without its cost. Attention sees only differences of positions, so the newest tokens may keep their
places in the stream, and everything older is moved up until it touches them: a front token's
position in the frame is that of the first token of the run, less the front tokens that stand
between. Keys of the run are rotated once, when they come; the front is rotated from its masters at
each fold. Angles are reduced in float64, so a place four million tokens out is as exact as the
first.

Models with *three axes* (Qwen2-VL's M-RoPE: Wang et al. 2024, section 2.1) rotate some pairs by a
place in time, others in height and in width. A word stands at the same place on all three; the
pieces of an image spread from where it begins, and the next word begins behind its longer side.
Each token has a *span*: where its word or image begins, and how far that reaches. A shift is the
same on all axes, so it moves a key like any other, and the pieces of an image keep their geometry.
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
        sections: of a model with three axes, how many frequencies turn by time, by height and by
            width, in that order and round again; None for one axis.
    """

    frequencies: Tensor
    scaling: float = 1.0
    sections: tuple[int, ...] | None = None
    _memo: list[tuple[Tensor, Rotation]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @cached_property
    def _per_turn(self) -> Tensor:
        """Turns per position [rotary_dim / 2], float64."""
        return self.frequencies / (2 * math.pi)

    @cached_property
    def _axes(self) -> Tensor:
        """By which axis each pair of a model with three axes turns [rotary_dim / 2], int64."""
        count = torch.tensor(self.sections)
        return (torch.arange(len(count)) % 3).repeat_interleave(count)

    def turns(self, positions: Tensor) -> Rotation:
        """The rotations to `positions` [...]."""
        angles = self._angles(positions[..., None])
        return Rotation(angles.cos(), angles.sin())

    def tables(self, positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines for a model that rotates by itself, scaled.

        Args:
            positions: [...]; of a model with three axes also [batch, length, 3].
            width: one for each pair of a head's dimensions, or two, as transformers mostly has it.

        Returns:
            Twice [..., width], float32.
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
        """The angles of positions, one or one for each pair [..., 1 or rotary_dim / 2], float32."""
        turns = positions.to(torch.float64) * self._per_turn.to(positions.device)
        # Reduced in float64, the sine itself may be taken in float32: no digits are lost far out.
        # A whole part is taken off without rounding, and much faster than a remainder is.
        return turns.sub_(turns.round()).to(torch.float32).mul_(2 * math.pi)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys [batch, heads, n, dim] at `positions` [batch, 1 or heads, n], scaled.

        All layers of a forward ask for the same positions, the very same tensor: what they need is
        worked out once.
        """
        for known, turn in self._memo:
            if known is positions:
                return turn.of(x)
        turn = self.turns(positions)
        if self.scaling != 1:
            turn = Rotation(turn.cos * self.scaling, turn.sin * self.scaling)
        self._memo[:] = [(positions, turn)]
        return turn.of(x)

    def move(self, keys: Tensor, by: Tensor, out: Tensor | None = None) -> Tensor:
        """Rotated keys [batch, heads, n, dim] moved on by `by` [batch or 1, heads or 1, n].

        Args:
            keys, by: other memory than `out`'s.
            out: where they are written; None for new memory.
        """
        turned = kernels.rotate_keys(keys)
        if turned is not None and (out is None or out.dtype == keys.dtype):
            # The frequencies are where the model's are; of one on several devices, on one of them.
            moved: Tensor = turned(keys, by, self._per_turn.to(keys.device), out)
            return moved
        moved = self.turns(by).of(keys)
        return moved if out is None else out.copy_(moved)


class Rotation(NamedTuple):
    """Rotations of the pairs (i, i + half) of a head's first dimensions.

    Attributes:
        cos, sin: of each pair [batch, 1 or heads, n, rotary_dim / 2], float32.
    """

    cos: Tensor
    sin: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Queries or keys [batch, heads, n, dim], rotated in float32 or float64."""
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
    """Cosines and sines for one type of a model's layers, which rotates by itself.

    Args:
        rotaries: the rotary embedding of each type of layers that has one.
        kind: the type; one that has none of its own shares the first.
        positions, width: as for `Rotary.tables`.

    Returns:
        Twice [..., width], float32; None where no layer rotates.
    """
    if not rotaries:
        return None
    rotary = rotaries.get(kind) or next(iter(rotaries.values()))
    return rotary.tables(positions, width)


@dataclass(frozen=True)
class Alibi:
    """Attention with linear biases (Press, Smith and Lewis 2022): logits fall with distance.

    Attributes:
        slopes: how much, by query head [heads], float32.
        rounding: the model computes slope times place in this dtype, counting from its cache's
            first token; None where nothing is rounded, so that only distances matter.
        factor: of that product.
    """

    slopes: Tensor
    rounding: torch.dtype | None = None
    factor: float = 1.0

    def bias(
        self, places: Tensor, kv_heads: int, first: Tensor | int, newest: Tensor | int
    ) -> Tensor:
        """Compute the bias on the logits of slots at `places`.

        Args:
            places: [batch or 1, kv_heads or 1, slots], int64.
            kv_heads: as many as the query heads are grouped by.
            first: the place of the cache's first token, broadcasts with `places`; it matters only
                where the model rounds.
            newest: a place near the queries', broadcasts with `places`.

        Returns:
            [batch or 1, kv_heads, group, 1, slots], float32.
        """
        slopes = self.slopes.to(places.device).view(kv_heads, -1)[None, :, :, None, None]
        if self.rounding is None:
            # The softmax ignores what is added to all slots alike; counted from nearby, the
            # newest slots' bias is exact however long the stream.
            near = (places - newest)[:, :, None, None]
            return slopes * near.to(torch.float32) * self.factor
        index = (places - first)[:, :, None, None]
        product = slopes.to(self.rounding) * index.to(self.rounding)
        return product.to(torch.float32) * self.factor


def roll_positions(positions: Tensor, first_of_run: Tensor) -> Tensor:
    """The rolling frame of front tokens.

    Args:
        positions: places in the stream [batch, kv_heads, front], int64; -1 where empty.
        first_of_run: where the unbroken run of newest tokens begins [batch], int64.

    Returns:
        Their positions in the frame, same shape: consecutive, in the order of the stream, the last
        one just before the run. Slots that hold the same token share a position; empty slots get
        one that means nothing.
    """
    if bool((positions[:, :, 1:] > positions[:, :, :-1]).all()):
        # As most pools leave them, and several times as fast.
        before_last = torch.arange(positions.shape[2] - 1, -1, -1, device=positions.device)
        return (first_of_run[:, None, None] - 1 - before_last).expand_as(positions)
    ordered, order = positions.sort(dim=2)
    new = torch.ones_like(ordered)
    new[:, :, 1:] = (ordered[:, :, 1:] != ordered[:, :, :-1]).long()
    rank = new.cumsum(dim=2)
    frame = first_of_run[:, None, None] - 1 - (rank[:, :, -1:] - rank)
    return torch.empty_like(frame).scatter_(2, order, frame)


def shift_spans(positions: Tensor, spans: Tensor, begin: Tensor) -> Tensor:
    """The rolling frame of front tokens on three axes: how far each is moved.

    What lies between a token and the run is as long as the words and images that are still there;
    of an image the whole counts while one piece is left. With words alone this is `roll_positions`.

    Args:
        positions: places in the stream [batch, kv_heads, front], int64; -1 where empty.
        spans: on the axes [batch, kv_heads, front, 2], int64.
        begin: where the first word or image of the run begins on the axes [batch], int64.

    Returns:
        [batch, kv_heads, front], the same on all axes; 0 for pieces of the image that the run
        begins with. Empty slots get a shift that means nothing.
    """
    empty = positions < 0
    first, reach = spans[..., 0].masked_fill(empty, -1), spans[..., 1].masked_fill(empty, 0)
    ordered, order = first.sort(dim=2, stable=True)
    last = begin[:, None, None].expand(*ordered.shape[:2], 1)
    after = torch.cat([ordered[:, :, 1:], last], dim=2)
    # Pieces of one image begin together: only the last of them counts.
    covered = torch.minimum(reach.gather(2, order), after - ordered).clamp_min(0)
    between = covered.flip(2).cumsum(dim=2).flip(2)
    shift = last - between - ordered
    return torch.empty_like(shift).scatter_(2, order, shift)


@dataclass(frozen=True)
class LayerPositions:
    """What a layer knows about positions.

    Attributes:
        rotary: its rotary embedding; None for none.
        alibi: its linear biases; None for none.
        window: it sees only this many newest tokens (a sliding layer that keeps its own window);
            None for all.
        rolling: positions inside the cache, not in the stream.
        placed: its queries and keys come rotated to their places in the stream already; otherwise
            the layer rotates them.
    """

    rotary: Rotary | None = None
    alibi: Alibi | None = None
    window: int | None = None
    rolling: bool = True
    placed: bool = False
