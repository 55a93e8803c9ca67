"""What a server will hold, known before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from weir.cache import size_of
from weir.errors import WeirError
from weir.models import default_device, free_memory, skeleton
from weir.policies import Policy

KEPT = 256
"""Ends of turns that are kept where nobody says how many, if so many fit."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a server.

    Attributes:
        weights: of the model.
        row: of one row, and of the end of one turn.
        rows: how many rows.
        kept: how many ends of turns.
        free: what is free before anything is loaded; None where nobody knows.
    """

    weights: int
    row: int
    rows: int
    kept: int
    free: int | None

    @property
    def all(self) -> int:
        """Of everything together."""
        return self.weights + (self.rows + self.kept) * self.row


def estimate_memory(
    model_name: str,
    policy: str | Policy,
    *,
    chunk: int,
    rows: int,
    kept: int | None,
    loading: Mapping[str, Any] = MappingProxyType({}),
) -> MemoryEstimate:
    """What a server will hold.

    Args:
        model_name: nano, a folder, or a Hugging Face Hub id.
        policy, chunk: of every row.
        rows: turns that are answered at once.
        kept: ends of turns that are kept in memory; None for `KEPT`, or as many as fit into half of
            what is left.
        loading: how the model is loaded, arguments of `load`; how much is free on the devices of a
            device map nobody knows.

    Raises:
        WeirError: there is no such model, policy or device, or it does not fit into what memory is
            free.
    """
    size = size_of(skeleton(model_name, **loading), policy, chunk=chunk)
    try:
        device = torch.device(loading.get("device") or default_device())
        free = None if loading.get("device_map") else free_memory(device)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise WeirError(f"there is no device {loading.get('device')!r} here ({reason})") from None
    left = 0 if free is None else free - size.weights - rows * size.stream
    if kept is None:
        kept = KEPT if free is None else max(1, min(KEPT, left // 2 // size.stream))
    room = MemoryEstimate(size.weights, size.stream, rows, kept, free)
    if free is not None and room.all > free:
        raise WeirError(
            f"{model_name} takes {size.weights:,} bytes, {rows} rows {rows * size.stream:,} and "
            f"the ends of {kept} turns {kept * size.stream:,}, and {free:,} are free on {device}; "
            "take fewer rows, keep fewer turns, or a smaller budget"
        )
    return room
