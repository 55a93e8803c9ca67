"""Sampling: from logits to the next token, the likeliest or one drawn."""

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
"""Logits are divided in float64 by lower temperatures, which may make them infinite in float32."""
HOTTEST = float(torch.finfo(torch.float32).max)
"""The highest temperature that is divided by; a higher one would change no draw."""
FEW = 64
"""Number of likeliest tokens that `_nucleus` looks at first."""
MORE = 16
"""How many times as many it looks at next, if those do not add up to `top_p`."""


@dataclass(frozen=True)
class Sampling:
    """Parameters of sampling.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: draw from the likeliest k only; None from all.
        top_p: draw from the likeliest tokens that make up this probability; None from all.
        min_p: draw from tokens at least as likely as this share of the likeliest (Nguyen et al.
            2024, "Turning Up the Heat", section 3); None from all.

    Raises:
        WeirError: one of them makes no sense.
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

        `generator`, on the CPU, is one for all rows, or one for each: then a row is the same to the
        last bit whatever rows are beside it. Raises WeirError, and moves no generator, if logits
        are not finite.
        """
        temperature = float(min(self.temperature, HOTTEST))
        if temperature == 0:
            token = _likeliest(logits)
            # NaN and infinity count as the largest. Where all are excluded, that is not for here.
            _check(all(top < math.inf for top in logits.gather(-1, token)[:, 0].tolist()))
            return token
        chances = self._limit(_cool(logits.cpu().float(), temperature)).softmax(dim=-1)
        return _draw(chances, generator)

    def _limit(self, logits: Tensor) -> Tensor:
        """Logits [rows, vocabulary] with -inf for what is not drawn, in transformers' order."""
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
    """The first of the largest of each row [rows, 1]; NumPy finds it ten times as fast on a CPU."""
    if logits.device.type != "cpu" or logits.requires_grad:
        return logits.argmax(dim=-1, keepdim=True)
    numbers = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return torch.from_numpy(numbers.numpy().argmax(axis=-1, keepdims=True))


def _draw(chances: Tensor, generator: torch.Generator | Sequence[torch.Generator]) -> Tensor:
    """One draw from each row of `chances` [rows, vocabulary], float32; [rows, 1].

    To the last bit `torch.multinomial`'s, which takes one generator only.
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
    """Set the logits [rows, vocabulary] of all but a row's nucleus to -inf: the fewest likeliest
    tokens whose probabilities add up to `part`.

    Nucleus sampling of Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration",
    section 3.1. Most nuclei are small, so the vocabulary is not sorted.
    """
    chances = logits.softmax(dim=-1)
    _check(bool(chances.sum().isfinite()))  # before tokens that are NaN are masked
    size = logits.shape[-1]
    kept = torch.zeros_like(logits, dtype=torch.bool)
    rows, count = torch.arange(len(logits)), min(FEW, size)
    while len(rows):
        likely, index = chances[rows].topk(count)
        summed = likely.double().cumsum(dim=-1)
        stays = summed - likely < part
        stays[:, 0] = True
        kept[rows] = kept[rows].scatter(1, index, stays)
        # Where all tokens looked at are in the nucleus, later ones may be too.
        rows = rows[stays[:, -1]] if count < size else rows[:0]
        count = min(MORE * count, size)
    return logits.masked_fill(~kept, -math.inf)


def _cool(logits: Tensor, temperature: float) -> Tensor:
    """Logits [rows, vocabulary], float32, divided by a temperature over 0."""
    if temperature == 1:
        return logits
    if temperature >= GENTLE:
        return logits / temperature
    # Whatever stands below the largest is then far below it, or infinitely; never inf - inf.
    below = logits.double() - logits.amax(dim=-1, keepdim=True)
    return (below / temperature).float()


def check_penalty(penalty: object) -> None:
    """Refuse a penalty that is not a number over 0 (WeirError)."""
    if not fits(penalty, float) or not 0 < float(penalty) < math.inf:  # type: ignore[arg-type]
        raise WeirError(f"repetition_penalty must be a number greater than 0, got {quote(penalty)}")


class RepetitionPenalty:
    """The repetition penalty of CTRL: tokens that came before are made less likely.

    Keskar et al. 2019, "CTRL: A Conditional Transformer Language Model for Controllable
    Generation", section 4.1, as transformers has it for logits of either sign.
    """

    def __init__(self, penalty: float, before: Iterable[int] = ()) -> None:
        self._penalty = penalty
        self._known = set(before)
        # Kept from step to step: of many tokens it takes tens of milliseconds to make it.
        self._index = torch.tensor(sorted(self._known), dtype=torch.int64)

    def add(self, token: int) -> None:
        """Add a token that has come."""
        if token not in self._known:
            self._known.add(token)
            self._index = torch.cat([self._index, self._index.new_tensor([token])])

    def penalize(self, logits: Tensor) -> Tensor:
        """Divide positive logits [..., vocabulary] of the tokens by the penalty, and multiply
        negative ones.
        """
        self._index = index = self._index.to(logits.device)
        some = logits[..., index]
        changed = logits.clone()
        changed[..., index] = torch.where(some > 0, some / self._penalty, some * self._penalty)
        return changed
