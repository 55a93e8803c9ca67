"""Compilation of an engine's decode steps, before its first sequence.

A graph is made for each number of rows that a call may have. There are few of these, and a call
over other numbers is made over the next larger one. Knows nothing about sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weir.errors import WeirError
from weir.models import compile_steps
from weir.serve.engine.engine import Engine

GROWTH = 4
"""How many times as many rows the next larger graph has: computing a row for nothing costs little
beside compiling another graph."""


def sizes_of(engine: Engine) -> tuple[int, ...]:
    """The numbers of rows that compiled decode calls have: 1, 4, 16, ... and all.

    Only 1 in a deterministic engine.
    """
    rows = engine.load().rows
    sizes = [1]
    while not engine.deterministic and sizes[-1] < rows:
        sizes.append(min(GROWTH * sizes[-1], rows))
    return tuple(sizes)


@torch.no_grad()
def compile_engine(
    engine: Engine, on_size: Callable[[int], None] = lambda size: None, **options: Any
) -> None:
    """Compile the decode steps of an engine that has not been asked anything yet.

    Answers differ by rounding only. If compilation fails the engine is as it was, but for the
    matrix products that were chosen.

    Args:
        engine: its rows are empty, before and after.
        on_size: called with the number of rows of the next graph.
        options: of `weir.compile_steps`.

    Raises:
        WeirError: there is no compiler here, or it does not compile this model.
    """
    compile_steps(engine.model, strict=True, **options)
    runner = engine.runner
    try:
        for size in sizes_of(engine):
            on_size(size)
            runner.sizes = (size,)
            engine.cache.reset()
            for _ in range(2):  # the first call tells a layer what its graph is made of
                runner.run({row: [0] for row in range(size)})
        runner.sizes = sizes_of(engine)
    except WeirError:
        compile_steps(engine.model, on=False)
        runner.sizes = ()
        raise
    finally:
        engine.cache.reset()
