"""If a method of a pool that a user wrote fails, the error names the pool, the method and the line,
and often what the pool forgot to declare.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import weir
from weir.errors import WeirError
from weir.policies import parse_policy
from weir.pools import POOLS, Fold, Ranked, SizedPool, Tallied, pool
from weir.slab import Slots

pytestmark = pytest.mark.usefixtures("pools_as_before")


def failing(base: type, **methods: Callable[..., Any]) -> None:
    """Register the pool `failing`, with these methods."""

    class Failing(base):  # type: ignore[misc]
        n: int = 4

        __annotations__ = {"n": int}

    for name, method in methods.items():
        method.__name__ = name
        setattr(Failing, name, method)
    Failing.__abstractmethods__ = frozenset()
    pool("failing")(dataclass(frozen=True)(Failing))


def feed(llama, ids, policy: str = "recent(4) | failing") -> None:
    """Read a text whose tokens do not fit in a policy."""
    weir.Stream(llama, policy, chunk=4).feed(ids(1, 24))


def fails_in_helper() -> None:
    raise KeyError("gone")


@pytest.mark.parametrize("policy", ["recent(4) | failing", "recent(4) | chunks(failing, 2)"])
def test_the_pool_the_method_and_the_line_are_named_and_the_error_is_the_cause(llama, ids, policy):
    def score(self, slots, fold):
        return slots.position + torch.zeros(7)

    failing(Ranked, score=score)
    line = inspect.getsourcelines(score)[1] + 1
    with pytest.raises(WeirError) as error:
        feed(llama, ids, policy)
    told = str(error.value)
    assert told.startswith(
        f"the pool failing failed in score() (test_failures.py, line {line}): RuntimeError: The "
        "size of tensor a"
    )
    assert told.endswith(". Change the pool's code.")
    assert isinstance(error.value.__cause__, RuntimeError)


def test_the_line_is_that_of_the_innermost_function_of_the_users_code(llama, ids):
    failing(SizedPool, fold=lambda self, held, new, fold: fails_in_helper())
    line = inspect.getsourcelines(fails_in_helper)[1] + 1
    with pytest.raises(WeirError, match=rf"failures\.py, line {line}\): KeyError: 'gone'\. Change"):
        feed(llama, ids)


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_an_error_about_memory_stays_as_it_is(llama, ids, kind):
    def score(self, slots, fold):
        raise kind("full")

    failing(Ranked, score=score)
    with pytest.raises(kind, match="full"):
        feed(llama, ids)


def test_an_error_in_a_pool_of_weirs_stays_as_it_is(llama, ids, monkeypatch):
    def fold(self, held, new, fold):
        raise KeyError("gone")

    monkeypatch.setattr(POOLS["heavy"], "fold", fold)
    with pytest.raises(KeyError, match="gone"):
        feed(llama, ids, "recent(4) | heavy(4)")


def doubles_mass(self, slots, fold):
    return slots.mass * 2


def asserts_mass(self, slots, fold):
    assert slots.mass is not None
    return slots.mass


def reads_queries(self, slots, fold):
    return fold.queries.sum() + slots.a


def reads_marks(self, slots, fold):
    return slots.a + fold.turn[:, None, None]


@pytest.mark.parametrize(
    ("score", "told"),
    [
        (doubles_mass, r"reads slots\.mass, which is None .* Set needs_mass = True in the class"),
        (asserts_mass, r"reads slots\.mass, which is None .* Set needs_mass = True in the class"),
        (reads_queries, r"reads fold\.queries, .* Set needs_queries = 16, or another number, in"),
        (reads_marks, r"reads fold\.turn, .* Set needs_marks = True in the class"),
    ],
)
def test_a_missing_declaration_is_named(llama, ids, score, told):
    failing(Ranked, score=score)
    with pytest.raises(WeirError, match=told):
        feed(llama, ids)


def test_a_none_that_no_declaration_would_set_gets_no_such_advice(llama, ids):
    def score(self, slots, fold):
        return slots.mass + None

    failing(Ranked, score=score)
    POOLS["failing"].needs_mass = True
    with pytest.raises(WeirError, match=r"NoneType.*\. Change the pool's code\.$"):
        feed(llama, ids)


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        (0, r"it reads the last queries, but no pool .* Set needs_queries = 16, or another"),
        (4, r"it reads the attention of the last 8 queries, .* of more than 4\. Set needs_queries"),
    ],
)
def test_a_pool_that_declares_too_few_queries_is_named(llama, ids, declared, told):
    def score(self, slots, fold):
        return fold.read.received(slots, 8)

    failing(Ranked, score=score)
    POOLS["failing"].needs_queries = declared
    line = inspect.getsourcelines(score)[1] + 1
    where = rf"the pool failing failed in score\(\) \(test_failures\.py, line {line}\): "
    with pytest.raises(WeirError, match=f"^{where}{told}"):
        feed(llama, ids)


def test_a_method_that_takes_other_arguments_is_named(llama, ids):
    def score(self, slots):
        return slots.a

    failing(Ranked, score=score)
    line = inspect.getsourcelines(score)[1]
    told = rf"failing failed in score\(\) \(test_failures\.py, line {line}\): TypeError: .* takes 2"
    with pytest.raises(WeirError, match=told):
        feed(llama, ids)


def keeps(self, held, new, fold):
    both = held.join(new)
    return both.part(0, self.n), both.part(self.n, len(both))


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (lambda self, like: [1], r"must return a dictionary of tensors, got list\. Return"),
        (lambda self, like: None, r"must return a dictionary of tensors, got None\. Return"),
        (lambda self, like: {"came": 3}, r"must return tensors by name, got int for 'came'\."),
        (
            lambda self, like: {"came": torch.zeros(3)},
            r"the state came of the pool failing must have the shape \[batch, kv_heads, \.\.\.\], "
            r"here \[\d, \d, \.\.\.\], got \[3\]\. Begin",
        ),
        (lambda self, like: {"came": 1 / 0}, r"the pool failing failed in state\(\) \(test_fail"),
    ],
)
def test_a_state_that_is_none_is_refused_when_it_is_first_made(llama, ids, state, told):
    failing(SizedPool, fold=keeps)
    state.__name__ = "state"
    state.__code__ = state.__code__.replace(co_name="state")
    POOLS["failing"].state = state
    with pytest.raises(WeirError, match=told):
        feed(llama, ids)


@pytest.mark.parametrize(
    ("tally", "told"),
    [
        (lambda self, slots, before, fold: None, r"it is None\. Return a tensor from tally\(\)"),
        (lambda self, slots, before, fold: 3, r"it must be a tensor, got a value of type int"),
        (lambda self, slots, before, fold: torch.zeros(3), r"its shape must be that of the slots"),
        (
            lambda self, slots, before, fold: slots.position,
            "its dtype must be a floating-point dtype",
        ),
        (lambda self, slots, before, fold: before + float("nan"), "it is NaN for some tokens"),
    ],
)
def test_what_is_no_tally_is_refused_under_its_name(llama, ids, tally, told):
    failing(Tallied, tally=tally)
    with pytest.raises(WeirError, match="the tally of the pool failing cannot be used: " + told):
        feed(llama, ids)


def test_an_index_of_take_that_is_out_of_range_is_named(llama, ids):
    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        both = held.join(new)
        index = torch.full(both.position.shape[:2], 99)[:, :, None]
        return both.take(index), both.take(index)

    failing(SizedPool, fold=fold)
    told = r"IndexError: take\(\) got the index 99, and there are \d+ slots\. Use indices from 0 to"
    with pytest.raises(WeirError, match=told):
        feed(llama, ids)


def test_a_report_that_fails_is_named(llama, ids):
    def report(self, state: dict[str, Tensor], row: int) -> dict[str, Any]:
        return {"x": state["x"]}

    failing(SizedPool, fold=keeps, report=report)
    stream = weir.Stream(llama, "recent(4) | failing", chunk=4)
    stream.feed(ids(1, 24))
    with pytest.raises(WeirError, match=r"failing failed in report\(\) .*KeyError: 'x'\."):
        stream.report()


def test_post_init_that_fails_is_named_and_its_error_is_the_cause():
    def __post_init__(self):
        raise ValueError("n must be even")

    failing(Ranked, score=reads_queries, __post_init__=__post_init__)
    line = inspect.getsourcelines(__post_init__)[1] + 1
    told = rf"failing failed in __post_init__\(\) \(test_failures\.py, line {line}\): ValueError: n"
    for write in (lambda: parse_policy("recent(4) | failing"), POOLS["failing"]):
        with pytest.raises(WeirError, match=told) as error:
            write()
        assert isinstance(error.value.__cause__, ValueError)


@pytest.mark.parametrize("policy", ["recent(4) | failing", "recent(4) | chunks(failing, 2)"])
def test_a_declaration_that_fails_is_named_and_its_error_is_the_cause(policy):
    def needs_queries(self):
        return self.windw

    failing(Ranked, score=reads_queries)
    POOLS["failing"].needs_queries = property(needs_queries)
    line = inspect.getsourcelines(needs_queries)[1] + 1
    told = rf"failing failed in needs_queries \(test_failures\.py, line {line}\): AttributeError:"
    with pytest.raises(WeirError, match=told) as error:
        parse_policy(policy)
    assert isinstance(error.value.__cause__, AttributeError)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("needs_queries", "8", r"must be a whole number of at least 0, got '8'\."),
        ("needs_queries", -1, r"must be a whole number of at least 0, got -1\."),
        ("needs_queries", True, r"must be a whole number of at least 0, got true\."),
        ("needs_queries", None, r"must be a whole number of at least 0, got none\."),
        ("needs_mass", "yes", r"must be True or False, got 'yes'\."),
        ("in_order", 1, r"must be True or False, got 1\."),
    ],
)
@pytest.mark.parametrize("policy", ["recent(4) | failing", "recent(4) | chunks(failing, 2)"])
def test_a_declaration_of_the_wrong_type_is_refused(policy, name, value, told):
    failing(Ranked, score=reads_queries)
    setattr(POOLS["failing"], name, value)
    with pytest.raises(WeirError, match=f"^{name} of the pool failing {told}"):
        parse_policy(policy)
