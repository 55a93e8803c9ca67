"""Whether the slots of a cache fit into what memory is free, asked before any is taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weir.cache.layers import LayerPlan
from weir.errors import WeirError, shorten
from weir.models import free_memory
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
            f"the slots of {shorten(str(policy))} in {len(plans)} layers take {needed:,} bytes "
            f"for {batch} row{'s' * (batch > 1)}, and {free:,} are free on {device}; take a "
            "smaller budget or chunk, or fewer rows"
        )
