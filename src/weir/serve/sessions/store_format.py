"""The model and policy that the rows of a store belong to, and the room that turns take."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import Any

from transformers import PreTrainedModel

from weir.cache import RowFormat, StreamingCache, check_kind
from weir.errors import WeirError
from weir.models import compare_fingerprints, fingerprint
from weir.policies import Policy

OVERHEAD = 2**18
"""Approximate number of bytes that a turn takes in addition to its row."""


@dataclass(frozen=True)
class StoreFormat:
    """The model and policy that rows of a store belong to."""

    model: dict[str, Any]
    rows: RowFormat

    @classmethod
    def of(cls, model: PreTrainedModel, policy: str | Policy, chunk: int | None) -> StoreFormat:
        """Find the format of an engine's rows without allocating a cache."""
        return cls(fingerprint(model), StreamingCache(model, policy, chunk=chunk).row_format)

    def turn_bytes(self, tokens: int | None = None) -> int:
        """Return the bytes that a saved turn may take: its row, names, messages, and pages of a
        database.

        Args:
            tokens: number of tokens of its stream up to its end; None for a full row.
        """
        slots = inf if tokens is None else tokens + self.rows.chunk
        return OVERHEAD + sum(int(min(n, slots)) * size for n, size in self._buffers.items())

    @cached_property
    def _buffers(self) -> Counter[int]:
        """For each number of slots that a buffer can have, the bytes of one slot, added up over all
        buffers with this number of slots.

        Buffers whose size does not depend on the number of tokens count as buffers of one slot.
        """
        found: Counter[int] = Counter()
        for plan in self.rows.plans:
            held = plan.spec.held([0] * len(plan.spec.pipe.pools))
            for name, (shape, dtype) in plan.slab.tensors().items():
                size = prod(shape) * dtype.itemsize
                if name in held and shape[2]:
                    found[shape[2]] += size // shape[2]
                else:
                    found[1] += size
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the model and the kind of the rows, as they are written to a store or a file."""
        return {"model": self.model, "kind": self.rows.kind}

    def check_place(self, place: str, stated: str | bytes) -> None:
        """Refuse a place if the JSON stored there names another model or policy, or none."""
        try:
            self.check(json.loads(stated))
        except (WeirError, ValueError, RecursionError) as error:
            raise WeirError(
                f"{place} cannot be used here: {str(error).removesuffix('.')}. Use the model and "
                "policy that it was made with, or another folder."
            ) from None

    def check(self, stated: Any) -> None:
        """Refuse rows of another model or policy, and say what differs."""
        mine = self.to_json()
        if not isinstance(stated, dict) or not all(isinstance(stated.get(n), dict) for n in mine):
            raise WeirError("it does not say which model and policy it belongs to")
        if what := compare_fingerprints(self.model, stated["model"]):
            raise WeirError(f"it is of another model ({what})")
        check_kind(self.rows.kind, stated["kind"], "its rows are")
