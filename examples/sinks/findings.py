"""StreamingLLM's figures (Xiao et al. 2024), and which of its claims the measured figures support.

A model *needs* something if perplexity without it is more than 1% higher, and *does without* it if
perplexity without it is less than 1% higher. In both cases the whole 95% interval must be on the
same side of 1%. Otherwise the claim is not settled. The interval is computed over pairs of losses
of two models or caches on the same tokens: blocks of 500 tokens of a stream, or whole samples
inside the window. The claim that a sink is enough is also not settled for a model that does not
need initial tokens. These rules were fixed before anything was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weir.evals.scores import mean_interval

VARIANTS = {
    "none": "Vanilla",
    "zero": "Zero Sink",
    "learnable": "Learnable Sink",
    "learnable:2": "2 Sink Tokens",
}
"""weir's name of each model, and the paper's."""
CONFIGS = (0, 1, 2, 4)
"""x of the cache configurations x+y: x initial tokens and y recent ones (paper: x+y = 1024)."""
PERPLEXITY = {
    "none": (27.87, 18.49, 18.05, 18.05),
    "zero": (29214.0, 19.90, 18.27, 18.01),
    "learnable": (1235.0, 18.01, 18.01, 18.02),
    "learnable:2": (1262.0, 25.73, 18.05, 18.05),
}
"""Tables 3 and 10: streaming perplexity of the first book of PG-19's test set, by `CONFIGS`."""
ACCURACY = {
    "none": (18.6, 45.2, 29.4, 39.6, 16.0, 62.2, 50.1),
    "learnable": (19.6, 45.6, 29.8, 39.9, 16.6, 62.6, 50.8),
    "learnable:2": (18.7, 45.6, 29.6, 37.5, 15.8, 64.3, 50.4),
}
"""Tables 4 and 9: zero-shot accuracy in per cent on ARC-c, ARC-e, HellaSwag, LAMBADA, OpenbookQA,
PIQA and Winogrande."""
MARGIN = math.log(1.01)
"""Nats; one per cent of perplexity."""
REPRODUCED, NOT, OPEN = "reproduced", "not reproduced", "not settled"

STREAMING_CLAIMS = (
    (True, "none", "Vanilla needs initial tokens to stream", "0", "4"),
    (True, "none", "one initial token is not enough for Vanilla", "1", "4"),
    (True, "zero", "Zero Sink still needs initial tokens", "0", "4"),
    (True, "zero", "one initial token is not enough for Zero Sink", "1", "4"),
    (True, "learnable", "a model with a learnable sink cannot do without it", "0", "1"),
    (False, "learnable", "its sink alone is enough", "1", "4"),
    (True, "learnable:2", "a model with two sinks needs both", "1", "2"),
    (False, "learnable:2", "two sinks are enough for it", "2", "4"),
)
"""(whether the claim is a need, model, claim, configuration without, configuration with)."""
INSIDE_CLAIMS = {
    "zero": "Zero Sink costs",
    "learnable": "a sink costs",
    "learnable:2": "two sinks cost",
}


def judge(
    claim: str, without: Sequence[float], having: Sequence[float], compared: str, *, need: bool
) -> dict[str, Any]:
    """A claim with its verdict and the excess perplexity (the ratio minus 1), with its interval.

    Args:
        claim: the claim as a sentence.
        without, having: losses of the same blocks, without and with what the claim is about.
        compared: what was compared with what, in words.
        need: True if the claim says that the model needs something, False if it says that the model
            does without.
    """
    mean, reach = mean_interval([a - b for a, b in zip(without, having, strict=True)])
    reach = math.inf if reach is None else reach
    low, high = mean - reach, mean + reach
    if low > MARGIN or high < MARGIN:
        verdict = REPRODUCED if (low > MARGIN) is need else NOT
    else:
        verdict = OPEN
    excess = {"excess": mean, "low": low, "high": high}
    factors = {name: math.expm1(min(nats, 700.0)) for name, nats in excess.items()}
    return {"claim": claim, "verdict": verdict, **factors, "compared": compared}


def judge_claims(
    streams: dict[str, dict[str, list[float]]], inside: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """The paper's claims about its models with their verdicts, in the paper's order.

    Args:
        streams: for each model and configuration ("0", "1", ...) the losses by block.
        inside: for each model the losses of samples inside the window.
    """
    found = []
    for need, model, claim, without, having in STREAMING_CLAIMS:
        if model not in streams:
            continue
        losses = streams[model]
        compared = f"{model}: {without}+y against {having}+y"
        finding = judge(claim, losses[without], losses[having], compared, need=need)
        needed = judge("", losses["0"], losses["4"], "", need=True)["verdict"] == REPRODUCED
        if not need and finding["verdict"] == REPRODUCED and not needed:
            finding["verdict"] = OPEN
        found.append(finding)
    for model, costs in INSIDE_CLAIMS.items():
        if model in inside and "none" in inside:
            claim = f"inside the window {costs} nothing"
            compared = f"{model} against none, samples of the window's length"
            found.append(judge(claim, inside[model], inside["none"], compared, need=False))
    return found
