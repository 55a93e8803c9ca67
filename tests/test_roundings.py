"""The tests' tolerances allow what rounding does, and not much more."""

from __future__ import annotations

import pytest
import torch
from roundings import close, close_runs, largest, off, run_off, softmax_off, weights_off, within


@pytest.mark.parametrize("terms", [2, 64, 4096])
def test_a_sum_in_any_order_is_close_and_one_that_lost_a_term_is_not(terms):
    numbers = torch.randn(500, terms, generator=torch.Generator().manual_seed(0))
    exact, sizes = numbers.double().sum(dim=1), numbers.abs().sum(dim=1)
    one_by_one = torch.zeros(500)
    for number in numbers.T:
        one_by_one += number
    close(one_by_one, exact, terms, sizes)
    close(numbers.sum(dim=1), one_by_one, terms, sizes)
    with pytest.raises(AssertionError, match="more than roundings allow"):
        close(numbers[:, 1:].sum(dim=1), exact, terms, sizes)


def test_what_is_not_finite_is_to_be_the_same():
    numbers = torch.tensor([1.0, torch.inf, -torch.inf])
    close(numbers, numbers.clone())
    for other in (2.0, torch.nan, -torch.inf):
        with pytest.raises(AssertionError):
            close(torch.tensor([1.0, other, -torch.inf]), numbers)
    with pytest.raises(AssertionError):
        within(torch.zeros(2), torch.zeros(3), 1.0)


def test_softmax_weights_and_sums_of_logarithms_are_as_close_as_they_are_said_to_be():
    draw = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(1000, 64, generator=draw) for _ in "qk")
    logit = float(queries.norm(dim=1).max() * keys.norm(dim=1).max()) / 8
    exact = (queries.double() @ keys.double().T / 8).softmax(dim=1)
    found = (queries @ keys.T / 8).softmax(dim=1)
    within(found, exact, (softmax_off(64, logit) + off(1000)) * exact)
    weight = torch.zeros(1000)
    for _ in range(16):  # 2^16 tokens for each, in sixteen doublings
        weight += torch.tensor(2.0).log()
    total = 1000 * 2.0**16
    assert abs(float(weight.double().exp().sum()) / total - 1) < weights_off(total)


@pytest.mark.parametrize("length", [32, 300])
def test_a_model_in_float32_is_itself_in_float64_but_not_with_weights_a_little_off(
    fresh_llama, ids, length
):
    model, other, text = fresh_llama(), fresh_llama(), ids(2, length)
    with torch.no_grad():
        exact = fresh_llama().double()(text).logits
        found = model(text).logits
        close_runs(found, exact, model, length)
        # The tolerance is more than the error of this run, but less than a hundred times as much.
        assert largest(found - exact) > run_off(model, length) * largest(exact) / 100
        other.model.layers[0].self_attn.v_proj.weight.mul_(1 + 1e-3)
        with pytest.raises(AssertionError, match="more than roundings allow"):
            close_runs(other(text).logits, found, model, length)
