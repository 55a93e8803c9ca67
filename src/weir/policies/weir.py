"""weir's own policy: exact sinks, and the newest tokens in 4 bits, with more slots in heads that
look things up.

In every model that was examined, some KV heads search for earlier occurrences of the current text
and copy what followed (induction heads: Olsson et al. 2022, "In-context Learning and Induction
Heads", arXiv:2209.11895). They need every token. The others hardly attend beyond the last few
hundred tokens. DuoAttention (Xiao et al. 2024, arXiv:2410.10819) keeps everything in heads of the
first kind and a window in the others. Here both kinds have windows, whose mean is the budget.
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
"""One in this many slots of `centers` belongs to a center."""
Heads = Literal["measured", "alike"]
BUDGET = 1024
"""Average slots of a KV head if no budget is given and the model's window holds more."""
SINKS = 4
"""Default number of sinks."""
NEAR = 2
"""Heads that look nothing up get one in this many slots of the budget."""
LEAST_NEAR = 256
"""But at least this many: with 128, SmolLM2 reads worse than with the same budget in all heads."""
LOOKS_UP = 0.175
"""Score from which a head counts as looking things up: 14 of the 90 heads of SmolLM2-135M, whose
best head has 0.93.
"""
SPOILED = 0.3
"""Shift in nats (`HeadFacts`) from which a model gets 8-bit slots. SmolLM2 has 0.15, nano 0.04.

In tests with enlarged key channels of nano, in all layers or one, 4 bits increased its perplexity
by -0.2 to 0.8 % in six cases below 0.3, and by 0.3 to 7 % in ten cases above.
"""


@named(
    "weir's own: StreamingLLM's window in 4-bit slots, longer in KV heads that look up earlier "
    "tokens"
)
def weir(
    budget: int | None = None,
    sinks: int = SINKS,
    newest: int = 16,
    slots: str = "int4",
    heads: str = "measured",
) -> Policy:
    """Keep exact sinks, and the newest tokens in 4 bits: more of them in heads that look things up.

    Args:
        budget: average number of slots of a KV head; none for 1,024, or for as many as the model's
            window holds if those are fewer.
        newest: how many of the newest tokens stay exact, as sinks do.
        slots: the format of all other slots: one of int4, int8, k8v4 and fp8, or exact for
            unquantized slots. If it is left out and the model does not tolerate 4 bits, int8 is
            used.
        heads: "measured" finds out which KV heads look up earlier tokens, when a model is first
            used with this policy. All other heads get half of the budget (at least 256 slots,
            unless the budget is smaller), and the heads that look up tokens share the slots that
            this frees. "alike" gives all heads the same budget.
    """
    if heads not in get_args(Heads):
        raise WeirError(f"heads of weir must be {' or '.join(get_args(Heads))}, got {quote(heads)}")
    return _window(BUDGET if budget is None else budget, sinks, newest, slots)


def _window(budget: int, sinks: int, newest: int, slots: str) -> Pipe:
    """Return the pipe of a head with `budget` slots."""
    check_room(budget, sinks, recent_tokens=budget - sinks)
    pipe = Pipe(ends(sinks, budget - sinks))
    if slots == EXACT or budget - sinks <= newest:
        return pipe
    return Quantized(pipe, slots, newest).for_layer(0, 1)


def is_weir(policy: Policy) -> bool:
    """Return whether a policy is `weir`, whose budgets depend on the KV heads of a model."""
    return policy.called is not None and policy.called.name == "weir"


def fit_budgets(
    policy: Policy,
    lookup: Sequence[Sequence[float]],
    shift: float,
    most: int | None,
) -> Policy:
    """Divide the budget of `weir` among the KV heads of a model.

    Args:
        policy: a policy for which `is_weir` is true.
        lookup: how much each KV head of each layer with a policy looks up earlier tokens; empty for
            the same budget in all heads.
        shift: by how many nats 4-bit slots shift attention.
        most: the most slots that fit in the model's window; None for any number. No head gets more
            than this, unless the user gave a larger budget. Then every head gets that budget. If
            the limit leaves slots over, the other heads get them.
    """
    assert policy.called is not None
    given = dict(policy.called.given)
    if given.get("budget") is None:
        # If the chunk is larger than the window, even `fewest` is too many slots. The code that
        # plans layers reports this.
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
    return Layered(tuple(layers), name=policy.text)


@named("weir's own: StreamingLLM, SubGen's k centers (Zandieh et al. 2024), slots of 8 bits")
def centers(
    budget: int = 256,
    sinks: int = 4,
    newest: int = 16,
    slots: str = "int8",
    quiet: float = 2.0,
    half_life: int | None = 4096,
) -> Policy:
    """Keep exact sinks, and in 8 bits the newest tokens and tokens whose keys are far apart.

    A third of the budget is for tokens whose keys are far apart. Use this policy with small models
    that look up single tokens. `quiet` and `half_life` are those of the pool `kcenter`.

    Args:
        newest: how many of the newest tokens stay exact, as sinks do.
        slots: the format of all other slots: int8, int4, k8v4 or fp8; exact for unquantized slots.
    """
    count = budget // OF_CENTERS
    recent = budget - sinks - count
    check_room(budget, sinks, recent_tokens=recent, centers=count)
    pipe = Pipe((*ends(sinks, recent), KCenter(count, quiet=quiet, half_life=half_life)))
    return pipe if slots == EXACT else Quantized(pipe, slots, newest).for_layer(0, 1)
