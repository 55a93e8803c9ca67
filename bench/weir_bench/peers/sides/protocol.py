"""How a peer is asked: lines of JSON on standard input and output, in an environment of its own.

The first line says what to build; each line after it names a method and its arguments. Knows
nothing about weir or any peer, and needs nothing but Python.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(build: Callable[[dict[str, Any]], Any]) -> None:
    """Build what the first line asks for, then call its methods as the others ask."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to standard output too

    def say(what: object) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    side: Any = None
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        try:
            if side is None:
                side, made = build(asked), None
            else:
                made = getattr(side, asked.pop("do"))(**asked)
            say({"made": made})
        except Exception as error:  # what a peer raises is its answer
            told = (str(error).strip().splitlines() or [""])[-1]
            name = type(error).__name__
            say({"error": told[:300] if name == "WeirError" else f"{name}: {told[:300]}"})


def gaps(times: list[float]) -> list[float]:
    """Seconds from each of some times to the next."""
    return [after - before for before, after in itertools.pairwise(times)]


def timed(do: Callable[[], object]) -> float:
    """Return how long something takes."""
    start = time.perf_counter()
    do()
    return time.perf_counter() - start
