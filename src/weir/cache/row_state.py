"""A row's whole state: what is needed to go on from where it is, in any cache of the same kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weir.cache.layer import Layer
from weir.cache.layers import LayerPlan
from weir.cache.validation import (
    ValidationError,
    check_numbers,
    check_row,
    check_sizes,
    located,
    row_facts,
)
from weir.errors import WeirError, quote, shorten
from weir.policies import saved_policy

FACTS = ("policy", "chunk", "positions", "origin", "model", "weights")
"""What two caches must have in common for a row of one to go on in the other."""


@dataclass(frozen=True)
class RowState:
    """One row of a cache, apart from it.

    Attributes:
        kind: what the cache must be: `policy`, as it is called, and the `pools` that stands for,
            `chunk`, `positions`, `origin`, and of the `model` its type, layers, and the sizes and
            dtype of each layer's heads; and what tells its `weights` from those of others; as JSON
            can hold it.
        facts: of the row: columns, seen, waiting, claimed, last, ended, seed, marks (`Marks`, by
            name), lengths (slots in use by layer and pool), and of a model with three axes drift;
            as JSON can hold it.
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
        if name == "policy":
            if (unlike := unlike_policies(mine, theirs)) is not None:
                raise WeirError(
                    f"this row is of a cache with policy {quote(unlike[1])}, and this one has "
                    f"{quote(unlike[0])}"
                )
        elif mine.get(name) != theirs.get(name):
            if name == "model":
                what = _difference(mine["model"], theirs.get("model"))
                raise WeirError(f"this row is of another model: {what}")
            if name == "weights":
                raise WeirError("this row is of another model, whose weights are others")
            raise WeirError(
                f"this row is of a cache with {name} {quote(theirs.get(name))}, and this one has "
                f"{quote(mine[name])}"
            )


def unlike_policies(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[Any, Any] | None:
    """How the policies of two kinds are told apart; None if they are one, whatever it is called.

    A policy is its pools. Of rows that were written without them it is what its name stands for
    now.

    Args:
        mine, theirs: `RowState.kind` of a cache and of a row.

    Returns:
        Mine and theirs: their names, or their pools where one name stood for others.
    """
    pools = mine["pools"], theirs.get("pools", theirs.get("policy"))
    if pools[0] == pools[1]:
        return None
    try:
        if isinstance(pools[1], str) and saved_policy(pools[0]) == saved_policy(pools[1]):
            return None
    except WeirError:
        pass  # one that cannot be read is another
    names = mine["policy"], theirs.get("policy")
    return pools if names[0] == names[1] else names


def _difference(mine: dict[str, Any], theirs: Any) -> str:
    if not isinstance(theirs, dict):
        return f"{quote(theirs)} is no description of one"
    for name, value in mine.items():
        if theirs.get(name) != value:
            return f"{name} {shorten(str(theirs.get(name)))}, here {shorten(str(value))}"
    return "it says more of it than is known here"


def check_state(
    plans: Sequence[LayerPlan], state: RowState, *, vocabulary: int, chunk: int, origin: int
) -> None:
    """Refuse a state that no row of such a cache can have, as a session file's are refused.

    Args:
        plans: every layer of the cache, its heads as they are.
        state: of the cache's kind (`check_kind`).
        vocabulary: token ids run from 0 to this, exclusive.
        chunk, origin: of the cache.

    Raises:
        WeirError: naming the fact or the tensor.
    """
    try:
        facts = state.facts
        row_facts(plans, vocabulary, chunk)(facts, "")
        # Whether it was fed through a cache that folds whole prompts, nobody knows.
        check_row(facts, chunk=chunk, origin=origin, whole_prompt=True)
        each = _by_layer(state.tensors, len(plans))
        for layer, (plan, tensors) in enumerate(zip(plans, each, strict=True)):
            with located(f"layer {layer}"):
                sizes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
                check_sizes(plan, sizes, facts["lengths"][layer])
                check_numbers(plan, tensors, facts, origin)
    except ValidationError as wrong:
        raise WeirError(f"this row's state is that of no row: {wrong}") from None


def _by_layer(tensors: Mapping[str, Tensor], layers: int) -> list[dict[str, Tensor]]:
    """The tensors of each layer by their own names.

    Raises:
        Wrong: one is of no layer, or is none.
    """
    each: list[dict[str, Tensor]] = [{} for _ in range(layers)]
    for name, t in tensors.items():
        layer, _, own = str(name).partition(".")
        if not layer.isdecimal() or int(layer) >= layers or name != f"{int(layer)}.{own}":
            raise ValidationError(f"{quote(name)} is of no layer")
        if not isinstance(t, Tensor):
            raise ValidationError(f"{name} is no tensor")
        each[int(layer)][own] = t
    return each


def own_tensors(layer: Layer, state: RowState) -> dict[str, Tensor]:
    """The tensors of a state, checked before, for one layer and on its device."""
    slab = layer.state.slab
    assert slab is not None
    return {
        name: state.tensors[f"{layer.spec.index}.{name}"].to(mine.device)
        for name, mine in slab.tensors().items()
    }
