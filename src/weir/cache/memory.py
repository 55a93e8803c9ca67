"""Whether the slots of a cache fit into what memory is free, asked before any is taken."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from weir.cache.layers import LayerPlan
from weir.errors import WeirError, shortened
from weir.policies import Policy


def check_room(
    plans: Sequence[LayerPlan], policy: Policy, batch: int, device: torch.device
) -> None:
    """Refuse slots that do not fit.

    Args:
        plans: every layer.
        policy: theirs, for the sentence.
        batch: rows.
        device: where the slots are to be.

    Raises:
        WeirError: they take more bytes than are free.
    """
    if any(plan.spec.pipe.slots is None for plan in plans):
        return  # it grows, and nobody knows how far
    needed = sum(plan.slab.nbytes(batch) for plan in plans)
    free = free_memory(device)
    if free is not None and needed > free:
        raise WeirError(
            f"the slots of {shortened(str(policy))} in {len(plans)} layers take {needed:,} bytes "
            f"for {batch} row{'s' * (batch > 1)}, and {free:,} are free on {device}; take a "
            "smaller budget, or fewer rows"
        )


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device; None where nobody says so."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
