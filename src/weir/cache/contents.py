"""What a layer holds now, to be looked at: by users, tests and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weir.cache.layer import Layer, LayerSpec, laid_out
from weir.errors import WeirError
from weir.pools import WAITING


@dataclass(frozen=True)
class Contents:
    """What one layer holds now; slots that are empty have position -1.

    Attributes:
        position: places in the stream [batch, kv_heads, slots], int64.
        a, b: log-weights in numerator and denominator [batch, kv_heads, slots], float32.
        keys: as attention reads them [batch, kv_heads, slots, key_dim].
        values: [batch, kv_heads, slots, value_dim].
        pool: which of `pools` holds each slot [batch, kv_heads, slots], int64; -1 for none.
        pools: the pools' names in the order of the pipe, and last "new" for tokens that wait for
            the next fold.
        mass: attention received up to the last fold [batch, kv_heads, slots], float32, where a
            pool asks for it.
    """

    position: Tensor
    a: Tensor
    b: Tensor
    keys: Tensor
    values: Tensor
    pool: Tensor
    pools: tuple[str, ...]
    mass: Tensor | None = None


def contents_of(layer: Layer, waiting: list[int]) -> Contents:
    """A copy of what `layer` holds, with `waiting` tokens in each row's tail.

    Raises:
        WeirError: nothing was fed yet.
    """
    if layer.slab is None:
        raise WeirError("nothing was fed to this cache yet")
    ends = layer.ends(waiting)
    part = layer.slab.run(0, max(ends))
    steps = torch.arange(max(ends), device=part.position.device)
    used = steps < torch.tensor(ends, device=steps.device)[:, None]
    position = part.position.masked_fill(~used[:, None], -1)
    pools = torch.full_like(position, -1)
    for row, end in enumerate(ends):
        pools[row, :, :end] = pools_of(layer.spec, layer.lengths[row], end)
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
    """The pools of a layer in the order of its pipe, and `WAITING` for what waits for a fold."""
    return (*(pool.name for pool in spec.pipe.pools), WAITING)


def pools_of(spec: LayerSpec, lengths: Sequence[int], end: int) -> Tensor:
    """Which of `pool_names` has each of a row's first `end` slots [end], int64.

    Args:
        spec: of the layer.
        lengths: slots in use of the row, by pool.
        end: where slots in use end, with those that wait for a fold.
    """
    pools = torch.full((end,), len(spec.pipe.pools))
    for pool, start in laid_out(spec.pipe, lengths).starts.items():
        pools[start : start + lengths[pool]] = pool
    return pools


def report(layer: Layer, row: int, waiting: int) -> dict[str, Any]:
    """A layer's pipe, its bytes, the slots that a row holds, and what its pools say of it.

    Slots by pool and together; "pools" only where one has something to say (`Pool.report`), by its
    number and name. As JSON can hold it; `waiting` tokens are in the row's tail.
    """
    pools = layer.spec.pipe.pools
    lengths = layer.lengths[row] if layer.slab is not None else [0] * len(pools)
    held: dict[str, int] = {}
    for pool, length in zip(pools, lengths, strict=True):
        held[pool.name] = held.get(pool.name, 0) + length
    held[WAITING] = waiting
    facts = {
        "policy": str(layer.spec.pipe),
        "slots": held,
        "held": sum(held.values()),
        "bytes": 0 if layer.slab is None else layer.slab.nbytes,
    }
    if layer.slab is None:
        return facts
    states = layer.folding.states(layer.slab)
    say = [pool.report(state, row) for pool, state in zip(pools, states, strict=True)]
    said = {f"{pools[index].name} {index}": told for index, told in enumerate(say) if told}
    return {**facts, "pools": said} if said else facts
