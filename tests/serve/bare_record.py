"""The record of a turn that tests of the engine alone save."""

from __future__ import annotations

from weir.serve import TokenSequence, TurnRecord


def bare_record(turn: TokenSequence, reason: str) -> TurnRecord:
    """A record that names the turn and has no further content."""
    return TurnRecord(turn.id, "", turn.id, turn.parent, turn.id, (), turn.output_ids[-1], 1)
