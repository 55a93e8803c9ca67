"""Where the slots of each pool lie in a row of the slab.

Quantized slots come first, in a region of fixed size: those of the front, those of the run, then
empty ones. The exact slots follow without a gap: front, run and tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from weir.policies import Pipe
from weir.pools import CounterRNG, Gating, Output
from weir.slab import CODED, SLOT_BUFFERS, Heads, LayerPositions, SlabSpec, Slots


@dataclass(frozen=True)
class Layout:
    """Layout of the slots of a row.

    Attributes:
        lengths: slots in use, by pool.
        order: the pools in the order of their slots.
        starts: the first slot of each pool, by its place in the pipe.
        quantized_front, quantized: quantized slots in use, those of the front and all.
        first: the first exact slot.
        front: the end of the exact slots of the front.
        used: the end of the run, where the tail begins.
    """

    lengths: tuple[int, ...]
    order: tuple[int, ...]
    starts: dict[int, int]
    quantized_front: int
    quantized: int
    first: int
    front: int
    used: int

    @property
    def run(self) -> int:
        """Tokens of the run, quantized and exact."""
        return self.quantized - self.quantized_front + self.used - self.front

    @property
    def packed(self) -> Layout:
        """The layout of the slots in use alone (`LayerSpec.held`), without empty ones."""
        gap = self.first - self.quantized
        starts = {pool: at - gap if at >= self.first else at for pool, at in self.starts.items()}
        return replace(
            self,
            starts=starts,
            first=self.quantized,
            front=self.front - gap,
            used=self.used - gap,
        )


def lay_out(pipe: Pipe, lengths: Sequence[int]) -> Layout:
    """Lay out a row whose pools have `lengths` slots in use."""
    return _build_layout(pipe.front, pipe.run, pipe.quantized, pipe.quantized_slots, tuple(lengths))


@lru_cache(maxsize=256)
def _build_layout(
    in_front: tuple[int, ...],
    in_run: tuple[int, ...],
    quantized: tuple[int, ...],
    first: int,
    lengths: tuple[int, ...],
) -> Layout:
    """`lay_out`, cached by plain numbers: once pools are full, rows and folds share a layout."""
    exact = [pool for pool in (*in_front, *in_run) if pool not in quantized]
    starts: dict[int, int] = {}
    ends = []
    for pools, at in ((quantized, 0), (exact, first)):
        for pool in pools:
            starts[pool] = at
            at += lengths[pool]
        ends.append(at)
    quantized_front = sum(lengths[pool] for pool in quantized if pool in in_front)
    front = first + sum(lengths[pool] for pool in in_front if pool not in quantized)
    return Layout(
        lengths, (*quantized, *exact), starts, quantized_front, ends[0], first, front, ends[1]
    )


def count_used(pipe: Pipe, lengths: Sequence[int]) -> int:
    """Compute `Layout.used` alone, which every step needs."""
    total = sum(lengths)
    return (
        pipe.quantized_slots + total - sum(lengths[p] for p in pipe.quantized)
        if pipe.quantized
        else total
    )


@dataclass(frozen=True)
class LayerSpec:
    """The fixed facts of one layer.

    Attributes:
        pipe: the pools that hold slots.
        positions: what the layer knows about positions.
        chunk: tokens between two folds.
        draws: the layer's random numbers; each row sets its own seed.
        index, layers: the number of the layer, and how many there are.
        output: the projection of the layer's output; None if not known.
        gate: the layer's gate; None if no pool reads it.
    """

    pipe: Pipe
    positions: LayerPositions = field(default_factory=LayerPositions)
    chunk: int = 64
    draws: CounterRNG = field(default_factory=lambda: CounterRNG(0))
    index: int = 0
    layers: int = 1
    output: Output | None = field(default=None, compare=False)
    gate: Gating | None = field(default=None, compare=False)

    @property
    def front_moves(self) -> bool:
        """Whether tokens of the front move closer to the present at each fold."""
        return self.positions.rolling and bool(self.pipe.front)

    @property
    def three_axes(self) -> bool:
        """Whether tokens have places in time, height and width."""
        return self.positions.rotary is not None and self.positions.rotary.sections is not None

    @property
    def moves_on_axes(self) -> bool:
        """Whether tokens of the front move and have places on three axes."""
        return self.front_moves and self.three_axes

    @property
    def keeps_queries(self) -> int:
        """Number of queries that wait in the slab: the last ones, or those of the whole tail if the
        attention received is summed, whichever is more.
        """
        return max(self.pipe.needs_queries, self.chunk if self.pipe.needs_mass else 0)

    def query_place(self, waiting: int) -> int:
        """Return the place of a token's query, `waiting` tokens being before it in the tail.

        The last query of a full tail takes the last place; queries that no fold reads share the
        first.
        """
        return max(0, waiting + self.keeps_queries - self.chunk)

    def held(self, lengths: Sequence[int]) -> dict[str, tuple[slice, ...]]:
        """The slots in use of a row and its whole tail, by the names of buffers (`Slab.tensors`).

        Buffers that are not named are no longer for more slots.
        """
        lies = lay_out(self.pipe, lengths)
        end = lies.used + self.chunk
        coded, exact = slice(0, lies.quantized), slice(0, end - lies.first)
        slots = (coded, slice(lies.first, end)) if lies.first else (slice(0, end),)
        found: dict[str, tuple[slice, ...]] = dict.fromkeys(SLOT_BUFFERS, slots)
        found |= {"keys": (exact,), "values": (exact,)}
        found["masters"] = (slice(0, lies.front - lies.first),)
        for name, part in (
            ("keys", coded),
            ("values", coded),
            ("masters", slice(0, lies.quantized_front)),
        ):
            found |= dict.fromkeys((f"{CODED}{name}", f"{CODED}{name}_peaks"), (part,))
        return found

    def slab(self, heads: Heads) -> SlabSpec:
        """Describe the buffers of the layer; a pipe without a limit starts with a few chunks and
        grows.
        """
        pipe, positions = self.pipe, self.positions
        slots = (4 * self.chunk if pipe.slots is None else pipe.slots) + self.chunk
        rotates = self.front_moves and positions.rotary is not None
        quantized = [pool for pool in pipe.front if pool in pipe.quantized]
        exact = [pool for pool in pipe.front if pool not in quantized]
        masters = self.chunk if pipe.slots is None else 0
        return SlabSpec(
            heads,
            slots,
            masters=(pipe.slots_of(exact) or masters) if rotates else 0,
            mass=pipe.needs_mass or pipe.needs_second_reading,
            two_weights=pipe.two_weights,
            frames=positions.alibi is not None,
            spans=self.moves_on_axes,
            queries=self.keeps_queries,
            state=self._state(heads),
            format=pipe.format,
            quantized=pipe.quantized_slots,
            quantized_masters=pipe.slots_of(quantized) if rotates else 0,
        )

    def _state(self, heads: Heads) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what pools remember beside their slots, by the slab's names."""
        shape = (1, heads.kv_heads, 0)
        with torch.device("meta"):
            keys = torch.empty(*shape, heads.key_dim, dtype=heads.dtype)
            values = torch.empty(*shape, heads.value_dim, dtype=heads.dtype)
            weights = torch.empty(shape)
            position = torch.empty(shape, dtype=torch.int64)
        mass = weights if self.pipe.needs_mass or self.pipe.needs_second_reading else None
        nothing = Slots(keys, values, weights, weights, position, mass)
        return {
            f"{index}.{name}": (tuple(t.shape[2:]), t.dtype)
            for index, pool in enumerate(self.pipe.pools)
            for name, t in pool.state(nothing).items()
        }
