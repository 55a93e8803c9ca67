"""Sampling: chooses the next token from logits, either the likeliest or a random one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weir.errors import WeirError, quote
from weir.pools import fits
from weir.stream.inputs import is_count

GENTLE = 1e-6
"""Below this temperature, logits are divided in float64, because they could become infinite in
float32.
"""
HOTTEST = float(torch.finfo(torch.float32).max)
"""The highest temperature that is used; a higher one would not change any draw."""
FEW = 64
"""Number of likeliest tokens that `_nucleus` tries first."""
MORE = 16
"""Factor by which this number grows for the next try, if the tokens do not add up to `top_p`."""


@dataclass(frozen=True)
class Sampling:
    """Parameters of sampling.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: draw only from the likeliest k tokens; None for all.
        top_p: draw only from the likeliest tokens whose probabilities add up to this; None for all.
        min_p: draw only from tokens that have at least this share of the probability of the
            likeliest token (Nguyen et al. 2024, "Turning Up the Heat", section 3); None for all.

    Raises:
        WeirError: one of them is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if not (fits(self.temperature, float) and 0 <= self.temperature < math.inf):
            raise WeirError(
                f"temperature must be a number of at least 0, got {quote(self.temperature)}"
            )
        if self.top_k is not None and not (is_count(self.top_k) and self.top_k):
            raise WeirError(f"top_k must be a whole number of at least 1, got {quote(self.top_k)}")
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if share is not None and not (fits(share, float) and 0 <= share <= 1):
                raise WeirError(f"{name} must be a number from 0 to 1, got {quote(share)}")

    def pick(
        self, logits: Tensor, generator: torch.Generator | Sequence[torch.Generator]
    ) -> Tensor:
        """Choose the next token of each row of logits [rows, vocabulary]; [rows, 1], int64.

        `generator`, on the CPU, is one for all rows or one for each. With one for each, a row's
        tokens are bit-identical whatever the other rows are. Raises WeirError if a row has NaN or
        +inf, or, at a temperature above 0, if all its logits are -inf. No generator has advanced
        then.
        """
        temperature = float(min(self.temperature, HOTTEST))
        if temperature == 0:
            token = _likeliest(logits)
            # NaN and infinity count as the largest. A row in which all logits are -inf is not an
            # error here.
            _check(all(top < math.inf for top in logits.gather(-1, token)[:, 0].tolist()))
            return token
        chances = self._limit(_cool(logits.cpu().float(), temperature)).softmax(dim=-1)
        return _draw(chances, generator)

    def _limit(self, logits: Tensor) -> Tensor:
        """Set the logits [rows, vocabulary] of tokens that must not be drawn to -inf, with the
        filters in transformers' order.
        """
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        if self.top_p is not None:
            logits = _nucleus(logits, float(self.top_p))
        if self.min_p is not None:
            chances = logits.softmax(dim=-1)
            least = float(self.min_p) * chances.amax(dim=-1, keepdim=True)
            logits = logits.masked_fill(chances < least, -math.inf)
        return logits


def _likeliest(logits: Tensor) -> Tensor:
    """Return the token with the largest logit in each row [rows, 1], or the first of several such
    tokens. On a CPU, NumPy is ten times as fast as PyTorch.
    """
    if logits.device.type != "cpu" or logits.requires_grad:
        return logits.argmax(dim=-1, keepdim=True)
    numbers = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return torch.from_numpy(numbers.numpy().argmax(axis=-1, keepdims=True))


def _draw(chances: Tensor, generator: torch.Generator | Sequence[torch.Generator]) -> Tensor:
    """Draw a token from each row of `chances` [rows, vocabulary], float32; returns [rows, 1].

    Results are bit-identical to `torch.multinomial`, which accepts only one generator.
    """
    _check(bool(chances.sum().isfinite()))
    waits = torch.empty_like(chances)
    if isinstance(generator, torch.Generator):
        waits.exponential_(generator=generator)
    else:
        for row, own in zip(waits, generator, strict=True):
            row.exponential_(generator=own)
    return _likeliest(torch.div(chances, waits, out=waits))


def _check(finite: bool) -> None:
    if not finite:
        raise WeirError("no token can be drawn: the logits are not finite")


def _nucleus(logits: Tensor, part: float) -> Tensor:
    """Set the logits [rows, vocabulary] of all tokens outside a row's nucleus to -inf. The nucleus
    is the fewest likeliest tokens whose probabilities add up to at least `part`.

    Nucleus sampling of Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration",
    section 3.1. Most nuclei are small, so the vocabulary is not sorted.
    """
    chances = logits.softmax(dim=-1)
    _check(bool(chances.sum().isfinite()))  # before NaN is masked
    size = logits.shape[-1]
    kept = torch.zeros_like(logits, dtype=torch.bool)
    rows, count = torch.arange(len(logits)), min(FEW, size)
    while len(rows):
        likely, index = chances[rows].topk(count)
        summed = likely.double().cumsum(dim=-1)
        stays = summed - likely < part
        stays[:, 0] = True
        kept[rows] = kept[rows].scatter(1, index, stays)
        # If all tokens that were tried are in the nucleus, others may be, too.
        rows = rows[stays[:, -1]] if count < size else rows[:0]
        count = min(MORE * count, size)
    return logits.masked_fill(~kept, -math.inf)


def _cool(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits [rows, vocabulary] by a temperature greater than 0; returns float32."""
    if temperature == 1:
        return logits
    if temperature >= GENTLE:
        return logits / temperature
    # Divided by a small temperature, a logit could become inf, and softmax would compute inf - inf.
    # After the largest logit is subtracted, no quotient is positive.
    below = logits.double() - logits.amax(dim=-1, keepdim=True)
    return (below / temperature).float()


def check_penalty(penalty: object) -> None:
    """Refuse a penalty that is not a number greater than 0 (WeirError)."""
    if not fits(penalty, float) or not 0 < float(penalty) < math.inf:  # type: ignore[arg-type]
        raise WeirError(f"repetition_penalty must be a number greater than 0, got {quote(penalty)}")


class RepetitionPenalty:
    """The repetition penalty of CTRL, which makes tokens that came before less likely.

    Keskar et al. 2019, "CTRL: A Conditional Transformer Language Model for Controllable
    Generation", section 4.1, in transformers' version for logits of either sign.
    """

    def __init__(self, penalty: float, before: Iterable[int] = ()) -> None:
        self._penalty = penalty
        self._known = set(before)
        # Kept from step to step, because making it from many tokens takes tens of milliseconds.
        self._index = torch.tensor(sorted(self._known), dtype=torch.int64)

    def add(self, token: int) -> None:
        """Add a token to those that came before."""
        if token not in self._known:
            self._known.add(token)
            self._index = torch.cat([self._index, self._index.new_tensor([token])])

    def penalize(self, logits: Tensor) -> Tensor:
        """Return logits [..., vocabulary] in which tokens that came before have a penalty: their
        positive logits are divided by it, and their negative logits are multiplied by it.
        """
        self._index = index = self._index.to(logits.device)
        some = logits[..., index]
        changed = logits.clone()
        changed[..., index] = torch.where(some > 0, some / self._penalty, some * self._penalty)
        return changed
