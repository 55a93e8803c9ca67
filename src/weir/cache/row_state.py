"""Complete state of a row, to continue in any cache of the same kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weir.cache.layer import Layer
from weir.cache.layers import LayerPlan
from weir.cache.validation import ValidationError, check_row, row_facts
from weir.errors import WeirError, quote, shorten
from weir.policies import saved_policy
from weir.slab import cut_slots

FACTS = ("policy", "chunk", "positions", "origin", "model", "weights")
"""Properties that must be equal in two caches for a row of one to continue in the other."""


@dataclass(frozen=True)
class RowState:
    """One row of a cache, detached from it.

    Attributes:
        kind: properties of the cache, as JSON: `policy` by its name and the `pools` it stands for,
            `chunk`, `positions`, `origin`, the `model` (type, layers, sizes and dtype of each
            layer's heads) and a fingerprint of its `weights`.
        facts: facts of the row, as JSON: columns, seen, waiting, claimed, last, ended, seed, marks
            (`Marks`, by name), lengths (slots in use by layer and pool), and for a model with three
            axes drift.
        tensors: `LAYER.NAME` for each buffer of each layer [1, kv_heads, ...], with the slots in
            use alone (`LayerSpec.held`), on the device of the cache that the row was taken from.
    """

    kind: dict[str, Any]
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.nbytes for t in self.tensors.values())


def check_kind(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Refuse a row of kind `theirs` (`RowState.kind`) that cannot continue in a cache of kind
    `mine`.
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
    """Compare the policies of two kinds (`RowState.kind`) by their pools; None if they are equal.

    Returns the two names, or the pools if one name stands for different pools. For a row that was
    saved without pools, the policy's name stands for them.
    """
    pools = mine["pools"], theirs.get("pools", theirs.get("policy"))
    if pools[0] == pools[1]:
        return None
    try:
        if isinstance(pools[1], str) and saved_policy(pools[0]) == saved_policy(pools[1]):
            return None
    except WeirError:
        pass  # a policy that cannot be read is a different one
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
    """Refuse a state of a checked kind that no row of such a cache can have (WeirError)."""
    try:
        facts = state.facts
        row_facts(plans, vocabulary, chunk)(facts, "")
        # The row may come from a cache that folds whole prompts.
        check_row(plans, facts, state.tensors, chunk=chunk, origin=origin, whole_prompt=True)
    except ValidationError as wrong:
        raise WeirError(f"this row's state is that of no row: {wrong}") from None


def cut_rows(
    plans: Sequence[LayerPlan], facts: Any, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Cut the whole buffers of a row, as earlier weirs saved them, to the slots in use.

    Facts and tensors are unchecked; if the facts are those of no row, nothing is cut.
    """
    try:
        held = [plan.spec.held(facts["lengths"][plan.spec.index]) for plan in plans]
        parts = {f"{n}.{name}": cut for n, layer in enumerate(held) for name, cut in layer.items()}
        return {name: cut_slots(t, parts.get(name)) for name, t in tensors.items()}
    except (LookupError, TypeError, ValueError):
        return dict(tensors)


def own_tensors(layer: Layer, state: RowState) -> dict[str, Tensor]:
    """Return one layer's tensors of a checked state, on the layer's device."""
    slab = layer.state.slab
    assert slab is not None
    return {
        name: state.tensors[f"{layer.spec.index}.{name}"].to(mine.device)
        for name, mine in slab.tensors().items()
    }
