"""Estimate the memory that a server will take, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from weir.cache import fit_to_model, size_of
from weir.errors import WeirError, first_line, format_size, in_words
from weir.loading import default_device, skeleton
from weir.models import free_memory
from weir.policies import SAME, Pinned, Policy, parse_policy, with_pin
from weir.serve.engine.engine import PREFIXES
from weir.serve.sessions.store import DEFAULT_KEPT

MOST_PINNED = 32_768
"""The most tokens of a beginning that `--pin auto` pins. Coding agents send 10,000 to 25,000."""
STEP = 256
"""`--pin auto` chooses a multiple of this."""
LEAST_KEPT = 16
"""Number of checkpoints for which `--pin auto` leaves room."""


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a server.

    Attributes:
        policy: the policy, with the budget and the heads that it has on this model.
        weights: bytes of the model's weights.
        row: bytes of one row. A checkpoint has as many.
        rows: number of rows.
        kept: number of checkpoints in memory.
        prefixes: number of prompt states that are kept so that nothing is read twice.
        free: bytes that are free before anything is loaded; None if unknown.
    """

    policy: Policy
    weights: int
    row: int
    rows: int
    kept: int
    free: int | None
    prefixes: int = PREFIXES

    @property
    def total(self) -> int:
        """Total number of bytes."""
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
    """Estimate the memory of a server. Raises WeirError if it is more than is free.

    Args:
        kept: checkpoints in memory; None for `DEFAULT_KEPT`, or fewer if these would take more than
            half of the remaining memory.
        loading: arguments of `load`. With a device map, the free memory is unknown.
    """
    model = skeleton(model_name, **loading)
    fitted = fit_to_model(parse_policy(policy), model, chunk)
    size = size_of(model, fitted, chunk=chunk)
    device, free = _find_free(loading)
    left = 0 if free is None else free - size.weights - (rows + PREFIXES) * size.stream
    remedies = ["fewer --rows"] if rows > 1 else []
    if kept is not None and kept > 1:
        remedies.append("a smaller --keep")
    remedies.append("a smaller budget")
    if kept is None:
        kept = DEFAULT_KEPT if free is None else max(1, min(DEFAULT_KEPT, left // 2 // size.stream))
    estimate = MemoryEstimate(fitted, size.weights, size.stream, rows, kept, free)
    if free is not None and estimate.total > free:
        if size.weights > free:
            remedies = ["a smaller model"]
        elif size.weights + (1 + PREFIXES) * size.stream > free:  # not even one row fits
            remedies = ["a smaller budget"]
        turns = f" the states of {in_words(kept, 'turn')} {format_size(kept * size.stream)},"
        raise WeirError(
            f"not enough memory on {device}: {format_size(free)} are free. {model_name} takes "
            f"{format_size(size.weights)}, {in_words(rows, 'row')} "
            f"{'takes' if rows == 1 else 'take'} {format_size(rows * size.stream)},"
            f"{turns if kept else ''} and {PREFIXES} states of prompts "
            f"{format_size(PREFIXES * size.stream)}. Use {_either(remedies)}."
        )
    return estimate


def _either(remedies: Sequence[str]) -> str:
    """Join alternatives with "or"."""
    *others, last = remedies
    return f"{', '.join(others)}{',' * (len(others) > 1)} or {last}" if others else last


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
    """Choose how many tokens of a beginning are pinned.

    These are as many as fit if the server takes half of the free memory, and at most `MOST_PINNED`.
    They are at least as many as `with_pin` pins without a number, up to `MOST_PINNED`.

    Args:
        policy: the policy, without pinned slots.
        kept: checkpoints in memory; None for at least `LEAST_KEPT`.

    Raises:
        WeirError: the policy cannot pin a beginning, or the free memory is not known.
    """
    _, free = _find_free(loading)
    if free is None:
        raise WeirError(
            "--pin auto needs to know how much memory is free. This is unknown with --device-map, "
            "and on some systems. Give a number of tokens, as in --pin 8192."
        )
    least = with_pin(policy)
    if not isinstance(least, Pinned) or least is policy:
        raise WeirError(
            f"--pin auto needs a policy of fixed size that does not pin tokens yet, got {policy}, "
            "which already keeps the beginning or has no room for it. Leave out --pin."
        )
    model = skeleton(model_name, **loading)
    few, many = (
        size_of(model, with_pin(policy, n, format), chunk=chunk) for n in (STEP, MOST_PINNED)
    )
    held = rows + PREFIXES + (LEAST_KEPT if kept is None else kept)
    each = (free // 2 - few.weights) // held  # bytes available for a row
    slope = (many.stream - few.stream) / (MOST_PINNED - STEP)
    most = int((each - few.stream) / slope) + STEP
    return max(min(least.n, MOST_PINNED), min(MOST_PINNED, most // STEP * STEP))


def _find_free(loading: Mapping[str, Any]) -> tuple[torch.device, int | None]:
    """Return the device of a model, and the free bytes on it (None if unknown)."""
    try:
        device = torch.device(loading.get("device") or default_device())
        return device, None if loading.get("device_map") else free_memory(device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise WeirError(
            f"no device {loading.get('device')!r} on this machine ({first_line(error)}). Use "
            "another --device."
        ) from None
