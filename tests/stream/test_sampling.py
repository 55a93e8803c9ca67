"""From logits to a token, compared with plain sums of probabilities, at extreme temperatures."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

import weir
from weir.errors import WeirError
from weir.stream import RepetitionPenalty
from weir.stream.sampling import Sampling

pytestmark = pytest.mark.thinned(3, least=2)

LOGITS = torch.tensor([[0.5, -2.0, 3.0, 2.999, -1e4], [7.0, -3e38, 6.0, 3e38, 0.0]])


def drawn(sampling: Sampling, logits: torch.Tensor, count: int = 400, seed: int = 0) -> list:
    generator = torch.Generator().manual_seed(seed)
    return [sampling.pick(logits, generator)[:, 0].tolist() for _ in range(count)]


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-45, 1e-40, 1e-38, 1e-9, 9e-7])
@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 2, "top_p": 0.5}])
def test_a_temperature_next_to_nothing_takes_the_likeliest_token(temperature, more):
    assert {tuple(row) for row in drawn(Sampling(temperature, **more), LOGITS, 50)} == {(2, 3)}
    masked = torch.tensor([[-torch.inf, 1.0, 2.0]])
    assert {tuple(row) for row in drawn(Sampling(temperature, **more), masked, 50)} == {(2,)}


def test_a_penalty_is_that_of_transformers_for_logits_of_either_sign():
    logits, before = torch.randn(2, 40, generator=torch.Generator().manual_seed(0)), [3, 3, 7, 20]
    told = torch.tensor([before, before])
    for penalty in (1.7, 0.4):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(told, logits.clone())
        whole, grown = RepetitionPenalty(penalty, before), RepetitionPenalty(penalty, before[:2])
        assert torch.equal(whole.penalize(logits), expected)
        assert not torch.equal(grown.penalize(logits), expected)
        for token in before[2:]:
            grown.add(token)
        assert torch.equal(grown.penalize(logits), expected)
    assert RepetitionPenalty(2.0).penalize(logits).equal(logits)


@pytest.mark.parametrize("temperature", [1e-40, 1e-9])
def test_where_two_tokens_are_equally_likely_both_are_drawn_at_any_temperature(temperature):
    rows = drawn(Sampling(temperature), torch.tensor([[1.0, 4.0, 4.0, -2.0]]))
    ones = sum(row == [1] for row in rows)
    assert {row[0] for row in rows} == {1, 2}
    assert abs(ones - 200) < 5 * math.sqrt(400 / 4)


@pytest.mark.parametrize("temperature", [1e38, 1e300, 10**400])
def test_a_vast_temperature_draws_from_all_that_can_be_drawn(temperature):
    logits = torch.tensor([[0.0, 50.0, -torch.inf, -50.0]])
    assert {row[0] for row in drawn(Sampling(temperature), logits)} == {0, 1, 3}


@pytest.mark.parametrize(
    "more", [{"temperature": True}, {"temperature": False}, {"top_p": True}, {"min_p": True}]
)
def test_true_and_false_are_no_numbers(more):
    with pytest.raises(WeirError, match=f"{next(iter(more))} must be a number (from|of .*) 0"):
        Sampling(**more)


@pytest.mark.parametrize("temperature", [0, 0.0, Fraction(0), Fraction(1, 10**400)])
def test_greedy_asks_nothing_of_the_generator(temperature):
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    assert Sampling(temperature).pick(LOGITS, generator).tolist() == [[2], [3]]
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("temperature", [2e-6, 0.1, 0.7, np.float32(0.7), Fraction(1, 3), 1, 1.9])
def test_usual_temperatures_divide_as_transformers_does_to_the_last_bit(temperature):
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * 5
    warped = TemperatureLogitsWarper(float(temperature))(None, logits).softmax(dim=-1)
    expected = torch.multinomial(warped, 1, generator=torch.Generator().manual_seed(3))
    found = Sampling(temperature).pick(logits, torch.Generator().manual_seed(3))
    assert torch.equal(found, expected)


SAMPLINGS = [
    Sampling(0.7),
    Sampling(1e-9, top_k=5),
    Sampling(0.9, top_k=7),
    Sampling(1.3, top_p=0.8),
    Sampling(1.0, top_p=0.999),
    Sampling(0.8, min_p=0.1),
    Sampling(1.1, top_k=300, top_p=0.9, min_p=0.01),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_rows_with_generators_of_their_own_draw_what_they_would_alone(sampling):
    logits = torch.randn(5, 1003, generator=torch.Generator().manual_seed(0)) * 2
    many, alone = ([torch.Generator().manual_seed(n) for n in range(5)] for _ in range(2))
    for _ in range(10):
        found = sampling.pick(logits, many)
        rows = zip(logits.split(1), alone, strict=True)
        assert torch.equal(found, torch.cat([sampling.pick(row, its) for row, its in rows]))
        logits = logits.roll(1, dims=0)


def limited(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return a row's logits [vocabulary] with -inf for tokens that are never drawn."""
    logits = (logits / sampling.temperature).tolist()
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    kept = order[: sampling.top_k]
    if sampling.top_p is not None:
        whole = math.fsum(math.exp(logits[token]) for token in kept)
        sums = [math.fsum(math.exp(logits[t]) for t in kept[:n]) / whole for n in range(len(kept))]
        kept = [token for token, sum in zip(kept, sums, strict=True) if sum < sampling.top_p]
    if sampling.min_p is not None:
        least = sampling.min_p * math.exp(logits[order[0]])
        kept = [token for token in kept if math.exp(logits[token]) >= least]
    found = torch.full((len(logits),), -torch.inf)
    found[kept] = torch.tensor(logits)[kept]
    return found


@pytest.mark.parametrize("spread", [4.0, 0.1])
@pytest.mark.parametrize("sampling", SAMPLINGS[2:], ids=str)
def test_draws_are_those_of_torch_from_what_a_plain_loop_leaves(sampling, spread):
    # At a spread of 0.1, tokens are almost equally likely, and top_p keeps hundreds.
    logits = torch.randn(3, 1500, generator=torch.Generator().manual_seed(1)) * spread
    for row, its in enumerate(logits):
        chances = limited(its, sampling).softmax(dim=-1)
        own, other = (torch.Generator().manual_seed(row) for _ in range(2))
        for _ in range(30):
            expected = torch.multinomial(chances, 1, generator=own)
            assert torch.equal(sampling.pick(its[None], other)[0], expected)


def test_of_equal_tokens_a_nucleus_keeps_no_more_than_it_needs():
    logits = torch.zeros(1, 1000)
    assert len({row[0] for row in drawn(Sampling(1.0, top_p=0.004), logits)}) == 4
    assert len({row[0] for row in drawn(Sampling(1.0, top_p=0.0), logits, 50)}) == 1


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_refused_in_a_sentence(wrong):
    logits = torch.tensor([[1.0, wrong, 2.0]])
    for temperature in (0, 1e-40, 0.5, 1.0):
        for more in ({}, {"top_p": 0.1}, {"top_k": 1}, {"min_p": 0.9}):
            with pytest.raises(WeirError, match="no token can be drawn: the logits are not finite"):
                Sampling(temperature, **more).pick(logits, torch.Generator())


@pytest.mark.parametrize("temperature", [1e-40, 1e-300])
def test_a_stream_at_a_tiny_temperature_goes_on_as_the_greedy_one(llama, ids, temperature):
    tokens = []
    for how in ({}, {"temperature": temperature}, {"temperature": temperature, "top_p": 0.95}):
        stream = weir.Stream(llama, "streaming_llm(24)", chunk=8)
        stream.feed(ids(1, 40))
        tokens.append(list(stream.generate(30, **how)))
    assert tokens[0] == tokens[1] == tokens[2]


def test_min_p_draws_from_what_is_nearly_as_likely_as_the_likeliest():
    logits = torch.tensor([[0.6, 0.3, 0.08, 0.02]]).log()
    assert {row[0] for row in drawn(Sampling(1.0, min_p=0.4), logits)} == {0, 1}
    assert {row[0] for row in drawn(Sampling(1.0, min_p=1), logits, 50)} == {0}
    assert {row[0] for row in drawn(Sampling(1.0, min_p=0.0), logits, 2000)} == {0, 1, 2, 3}
    with pytest.raises(WeirError, match="min_p must be a number from 0 to 1, got 2"):
        Sampling(min_p=2)
