"""The protocol of a peer's process: lines of JSON on its standard input and output.

The first line has the settings of the object to build. Each further line has the name of a method
and its arguments. This file needs only Python, so that it runs in every peer's environment.
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
    """Build an object from the first line, then call the method that each further line names."""
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
        except Exception as error:  # the caller gets a peer's exception as its answer
            told = (str(error).strip().splitlines() or [""])[-1]
            name = type(error).__name__
            say({"error": told[:300] if name == "WeirError" else f"{name}: {told[:300]}"})


def gaps(times: list[float]) -> list[float]:
    """Return the seconds from each time to the next."""
    return [after - before for before, after in itertools.pairwise(times)]


def timed(do: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    do()
    return time.perf_counter() - start
