"""weir's own policy: sinks and the newest tokens, in 4 bits, longest in heads that look things up.

In every model that was looked at, some KV heads look for earlier occurrences of what is read and
copy what followed (induction heads: Olsson et al. 2022, "In-context Learning and Induction Heads",
arXiv:2209.11895). They need every token; the others hardly look beyond the last few hundred.
DuoAttention (Xiao et al. 2024, arXiv:2410.10819) keeps everything in heads of the first kind and a
window in the others; here both are windows, whose mean is the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from weir.errors import WeirError, quote
from weir.policies.layered import ByHead, Layered
from weir.policies.library import check_room, ends
from weir.policies.pipe import Pipe, Policy
from weir.policies.registry import PolicyCall, named
from weir.policies.wrappers import EXACT, Quantized
from weir.pools import KCenter

OF_CENTERS = 3
"""One in so many slots of `centers` is a center's."""
Heads = Literal["measured", "alike"]
BUDGET = 1024
"""Slots of a KV head on average where none are given and the model's window holds more."""
SINKS = 4
"""Sinks where their number is not given."""
NEAR = 2
"""Heads that look nothing up keep one in so many slots of the budget."""
LEAST_NEAR = 256
"""But no fewer than so many: with 128, SmolLM2 reads worse than with the same budget in all."""
LOOKS_UP = 0.175
"""Score from which on a head looks things up: 14 of the 90 of SmolLM2-135M, whose best has 0.93."""
SPOILED = 0.3
"""Nats of shift (`HeadFacts`) from which on a model gets slots of 8 bits. SmolLM2 has 0.15, nano
0.04. With key channels of nano made larger, in all layers or one, 4 bits cost 0 to 0.8 % of its
perplexity in six cases below 0.3, and 0.3 to 7 % in ten above."""


@named(
    "weir's own: StreamingLLM's window in slots of 4 bits, longer in KV heads that look up earlier "
    "tokens"
)
def weir(
    budget: int | None = None,
    sinks: int = SINKS,
    newest: int = 16,
    slots: str = "int4",
    heads: str = "measured",
) -> Policy:
    """Keep sinks and the newest tokens in 4 bits, most of them in heads that look things up.

    Args:
        budget: slots of each KV head on average; none for 1,024, or as many as the model's window
            holds.
        newest: how many of the newest tokens stay exact, as sinks do.
        slots: the format of all other slots: int4, int8, k8v4 or fp8; exact for as the model
            computes. Where none is given and the model does not bear 4 bits, it is int8.
        heads: measured, to find out at loading which KV heads look up earlier tokens, and give them
            what half of the budget of the others leaves; alike for the same budget in all.
    """
    if heads not in get_args(Heads):
        raise WeirError(f"heads of weir are {' or '.join(get_args(Heads))}, not {quote(heads)}")
    return _window(BUDGET if budget is None else budget, sinks, newest, slots)


def _window(budget: int, sinks: int, newest: int, slots: str) -> Pipe:
    """The pipe of a head with `budget` slots."""
    check_room(budget, sinks, recent_tokens=budget - sinks)
    pipe = Pipe(ends(sinks, budget - sinks))
    if slots == EXACT or budget - sinks <= newest:
        return pipe
    return Quantized(pipe, slots, newest).for_layer(0, 1)


def is_weir(policy: Policy) -> bool:
    """Whether a policy is `weir`, whose budgets follow from what each KV head of a model does."""
    return policy.called is not None and policy.called.name == "weir"


def fit_budgets(
    policy: Policy,
    lookup: Sequence[Sequence[float]],
    shift: float,
    most: int | None,
) -> Policy:
    """Share out the budget of `weir` over the KV heads of a model.

    Args:
        policy: one that `is_weir`.
        lookup: how much each KV head of each layer that it holds looks up earlier tokens; none for
            the same budget in all.
        shift: by how many nats slots of 4 bits shift attention.
        most: slots that the model's window has places for; None for any number. A head that looks
            things up gets no more, and neither does any head where no budget was given.
    """
    assert policy.called is not None
    given = dict(policy.called.given)
    if given.get("budget") is None:
        # A larger chunk than the window has places for is told where layers are planned.
        fewest = given.get("sinks", SINKS) + 1
        given["budget"] = BUDGET if most is None else max(fewest, min(BUDGET, most))
    if "slots" not in given and shift >= SPOILED:
        given["slots"] = "int8"
    if given != policy.called.given:
        call = PolicyCall.by_name("weir", given)
        policy = weir(**given).as_written(str(call), call)
    budget: int = given["budget"]
    scores = [score for layer in lookup for score in layer]
    looking = sum(score >= LOOKS_UP for score in scores)
    if given.get("heads") == "alike" or not 0 < looking < len(scores):
        return policy
    others, total = len(scores) - looking, budget * len(scores)
    far = (total - min(budget, max(budget // NEAR, LEAST_NEAR)) * others) // looking
    if most is not None:
        far = max(budget, min(far, most))
    near = (total - far * looking) // others
    if near == far:
        return policy
    given["heads"] = "alike"
    layers: list[Policy] = []
    long, short = (weir(**{**given, "budget": size}) for size in (far, near))
    for layer in lookup:
        each = [long if s >= LOOKS_UP else short for s in layer]
        layers.append(each[0] if len(set(each)) == 1 else ByHead(tuple(each)))
    return Layered(tuple(layers))


@named("weir's own: StreamingLLM, SubGen's k centers (Zandieh et al. 2024), slots of 8 bits")
def centers(
    budget: int = 256,
    sinks: int = 4,
    newest: int = 16,
    slots: str = "int8",
    quiet: float = 2.0,
    half_life: int | None = 4096,
) -> Policy:
    """Keep sinks, the newest tokens and, a third, those whose keys lie far apart; in 8 bits.

    `quiet` and `half_life` are those of `kcenter`. For small models that look up single tokens.

    Args:
        newest: how many of the newest tokens stay exact, as sinks do.
        slots: the format of all other slots: int8, int4, k8v4 or fp8; exact for as the model
            computes.
    """
    count = budget // OF_CENTERS
    recent = budget - sinks - count
    check_room(budget, sinks, recent_tokens=recent, centers=count)
    pipe = Pipe((*ends(sinks, recent), KCenter(count, quiet=quiet, half_life=half_life)))
    return pipe if slots == EXACT else Quantized(pipe, slots, newest).for_layer(0, 1)
