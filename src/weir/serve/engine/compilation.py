"""The decode steps of an engine, compiled before its first turn.

A graph is made for each number of rows that a call may have, so there are few of these, and a call
over others is made over the next larger one. Knows nothing about turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weir.errors import WeirError
from weir.models import compile_steps
from weir.serve.engine.engine import Engine

APART = 4
"""How many times as many rows the next larger graph has: a row that is computed for nothing costs
little beside a graph that is waited for."""


def sizes_of(engine: Engine) -> tuple[int, ...]:
    """How many rows the decode calls of an engine have where they are compiled: 1, 4, 16, ... all.

    One, where each row is decoded by itself.
    """
    rows = engine.load().rows
    sizes = [1]
    while not engine.deterministic and sizes[-1] < rows:
        sizes.append(min(APART * sizes[-1], rows))
    return tuple(sizes)


@torch.no_grad()
def compile_engine(
    engine: Engine, on_size: Callable[[int], None] = lambda size: None, **options: Any
) -> None:
    """Compile an engine's decode steps, one after the other; nobody may have asked it anything.

    Answers differ by rounding only. Where a step cannot be compiled the engine is as it was, but
    for the matrix products that were chosen.

    Args:
        engine: whose rows are empty, and are afterwards.
        on_size: told how many rows the next graph has.
        options: for `weir.compile_steps`.

    Raises:
        WeirError: there is no compiler here, or it does not compile this model.
    """
    compile_steps(engine.model, strict=True, **options)
    feeder = engine.feeder
    try:
        for size in sizes_of(engine):
            on_size(size)
            feeder.sizes = (size,)
            engine.cache.reset()
            for _ in range(2):  # a layer learns from its first call what a graph is made of
                feeder.feed({row: [0] for row in range(size)})
        feeder.sizes = sizes_of(engine)
    except WeirError:
        compile_steps(engine.model, on=False)
        feeder.sizes = ()
        raise
    finally:
        engine.cache.reset()
