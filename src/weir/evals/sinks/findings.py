"""What the figures say of the paper's claims, by rules that were fixed before there were figures.

A model *needs* something where perplexity without it is more than 1 % higher, and *does without* it
where it is less than 1 % higher: in both cases with the whole 95 % interval, from pairs of the same
`BLOCK` tokens. In between nothing is settled, and that a sink is enough is not settled for a model
that does without any. Knows nothing of how anything was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from weir.evals.measures import around_mean

MARGIN = math.log(1.01)
"""Nats; one per cent of perplexity."""
REPRODUCED, NOT, OPEN = "reproduced", "not reproduced", "not settled"


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, and what came of it here.

    Attributes:
        claim: as one sentence.
        verdict: reproduced, not reproduced, or not settled.
        excess: how much higher the one perplexity is than the other, as a factor less 1.
        low, high: its 95 % interval.
        compared: what was compared with what.
    """

    claim: str
    verdict: str
    excess: float
    low: float
    high: float
    compared: str

    def as_json(self) -> dict[str, Any]:
        """Every figure, by name."""
        return asdict(self)


def excess(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """How much higher losses are than their pairs, and its interval; nats."""
    mean, reach = around_mean([a - b for a, b in zip(one, other, strict=True)])
    reach = math.inf if reach is None else reach
    return mean, mean - reach, mean + reach


def needs(claim: str, without: Sequence[float], having: Sequence[float], what: str) -> Finding:
    """The claim that a model needs something: losses without it, and with it."""
    return _judged(claim, without, having, what, wanted=True)


def does_without(
    claim: str, without: Sequence[float], having: Sequence[float], what: str
) -> Finding:
    """The claim that a model can do without something: losses without it, and with it."""
    return _judged(claim, without, having, what, wanted=False)


def _judged(
    claim: str, without: Sequence[float], having: Sequence[float], what: str, *, wanted: bool
) -> Finding:
    mean, low, high = excess(without, having)
    needed = True if low > MARGIN else False if high < MARGIN else None
    verdict = OPEN if needed is None else REPRODUCED if needed is wanted else NOT
    return Finding(claim, verdict, _factor(mean), _factor(low), _factor(high), what)


def _factor(nats: float) -> float:
    return math.expm1(min(nats, 700.0))


def findings(
    streams: dict[str, dict[str, list[float]]], inside: dict[str, list[float]]
) -> list[Finding]:
    """The paper's claims about its models, in its order.

    Args:
        streams: of each model and configuration ("0", "1", ...) the losses by block.
        inside: of each model the losses of samples inside the window.
    """
    found = []

    def ask(rule: Any, model: str, claim: str, without: str, having: str) -> None:
        if model not in streams:
            return
        its = streams[model]
        compared = f"{model}: {without}+y against {having}+y"
        said = rule(claim, its[without], its[having], compared)
        needed = needs("", its["0"], its["4"], "").verdict == REPRODUCED
        if rule is does_without and said.verdict == REPRODUCED and not needed:
            said = replace(said, verdict=OPEN)
        found.append(said)

    ask(needs, "none", "Vanilla needs initial tokens to stream", "0", "4")
    ask(needs, "none", "one initial token is not enough for Vanilla", "1", "4")
    ask(needs, "zero", "Zero Sink still needs initial tokens", "0", "4")
    ask(needs, "zero", "one initial token is not enough for Zero Sink", "1", "4")
    ask(needs, "learnable", "a model with a learnable sink cannot do without it", "0", "1")
    ask(does_without, "learnable", "its sink alone is enough", "1", "4")
    ask(needs, "learnable:2", "a model with two sinks needs both", "1", "2")
    ask(does_without, "learnable:2", "two sinks are enough for it", "2", "4")
    inside_claims = (
        ("zero", "Zero Sink costs"),
        ("learnable", "a sink costs"),
        ("learnable:2", "two sinks cost"),
    )
    for model, name in inside_claims:
        if model in inside and "none" in inside:
            found.append(
                does_without(
                    f"inside the window {name} nothing",
                    inside[model],
                    inside["none"],
                    f"{model} against none, samples of the window's length",
                )
            )
    return found
