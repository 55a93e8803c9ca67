"""The end of a turn as bytes, a safetensors file with one row, and back again.

Nothing is believed on the way back: facts are checked by a table, the row as a session's is, by the
cache that takes it or here. Knows nothing about folders, or whose a turn is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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
from weir.serve.engine import Checkpoint

FORMAT = 3
KEY = "weir_node"


def _anything(value: Any, place: str) -> None:
    """What is compared as a whole."""


@dataclass(frozen=True)
class RowFormat:
    """What the rows of a store are rows of.

    Attributes:
        model: the model's fingerprint.
        kind: of the rows (`RowState.kind`).
        plans: of each layer of a cache of theirs.
        vocabulary: token ids run from 0 to this, exclusive.
    """

    model: dict[str, Any]
    kind: dict[str, Any]
    plans: list[LayerPlan]
    vocabulary: int

    @classmethod
    def of(cls, model: PreTrainedModel, policy: str | Policy, chunk: int | None) -> RowFormat:
        """Of rows of a cache that an engine makes of these; no memory is taken for one.

        Raises:
            WeirError: there is no such cache.
        """
        cache = StreamingCache(model, policy, chunk=chunk)
        vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        return cls(fingerprint(model), cache.kind, cache.plans, vocabulary)

    @property
    def said(self) -> dict[str, Any]:
        """What a store or a file says of its rows, as JSON can hold it."""
        return {"model": self.model, "kind": self.kind}

    def check(self, said: Any) -> None:
        """Refuse what others say of their rows where it is not this.

        Raises:
            WeirError: naming what differs.
        """
        if not isinstance(said, dict) or not all(isinstance(said.get(n), dict) for n in self.said):
            raise WeirError("it does not say which model and policy it is of")
        theirs = said["model"]
        differ = [name for name, value in self.model.items() if theirs.get(name) != value]
        if differ:
            what = ", ".join(f"{n} {quote(theirs.get(n))}, here {self.model[n]}" for n in differ)
            raise WeirError(f"it is of another model ({what})")
        unlike = unlike_policies(self.kind, said["kind"])
        if unlike is not None:
            raise WeirError(f"its rows have the policy {quote(unlike[1])}, here {quote(unlike[0])}")
        for name, mine in self.kind.items():
            other = said["kind"].get(name)
            if name not in ("policy", "pools") and other != mine:
                raise WeirError(f"its rows have the {name} {quote(other)}, here {quote(mine)}")


def encode_checkpoint(form: RowFormat, node: Checkpoint) -> bytes:
    """A node as a safetensors file."""
    said = {
        "format": FORMAT,
        **form.said,
        "row": node.state.facts,
        "pending": list(node.pending),
    }
    tensors = {name: t.detach().cpu().contiguous() for name, t in node.state.tensors.items()}
    return save(tensors, {KEY: json.dumps(said)})


def decode_checkpoint(form: RowFormat, data: bytes) -> Checkpoint:
    """The node that a file of a store holds.

    Its row is of the right model and policy by what the file says. What its numbers are is not
    looked at: who reads a file of its own knows by a checksum that they are what was written, and
    somebody else's is for `decode_foreign`.

    Args:
        form: what its row must be a row of.
        data: the whole file; no tensor is larger than what is in it.

    Raises:
        WeirError: it is damaged, or of another model or policy.
    """
    try:
        said = json.loads(read_metadata(data)[KEY])
        tensors = load(data)
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise WeirError(f"it is damaged or no snapshot of weir ({quote(str(error))})") from None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        found = said.get("format") if isinstance(said, dict) else said
        raise WeirError(f"it has the format {quote(found)}, and this weir reads {FORMAT}")
    form.check(said)
    token = integer(0, form.vocabulary - 1)
    try:
        record(
            format=integer(FORMAT, FORMAT),
            model=_anything,
            kind=_anything,
            row=_anything,
            pending=list_of(token),
        )(said, "")
    except ValidationError as wrong:
        raise WeirError(f"what it says cannot be: {wrong}") from None
    return Checkpoint(RowState(form.kind, said["row"], tensors), tuple(said["pending"]))


def decode_foreign(form: RowFormat, data: bytes) -> Checkpoint:
    """The node that somebody else's file holds, its row checked as a session's is.

    Raises:
        WeirError: as `read`, or the row is one that no stream has.
    """
    node = decode_checkpoint(form, data)
    check_state(
        form.plans,
        node.state,
        vocabulary=form.vocabulary,
        chunk=form.kind["chunk"],
        origin=form.kind["origin"],
    )
    return node


def read_metadata(data: bytes) -> dict[str, str]:
    """The texts that a safetensors file begins with; `load` leaves them out.

    Raises:
        ValueError, LookupError, RecursionError: there are none.
    """
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        raise ValueError("its header is longer than it is")
    header = json.loads(data[8 : 8 + length])
    found = header["__metadata__"]
    if not isinstance(found, dict):
        raise ValueError("it says nothing of itself")
    return found
