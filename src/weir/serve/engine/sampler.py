"""Sample the next token of each answer, with the parameters of OpenAI's and vLLM's clients.

Every answer has a separate random generator, so that its draws do not depend on other answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import GenerationConfig

from weir.errors import WeirError
from weir.stream import RepetitionPenalty, Sampling

if TYPE_CHECKING:
    from weir.serve.after_thoughts import AfterThoughts
    from weir.serve.structured import GrammarConstraint

LOGITS_AT_ONCE = 2**17
"""Number of logits to draw from together. Copies of more do not fit in a processor's cache."""


@dataclass(frozen=True)
class SampledToken:
    """A token of an answer.

    `logprob` and `top`, if requested, are computed from the model's logits, without penalties,
    bias, format, temperature or limits such as `top_k`.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one answer. The schemas of requests check their bounds.

    Attributes:
        sampling: the temperature, and limits such as `top_k`.
        repetition: logits of tokens that came before are divided by this number if they are
            positive, and multiplied if not (CTRL, section 4.1); 1 does nothing.
        presence: subtracted once from the logits of tokens in this answer.
        frequency: subtracted for each time that a token occurs in this answer.
        bias: added to the logits of tokens, by token id.
        logprobs: number of most likely tokens to report with every token; None for no
            log-probabilities at all.
        seed: seed of the answer's random draws.
    """

    sampling: Sampling = field(default_factory=Sampling)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    seed: int = 0


def read_defaults(config: GenerationConfig | None) -> tuple[SamplingParams, list[str]]:
    """Return the sampling parameters in a model's generation configuration, and its unused options.

    Only a valid configuration with `do_sample` changes anything. Otherwise the defaults are
    OpenAI's: temperature 1, all tokens.
    """
    given = {} if config is None else config.to_diff_dict()
    if not given.get("do_sample"):
        return SamplingParams(Sampling(temperature=1.0)), []
    top_p, top_k = given.get("top_p"), given.get("top_k")
    try:
        sampling = Sampling(
            temperature=given.get("temperature") or 1.0,
            top_k=top_k or None,
            top_p=None if top_p == 1 else top_p,
            min_p=given.get("min_p") or None,
        )
        repetition = given.get("repetition_penalty") or 1.0
        if not (isinstance(repetition, int | float) and 0 < repetition < math.inf):
            raise WeirError(
                f"repetition_penalty must be a number greater than 0, got {repetition!r}"
            )
    except WeirError:
        return SamplingParams(Sampling(temperature=1.0)), sorted({*given} & (_USED | _NOT_USED))
    return SamplingParams(sampling, repetition=repetition), sorted({*given} & _NOT_USED)


_USED = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
_NOT_USED = {
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "top_h",
    "no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
    "num_beams",
    "penalty_alpha",
    "guidance_scale",
    "length_penalty",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "min_length",
    "min_new_tokens",
}
"""Options of transformers' generation configuration that change answers there but not here."""


class Sampler:
    """The sampling state of one answer. The repetition penalty also counts `prompt_ids`."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: tuple[int, ...] = (),
        constraint: GrammarConstraint | AfterThoughts | None = None,
    ) -> None:
        self.params = params
        self.constraint = constraint
        self._counts: Counter[int] = Counter()
        self._bias: tuple[Tensor, Tensor] | None = None
        if params.bias:
            biased = torch.tensor(list(params.bias), dtype=torch.int64)
            self._bias = biased, torch.tensor(list(params.bias.values()), dtype=torch.float32)
        penalized = params.repetition != 1
        self._repetition = RepetitionPenalty(params.repetition, prompt_ids) if penalized else None
        self.generator = torch.Generator().manual_seed(params.seed % 2**63)

    @property
    def done(self) -> bool:
        """Return whether the answer is complete according to its constraint."""
        return self.constraint is not None and self.constraint.done

    def adjust(self, logits: Tensor) -> Tensor:
        """Apply penalties, bias and constraint to a copy of logits [vocabulary].

        The same tensor is returned if nothing applies. Raises WeirError if the answer cannot follow
        its constraint any longer.
        """
        params, counts = self.params, self._counts
        penalized = counts and (params.presence or params.frequency)
        if not (self.constraint or self._bias or self._repetition or penalized):
            return logits
        if self._repetition is not None:
            adjusted = self._repetition.penalize(logits)
        else:
            adjusted = logits.clone()
        if penalized:
            index = torch.tensor(list(counts), dtype=torch.int64)
            times = torch.tensor(list(counts.values()), dtype=adjusted.dtype)
            adjusted[index] -= params.presence + params.frequency * times
        if self._bias is not None:
            index, bias = self._bias
            adjusted[index] += bias
        return adjusted if self.constraint is None else self.constraint.allow(adjusted)

    def accept(self, token: int, logits: Tensor, adjusted: Tensor) -> SampledToken:
        """Advance by a token that was drawn.

        `logits` [vocabulary] are the model's. `adjusted` are the logits that `adjust` has returned
        for them, from which the token was drawn.

        Raises WeirError if there was no token to draw, or if the constraint does not allow this
        one.
        """
        if adjusted is not logits and adjusted[token] == -math.inf:
            raise WeirError(
                "the format and logit_bias of this answer leave no token to choose from. Change "
                "one of them."
            )
        params = self.params
        if params.presence or params.frequency:
            self._counts[token] += 1
        if self._repetition is not None:
            self._repetition.add(token)
        if self.constraint is not None:
            self.constraint.accept(token)
        if params.logprobs is None:
            return SampledToken(token)
        logprobs = logits.log_softmax(dim=-1)
        values, tokens = logprobs.topk(min(params.logprobs, len(logprobs)))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        return SampledToken(token, float(logprobs[token]), top)


def sample(samplers: Sequence[Sampler], logits: Tensor) -> list[SampledToken | Exception]:
    """Sample the next token of each answer from logits [answers, vocabulary].

    For an answer without a token, the result is the error. Each token is bit-identical to sampling
    its answer alone.
    """
    rows = list(logits.float().cpu())
    adjusted = list(rows)
    sampled: dict[int, SampledToken | Exception] = {}
    by_sampling: dict[Sampling, list[int]] = {}
    for at, sampler in enumerate(samplers):
        try:
            adjusted[at] = sampler.adjust(rows[at])
        except Exception as error:
            sampled[at] = error
            continue
        by_sampling.setdefault(sampler.params.sampling, []).append(at)
    size = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    groups = (
        (sampling, answers[first : first + size])
        for sampling, answers in by_sampling.items()
        for first in range(0, len(answers), size)
    )
    for sampling, group in groups:
        generators = [samplers[at].generator for at in group]
        drawn = _draw(sampling, torch.stack([adjusted[at] for at in group]), generators)
        for at, token in zip(group, drawn, strict=True):
            if isinstance(token, Exception):
                sampled[at] = token
                continue
            try:
                sampled[at] = samplers[at].accept(token, rows[at], adjusted[at])
            except Exception as error:
                sampled[at] = error
    return [sampled[at] for at in range(len(samplers))]


def _draw(
    sampling: Sampling, logits: Tensor, generators: list[torch.Generator]
) -> list[int | WeirError]:
    """Draw a token from each row of logits [rows, vocabulary]. For a row without one, return the
    error.
    """
    try:
        return list(sampling.pick(logits, generators)[:, 0].tolist())
    except WeirError as error:
        if len(generators) == 1:
            return [error]
        # One row is wrong, and no generator has advanced yet.
        pairs = zip(logits.split(1), generators, strict=True)
        return [_draw(sampling, row, [generator])[0] for row, generator in pairs]
