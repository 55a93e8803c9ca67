"""Every policy with a name that stands around another: how its slots are shared out and held."""

from __future__ import annotations

from weir.errors import WeirError
from weir.policies.library import ends, kcenter, streaming_llm
from weir.policies.naming import named
from weir.policies.pinned import Pinned
from weir.policies.pipe import Pipe, Policy
from weir.policies.pyramid import Pyramid
from weir.policies.quantized import EXACT, Quantized
from weir.pools import KCenter, Snap

OF_CENTERS = 3
"""One in so many slots of `weir` is a center's."""


@named(
    "Cai et al. 2024, PyramidKV, its budgets around any pipe",
    pipe="pyramid(snap(256, window=8), beta=20.0)",
)
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
    "Funneling",
    pipe="pyramid(snap(256, window=8), beta=20.0)",
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


@named("any policy, and what a conversation must not lose beside it")
def pinned(policy: Policy | None = None, n: int = 64, header: int = 16) -> Policy:
    """A policy, and beside it the beginning of the stream and the header of the running turn.

    `n` slots are for the beginning and `header` for the control tokens in front of an answer, in
    addition to those of the policy. How much of them a row uses, its marks say; a row without any
    has `n` sinks more.

    Args:
        policy: what holds all else; none for StreamingLLM.
        n: slots for the beginning of the stream.
        header: slots for the control tokens in front of an answer.
    """
    return Pinned(streaming_llm() if policy is None else policy, n, header)


@named("any policy, its middle in 8 bits or 4")
def quantized(
    policy: Policy | None = None, slots: str = "int8", newest: int | None = None
) -> Policy:
    """A policy whose slots are quantized, but for first and newest tokens.

    Args:
        policy: whose slots they are; none for kcenter.
        slots: how they are written: int8, k8v4 or fp8.
        newest: of the newest tokens only so many stay exact; none for all that the policy keeps as
            such.
    """
    return Quantized(kcenter() if policy is None else policy, slots, newest)


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
        newest: so many of the newest tokens stay exact, as sinks do.
        slots: how all other slots are written: int8, k8v4 or fp8; exact for as the model computes.
    """
    centers = budget // OF_CENTERS
    recent = budget - sinks - centers
    if recent < 1 or centers < 1:
        raise WeirError(
            f"weir keeps {sinks} sinks, the newest tokens and a third of its budget of centers, "
            f"at least 1 of either, so a budget of {budget} is too small"
        )
    middle = KCenter(centers, quiet=quiet, half_life=half_life)
    pipe = Pipe((*ends(sinks, recent), middle))
    return pipe if slots == EXACT else Quantized(pipe, slots, newest).for_layer(0, 1)
