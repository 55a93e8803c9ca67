"""Compilation of an engine's decode steps, while it answers.

A program is made for each number of rows that a call may have. There are few of these, and a call
over other numbers is made over the next larger one. Knows nothing about sequences.
"""

from __future__ import annotations

from typing import Any

from weir.models import compile_steps
from weir.serve.engine.engine import Engine

GROWTH = 4
"""How many times as many rows the next larger program has: computing a row for nothing costs little
beside compiling another one."""


def sizes_of(engine: Engine) -> tuple[int, ...]:
    """The numbers of rows that compiled decode calls have: 1, 4, 16, ... and all.

    Only 1 in a deterministic engine.
    """
    rows = engine.load().rows
    sizes = [1]
    while not engine.deterministic and sizes[-1] < rows:
        sizes.append(min(GROWTH * sizes[-1], rows))
    return tuple(sizes)


def compile_engine(engine: Engine, **options: Any) -> None:
    """Compile the decode steps of an engine, each number of rows when a call first has it.

    Answers differ by rounding only. Until a program is ready, and where none can be made, steps run
    uncompiled.

    Args:
        engine: not in a step.
        options: of `weir.compile_steps`.

    Raises:
        WeirError: the model cannot be compiled, whatever the compiler.
    """
    compile_steps(engine.model, **options)
    engine.runner.sizes = sizes_of(engine)
