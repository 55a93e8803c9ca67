"""How the papers ran their tests: what reads a prompt, when it is compressed, what stays.

A policy says which tokens stay; a protocol says around it what the paper's experiments did. Where a
paper is silent the field says what its released code does.
"""

from __future__ import annotations

from dataclasses import dataclass

from weir.cache import Positions, Prefill
from weir.errors import WeirError, suggest


@dataclass(frozen=True)
class Protocol:
    """How a paper's tests read.

    Attributes:
        about: what it sets, in a sentence.
        chunk: tokens between two folds; None leaves it to the user.
        positions: inside the cache, or in the stream.
        prefill: "full" attends to a prompt whole and compresses it once.
        rate: the budget is this share of a prompt; None takes the budgets that are given.
        keeps_answers: tokens that follow a prompt are all kept.
    """

    about: str
    chunk: int | None = None
    positions: Positions = "rolling"
    prefill: Prefill = "chunked"
    rate: float | None = None
    keeps_answers: bool = False


PROTOCOLS: dict[str, Protocol] = {
    "streaming_llm": Protocol(
        "evict after every token, positions inside the cache (section 3.2)", chunk=1
    ),
    "reservoir": Protocol(
        "as streaming_llm: the sample is a change to its cache (section 3)", chunk=1
    ),
    "subgen": Protocol(
        "the prompt is read whole and compressed once to half, the largest reduction of Table 1; "
        "positions in the stream, and all that follows is kept (section 3.2)",
        positions="original",
        prefill="full",
        rate=0.5,
        keeps_answers=True,
    ),
    "balancekv": Protocol(
        "the prompt is read whole and compressed once to a quarter; positions in the stream, and "
        "all that follows is kept (section 4.2, appendix B)",
        positions="original",
        prefill="full",
        rate=0.25,
        keeps_answers=True,
    ),
    "buzz": Protocol(
        "the prompt is read whole and thinned at its end, then eviction goes on token by token; "
        "positions inside the cache (section 3, Remark 2)",
        chunk=1,
        prefill="full",
    ),
}
"""The papers' protocols, by name."""


def protocol(name: str) -> Protocol:
    """A protocol by its name.

    Raises:
        WeirError: there is none of that name.
    """
    if name not in PROTOCOLS:
        raise WeirError(
            f"no protocol is called {name!r}{suggest(name, PROTOCOLS)}; there are "
            f"{', '.join(PROTOCOLS)}"
        )
    return PROTOCOLS[name]
