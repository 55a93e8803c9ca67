"""Runs pools without a model: the rows of a batch go through a pipe, with invented attention.

Rows start at different times. As in a layer, rows fold together if their tails are full at the same
time and their slots have the same layout. For some time, a token receives the same small whole
number from every query, and nothing after that. So the attention it has received is exact, often
equal for two tokens, and different in every row and head. Keys, values and weights are computed
from a token's position, so a test can see which token they belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from reference.heavy import heavy_of
from reference.hive import hive_of
from torch import Tensor

import weir
from weir.policies.grammar import policy
from weir.policies.pipe import Pipe
from weir.pools import Fold, Hive, Pool
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams
from weir.slab.slots import Slots


def appeal(row: Any, head: Any, place: Any) -> tuple[Any, Any]:
    """Return the attention that a token receives from each query, and from how many queries it
    receives it. The arguments can be numbers or tensors.
    """
    dice = place * 2654435761 + head * 40503 + row * 97
    dice = (dice ^ (dice >> 13)) % 2**31 * 1103515245
    return (dice >> 19) % 8, 1 + (dice >> 27) % 60


def received(place: Tensor, row: Tensor, query: Tensor) -> Tensor:
    """Return the attention that tokens have received, including that of the newest query, float32.

    Args:
        place: positions in the stream [rows, kv_heads, slots], -1 for empty slots.
        row: the numbers of the rows [rows].
        query: the place of each row's newest query [rows].
    """
    heads = torch.arange(place.shape[1])[:, None]
    rate, life = appeal(row[:, None, None], heads, place)
    total = rate * torch.minimum(query[:, None, None] - place + 1, life)
    return total.float().masked_fill(place < 0, 0.0)


def tokens(place: Tensor) -> Slots:
    """Return the tokens at positions `place` [rows, kv_heads, slots] of a stream, without received
    attention. -1 is an empty slot.
    """
    empty = place < 0
    a = (place % 5 * 0.25).masked_fill(empty, -torch.inf)
    b = (place % 7 * 0.5).masked_fill(empty, -torch.inf)
    values = place[..., None].float()
    return Slots(torch.cat([values, -values], dim=-1), values, a, b, place, torch.zeros_like(a))


@dataclass
class Row:
    """One row of the batch: what its pools hold, their states, and the numbers of tokens that it
    has seen and that wait in its tail.
    """

    held: list[Slots]
    states: list[dict[str, Tensor]]
    seen: int = 0
    waiting: int = 0


@dataclass
class Streams:
    """Rows that go through a pipe together.

    Attributes:
        pipe: the pipe.
        chunk: tokens between two folds.
        starts: when the first token of each row comes.
        heads: KV heads of each row.
        prompt: how many tokens at the beginning of each row are folded at once.
        watch: called after each fold with the number of a row that folded, and the row.
        rows: the rows.
    """

    pipe: Pipe
    chunk: int
    starts: tuple[int, ...] = (0,)
    heads: int = 2
    prompt: int = 0
    watch: Callable[[int, Row], Any] = lambda index, row: None
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        none = tokens(torch.empty(1, self.heads, 0, dtype=torch.int64))
        pools = self.pipe.pools
        self.rows = [
            Row([none for _ in pools], [p.state(none) for p in pools]) for _ in self.starts
        ]

    def run(self, length: int) -> list[Row]:
        """Let each row see `length` tokens, and return the rows. Tokens that are left in a tail are
        not folded.
        """
        for tick in range(max(self.starts) + length):
            due: dict[tuple[int, ...], list[int]] = {}
            for index, (row, start) in enumerate(zip(self.rows, self.starts, strict=True)):
                if not start <= tick < start + length:
                    continue
                row.seen += 1
                row.waiting += 1
                whole = row.seen <= self.prompt
                if row.seen == self.prompt or (not whole and row.waiting == self.chunk):
                    layout = (*map(len, row.held), row.waiting, int(whole))
                    due.setdefault(layout, []).append(index)
            for indices in due.values():
                self._fold(torch.tensor(indices), [self.rows[index] for index in indices])
                for index in indices:
                    self.watch(index, self.rows[index])
        return self.rows

    def _fold(self, index: Tensor, rows: list[Row]) -> None:
        seen = torch.tensor([row.seen for row in rows])
        steps = torch.arange(-rows[0].waiting, 0)
        arrived = (seen[:, None] + steps)[:, None].expand(-1, self.heads, -1)
        new = tokens(arrived)
        held = [stacked(pool) for pool in zip(*(row.held for row in rows), strict=True)]
        for slots in (*held, new):
            slots.mass = received(slots.position, index, seen - 1)
        states = [
            {name: torch.cat([state[name] for state in pool]) for name in pool[0]}
            for pool in zip(*(row.states for row in rows), strict=True)
        ]
        prompt = rows[0].seen == self.prompt
        kept = self.pipe.fold(
            held, new, Fold(CounterRNG(0), seen, AttentionParams(1.0), prompt=prompt), states
        )
        for pool, slots in zip(self.pipe.pools, kept, strict=True):
            assert len(slots) <= pool.slots()
            assert bool(slots.held.any(dim=1).any(dim=0).all()), "an empty column"
        for place, row in enumerate(rows):
            row.held = [slots.map(lambda t, p=place: t[p : p + 1]) for slots in kept]
            row.states = [{k: t[place : place + 1] for k, t in s.items()} for s in states]
            row.waiting = 0


def fed(pool: Pool, sizes: list[int], heads: int = 2) -> tuple[Slots, list[Slots]]:
    """Fold arrivals of these sizes. Return what the pool holds in the end, and what it passed on at
    each fold.

    The attention that a token has received does not change, and is often equal for two tokens.
    """
    held, seen, gone = tokens(torch.empty(1, heads, 0, dtype=torch.int64)), 0, []
    state = pool.state(held)
    for size in sizes:
        new = tokens(torch.arange(seen, seen + size).expand(1, heads, -1))
        new.mass, seen = (
            appeal(3, torch.arange(heads)[:, None], new.position)[0].float(),
            seen + size,
        )
        fold = Fold(CounterRNG(0), torch.tensor([seen]), AttentionParams(1.0), state=state)
        held, rest = pool.fold(held, new, fold)
        gone.append(rest)
    return held, gone


def stacked(rows: tuple[Slots, ...]) -> Slots:
    """Return the slots of several rows as one batch."""
    each = [slots.tensors() for slots in rows]
    return Slots(**{name: torch.cat([t[name] for t in each]) for name in each[0]})


def unharmed(slots: Slots) -> bool:
    """Return whether all tokens have their own keys, values and weights, and empty slots have the
    weight 0.
    """
    wanted, held = tokens(slots.position), slots.held
    names = ("keys", "values", "a", "b")
    return all(torch.equal(getattr(slots, n)[held], getattr(wanted, n)[held]) for n in names) and (
        bool(slots.a[~held].isneginf().all() and slots.b[~held].isneginf().all())
    )


def places(slots: Slots) -> list[list[int]]:
    """Return the positions of the first row's tokens by head, in the order of their slots."""
    return [[place for place in head if place >= 0] for head in slots.position[0].tolist()]


@dataclass
class Token:
    """A token of a naive loop. It receives `rate` from each of `life` queries, and has received
    `mass` so far.
    """

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
        pools: the number of its pools.
        chunk, heads, prompt: as in `Streams`.
        row: the number of the row, on which the invented attention depends.
        seen: how many tokens the row has seen.
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
        self.tail: list[list[Token]] = [[] for _ in heads]

    def until(self, seen: int) -> None:
        """Continue until the row has seen this number of tokens."""
        while self.seen < seen:
            for head, pools in enumerate(self.held):
                self.tail[head].append(Token(self.seen, *appeal(self.row, head, self.seen)))
                for token in chain(*pools, self.tail[head]):
                    token.mass += token.rate if self.seen - token.position < token.life else 0
            self.seen += 1
            whole = self.seen <= self.prompt
            if self.seen == self.prompt or (not whole and len(self.tail[0]) == self.chunk):
                for head, pools in enumerate(self.held):
                    at = At(0, head, self.seen)
                    self.held[head] = self.fold(pools, self.tail[head], at)
                    self.tail[head] = []

    def places(self, pool: int) -> list[list[int]]:
        """Return the positions of the tokens that a pool holds, by head, from the oldest on."""
        return [sorted(token.position for token in head[pool]) for head in self.held]


def naive_pools(text: str, twins: Any, prompt: int = 0) -> list:
    """Return the naive version of each pool of a pipe."""
    made = {"sink": twins.sink, "recent": twins.recent, "heavy": heavy_of}
    return [
        hive_of(pool.threshold, pool.stride, pool.swapped, pool.local_max, prompt=prompt)
        if isinstance(pool, Hive)
        else made[pool.name](pool.n)
        for pool in policy(text).pools
    ]


def compare(
    twins: Any,
    text: str,
    chunk: int,
    length: int,
    starts: tuple[int, ...] = (0, 3, 3),
    prompt: int = 0,
    heads: int = 2,
) -> list[Row]:
    """Run a pipe and its naive version, compare them after each fold, and return the rows."""
    loops = []
    for row in range(len(starts)):
        pools = naive_pools(text, twins, prompt)
        fold = twins.pipe(*pools)
        loops.append(NaiveRow(fold, len(pools), chunk, row, heads=heads, prompt=prompt))

    def watch(index: int, row: Row) -> None:
        loops[index].until(row.seen)
        for pool, slots in enumerate(row.held):
            assert places(slots) == loops[index].places(pool)

    streams = Streams(policy(text), chunk, starts, heads=heads, prompt=prompt, watch=watch)
    rows = streams.run(length)
    assert all(unharmed(slots) for row in rows for slots in row.held)
    return rows


PADDING, PROMPT, MORE = (0, 3, 9), 40, 45


@torch.no_grad()
def read(model: Any, ids: Any, text: str, chunk: int, prefill: str = "chunked") -> tuple:
    """Read left-padded prompts, and more tokens after them. Return the logits, the cache, and the
    tokens of each row.
    """
    batch = ids(len(PADDING), PROMPT + MORE)
    mask = torch.ones_like(batch)
    for row, pads in enumerate(PADDING):
        mask[row, :pads] = 0
    cache = weir.StreamingCache(model, text, chunk=chunk, prefill=prefill)
    one = model(batch[:, :PROMPT], attention_mask=mask[:, :PROMPT], past_key_values=cache)
    two = model(batch[:, PROMPT:], attention_mask=mask, past_key_values=cache)
    rows = [batch[row, pads:].tolist() for row, pads in enumerate(PADDING)]
    return torch.cat([one.logits, two.logits], dim=1), cache, rows
