"""Budgets by layer: large at the bottom, small at the top, the same in all.

PyramidKV (Cai et al. 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
Funneling", arXiv:2406.02069), section 4.2: lower layers attend far and wide and upper ones to few
tokens, so slots go to the lower layers. Knows nothing of pools but their numbers of slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from weir.errors import WeirError
from weir.policies.pipe import Pipe, Policy
from weir.policies.registry import named
from weir.pools import Pool, Snap


def budgets(mean: int, layers: int, beta: float) -> list[int]:
    """Compute the slots of each layer, bottom up: an arithmetic sequence, in whole numbers.

    The top layer has mean / beta, the bottom one 2 * mean - mean / beta; what rounding down leaves
    over goes to the lowest layers, one slot each. A single layer has the mean.

    Args:
        mean: slots of a layer on average: all together have exactly `layers * mean`.
        layers: how many there are.
        beta: at least 1.
    """
    top = mean / Fraction(beta)
    bottom = 2 * mean - top
    steps = max(1, layers - 1)
    exact = [bottom - (bottom - top) * layer / steps for layer in range(layers)]
    whole = [int(slots) for slots in exact] if layers > 1 else [mean]
    left = layers * mean - sum(whole)
    return [slots + (layer < left) for layer, slots in enumerate(whole)]


def of_layer(pools: tuple[Pool, ...], layer: int, layers: int, beta: float) -> tuple[Pool, ...]:
    """Resize pools for one layer of a pyramid.

    The first and the newest tokens that pools keep for those behind them, and the slots that a pool
    calls fixed, are the same in every layer, as the paper's last tokens are. The other slots follow
    `budgets`, shared out in the proportions that the pools have.

    Args:
        pools: the pools of a pipe with a limit, in their average sizes.
        layer: which layer, bottom up.
        layers: how many there are.
        beta: the average number of slots over that of the top layer.

    Raises:
        WeirError: the layer's slots are too few for its pools, or a pool has only one size.
    """
    sizes = [pool.slots() or 0 for pool in pools]
    last = len(pools) - 1
    fixed = [
        size if pool.in_order and place < last else pool.fixed(pools[:place])
        for place, (pool, size) in enumerate(zip(pools, sizes, strict=True))
    ]
    free = [size - always for size, always in zip(sizes, fixed, strict=True)]
    slots = budgets(sum(free), layers, beta)[layer]
    which = {0: "lowest", layers - 1: "top"}
    name = f"{which[layer]} layer" if layer in which else f"layer {layer} of {layers}"
    where = f"the {name} of this pyramid would have {slots} slots to share out"
    if slots < sum(n > 0 for n in free):
        raise WeirError(
            f"{where}, and each of its pools needs one; take a larger budget or a smaller beta"
        )
    try:
        return tuple(
            pool if share == average else pool.resized(always + share)
            for pool, share, average, always in zip(
                pools, share_slots(slots, free), free, fixed, strict=True
            )
        )
    except WeirError as error:
        raise WeirError(f"{where}: {error}") from None


def share_slots(slots: int, free: list[int]) -> list[int]:
    """Share out slots in the proportions of `free`, at least one where it is not 0.

    Args:
        slots: how many; at least one for each of `free` that is not 0.
        free: the proportions.
    """
    one = [int(n > 0) for n in free]
    parts = [n - at_least for n, at_least in zip(free, one, strict=True)]
    parts = parts if any(parts) else one
    rest, whole = slots - sum(one), sum(parts)
    given = [at_least + rest * part // whole for at_least, part in zip(one, parts, strict=True)]
    # What rounding down left over goes to the largest remainders, the first of equal ones.
    order = sorted(range(len(free)), key=lambda place: -(rest * parts[place] % whole))
    for place in order[: slots - sum(given)]:
        given[place] += 1
    return given


@dataclass(frozen=True, repr=False)
class Pyramid(Policy):
    """A pipe with PyramidKV's budgets: more slots in the lower layers.

    Attributes:
        pipe: what a layer holds on average.
        beta: the average number of slots over that of the top layer; 1 is no pyramid.
    """

    is_pipe = True

    pipe: Pipe
    beta: float = 20.0
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.pipe.slots is None:
            raise WeirError(f"{self.pipe} has no limit, so a pyramid has nothing to share out")
        if not 1 <= self.beta < math.inf:
            raise WeirError(f"beta of a pyramid is a number from 1 on, not {self.beta}")
        for layer in range(2):  # the top layer of any model has as few slots as that of two
            self.for_layer(layer, 2)
        if not self.text:
            object.__setattr__(self, "text", f"pyramid({self.pipe}, beta={self.beta})")

    @property
    def stands_for(self) -> str:
        """The pyramid around its pools, the way it is written."""
        return f"pyramid({self.pipe.stands_for}, beta={self.beta})"

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Return the pipe with the slots of its layer.

        Raises:
            WeirError: the pools cannot be given that many slots.
        """
        pools = of_layer(self.pipe.pools, layer, layers, self.beta)
        return Pipe(pools, formats=self.pipe.formats)


@named("Cai et al. 2024, PyramidKV, its budgets around any pipe")
def pyramid(pipe: Policy | None = None, beta: float = 20.0) -> Policy:
    """A pipe with more slots in the lower layers and fewer in the upper ones, the same in all.

    The pipe is what a layer holds on average. First and newest tokens that it keeps in front of
    other pools are the same in every layer; the rest is `beta` times smaller than the average in
    the top layer, and from there rises evenly to the bottom one. Without a pipe, it is PyramidKV.

    Args:
        pipe: what a layer holds on average; none for PyramidKV's.
        beta: how many times fewer slots than the average the top layer has.
    """
    if pipe is None:
        return pyramidkv(beta=beta)
    if not isinstance(pipe, Pipe):
        raise WeirError(f"a pyramid shares out the slots of a pipe, and {pipe} is none")
    return Pyramid(pipe, beta)


@named(
    "Cai et al. 2024, PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information "
    "Funneling"
)
def pyramidkv(
    budget: int = 256,
    window: int = 8,
    kernel: int = 7,
    average: bool = False,
    beta: float = 20.0,
    frame: str = "read",
) -> Policy:
    """Keep what SnapKV keeps, with more slots in the lower layers and fewer in the upper ones.

    Args:
        budget: slots of each KV head, in a layer on average.
        beta: how many times fewer slots than the average the top layer has.
    """
    return Pyramid(Pipe((Snap(budget, window, kernel, average, frame),)), beta)
