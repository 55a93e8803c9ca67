"""A row's whole state: what is needed to go on from where it is, in any cache of the same kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weir.errors import WeirError, shortened, shown
from weir.policies import policy_of

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
