"""Feed a flow of tokens, with keys, values and log-weights, to a single pool, fold by fold.

Tests use this to compare a pool with a naive loop that gets the same tokens one by one. Nothing
here depends on a particular pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weir.pools import Fold, Pool
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams
from weir.slab.slots import Slots


@dataclass
class Flow:
    """Tokens of whole streams.

    Attributes:
        keys, values: [batch, kv_heads, length, dim].
        weights: function from places [batch, kv_heads, n] to the log-weights (a, b) of their
            tokens, in the same shape; None if all are zero.
    """

    keys: Tensor
    values: Tensor
    weights: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    def at(self, position: Tensor) -> Slots:
        """The tokens at places [batch, kv_heads, n], -1 for none."""
        place, empty = position.clamp_min(0), position < 0
        keys, values = (
            t.gather(2, place[..., None].expand(-1, -1, -1, t.shape[3]))
            for t in (self.keys, self.values)
        )
        both = (position * 0, position * 0) if self.weights is None else self.weights(position)
        a, b = (t.float().masked_fill(empty, -torch.inf) for t in both)
        return Slots(keys, values, a, b, position)


@dataclass
class PoolStream:
    """A pool that folds a flow. Iterating yields the places of the tokens that enter each fold.

    Attributes:
        pool: the pool.
        flow: the tokens.
        chunk: tokens of each fold.
        share: the share of these tokens that each head of each row gets, chosen at random.
        draws: the pool's random numbers.
        form: the parameters of attention.
        held, state: the pool's slots and its other state after the last fold.
    """

    pool: Pool
    flow: Flow
    chunk: int
    share: float = 1.0
    draws: CounterRNG = field(default_factory=lambda: CounterRNG(0))
    form: AttentionParams = field(default_factory=lambda: AttentionParams(1.0))
    held: Slots = field(init=False)
    state: dict[str, Tensor] = field(init=False)

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1)
        length, shape = self.flow.keys.shape[2], self.flow.keys.shape[:2]
        self.held = self.flow.at(torch.empty(*shape, 0, dtype=torch.int64))
        self.state = self.pool.state(self.held)
        slots = self.pool.slots()
        for start in range(0, length, self.chunk):
            place = torch.arange(start, min(start + self.chunk, length)).expand(*shape, -1)
            if self.share < 1:
                place = place.where(torch.rand(place.shape, generator=generator) < self.share, -1)
            fold = Fold(
                self.draws,
                torch.tensor([0]),
                self.form,
                state=dict(self.state),
                unbroken=self.share == 1,
            )
            self.held, rest = self.pool.fold(self.held, self.flow.at(place), fold)
            assert len(rest) == 0
            assert slots is None or len(self.held) <= slots
            for name, t in self.state.items():
                assert slots is None or fold.state[name].shape == t.shape
                assert fold.state[name].dtype == t.dtype
            self.state = fold.state
            yield place

    def whole(self) -> PoolStream:
        """Fold the whole flow; self."""
        for _ in self:
            pass
        return self

    def beside(
        self, loops: Mapping[tuple[int, int], Any], token: Callable[..., Any]
    ) -> Iterator[tuple[int, int, Any]]:
        """After each fold, yield each (row, head, naive loop); loops take the pool's tokens.

        Args:
            loops: naive loops by row and head, with a method `take(token)`.
            token: function that makes a loop's token from position, key, value, a and b.
        """
        batch, heads, length, _ = self.flow.keys.shape
        whole = self.flow.at(torch.arange(length).expand(batch, heads, -1))
        lists = [t.tolist() for t in (whole.keys, whole.values, whole.a, whole.b)]
        for arrivals in self:
            for (row, head), loop in loops.items():
                for place in arrivals[row, head].tolist():
                    if place >= 0:
                        loop.take(token(place, *(each[row][head][place] for each in lists)))
                yield row, head, loop
