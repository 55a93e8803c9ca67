"""Snapshots of what a cache holds, for users, tests and pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weir.cache.layer import Layer, LayerSpec, Layout, lay_out, states_of
from weir.cache.layers import LayerPlan
from weir.cache.row_state import RowState
from weir.errors import WeirError
from weir.pools import WAITING, Pool, name_failure


@dataclass(frozen=True)
class Contents:
    """The slots of one layer; empty slots have position -1.

    Attributes:
        position: places in the stream [batch, kv_heads, slots], int64.
        a, b: log-weights in numerator and denominator [batch, kv_heads, slots], float32.
        keys: as attention reads them [batch, kv_heads, slots, key_dim].
        values: [batch, kv_heads, slots, value_dim].
        pool: which of `pools` holds each slot [batch, kv_heads, slots], int64; -1 for none.
        pools: the pools' names in the order of the pipe, followed by "new" for tokens that wait for
            the next fold.
        mass: attention received up to the last fold [batch, kv_heads, slots], float32; None unless
            a pool of every KV head needs it.
    """

    position: Tensor
    a: Tensor
    b: Tensor
    keys: Tensor
    values: Tensor
    pool: Tensor
    pools: tuple[str, ...]
    mass: Tensor | None = None

    def __repr__(self) -> str:
        """Return sizes, and slots by pool over all rows and KV heads, because printed tensors would
        be long.
        """
        rows, heads, slots = self.position.shape
        counts = (f"{name} {int((self.pool == n).sum())}" for n, name in enumerate(self.pools))
        return f"<weir.cache.Contents of {rows} x {heads} x {slots} slots: {', '.join(counts)}>"


def contents_of(parts: Sequence[Layer], waiting: list[int]) -> Contents:
    """Copy the slots of a layer, with `waiting` tokens in each row's tail; WeirError if the slots
    are not allocated yet.

    If a layer has several parts, heads with fewer slots than others are padded with empty ones.
    """
    each = [_contents_of(part, waiting) for part in parts]
    if len(each) == 1:
        return each[0]
    pools = each[0].pools
    if any(one.pools != pools for one in each):
        known = dict.fromkeys(name for one in each for name in one.pools if name != WAITING)
        pools = (*known, WAITING)
        for place, one in enumerate(each):
            number = torch.tensor([*map(pools.index, one.pools), -1])  # the last is "no pool"
            each[place] = replace(one, pool=number.to(one.pool.device)[one.pool])
    order = torch.tensor([head for part in parts for head in part.spec.heads or ()]).argsort()
    slots = max(one.position.shape[2] for one in each)
    empty = {"position": -1, "a": -torch.inf, "b": -torch.inf, "keys": 0, "values": 0, "pool": -1}
    if all(one.mass is not None for one in each):
        empty["mass"] = 0

    def join(name: str) -> Tensor:
        tensors = [getattr(one, name) for one in each]
        padded = []
        for t in tensors:
            more = t.new_full((*t.shape[:2], slots - t.shape[2], *t.shape[3:]), empty[name])
            padded.append(torch.cat([t, more], dim=2))
        return torch.cat(padded, dim=1).index_select(1, order.to(tensors[0].device))

    return Contents(**{name: join(name) for name in empty}, pools=pools)


def _contents_of(layer: Layer, waiting: list[int]) -> Contents:
    if layer.state.slab is None:
        raise WeirError("nothing was fed to this cache yet")
    ends = layer.state.ends(waiting)
    part = layer.state.slab.run(0, max(ends))
    steps = torch.arange(max(ends), device=part.position.device)
    used = steps < torch.tensor(ends, device=steps.device)[:, None]
    counts = _counts(part.position, part.a, part.b)
    position = part.position.masked_fill(~(used[:, None] & counts), -1)
    pools = torch.full_like(position, -1)
    for row, end in enumerate(ends):
        pools[row, :, :end] = pool_indices(lay_out(layer.spec.pipe, layer.state.lengths[row]), end)
    empty = position < 0
    return Contents(
        position=position,
        a=part.a.masked_fill(empty, -torch.inf),
        b=part.b.masked_fill(empty, -torch.inf),
        keys=part.keys.clone(),
        values=part.values.clone(),
        pool=pools.masked_fill(empty, -1),
        pools=pool_names(layer.spec),
        mass=None if part.mass is None else part.mass.clone(),
    )


def pool_names(spec: LayerSpec) -> tuple[str, ...]:
    """Return the names of a layer's pools in pipe order, then `WAITING` for unfolded tokens."""
    return (*(pool.name for pool in spec.pipe.pools), WAITING)


def pool_indices(lies: Layout, end: int) -> Tensor:
    """Return the index in `pool_names` of each of a row's first `end` slots [end], int64."""
    pools = torch.full((end,), len(lies.lengths))
    for pool, start in lies.starts.items():
        pools[start : start + lies.lengths[pool]] = pool
    return pools


def layer_report(parts: Sequence[Layer], row: int, waiting: int, columns: int) -> dict[str, Any]:
    """Report a layer (`_report`). If the layer has several parts, slots are means over its heads,
    and "heads" has the report of each part.
    """
    each = [_report(part, row, waiting, columns) for part in parts]
    if len(each) == 1:
        return each[0]
    counts = [len(part.spec.heads or ()) for part in parts]
    names = dict.fromkeys(name for one in each for name in one["slots"])
    slots = {
        name: round(
            sum(n * one["slots"].get(name, 0) for n, one in zip(counts, each, strict=True))
            / sum(counts)
        )
        for name in names
    }
    by_head = {head: part for part in parts for head in part.spec.heads or ()}
    return {
        "policy": f"[{', '.join(str(by_head[head].spec.pipe) for head in sorted(by_head))}]",
        "slots": slots,
        "held": sum(slots.values()),
        "bytes": sum(one["bytes"] for one in each),
        "heads": [
            {"of": list(part.spec.heads or ()), **one}
            for part, one in zip(parts, each, strict=True)
        ],
    }


def _report(layer: Layer, row: int, waiting: int, columns: int) -> dict[str, Any]:
    """Report the pipe and bytes of a layer, the slots of a row, and what the pools report, as JSON.

    "slots" are by pool, "held" is their sum; "pools" is there only if a pool has a report.
    `waiting` tokens are in the row's tail, and `columns` were fed to every row.
    """
    pools = layer.spec.pipe.pools
    lengths = layer.state.lengths[row] if layer.state.slab is not None else [0] * len(pools)
    held: dict[str, int] = {}
    for pool, length in zip(pools, lengths, strict=True):
        held[pool.name] = held.get(pool.name, 0) + length
    held[WAITING] = waiting
    facts = {
        "policy": str(layer.spec.pipe),
        "slots": held,
        "held": sum(held.values()),
        "bytes": layer.state.nbytes(columns),
    }
    if layer.state.slab is None:
        return facts
    states = states_of(layer.spec.pipe, layer.state.slab)
    texts = [_report_pool(pool, state, row) for pool, state in zip(pools, states, strict=True)]
    reports = {f"{pools[index].name} {index}": text for index, text in enumerate(texts) if text}
    return {**facts, "pools": reports} if reports else facts


def _report_pool(pool: Pool, state: dict[str, Tensor], row: int) -> dict[str, Any]:
    """Return what a pool reports about a row."""
    with name_failure(pool, "report"):
        return pool.report(state, row)


MOST = 700.0
"""Largest log-weight shown: e^710 overflows float64."""


@dataclass(frozen=True)
class Held:
    """One token that is still held, and where.

    Attributes:
        token: which token of the row, from 0 on, counting all that were fed.
        pairs: number of pairs of a layer and a KV head in which it holds a slot.
        pools: number of those pairs by pool; pools that do not hold the token are left out.
        above, below: how many tokens its slots stand for in the numerator and in the denominator
            of attention, the mean over those pairs; 1 in pools without weights.
    """

    token: int
    pairs: int
    pools: dict[str, int]
    above: float
    below: float


@dataclass(frozen=True)
class Holding:
    """The slots in use of one row of a cache, one entry for each slot [slots].

    A slot has the key and value of one token. In a pool with weights it also stands for evicted
    tokens, whose attention is estimated. Slots of a `synthetic` pool hold means of keys and values,
    and are listed under the newest token in each.

    Attributes:
        seen: tokens of the row so far.
        pairs: number of pairs of a layer and a KV head.
        pools: the pools' names in the order of the pipe, followed by "new" for tokens that wait for
            the next fold. Pools of the same name count as one.
        layer, head: the layer and the KV head of the slot, int64.
        token: the token in the slot, from 0 on, counting all that were fed, int64.
        pool: index in `pools`, int64.
        a, b: log-weights in numerator and denominator, float32.
    """

    seen: int
    pairs: int
    pools: tuple[str, ...]
    layer: Tensor
    head: Tensor
    token: Tensor
    pool: Tensor
    a: Tensor
    b: Tensor

    def tokens(self) -> list[Held]:
        """Return the tokens that are held anywhere, from the oldest to the newest."""
        token, at = self.token.unique(return_inverse=True)
        heads = int(self.head.max()) + 1 if len(self.head) else 1
        pair = self.layer * heads + self.head
        counts = _pairs(at, pair, len(token))
        by_pool = [
            _pairs(at[mine], pair[mine], len(token)).tolist()
            for mine in (self.pool == n for n in range(len(self.pools)))
        ]
        none = torch.zeros(len(token), dtype=torch.float64)
        above, below = (
            (none.index_add(0, at, weight) / counts).tolist()
            for weight in (w.double().clamp_max(MOST).exp() for w in (self.a, self.b))
        )
        return [
            Held(
                number,
                count,
                {name: held[n] for name, held in zip(self.pools, by_pool, strict=True) if held[n]},
                above[n],
                below[n],
            )
            for n, (number, count) in enumerate(zip(token.tolist(), counts.tolist(), strict=True))
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the data of a page that shades each token of a text by how much of it is held, as
        JSON.
        """
        return {
            "seen": self.seen,
            "pairs": self.pairs,
            "pools": list(self.pools),
            "tokens": [vars(held) for held in self.tokens()],
        }


Part = tuple[LayerSpec, Layout, Sequence[Tensor]]
"""A layer of a row, or a part of one, and its buffers `position`, `a` and `b` [kv_heads, slots] in
that layout.
"""


def snapshot_row(
    layers: Iterable[Layer], row: int, seen: int, waiting: int, origin: int
) -> Holding:
    """Take a snapshot of one row in all layers, `seen` tokens long, of which `waiting` are in the
    tail.
    """
    parts: list[Part] = []
    for layer in layers:
        slab = layer.state.slab
        if slab is None:
            raise WeirError("nothing was fed to this cache yet")
        lies = lay_out(layer.spec.pipe, layer.state.lengths[row])
        parts.append((layer.spec, lies, [t[row] for t in (slab.position, slab.a, slab.b)]))
    return _join_layers(parts, seen, waiting, origin)


def held_places(layers: Iterable[Layer], row: int, waiting: int) -> Tensor:
    """Return the places of the tokens of a row that are held in any layer and KV head, in order."""
    held: list[Tensor] = []
    for layer in layers:
        slab = layer.state.slab
        if slab is None:
            return torch.empty(0, dtype=torch.int64)
        end = lay_out(layer.spec.pipe, layer.state.lengths[row]).used + waiting
        place, a, b = (t[row][:, :end] for t in (slab.position, slab.a, slab.b))
        held.append(place[_counts(place, a, b)].unique().cpu())
    return torch.cat(held).unique()


def _counts(position: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return which slots hold a token. If one of the newest tokens was dropped, it has a slot, but
    no weights (`StreamingCache.drop`).
    """
    return (position >= 0) & ~(a.isneginf() & b.isneginf())


def holding_in(plans: Sequence[LayerPlan], state: RowState) -> Holding:
    """Take a snapshot of a row that was taken from a cache, given the plans of a cache that accepts
    it.
    """
    facts = state.facts
    parts: list[Part] = []
    for part, (plan, lengths) in enumerate(zip(plans, facts["lengths"], strict=True)):
        names = (f"{part}.{name}" for name in ("position", "a", "b"))
        lies = lay_out(plan.spec.pipe, lengths).packed
        parts.append((plan.spec, lies, [state.tensors[name][0] for name in names]))
    return _join_layers(parts, facts["seen"], facts["waiting"], state.kind["origin"])


def _join_layers(layers: Sequence[Part], seen: int, waiting: int, origin: int) -> Holding:
    known = dict.fromkeys(name for spec, _, _ in layers for name in pool_names(spec))
    names = (*(name for name in known if name != WAITING), WAITING)
    parts: list[tuple[Tensor, ...]] = []
    pairs = 0
    for spec, lies, buffers in layers:
        end = lies.used + waiting
        place, a, b = (t[:, :end].cpu() for t in buffers)
        used = _counts(place, a, b)
        number = torch.tensor([names.index(name) for name in pool_names(spec)])
        pool = number[pool_indices(lies, end)].expand(place.shape)
        head = used.nonzero()[:, 0]
        if spec.heads is not None:
            head = torch.tensor(spec.heads)[head]
        here = torch.full_like(head, spec.index)
        parts.append((here, head, place[used] - origin, pool[used], a[used], b[used]))
        pairs += place.shape[0]
    layer_of, head, token, pool, a, b = (torch.cat(part) for part in zip(*parts, strict=True))
    return Holding(seen, pairs, names, layer_of, head, token, pool, a, b)


def _pairs(at: Tensor, pair: Tensor, tokens: int) -> Tensor:
    """Count the pairs of a layer and a head in which each token holds a slot [tokens], int64.

    `at` has the index of each slot's token, `pair` its pair [slots].
    """
    # Token and pair are combined into one number, because `unique(dim=1)` of both takes ten times
    # as long.
    pairs = int(pair.max()) + 1 if len(pair) else 1
    return torch.bincount((at * pairs + pair).unique() // pairs, minlength=tokens)
