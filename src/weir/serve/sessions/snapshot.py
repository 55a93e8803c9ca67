"""Checkpoints as bytes: a safetensors file of one row, and back.

Files that weir wrote are trusted by their checksum. Files from elsewhere are validated in full
(`decode_foreign`).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from transformers import PreTrainedModel

from weir.cache import (
    LayerPlan,
    RowState,
    StreamingCache,
    ValidationError,
    check_state,
    integer,
    list_of,
    record,
    unlike_policies,
)
from weir.errors import WeirError, quote
from weir.models import fingerprint
from weir.policies import Policy
from weir.serve.sessions.records import Checkpoint

FORMAT = 4
KEY = "weir_node"
OVERHEAD = 2**18
"""Approximate number of bytes that a turn takes besides its row."""


@dataclass(frozen=True)
class RowFormat:
    """The model and policy of the rows in a store.

    Attributes:
        vocabulary: token ids are at least 0 and less than this.
    """

    model: dict[str, Any]
    kind: dict[str, Any]
    plans: list[LayerPlan]
    vocabulary: int

    @classmethod
    def of(cls, model: PreTrainedModel, policy: str | Policy, chunk: int | None) -> RowFormat:
        """Return the format of an engine's rows, without allocating a cache."""
        cache = StreamingCache(model, policy, chunk=chunk)
        vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        return cls(fingerprint(model), cache.kind, cache.plans, vocabulary)

    def turn_bytes(self, tokens: int | None = None) -> int:
        """Return the bytes that a saved turn may take: its row, names, messages, and database
        pages.

        Args:
            tokens: tokens of its stream up to its end; None for a full row.
        """
        slots = inf if tokens is None else tokens + self.kind["chunk"]
        return OVERHEAD + sum(int(min(n, slots)) * size for n, size in self._buffers.items())

    @cached_property
    def _buffers(self) -> Counter[int]:
        """Return the bytes of the buffers, by the bytes of an entry (1: other buffers)."""
        found: Counter[int] = Counter()
        for plan in self.plans:
            held = plan.spec.held([0] * len(plan.spec.pipe.pools))
            for name, (shape, dtype) in plan.slab.tensors().items():
                size = prod(shape) * dtype.itemsize
                if name in held and shape[2]:
                    found[shape[2]] += size // shape[2]
                else:
                    found[1] += size
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the model and kind as a store or a file states them."""
        return {"model": self.model, "kind": self.kind}

    def check_place(self, place: str, stated: str | bytes) -> None:
        """Refuse a place whose rows belong to another model or policy, or that does not say
        which.
        """
        try:
            self.check(json.loads(stated))
        except (WeirError, ValueError, RecursionError) as error:
            raise WeirError(
                f"{place} cannot be used here: {error}. Use the model and policy that it was made "
                "with, or another folder."
            ) from None

    def check(self, stated: Any) -> None:
        """Refuse rows of another model or policy, and report the difference."""
        mine = self.to_json()
        if not isinstance(stated, dict) or not all(isinstance(stated.get(n), dict) for n in mine):
            raise WeirError("it does not say which model and policy it belongs to")
        theirs = stated["model"]
        differ = [name for name, value in self.model.items() if theirs.get(name) != value]
        if differ:
            what = ", ".join(f"{n} {quote(theirs.get(n))}, here {self.model[n]}" for n in differ)
            raise WeirError(f"it belongs to another model ({what})")
        unlike = unlike_policies(self.kind, stated["kind"])
        if unlike is not None:
            raise WeirError(
                f"its rows have the policy {quote(unlike[1])}, and this server has "
                f"{quote(unlike[0])}"
            )
        for name, value in self.kind.items():
            other = stated["kind"].get(name)
            if name not in ("policy", "pools") and other != value:
                raise WeirError(
                    f"its rows have the {name} {quote(other)}, and this server has {quote(value)}"
                )


def encode_checkpoint(row_format: RowFormat, checkpoint: Checkpoint) -> bytes:
    """Encode a checkpoint as a safetensors file."""
    return encode_state(row_format, checkpoint.state, pending=list(checkpoint.pending))


def encode_state(row_format: RowFormat, state: RowState, **more: Any) -> bytes:
    """Encode the state of a row as a safetensors file, with further facts about it."""
    facts = {"format": FORMAT, **row_format.to_json(), "row": state.facts, **more}
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.tensors.items()}
    return save(tensors, {KEY: json.dumps(facts)})


def decode_checkpoint(row_format: RowFormat, data: bytes) -> Checkpoint:
    """Decode a file that `encode_checkpoint` wrote. The caller has verified its checksum."""
    facts, state = decode_state(row_format, data)
    return Checkpoint(state, tuple(facts["pending"]))


def decode_foreign(row_format: RowFormat, data: bytes) -> Checkpoint:
    """Decode and validate the checkpoint in an untrusted file."""
    facts, state = decode_state(row_format, data)
    row_format.check(facts)
    token = integer(0, row_format.vocabulary - 1)
    try:
        record(
            format=integer(FORMAT, FORMAT),
            model=anything,
            kind=anything,
            row=anything,
            pending=list_of(token),
        )(facts, "")
    except ValidationError as wrong:
        raise WeirError(f"its content is invalid: {wrong}") from None
    check_state(
        row_format.plans,
        state,
        vocabulary=row_format.vocabulary,
        chunk=row_format.kind["chunk"],
        origin=row_format.kind["origin"],
    )
    return Checkpoint(state, tuple(facts["pending"]))


def decode_state(row_format: RowFormat, data: bytes) -> tuple[dict[str, Any], RowState]:
    """Decode the facts of a file, and its row without validation."""
    try:
        facts = json.loads(_read_metadata(data)[KEY])
        tensors = load(data)
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise WeirError(f"it is damaged, or not a snapshot of weir ({quote(str(error))})") from None
    found = facts.get("format") if isinstance(facts, dict) else facts
    if found != FORMAT:
        raise WeirError(
            f"it has the format {quote(found)}, and this version of weir reads {FORMAT}"
        )
    return facts, RowState(row_format.kind, facts.get("row"), tensors)


def anything(value: Any, place: str) -> None:
    """Accept anything. The value is checked elsewhere."""


def _read_metadata(data: bytes) -> dict[str, str]:
    """Read the metadata in the header of a safetensors file, which `load` does not return."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        raise ValueError("its header is longer than the file")
    found = json.loads(data[8 : 8 + length])["__metadata__"]
    if not isinstance(found, dict):
        raise ValueError("it has no metadata")
    return found
