"""Checks before a cache is made: the policy's model, free memory, and the model's window."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from weir.cache.layers import LayerPlan, pipes_of, reach_of
from weir.errors import WeirError, quote, shorten
from weir.models import describe, fingerprint, free_memory, window_of
from weir.policies import Policy


def check_origin(policy: Policy, model: PreTrainedModel) -> None:
    """Refuse a policy that was measured on another model (WeirError).

    Only type, shape and vocabulary are compared if weights are quantized, sharded, of another dtype
    or on `meta`, where their numbers differ or there are none.
    """
    origin = policy.origin
    if origin is None:
        return
    mine, theirs = fingerprint(model), origin.model
    compared = {"kind", "layers", "width", "vocabulary"}
    numbers = all(
        weight.device.type != "meta" and not is_traceable_wrapper_subclass(weight)
        for weight in model.parameters()
    )
    if numbers and mine["dtype"] == theirs["dtype"]:
        compared.add("weights")
    differ = [name for name in mine if name in compared and mine[name] != theirs[name]]
    if differ:
        what = ", ".join(f"{name} {_bare(theirs[name])}, here {mine[name]}" for name in differ)
        raise WeirError(
            f"{origin.file} was calibrated for another model ({what}); run weir calibrate for this "
            f"one{origin.told}"
        )


def _bare(value: object) -> str:
    return quote(value).strip("'")


def check_memory(
    plans: Sequence[LayerPlan], policy: Policy, batch: int, device: torch.device
) -> None:
    """Refuse slots of `batch` rows that exceed the free memory of a device (WeirError)."""
    if any(plan.spec.pipe.slots is None for plan in plans):
        return  # it grows without a limit
    needed = sum(plan.slab.nbytes(batch) for plan in plans)
    free = free_memory(device)
    if free is not None and needed > free:
        raise WeirError(
            f"the slots of {shorten(str(policy))} in {len(plans)} layers take {needed:,} bytes "
            f"for {batch} row{'s' * (batch > 1)}, and {free:,} are free on {device}; take a "
            "smaller budget or chunk, or fewer rows"
        )


PACKAGE = __name__.partition(".")[0]


def describe_window_excess(model: PreTrainedModel, policy: Policy, chunk: int) -> str | None:
    """Describe by how much a policy's slots and chunk exceed the model's window; None if they fit,
    or if the policy has no limit.
    """
    window = window_of(model.config)
    try:
        pipes = pipes_of(policy, describe(model))
    except WeirError:
        return None
    most = reach_of(pipes, chunk, rolling=True)
    if window is None or most is None or most <= window:
        return None
    return (
        f"{policy.brief} and a chunk of {chunk:,} hold up to {most:,} tokens, and this model was "
        f"made for {window:,}: what it says beyond is worth little"
    )


def warn_of_window(model: PreTrainedModel, policy: Policy, chunk: int) -> None:
    """Warn if a policy exceeds the model's window (`describe_window_excess`), once per caller."""
    excess = describe_window_excess(model, policy, chunk)
    if excess is not None:
        warnings.warn(f"weir: {excess}", stacklevel=_callers())


def _callers() -> int:
    """Return the stack level of the first caller outside weir, for `warnings.warn`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _of_weir(frame.f_globals.get("__name__")):
        frame, level = frame.f_back, level + 1
    return level


def _of_weir(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == PACKAGE


MOST_KEPT = 2**25 - 2**16
"""Bytes of the tensor that `keep_freed_memory` frees, below glibc's limit with its overhead."""


@lru_cache
def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of up to `MOST_KEPT` bytes for reuse; acts once in a process.

    glibc raises its threshold when so large a tensor is freed; the tensor is never written, so it
    takes no memory. Up to twice as much freed memory may stay with the process.
    """
    torch.empty(MOST_KEPT, dtype=torch.uint8, device="cpu")
