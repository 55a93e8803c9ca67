"""weir's own policy: sinks and the newest tokens, in 4 bits, longest in layers that look things up.

In every model that was looked at, some layers have heads that look for earlier occurrences of what
they read and copy what followed (induction heads: Olsson et al. 2022, "In-context Learning and
Induction Heads", arXiv:2209.11895). They need every token; the other layers hardly look beyond the
last few hundred. DuoAttention (Xiao et al. 2024, arXiv:2410.10819) keeps everything in heads of the
first kind and a window in the others; here both are windows, whose mean is the budget.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

from weir.errors import WeirError, quote
from weir.policies.library import check_room, ends
from weir.policies.pipe import Layered, Pipe, Policy
from weir.policies.registry import PolicyCall, named
from weir.policies.wrappers import EXACT, Quantized
from weir.pools import KCenter

OF_CENTERS = 3
"""One in so many slots of `centers` is a center's."""
Layers = Literal["measured", "alike"]
BUDGET = 1024
"""Slots of a layer on average where none are given and the model's window holds more."""
NEAR = 2
"""Layers that look nothing up get one in so many slots of the budget."""
LEAST_NEAR = 256
"""But no fewer than so many: with 128, SmolLM2 reads worse than with the same budget in all."""


@named(
    "weir's own: StreamingLLM's window in slots of 4 bits, longer in layers that look up earlier "
    "tokens"
)
def weir(
    budget: int | None = None,
    sinks: int = 4,
    newest: int = 16,
    slots: str = "int4",
    layers: str = "measured",
) -> Policy:
    """Keep sinks and the newest tokens in 4 bits, most of them in layers that look things up.

    Args:
        budget: slots of each KV head, in a layer on average; none for 1,024, or as many as the
            model's window holds.
        newest: how many of the newest tokens stay exact, as sinks do.
        slots: the format of all other slots: int4, int8, k8v4 or fp8; exact for as the model
            computes.
        layers: measured, to find out at loading which layers look up earlier tokens, and give them
            what half of the budget of the others leaves; alike for the same budget in all.
    """
    if layers not in get_args(Layers):
        raise WeirError(f"layers of weir are {' or '.join(get_args(Layers))}, not {quote(layers)}")
    return _window(BUDGET if budget is None else budget, sinks, newest, slots)


def _window(budget: int, sinks: int, newest: int, slots: str) -> Pipe:
    """The pipe of a layer with `budget` slots."""
    check_room(budget, sinks, recent_tokens=budget - sinks)
    pipe = Pipe(ends(sinks, budget - sinks))
    if slots == EXACT or budget - sinks <= newest:
        return pipe
    return Quantized(pipe, slots, newest).for_layer(0, 1)


def is_weir(policy: Policy) -> bool:
    """Whether a policy is `weir`, whose budgets follow from what each layer of a model does."""
    return policy.called is not None and policy.called.name == "weir"


def measures_layers(policy: Policy) -> bool:
    """Whether a policy that `is_weir` gives layers budgets of their own."""
    return policy.called is not None and policy.called.given.get("layers") != "alike"


def fit_budgets(policy: Policy, layers: int, looking: Collection[int], most: int | None) -> Policy:
    """Share out the budget of `weir` over the layers of a model.

    Args:
        policy: one that `is_weir`.
        layers: how many layers it holds.
        looking: which of them look up earlier tokens, counted from 0.
        most: slots that the model's window has places for; None for any number. A layer that looks
            things up gets no more, and neither does any layer where no budget was given.
    """
    assert policy.called is not None
    given = dict(policy.called.given)
    if given.get("budget") is None:
        given["budget"] = BUDGET if most is None else max(1, min(BUDGET, most))
        call = PolicyCall.by_name("weir", given)
        policy = weir(**given).as_written(str(call), call)
    budget = given.pop("budget")
    near = far = budget
    if measures_layers(policy) and 0 < len(looking) < layers:
        others, total = layers - len(looking), budget * layers
        far = (total - min(budget, max(budget // NEAR, LEAST_NEAR)) * others) // len(looking)
        if most is not None:
            far = max(budget, min(far, most))
        near = (total - far * len(looking)) // others
    if near == far:
        return policy
    given["layers"] = "alike"
    sizes = (far if layer in looking else near for layer in range(layers))
    return Layered(tuple(weir(**given, budget=size) for size in sizes))


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
