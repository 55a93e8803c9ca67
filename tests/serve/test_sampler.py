"""Tokens of several answers are chosen together, and each is the one it would be alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weir.errors import WeirError
from weir.serve import SampledToken, Sampler, SamplingParams
from weir.serve.engine import sampler
from weir.stream import Sampling

SIZE = 500
HOWS = [
    SamplingParams(),
    SamplingParams(Sampling(temperature=0.7), seed=1),
    SamplingParams(Sampling(temperature=0.7), seed=2, logprobs=3),
    SamplingParams(Sampling(temperature=0.7), seed=3, bias={4: 3.0}, presence=0.5, frequency=0.2),
    SamplingParams(Sampling(temperature=1.5, top_p=0.8), seed=4, repetition=1.4),
    SamplingParams(Sampling(temperature=0.7), seed=5),
    SamplingParams(logprobs=0),
]


def logits_of(step: int, rows: int = len(HOWS)) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(step)) * 3


def samplers() -> list[Sampler]:
    return [Sampler(how, prompt_ids=(7, 8)) for how in HOWS]


def sample_alone(one: Sampler, logits: Tensor) -> SampledToken:
    (token,) = sampler.sample([one], logits[None])
    if isinstance(token, Exception):
        raise token
    return token


@pytest.mark.parametrize("together", [2**17, SIZE])
def test_many_answers_choose_what_each_would_alone(monkeypatch, together):
    monkeypatch.setattr(sampler, "LOGITS_AT_ONCE", together)
    many, alone = samplers(), samplers()
    for step in range(20):
        logits = logits_of(step)
        before = logits.clone()
        found = sampler.sample(many, logits)
        assert found == [sample_alone(one, row) for one, row in zip(alone, logits, strict=True)]
        assert torch.equal(logits, before)


def test_penalties_and_bias_are_of_their_own_answer():
    logits = torch.zeros(3, 4)
    logits[:, 1], logits[:, 2] = 2.0, 1.9
    three = [
        Sampler(how)
        for how in (SamplingParams(), SamplingParams(frequency=1.0), SamplingParams(bias={3: 9}))
    ]
    tokens = [[each.id for each in sampler.sample(three, logits)] for _ in range(4)]
    assert tokens == [[1, 1, 3], [1, 2, 3], [1, 1, 3], [1, 2, 3]]


class Once:
    """A constraint that allows token 3 once, and afterwards no token."""

    done = False

    def __init__(self) -> None:
        self.came: list[int] = []

    def allow(self, logits: Tensor) -> Tensor:
        if len(self.came) == 2:
            raise WeirError("too complex")
        allowed = torch.full_like(logits, -torch.inf)
        allowed[3] = 0.0 if not self.came else -torch.inf
        return allowed

    def accept(self, token: int) -> None:
        self.came.append(token)


def test_what_goes_wrong_with_one_is_that_ones_alone():
    hot = Sampling(temperature=1.0)
    held = Once()
    several = [Sampler(SamplingParams(hot, seed=n)) for n in range(3)]
    several.append(Sampler(SamplingParams(), constraint=held))
    apart = [Sampler(SamplingParams(hot, seed=n)) for n in range(3)]
    logits = logits_of(0, 4)
    first = sampler.sample(several, logits)
    assert first[3] == SampledToken(3)
    assert first[:3] == [sample_alone(one, row) for one, row in zip(apart, logits[:3], strict=True)]
    wrong = logits_of(1, 4)
    wrong[1, 9] = torch.nan
    drawn = several[1].generator.get_state()
    found = sampler.sample(several, wrong)
    assert "the logits are not finite" in str(found[1])
    assert "leave no token" in str(found[3])
    assert (found[0], found[2]) == (
        sample_alone(apart[0], wrong[0]),
        sample_alone(apart[2], wrong[2]),
    )
    assert torch.equal(several[1].generator.get_state(), drawn)
    held.came.append(0)
    assert "too complex" in str(sampler.sample(several, logits)[3])
    with pytest.raises(WeirError, match="not finite"):
        sample_alone(several[0], wrong[1])
