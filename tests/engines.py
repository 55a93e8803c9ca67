"""An engine that weir would not choose on a CPU: steps under `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from weir.models import NOT_ASKED, Chosen, CompiledStep, choose_engine, describe


class Counted(CompiledStep):
    """Records the number of rows of every step, or 0 if the step was not compiled."""

    def __init__(self, strict: bool, **options: Any) -> None:
        super().__init__(options, strict)
        self.taken: list[int] = []

    def step(self, step: Any, given: Any, own: Callable[..., Any]) -> Any:
        output = super().step(step, given, own)
        self.taken.append(0 if output is None else len(step.waiting))
        return output


@contextmanager
def compiled(
    model: PreTrainedModel, *, strict: bool = True, backend: Any = "eager", **options: Any
) -> Iterator[list[int]]:
    """Let a model's steps run under `torch.compile`, wherever the model is.

    With `backend="eager"`, everything is done as for compilation except the last part, in which
    PyTorch turns a graph into machine code. Yields `Counted.taken`.
    """
    torch.compiler.reset()
    engine, decoder = Counted(strict, backend=backend, **options), describe(model).decoder
    choose_engine(decoder, Chosen(lambda _: engine))
    try:
        yield engine.taken
    finally:
        choose_engine(decoder, NOT_ASKED)
        torch.compiler.reset()
