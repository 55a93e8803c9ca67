"""Pools without a model: rows of a batch go through a pipe, with attention that is made up.

Rows start at different times, and those whose tails are full at the same time and that lie alike
fold together, as in a layer. A token draws the same small whole number from every query for some
time and then no more: so what it has received is exact, often equal for two tokens, and different
in every row and head. Keys, values and weights say which token they belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weir.draws import Draws
from weir.policy import Pipe
from weir.pools import Fold
from weir.slab import Slots


def appeal(row: int, head: Any, place: Any) -> tuple[Any, Any]:
    """(what a token draws from each query, from how many queries it draws); numbers or tensors."""
    dice = place * 2654435761 + head * 40503 + row * 97
    dice = (dice ^ (dice >> 13)) % 2**31 * 1103515245
    return (dice >> 19) % 8, 1 + (dice >> 27) % 60


def tokens(places: Tensor, row: int = 0, query: int = 0) -> Slots:
    """One row's tokens at places in the stream [1, kv_heads, slots]; -1 is an empty slot."""
    empty = places < 0
    a = (places % 5 * 0.25).masked_fill(empty, -torch.inf)
    b = (places % 7 * 0.5).masked_fill(empty, -torch.inf)
    values = places[..., None].float()
    found = Slots(torch.cat([values, -values], dim=-1), values, a, b, places)
    found.mass = mass_of(places, row, query)
    return found


def mass_of(places: Tensor, row: int, query: int) -> Tensor:
    """What the tokens at `places` [1, kv_heads, slots] have received, the query's share included."""
    rate, life = appeal(row, torch.arange(places.shape[1])[:, None], places)
    received = rate * torch.minimum(query - places + 1, life)
    return received.float().masked_fill(places < 0, 0.0)


@dataclass
class Row:
    """One row of the batch: what its pools hold and remember, and the tokens of its tail."""

    held: list[Slots]
    states: list[dict[str, Tensor]]
    seen: int = 0
    tail: list[int] = field(default_factory=list)


@dataclass
class Streams:
    """Rows that go through a pipe together.

    Attributes:
        starts: when each row's first token comes.
        prompt: so many tokens of a row are folded at once, first of all.
        watch: called after each fold with the number of a row that folded, and the row.
    """

    pipe: Pipe
    chunk: int
    starts: tuple[int, ...] = (0,)
    heads: int = 2
    prompt: int = 0
    watch: Callable[[int, Row], Any] = lambda index, row: None

    def __post_init__(self) -> None:
        none = tokens(torch.empty(1, self.heads, 0, dtype=torch.int64))
        self.rows = [
            Row([none for _ in self.pipe.pools], [pool.state(none) for pool in self.pipe.pools])
            for _ in self.starts
        ]

    def run(self, length: int) -> list[Row]:
        """Let each row see `length` tokens; what is left in its tail is not folded."""
        for tick in range(max(self.starts) + length):
            due: dict[tuple[int, ...], list[int]] = {}
            for index, (row, start) in enumerate(zip(self.rows, self.starts, strict=True)):
                if not start <= tick < start + length:
                    continue
                row.tail.append(row.seen)
                row.seen += 1
                whole = row.seen <= self.prompt
                if row.seen == self.prompt or (not whole and len(row.tail) == self.chunk):
                    layout = tuple(len(slots) for slots in row.held)
                    due.setdefault((*layout, len(row.tail), row.seen == self.prompt), []).append(
                        index
                    )
            for indices in due.values():
                self._fold(indices)
                for index in indices:
                    self.watch(index, self.rows[index])
        return self.rows

    def _fold(self, indices: list[int]) -> None:
        rows = [self.rows[index] for index in indices]
        new = []
        for index, row in zip(indices, rows, strict=True):
            for slots in row.held:
                slots.mass = mass_of(slots.position, index, row.seen - 1)
            places = torch.tensor(row.tail).expand(1, self.heads, -1)
            new.append(tokens(places, index, row.seen - 1))
            row.tail = []
        fold = Fold(
            draws=Draws(0),
            layer=0,
            layers=1,
            seen=torch.tensor([row.seen for row in rows]),
            scale=1.0,
            prompt=rows[0].seen == self.prompt,
        )
        pools = range(len(self.pipe.pools))
        held = [stacked([row.held[pool] for row in rows]) for pool in pools]
        states = [
            {name: torch.cat([row.states[pool][name] for row in rows]) for name in rows[0].states[pool]}
            for pool in pools
        ]
        kept = self.pipe.fold(held, stacked(new), fold, states)
        for pool, slots in enumerate(kept):
            assert len(slots) <= self.pipe.pools[pool].slots()
            held_by_any = slots.held.any(dim=0).any(dim=0)
            assert bool(held_by_any.all()), "a column is empty in every head of every row"
        for place, row in enumerate(rows):
            row.held = [slots.map(lambda t, p=place: t[p : p + 1].clone()) for slots in kept]
            row.states = [{k: t[place : place + 1].clone() for k, t in s.items()} for s in states]


def stacked(rows: list[Slots]) -> Slots:
    """Slots of several rows as one batch."""
    each = [slots.tensors() for slots in rows]
    return Slots(**{name: torch.cat([t[name] for t in each]) for name in each[0]})


def places(slots: Slots, head: int, row: int = 0) -> list[int]:
    """What one head holds, in the order of its slots, once all else fits that."""
    position = slots.position[row, head]
    held = position >= 0
    found = tokens(position[held][None, None])
    for name in ("keys", "values", "a", "b"):
        assert torch.equal(getattr(slots, name)[row, head][held], getattr(found, name)[0, 0]), name
    for weights in (slots.a, slots.b):
        assert bool(weights[row, head][~held].isneginf().all())
    return position[held].tolist()


@dataclass
class Token:
    """A token of a naive loop."""

    position: int
    rate: int
    life: int
    mass: int = 0


@dataclass
class At:
    """Where and when a naive loop folds."""

    layer: int
    head: int
    seen: int


@dataclass
class NaiveRow:
    """One row's stream through naive pools, a list of `Token`s for each pool and head.

    Attributes:
        fold: the naive pipe, (held, new, at) -> held.
        pools: how many it has.
        row: its number, which the made-up attention depends on.
    """

    fold: Callable[..., list[list[Token]]]
    pools: int
    chunk: int
    row: int = 0
    heads: int = 2
    prompt: int = 0
    seen: int = 0

    def __post_init__(self) -> None:
        heads = range(self.heads)
        self.held: list[list[list[Token]]] = [[[] for _ in range(self.pools)] for _ in heads]
        self.tail: list[list[Token]] = [[] for _ in range(self.heads)]

    def until(self, seen: int) -> list[list[list[Token]]]:
        """Read on until so many tokens were seen; returns [head][pool] lists of tokens."""
        while self.seen < seen:
            for head, pools in enumerate(self.held):
                self.tail[head].append(Token(self.seen, *appeal(self.row, head, self.seen)))
                for token in [*sum(pools, []), *self.tail[head]]:
                    token.mass += token.rate if self.seen - token.position < token.life else 0
            self.seen += 1
            whole = self.seen <= self.prompt
            if self.seen == self.prompt or (not whole and len(self.tail[0]) == self.chunk):
                for head, pools in enumerate(self.held):
                    at = At(0, head, self.seen)
                    self.held[head] = self.fold(pools, self.tail[head], at)
                    self.tail[head] = []
        return self.held
