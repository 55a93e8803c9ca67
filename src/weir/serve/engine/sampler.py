"""How one session's tokens are chosen: what OpenAI's and vLLM's clients send, for a row of its own.

Every session has a generator of its own, so that nobody's draws depend on who else is answered.
Knows nothing about rows or text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.stream import RepetitionPenalty, Sampling, check_penalty

TOGETHER = 2**17
"""Logits that are drawn from in one go; copies of more do not fit into a processor's cache."""


@dataclass(frozen=True)
class SampledToken:
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
class SamplingParams:
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
        check_penalty(self.repetition)
        for name in ("presence", "frequency"):
            if not math.isfinite(getattr(self, name)):
                raise WeirError(f"{name}_penalty must be a number, not {getattr(self, name)!r}")


class Sampler:
    """Chooses the tokens of one answer.

    Args:
        choosing: what the client asks for.
        before: tokens that the repetition penalty knows already: those of the prompt.
        constraint: what the answer must look like.

    Attributes:
        choosing, constraint: as given.
        generator: of its draws.
    """

    def __init__(
        self,
        choosing: SamplingParams,
        before: tuple[int, ...] = (),
        constraint: Constraint | None = None,
    ) -> None:
        self.choosing = choosing
        self.constraint = constraint
        self._counts: Counter[int] = Counter()
        repeats = choosing.repetition != 1
        self._bias: tuple[Tensor, Tensor] | None = None
        if choosing.bias:
            biased = torch.tensor(list(choosing.bias), dtype=torch.int64)
            self._bias = biased, torch.tensor(list(choosing.bias.values()), dtype=torch.float32)
        self._repetition = RepetitionPenalty(choosing.repetition, before) if repeats else None
        self.generator = torch.Generator().manual_seed(choosing.seed % 2**63)

    @property
    def done(self) -> bool:
        """Whether the answer is whole, and nothing more may come."""
        return self.constraint is not None and self.constraint.done

    def choose(self, logits: Tensor) -> SampledToken:
        """The next token.

        Args:
            logits: after what came last [vocabulary].

        Raises:
            WeirError: the logits are no numbers, or no token is left to choose from.
        """
        (chosen,) = choose([self], logits[None])
        if isinstance(chosen, Exception):
            raise chosen
        return chosen

    def changed(self, logits: Tensor) -> Tensor:
        """The logits [vocabulary] after penalties, bias and constraint; those given stay.

        They are the same object where nothing is to be changed.

        Raises:
            WeirError: nobody can say what the answer may go on with.
        """
        choosing, counts = self.choosing, self._counts
        told = choosing.presence or choosing.frequency
        if not (self.constraint or choosing.bias or self._repetition or (told and counts)):
            return logits
        if self._repetition is not None:
            changed = self._repetition.penalize(logits)
        else:
            changed = logits.clone()
        if counts and told:
            index = torch.tensor(list(counts), dtype=torch.int64)
            often = torch.tensor(list(counts.values()), dtype=changed.dtype)
            changed[index] -= choosing.presence + choosing.frequency * often
        if self._bias is not None:
            index, bias = self._bias
            changed[index] += bias
        return changed if self.constraint is None else self.constraint.allow(changed)

    def chosen(self, token: int, logits: Tensor, changed: Tensor) -> SampledToken:
        """A token was chosen.

        Args:
            token: which.
            logits: of the model [vocabulary].
            changed: what `changed` made of them.

        Raises:
            WeirError: it may not come; none was left to choose from.
        """
        if changed is not logits and changed[token] == -math.inf:
            raise WeirError("no token is left that this answer may go on with")
        choosing = self.choosing
        if choosing.presence or choosing.frequency:
            self._counts[token] += 1
        if self._repetition is not None:
            self._repetition.add(token)
        if self.constraint is not None:
            self.constraint.accept(token)
        if choosing.logprobs is None:
            return SampledToken(token)
        logprobs = logits.log_softmax(dim=-1)
        values, tokens = logprobs.topk(min(choosing.logprobs, len(logprobs)))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        return SampledToken(token, float(logprobs[token]), top)


def choose(choosers: Sequence[Sampler], logits: Tensor) -> list[SampledToken | Exception]:
    """The next tokens of several answers; each is what it would be alone, to the last bit.

    Args:
        choosers: of each answer.
        logits: after what came last, of each [answers, vocabulary].

    Returns:
        Of each its choice, or why there is none.
    """
    rows = list(logits.float().cpu())
    changed = list(rows)
    found: dict[int, SampledToken | Exception] = {}
    alike: dict[Sampling, list[int]] = {}
    for at, chooser in enumerate(choosers):
        try:
            changed[at] = chooser.changed(rows[at])
        except Exception as error:
            found[at] = error
            continue
        alike.setdefault(chooser.choosing.sampling, []).append(at)
    several = max(1, TOGETHER // logits.shape[-1])
    groups = (
        (how, its[at : at + several])
        for how, its in alike.items()
        for at in range(0, len(its), several)
    )
    for sampling, group in groups:
        generators = [choosers[at].generator for at in group]
        picked = _picked(sampling, torch.stack([changed[at] for at in group]), generators)
        for at, token in zip(group, picked, strict=True):
            if isinstance(token, Exception):
                found[at] = token
                continue
            try:
                found[at] = choosers[at].chosen(token, rows[at], changed[at])
            except Exception as error:
                found[at] = error
    return [found[at] for at in range(len(choosers))]


def _picked(
    sampling: Sampling, logits: Tensor, generators: list[torch.Generator]
) -> list[int | WeirError]:
    """A token of each row of logits [rows, vocabulary], or why there is none."""
    try:
        return list(sampling.pick(logits, generators)[:, 0].tolist())
    except WeirError as error:
        if len(generators) == 1:
            return [error]
        # One row is at fault, and no generator was asked for any.
        alone = zip(logits.split(1), generators, strict=True)
        return [_picked(sampling, row, [its])[0] for row, its in alone]
