"""An estimate of the memory that a server will take, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from weir.cache import size_of
from weir.errors import WeirError
from weir.loading import default_device, skeleton
from weir.models import free_memory
from weir.policies import SAME, Pinned, Policy, with_pin
from weir.serve.engine.engine import PREFIXES
from weir.serve.sessions.store import DEFAULT_KEPT

MOST_PINNED = 32_768
"""Tokens of a beginning that `--pin auto` pins at most; agents have 10,000 to 20,000."""
STEP = 256
"""`--pin auto` chooses a multiple of it."""
LEAST_KEPT = 16
"""Checkpoints for which `--pin auto` leaves room."""


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a server.

    Attributes:
        row: bytes of one row, and of one checkpoint.
        prefixes: states of prompts that are kept so that nothing is read twice.
        free: bytes that are free before anything is loaded; None if unknown.
    """

    weights: int
    row: int
    rows: int
    kept: int
    free: int | None
    prefixes: int = PREFIXES

    @property
    def total(self) -> int:
        """Bytes of everything together."""
        return self.weights + (self.rows + self.kept + self.prefixes) * self.row


def estimate_memory(
    model_name: str,
    policy: str | Policy,
    *,
    chunk: int,
    rows: int,
    kept: int | None,
    loading: Mapping[str, Any] = MappingProxyType({}),
) -> MemoryEstimate:
    """Estimate the memory of a server; WeirError if it is more than is free.

    Args:
        kept: checkpoints in memory; None for `DEFAULT_KEPT`, or as many as fit into half of what is
            left.
        loading: arguments of `load`. With a device map, free memory is unknown.
    """
    size = size_of(skeleton(model_name, **loading), policy, chunk=chunk)
    device, free = _find_free(loading)
    left = 0 if free is None else free - size.weights - (rows + PREFIXES) * size.stream
    if kept is None:
        kept = DEFAULT_KEPT if free is None else max(1, min(DEFAULT_KEPT, left // 2 // size.stream))
    estimate = MemoryEstimate(size.weights, size.stream, rows, kept, free)
    if free is not None and estimate.total > free:
        raise WeirError(
            f"{model_name} takes {size.weights:,} bytes, {rows} rows {rows * size.stream:,}, "
            f"the ends of {kept} turns {kept * size.stream:,} and {PREFIXES} states of prompts "
            f"{PREFIXES * size.stream:,}, and {free:,} are free on {device}; "
            "take fewer rows, keep fewer turns, or a smaller budget"
        )
    return estimate


def choose_pin(
    model_name: str,
    policy: Policy,
    *,
    chunk: int,
    rows: int,
    kept: int | None,
    loading: Mapping[str, Any] = MappingProxyType({}),
    format: str = SAME,
) -> int:
    """Choose how many tokens of a beginning are pinned: as many as half of the free memory leaves
    room for, and `MOST_PINNED` at most.

    Args:
        policy: without pinned slots.
        kept: checkpoints in memory; None for at least `LEAST_KEPT`.

    Raises:
        WeirError: the policy cannot be pinned, or free memory is not known.
    """
    _, free = _find_free(loading)
    if free is None:
        raise WeirError(
            "--pin auto asks how much memory is free, which nobody knows with a device map: say "
            "how many tokens, as in --pin 8192"
        )
    least = with_pin(policy)
    if not isinstance(least, Pinned) or least is policy:
        raise WeirError(
            f"--pin auto is for policies of a fixed size; {policy} keeps the beginning already, or "
            "has no room for it: leave --pin out"
        )
    model = skeleton(model_name, **loading)
    few, many = (
        size_of(model, with_pin(policy, n, format), chunk=chunk) for n in (STEP, MOST_PINNED)
    )
    held = rows + PREFIXES + (LEAST_KEPT if kept is None else kept)
    each = (free // 2 - few.weights) // held  # bytes that a row may have
    slope = (many.stream - few.stream) / (MOST_PINNED - STEP)
    most = int((each - few.stream) / slope) + STEP
    return max(min(least.n, MOST_PINNED), min(MOST_PINNED, most // STEP * STEP))


def _find_free(loading: Mapping[str, Any]) -> tuple[torch.device, int | None]:
    """The device of a model, and how many bytes are free on it; None if unknown."""
    try:
        device = torch.device(loading.get("device") or default_device())
        return device, None if loading.get("device_map") else free_memory(device)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise WeirError(f"there is no device {loading.get('device')!r} here ({reason})") from None
