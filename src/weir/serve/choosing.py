"""How one session's tokens are chosen: what OpenAI's and vLLM's clients send, for a row of its own.

Every session has a generator of its own, so that nobody's draws depend on who else is answered.
Knows nothing about rows or text.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.stream import Sampling


@dataclass(frozen=True)
class Choice:
    """A token that was chosen.

    Attributes:
        token: its id.
        logprob: the logarithm of its probability before temperature and limits; None if nobody
            asked.
        top: the likeliest tokens with theirs, as many as were asked for.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Constraint(Protocol):
    """What an answer must look like, token by token: a JSON schema, say."""

    @property
    def done(self) -> bool:
        """Whether the answer is whole, so that nothing more may come."""

    def allow(self, logits: Tensor) -> Tensor:
        """The logits [vocabulary] with -inf for what may not come next; those given may change."""

    def accept(self, token: int) -> None:
        """A token was chosen."""


@dataclass(frozen=True)
class Choosing:
    """What a client asks for.

    Attributes:
        sampling: temperature, top-k, top-p and min-p.
        repetition: logits of tokens that came before are divided by it where they are positive and
            multiplied where not (CTRL, section 4.1); 1 leaves them.
        presence, frequency: taken from the logits of tokens of this answer, once and as often as
            they came.
        bias: added to the logits of tokens.
        logprobs: so many of the likeliest tokens are told with every token; None tells none.
        seed: of the draws.

    Raises:
        WeirError: one of them makes no sense.
    """

    sampling: Sampling = field(default_factory=Sampling)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.repetition) and self.repetition > 0):
            raise WeirError(f"repetition_penalty must be a number over 0, not {self.repetition!r}")
        for name in ("presence", "frequency"):
            if not math.isfinite(getattr(self, name)):
                raise WeirError(f"{name}_penalty must be a number, not {getattr(self, name)!r}")


class Chooser:
    """Chooses the tokens of one answer.

    Args:
        choosing: what the client asks for.
        before: tokens that the repetition penalty knows already: those of the prompt.
        constraint: what the answer must look like.
    """

    def __init__(
        self,
        choosing: Choosing,
        before: tuple[int, ...] = (),
        constraint: Constraint | None = None,
    ) -> None:
        self.choosing = choosing
        self.constraint = constraint
        self._before = set(before) if choosing.repetition != 1 else set()
        self._counts: Counter[int] = Counter()
        self._generator = torch.Generator().manual_seed(choosing.seed % 2**63)

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is what it chooses, and that is all there is to tell."""
        choosing = self.choosing
        return (
            choosing.sampling.temperature == 0
            and choosing.repetition == 1
            and not (choosing.presence or choosing.frequency or choosing.bias)
            and choosing.logprobs is None
            and self.constraint is None
        )

    @property
    def done(self) -> bool:
        """Whether the answer is whole, and nothing more may come."""
        return self.constraint is not None and self.constraint.done

    def choose(self, logits: Tensor) -> Choice:
        """The next token.

        Args:
            logits: after what came last [vocabulary].

        Raises:
            WeirError: the logits are no numbers, or no token is left to choose from.
        """
        choosing = self.choosing
        logits = logits.float().cpu()
        changed = self._changed(logits)
        token = int(choosing.sampling.pick(changed[None], self._generator))
        if changed[token] == -math.inf:
            raise WeirError("no token is left that this answer may go on with")
        self._counts[token] += 1
        if self.constraint is not None:
            self.constraint.accept(token)
        if choosing.logprobs is None:
            return Choice(token)
        logprobs = logits.log_softmax(dim=-1)
        values, tokens = logprobs.topk(min(choosing.logprobs, len(logprobs)))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        return Choice(token, float(logprobs[token]), top)

    def _changed(self, logits: Tensor) -> Tensor:
        """The logits [vocabulary] after penalties, bias and constraint; those given stay."""
        choosing = self.choosing
        changed = logits.clone()
        if choosing.repetition != 1:
            index = torch.tensor(sorted(self._before | set(self._counts)), dtype=torch.int64)
            some = changed[index]
            over = some / choosing.repetition
            changed[index] = torch.where(some > 0, over, some * choosing.repetition)
        if self._counts and (choosing.presence or choosing.frequency):
            index = torch.tensor(list(self._counts), dtype=torch.int64)
            often = torch.tensor(list(self._counts.values()), dtype=changed.dtype)
            changed[index] -= choosing.presence + choosing.frequency * often
        for token, bias in choosing.bias.items():
            changed[token] += bias
        return changed if self.constraint is None else self.constraint.allow(changed)
