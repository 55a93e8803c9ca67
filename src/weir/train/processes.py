"""Training in one process, or in several under `accelerate launch`: row shares and sums.

Every process has the whole model and computes its share of a step's samples; gradients are summed
before the optimizers step, so all processes keep equal weights. Knows nothing about losses.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weir.errors import WeirError, describe_missing


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from one of them; the one of rank 0 writes files and messages.

    `state` is accelerate's; None for a single process, which needs no accelerate.
    """

    device: torch.device
    rank: int = 0
    count: int = 1
    state: Any = None

    @classmethod
    def here(cls) -> Processes:
        """Return the processes of `accelerate launch`, or else one process on the GPU or CPU."""
        count = int(os.environ.get("WORLD_SIZE") or 1)
        gpu = torch.cuda.is_available()
        if count == 1:
            return cls(torch.device("cuda" if gpu else "cpu"))
        try:
            from accelerate import PartialState
        except ImportError:
            what = f"training in {count} processes"
            raise WeirError(describe_missing(what, "accelerate")) from None
        state = PartialState(cpu=not gpu)
        return cls(state.device, state.process_index, state.num_processes, state)

    @staticmethod
    def speaks_here() -> bool:
        """Return whether this is process 0, according to the launcher's environment."""
        return int(os.environ.get("RANK") or 0) == 0

    @property
    def is_first(self) -> bool:
        """Whether this is process 0."""
        return self.rank == 0

    def share(self, rows: Tensor) -> Tensor:
        """Return this process's rows of a batch [rows, ...]."""
        return rows[self.rank :: self.count].to(self.device)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        if self.count == 1:
            return values
        from accelerate.utils import reduce

        summed: Tensor = reduce(values, reduction="sum")
        return summed

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every gradient by its sum over all processes."""
        if self.count == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        summed = self.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = summed.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def first_before_others(self) -> AbstractContextManager[None]:
        """Return a block that process 0 has ended before the others begin it."""
        return self.state.main_process_first() if self.state is not None else nullcontext()

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.state is not None:
            self.state.wait_for_everyone()
