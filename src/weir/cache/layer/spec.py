"""What is always so about one layer of a cache: its facts travel together."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weir.policies import Pipe
from weir.pools import CounterRNG, Output
from weir.slab import Heads, LayerPositions, SlabSpec, Slots


@dataclass(frozen=True)
class LayerSpec:
    """One layer, as all that serves it knows it.

    Attributes:
        pipe: who holds slots.
        positions: what the layer knows about positions.
        chunk: tokens between two folds.
        draws: its random numbers; each row puts its own seed in.
        index, layers: which layer it is, and of how many.
        output: the projection that its output goes through; None where it is not known.
    """

    pipe: Pipe
    positions: LayerPositions = field(default_factory=LayerPositions)
    chunk: int = 64
    draws: CounterRNG = field(default_factory=lambda: CounterRNG(0))
    index: int = 0
    layers: int = 1
    output: Output | None = field(default=None, compare=False)

    @property
    def front_moves(self) -> bool:
        """Whether tokens of the front move closer to the present at each fold."""
        return self.positions.rolling and bool(self.pipe.front)

    @property
    def three_axes(self) -> bool:
        """Whether tokens stand at places in time, height and width."""
        return self.positions.rotary is not None and self.positions.rotary.sections is not None

    @property
    def moves_on_axes(self) -> bool:
        """Whether tokens of the front move, and stand at places on three axes."""
        return self.front_moves and self.three_axes

    @property
    def keeps_queries(self) -> int:
        """Queries that wait in the slab: the last ones that pools read, or those of the whole tail
        where the attention received is summed, whichever are more.
        """
        return max(self.pipe.needs_queries, self.chunk if self.pipe.needs_mass else 0)

    def query_place(self, waiting: int) -> int:
        """Where the query of a token waits that has so many before it in the tail.

        A full tail's last query takes the last place. Queries that no fold is going to ask for
        share the first one, until that of the first token that is asked for takes it.
        """
        return max(0, waiting + self.keeps_queries - self.chunk)

    def slab(self, heads: Heads) -> SlabSpec:
        """The buffers of the layer, for attention of these sizes.

        A pipe without a limit begins with a few chunks and grows.
        """
        pipe, positions = self.pipe, self.positions
        slots = (4 * self.chunk if pipe.slots is None else pipe.slots) + self.chunk
        rotates = self.front_moves and positions.rotary is not None
        coded = [pool for pool in pipe.front if pool in pipe.coded]
        exact = [pool for pool in pipe.front if pool not in coded]
        masters = self.chunk if pipe.slots is None else 0
        return SlabSpec(
            heads,
            slots,
            masters=(pipe.slots_of(exact) or masters) if rotates else 0,
            mass=pipe.needs_mass,
            two_weights=pipe.two_weights,
            frames=positions.alibi is not None,
            spans=self.moves_on_axes,
            queries=self.keeps_queries,
            state=self._state(heads),
            format=pipe.format,
            coded=pipe.coded_slots,
            coded_masters=pipe.slots_of(coded) if rotates else 0,
        )

    def _state(self, heads: Heads) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """What the pools remember beside their slots, by the names a slab has for it."""
        shape = (1, heads.kv_heads, 0)
        with torch.device("meta"):
            keys = torch.empty(*shape, heads.key_dim, dtype=heads.dtype)
            values = torch.empty(*shape, heads.value_dim, dtype=heads.dtype)
            weights = torch.empty(shape)
            position = torch.empty(shape, dtype=torch.int64)
        mass = weights if self.pipe.needs_mass else None
        nothing = Slots(keys, values, weights, weights, position, mass)
        return {
            f"{index}.{name}": (tuple(t.shape[2:]), t.dtype)
            for index, pool in enumerate(self.pipe.pools)
            for name, t in pool.state(nothing).items()
        }
