"""From logits to the next token: the likeliest, or one drawn.

Knows nothing about models, streams or what a token says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from weir.errors import WeirError, shown
from weir.stream.tokens import is_count

GENTLE = 1e-6
"""Temperatures below may make infinite logits of finite ones, and are divided by in float64."""
HOTTEST = float(torch.finfo(torch.float32).max)
"""Temperatures above are taken for this one: they make all tokens equally likely, as it does."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: draw from the likeliest k only; None from all.
        top_p: draw from the likeliest tokens that make up this probability; None from all.
        min_p: draw from tokens that are at least so likely as this part of the likeliest (Nguyen
            et al. 2024, "Turning Up the Heat", section 3); None from all.

    Raises:
        WeirError: one of them makes no sense.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise WeirError(
                f"temperature must be a number from 0 on, not {shown(self.temperature)}"
            )
        if self.top_k is not None and not (is_count(self.top_k) and self.top_k):
            raise WeirError(f"top_k must be a whole number from 1 on, not {shown(self.top_k)}")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 <= self.top_p <= 1):
            raise WeirError(f"top_p must be a number from 0 to 1, not {shown(self.top_p)}")
        if self.min_p is not None and not (isinstance(self.min_p, Real) and 0 <= self.min_p <= 1):
            raise WeirError(f"min_p must be a number from 0 to 1, not {shown(self.min_p)}")

    def pick(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """The next token of each row [rows, 1], int64.

        Args:
            logits: of the tokens that may come next [rows, vocabulary].
            generator: of the draws, on the CPU; asked nothing where the temperature is 0.

        Raises:
            WeirError: the logits are no numbers, so that no token can be drawn.
        """
        temperature = float(min(self.temperature, HOTTEST))
        if temperature == 0:
            return logits.argmax(dim=-1, keepdim=True)
        logits = _cooled(logits.cpu().float(), temperature)
        before = torch.empty(len(logits), 0, dtype=torch.int64)
        chances = self._warpers()(cast(Any, before), cast(Any, logits)).softmax(dim=-1)
        try:
            return torch.multinomial(chances, 1, generator=generator)
        except RuntimeError as error:
            raise WeirError(f"no token can be drawn: the logits are no numbers ({error})") from None

    def _warpers(self) -> LogitsProcessorList:
        """Those of transformers that come after the temperature, in its usual order."""
        warpers = LogitsProcessorList()
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None:
            warpers.append(TopPLogitsWarper(float(self.top_p)))
        if self.min_p is not None:
            warpers.append(MinPLogitsWarper(float(self.min_p)))
        return warpers


def _is_number(value: object) -> bool:
    """Whether it is a number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _cooled(logits: Tensor, temperature: float) -> Tensor:
    """Logits [rows, vocabulary], float32, divided by a temperature over 0."""
    if temperature == 1:
        return logits
    if temperature >= GENTLE:
        return logits / temperature
    # Whatever stands below the largest is then far below it, or infinitely; never inf - inf.
    below = logits.double() - logits.amax(dim=-1, keepdim=True)
    return (below / temperature).float()
