"""The largest budget that fits into a given memory, computed without a model's weights."""

from __future__ import annotations

import warnings

import pytest

import weir
from weir.cache import size_of
from weir.errors import PolicyError, WeirError
from weir.evals.advice import CANDIDATES
from weir.evals.fitting import budget_in, check_fixed, fit_to_memory, smallest
from weir.evals.notation import with_budget
from weir.loading import skeleton

pytestmark = pytest.mark.thinned(3, least=2)


@pytest.fixture(scope="module")
def nano():
    return weir.load("nano")


@pytest.fixture(scope="module")
def shape():
    return skeleton("nano")


def fits(model, name: str, budget: int, memory: int) -> bool:
    """Whether a policy can be made with a budget and its cache fits."""
    try:
        return size_of(model, with_budget(name, budget)).stream <= memory
    except PolicyError:
        return False


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("memory", [330_000, 1_234_567])
@pytest.mark.thinned(3)
def test_no_larger_budget_within_the_window_fits(shape, name, memory):
    found = budget_in(shape, name, memory)
    if found is None:
        assert smallest(shape, name)[1] > memory
        return
    assert fits(shape, name, found, memory)
    assert not any(fits(shape, name, n, memory) for n in range(found + 1, min(found + 12, 449)))


@pytest.mark.parametrize("name", ["streaming_llm", "snapkv", "subgen"])
def test_a_stream_of_that_budget_takes_no_more(nano, shape, name):
    budget = budget_in(shape, name, 1_234_567)
    stream = weir.Stream(nano[0], f"{name}(budget={budget})")
    stream.feed([1, 2, 3])
    assert 1_200_000 < stream.nbytes <= 1_234_567


def test_the_window_and_what_is_asked_for_are_the_most(shape):
    assert budget_in(shape, "window", 10**9) == 512 - 64
    assert budget_in(shape, "window", 10**9, chunk=1) == 511
    assert budget_in(shape, "window", 10**9, most=100) == 100
    assert budget_in(shape, "window", 10**7, most=5000) > 1000


def test_the_smallest_of_a_policy_is_named_with_its_bytes(shape):
    sized, takes = smallest(shape, "snapkv")
    assert takes == size_of(shape, sized).stream
    budget = int(sized.partition("budget=")[2].rstrip(")"))
    with pytest.raises(PolicyError):
        with_budget("snapkv", budget - 1)
    with pytest.raises(WeirError, match="cannot get a budget here"):
        budget_in(shape, "dense", 10**6)


def test_a_policy_with_slots_of_its_own_has_to_fit(shape):
    policy = "sink(4) | recent(252)"
    takes = size_of(shape, policy).stream
    check_fixed(shape, policy, takes)
    with pytest.raises(WeirError, match=rf"^sink\(4\) \| recent\(252\) on nano takes {takes:,} "):
        check_fixed(shape, policy, takes - 1, name="nano")
    original = size_of(shape, policy, positions="original").stream
    assert original < takes  # no keys are rotated again
    check_fixed(shape, policy, original, positions="original")
    check_fixed(shape, "dense", 1)


def test_a_budget_of_few_slots_is_warned_of(shape):
    with pytest.warns(UserWarning, match=r"300,000 bytes leave window on nano only \d+ slots"):
        assert fit_to_memory(shape, "window", 300_000, name="nano")[1] < 32
    with pytest.warns(UserWarning, match=r"of the cache's [\d,]+ bytes are not keys and values"):
        fit_to_memory(shape, "h2o", 600_000, name="nano")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit_to_memory(shape, "window", 450_000)[1] >= 32


def test_a_budget_for_positions_in_the_stream_fills_the_memory(nano, shape):
    _, budget = fit_to_memory(shape, "snapkv", 900_000, positions="original")
    assert budget > fit_to_memory(shape, "snapkv", 900_000)[1]
    stream = weir.Stream(nano[0], f"snapkv(budget={budget})", positions="original")
    stream.feed([1, 2, 3])
    assert 880_000 < stream.nbytes <= 900_000
