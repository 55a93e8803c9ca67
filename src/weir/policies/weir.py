"""weir's own policy: sinks, the newest tokens and k centers, in slots of 8 bits."""

from __future__ import annotations

from weir.policies.library import check_room, ends
from weir.policies.pipe import Pipe, Policy
from weir.policies.quantized import EXACT, Quantized
from weir.policies.registry import named
from weir.pools import KCenter

OF_CENTERS = 3
"""One in so many slots is a center's."""


@named(
    "weir's own: StreamingLLM, SubGen's k centers (Zandieh et al. 2024), slots of 8 bits",
    pipe="sink(4) | recent(16) | recent(151):int8 | kcenter(85, quiet=2.0, half_life=4096):int8",
)
def weir(
    budget: int = 256,
    sinks: int = 4,
    newest: int = 16,
    slots: str = "int8",
    quiet: float = 2.0,
    half_life: int | None = 4096,
) -> Policy:
    """Keep sinks, the newest tokens and, a third, those whose keys lie far apart; in 8 bits.

    `quiet` and `half_life` are those of `kcenter`.

    Args:
        newest: how many of the newest tokens stay exact, as sinks do.
        slots: the format of all other slots: int8, k8v4 or fp8; exact for as the model computes.
    """
    centers = budget // OF_CENTERS
    recent = budget - sinks - centers
    check_room(budget, sinks, recent_tokens=recent, centers=centers)
    middle = KCenter(centers, quiet=quiet, half_life=half_life)
    pipe = Pipe((*ends(sinks, recent), middle))
    return pipe if slots == EXACT else Quantized(pipe, slots, newest).for_layer(0, 1)
