"""Training in one process, or in several under `accelerate launch`: distributes rows and sums
gradients.

Every process has the whole model and computes its share of a step's samples. Gradients are summed
before the optimizers use them, so all processes keep equal weights. This module knows nothing about
losses.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from one; that of rank 0 writes files and messages."""

    device: torch.device
    rank: int = 0
    count: int = 1

    @classmethod
    def here(cls) -> Processes:
        """Join the processes of the launcher's environment, if any."""
        gpu = torch.cuda.is_available()
        if int(os.environ.get("WORLD_SIZE") or 1) == 1:
            return cls(torch.device("cuda" if gpu else "cpu"))
        device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
        if not distributed.is_initialized():
            distributed.init_process_group("nccl" if gpu else "gloo")
        return cls(device, distributed.get_rank(), distributed.get_world_size())

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
        """Replace a tensor by its sum over all processes, and return it."""
        if self.count > 1:
            distributed.all_reduce(values)
        return values

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every gradient by its sum over all processes."""
        if self.count == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        summed = self.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = summed.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """Let process 0 end a block before the others begin it."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.count > 1:
            distributed.barrier()
