"""A row's whole state: what is needed to go on from where it is, in any cache of the same kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weir.cache.layer import Layer
from weir.errors import WeirError, shortened, shown
from weir.policies import policy_of
from weir.pools import fits

FACTS = ("policy", "chunk", "positions", "origin", "model")
"""What two caches must have in common for a row of one to go on in the other."""


@dataclass(frozen=True)
class RowState:
    """One row of a cache, apart from it.

    Attributes:
        kind: what the cache must be: `policy`, `chunk`, `positions`, `origin`, and of the `model`
            its type, layers, and the sizes and dtype of each layer's heads; as JSON can hold it.
        facts: of the row: columns, seen, waiting, claimed, last, ended, seed, and lengths (slots in
            use by layer and pool); as JSON can hold it.
        tensors: `LAYER.NAME` for each buffer of each layer [1, kv_heads, ...], on the device of the
            cache it was taken from.
    """

    kind: dict[str, Any]
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.nbytes for t in self.tensors.values())


def check_kind(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Refuse a row that cannot go on in this cache.

    Args:
        mine, theirs: `RowState.kind` of the cache and of the row.

    Raises:
        WeirError: naming what differs first.
    """
    for name in FACTS:
        if mine.get(name) != theirs.get(name):
            if name == "model":
                what = _difference(mine["model"], theirs.get("model"))
                raise WeirError(f"this row is of another model: {what}")
            if name == "policy" and _same_policy(mine[name], theirs.get(name)):
                continue
            raise WeirError(
                f"this row is of a cache with {name} {shown(theirs.get(name))}, and this one has "
                f"{shown(mine[name])}"
            )


def _same_policy(mine: str, theirs: Any) -> bool:
    """Whether two policies are one, written differently."""
    try:
        return isinstance(theirs, str) and policy_of(mine) == policy_of(theirs)
    except WeirError:
        return False


def _difference(mine: dict[str, Any], theirs: Any) -> str:
    if not isinstance(theirs, dict):
        return f"{shown(theirs)} is no description of one"
    for name, value in mine.items():
        if theirs.get(name) != value:
            return f"{name} {shortened(str(theirs.get(name)))}, here {shortened(str(value))}"
    return "it says more of it than is known here"


def check_facts(stack: list[Layer], chunk: int, facts: Any) -> None:
    """Refuse facts of a row that no row of such a cache can have.

    Args:
        stack: the cache's layers.
        chunk: tokens between two folds.
        facts: `RowState.facts`.

    Raises:
        WeirError: naming the fact.
    """
    facts = facts if isinstance(facts, dict) else {}
    limits = {"columns": None, "seen": None, "waiting": chunk - 1, "claimed": None, "seed": None}
    for name, limit in limits.items():
        value = facts.get(name)
        if not fits(value, int) or value < 0 or (limit is not None and value > limit):
            raise WeirError(f"{name} of this row's state is {shown(value)}, which no row has")
    lengths = facts.get("lengths")
    pools = [layer.spec.pipe.pools for layer in stack]
    if not isinstance(lengths, list) or len(lengths) != len(stack):
        raise WeirError(f"lengths of this row's state are not those of {len(stack)} layers")
    for layer, (its, own) in enumerate(zip(lengths, pools, strict=True)):
        slots = [pool.slots() for pool in own]
        if not (isinstance(its, list) and len(its) == len(own)) or not all(
            fits(n, int) and 0 <= n <= (facts["seen"] if limit is None else limit)
            for n, limit in zip(its, slots, strict=True)
        ):
            raise WeirError(
                f"lengths of layer {layer} in this row's state are {shown(str(its))}, and its "
                f"pools hold at most {slots}"
            )


def own_tensors(layer: Layer, state: RowState) -> dict[str, Tensor]:
    """The tensors of a state for one layer, checked, on the layer's device."""
    slab, index = layer.slab, layer.spec.index
    assert slab is not None
    found = {}
    for name, mine in slab.tensors().items():
        theirs = state.tensors.get(f"{index}.{name}")
        if theirs is None:
            raise WeirError(f"this row's state has no {name} of layer {index}")
        grows = layer.spec.pipe.slots is None and mine.ndim > 2
        shape = list(mine.shape[1:])
        own = list(theirs.shape[1:])
        if grows and len(own) == len(shape):
            shape[1], own[1] = 0, 0
        if theirs.ndim != mine.ndim or theirs.shape[0] != 1 or own != shape:
            raise WeirError(
                f"{name} of layer {index} in this row's state is {list(theirs.shape)}, and "
                f"this cache needs {[1, *mine.shape[1:]]}"
            )
        if theirs.dtype != mine.dtype:
            raise WeirError(
                f"{name} of layer {index} in this row's state is {theirs.dtype}, and this "
                f"cache has {mine.dtype}"
            )
        found[name] = theirs.to(mine.device)
    return found
