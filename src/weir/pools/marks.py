"""What a row is told of its stream's structure, which pools cannot see in tokens.

Who feeds a conversation knows where its system turn ends and where the running turn begins; pools
that keep such places ask here. Knows nothing about templates or roles.
"""

from __future__ import annotations

from dataclasses import dataclass

from weir.errors import WeirError
from weir.pools.parameters import fits


@dataclass(frozen=True)
class Marks:
    """Places of one row's stream that matter beyond what stands there.

    Attributes:
        beginning: tokens of the stream's beginning, its system turn, say; None if nobody said how
            many.
        turn: the place in the stream where the running turn begins.
        header: tokens that begin it: what a template puts in front of the answer.

    Raises:
        WeirError: one of them is no number of tokens.
    """

    beginning: int | None = None
    turn: int = 0
    header: int = 0

    def __post_init__(self) -> None:
        for name in ("beginning", "turn", "header"):
            value = getattr(self, name)
            if value is None and name == "beginning":
                continue
            if not fits(value, int) or not 0 <= value <= 2**53:
                raise WeirError(f"{name} is a number of tokens from 0 on, not {value!r}")
