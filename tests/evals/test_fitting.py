"""Budgets that fill a memory: the largest that fits, counted without weights."""

from __future__ import annotations

import pytest

import weir
from weir.cache import size_of
from weir.errors import PolicyError, WeirError
from weir.evals.advice import CANDIDATES
from weir.evals.fitting import budget_in, smallest
from weir.evals.notation import with_budget
from weir.models import skeleton

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
    with pytest.raises(WeirError, match="takes no budget here"):
        budget_in(shape, "dense", 10**6)
