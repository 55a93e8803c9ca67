"""One process, or several under `accelerate launch`: who computes which rows, and sums over all.

Every process has the whole model and takes its share of a step's samples; gradients are summed
before the optimizer steps, so the weights stay the same everywhere. Knows nothing of losses.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weir.errors import WeirError, describe_missing


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from one of them.

    Attributes:
        device: where this one computes.
        rank: which one it is; the first writes files and speaks.
        count: how many there are.
        state: accelerate's; None for one process, which needs no accelerate.
    """

    device: torch.device
    rank: int = 0
    count: int = 1
    state: Any = None

    @classmethod
    def here(cls) -> Processes:
        """As `accelerate launch` has set them up; without it, one on the GPU or the CPU.

        Raises:
            WeirError: there are several, and accelerate is not installed.
        """
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
        """Whether this is the first of all processes, as their launcher says."""
        return int(os.environ.get("RANK") or 0) == 0

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes files and speaks."""
        return self.rank == 0

    def share(self, rows: Tensor) -> Tensor:
        """This process's rows of a batch [rows, ...]."""
        return rows[self.rank :: self.count].to(self.device)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.count == 1:
            return values
        from accelerate.utils import reduce

        summed: Tensor = reduce(values, reduction="sum")
        return summed

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Put the sum over all processes in place of each gradient."""
        if self.count == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        summed = self.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = summed.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def wait(self) -> None:
        """Until all have come here."""
        if self.state is not None:
            self.state.wait_for_everyone()
