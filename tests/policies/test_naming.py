"""Which functions can become named policies, and what a policy records of the call that made it."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from weir.errors import PolicyError, WeirError
from weir.policies import NAMED, Pipe, Policy, named, parse_call, policy
from weir.policies.library import h2o, streaming_llm, uniform
from weir.policies.wrappers import pyramid
from weir.pools import POOLS, Recent, Sink


@pytest.fixture(autouse=True)
def policies_as_before() -> Iterator[None]:
    """Remove the policies that a test registers."""
    before = dict(NAMED)
    yield
    NAMED.clear()
    NAMED.update(before)


# --- which functions get a name


def test_the_name_of_another_policy_is_refused_and_the_other_stays():
    def h2o(budget: int = 3) -> Policy:
        return Pipe((Recent(budget),))

    with pytest.raises(
        WeirError, match=(r"called h2o already exists: " r"weir\.policies\.library\.h2o\.")
    ):
        named("nobody")(h2o)
    assert policy("h2o(8)").slots == 8
    assert len(policy("h2o(8)").pools) == 2


def test_the_name_of_a_pool_from_another_package_is_refused():
    def outliers(budget: int = 64) -> Policy:
        return Pipe((Recent(budget),))

    with pytest.raises(WeirError) as error:
        named("nobody")(outliers)
    assert str(error.value) == (
        "a pool called outliers already exists: weir.pools.outliers.Outliers. Use another name "
        "for the policy."
    )
    assert "outliers" not in NAMED


def test_the_name_of_a_policy_from_another_package_is_refused_when_the_pool_is_used(monkeypatch):
    @dataclass(frozen=True)
    class Mine(Recent):
        pass

    Mine.__qualname__ = "Mine"
    monkeypatch.setitem(POOLS, "h2o", Mine)
    told = (
        rf"h2o is both a pool, {__name__}\.Mine, and a policy, weir\.policies\.library\.h2o\. Use "
        r"another name for the pool\."
    )
    for text in ("h2o(16)", "sink(4) | h2o(16)", "quantized(h2o(16))"):
        with pytest.raises(PolicyError, match=f"^{told}"):
            policy(text)
    with pytest.raises(WeirError, match=f"^{told}"):
        named("somebody")(NAMED["h2o"].make)


def test_a_policy_and_a_pool_of_one_package_may_share_a_name(monkeypatch):
    @dataclass(frozen=True)
    class Mine(Recent):
        pass

    monkeypatch.setitem(POOLS, "mine", Mine)

    @named("nobody")
    def mine(budget: int = 64) -> Policy:
        return Pipe((Recent(budget),))

    assert NAMED["mine"].make is mine


def test_a_policy_may_be_defined_again():
    for size in (3, 5):

        @named("nobody")
        def mine(budget: int = size) -> Policy:
            return Pipe((Recent(budget),))

    assert policy("mine").slots == 5


def test_a_name_that_a_policy_cannot_be_written_with_is_refused():
    with pytest.raises(WeirError, match="a policy cannot be called '<lambda>'"):
        named("nobody")(lambda: Pipe((Recent(3),)))

    def true() -> Policy:
        return Pipe((Recent(3),))

    with pytest.raises(WeirError, match="a policy cannot be called true, which is a value"):
        named("nobody")(true)


@pytest.mark.parametrize("thing", [5, "h2o", Pipe, Pipe((Recent(3),))])
def test_what_is_no_function_is_refused(thing):
    with pytest.raises(WeirError, match="a named policy must be a function"):
        named("nobody")(thing)


def test_a_decorator_without_brackets_is_refused():
    with pytest.raises(WeirError, match=r'Write @named\("…"\) above plain\.'):

        @named
        def plain(budget: int = 64) -> Policy:
            return Pipe((Recent(budget),))


def test_a_parameter_that_a_policy_text_could_not_set_is_refused():
    def bare(budget=64):
        return Pipe((Recent(budget),))

    with pytest.raises(WeirError, match="budget of the policy function bare has no annotation"):
        named("nobody")(bare)

    def many(*budgets: int) -> Policy:
        return Pipe((Recent(budgets[0]),))

    with pytest.raises(
        WeirError, match=r"has the parameter \*budgets: .*int.*Give every parameter"
    ):
        named("nobody")(many)
    assert "bare" not in NAMED and "many" not in NAMED


@pytest.mark.parametrize("nothing", [None, "recent(3)", (Sink(4), Recent(3)), Recent(3)])
def test_a_function_that_returns_no_policy_is_refused_by_name(nothing):
    @named("nobody")
    def odd() -> Policy:
        return nothing

    with pytest.raises(WeirError, match=r"^the policy function odd must return a Policy"):
        odd()
    with pytest.raises(PolicyError, match="the policy function odd must return a Policy"):
        policy("odd")


def test_a_function_that_fails_is_named_with_its_line_and_its_error_is_the_cause():
    @named("nobody")
    def odd(budget: int = 64) -> Policy:
        return Pipe((Recent({}[budget]),))

    line = inspect.getsourcelines(odd)[1] + 2
    told = rf"the policy function odd\(\) failed \(test_naming\.py, line {line}\): KeyError: 8\. C"
    for call in (lambda: odd(8), lambda: policy("odd(8)")):
        with pytest.raises(WeirError, match=f"^{told}") as error:
            call()
        assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(TypeError, match="unexpected keyword"):
        odd(size=8)


def test_an_error_of_the_default_budget_says_so():
    @named("nobody")
    def odd(budget: int = 8) -> Policy:
        return Pipe((Sink(4), Recent(budget - 8)))

    told = r"n of recent must be a whole number of at least 1 or none, got 0"
    with pytest.raises(PolicyError, match=rf"^odd with its default budget=8: {told} \(character 1"):
        policy("odd")
    for call in (lambda: odd(8), lambda: policy("odd(8)"), lambda: policy("odd(budget=8)")):
        with pytest.raises(WeirError, match=f"^{told}"):
            call()
    assert policy("odd(9)").slots == 5


# --- what a policy records of the call that made it


@pytest.mark.parametrize(
    ("text", "name", "given", "arguments"),
    [
        ("h2o", "h2o", {}, ""),
        (" h2o ( ) ", "h2o", {}, ""),
        ("reservoir(64)", "reservoir", {"budget": 64}, "64"),
        ("uniform( rate = .5 )", "uniform", {"rate": 0.5}, "rate = .5"),
        ("streaming_llm(64,sinks=8)", "streaming_llm", {"budget": 64, "sinks": 8}, "64,sinks=8"),
    ],
)
def test_a_policy_knows_its_name_and_arguments(text, name, given, arguments):
    for it in (policy(text).called, parse_call(text)):
        assert (it.name, dict(it.given), it.arguments) == (name, given, arguments)


def test_a_policy_made_in_python_knows_its_name_and_arguments():
    made = streaming_llm(64, sinks=8)
    assert (made.called.name, made.called.given) == ("streaming_llm", {"budget": 64, "sinks": 8})
    assert str(made.called) == "streaming_llm(budget=64, sinks=8)"
    assert str(made) == "sink(8) | recent(56)"
    assert pyramid().called.name == "pyramid"


def test_pools_in_a_pipe_were_called_by_no_name():
    for text in ("sink(4) | recent(9)", "reservoir(n=12)", "recent(3) | uniform(4)"):
        assert policy(text).called is None
        assert parse_call(text) is None
    assert Pipe((Recent(3),)).called is None


def test_copies_remember_how_they_were_called():
    made = policy("reservoir(64)")
    for same in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (same, same.text, same.called) == (made, made.text, made.called)


def test_a_policy_that_only_fits_with_a_budget_can_be_given_one():
    assert parse_call("reservoir(samples=300)").with_arguments(budget=999) == (
        "reservoir(samples=300, budget=999)"
    )
    with pytest.raises(PolicyError):
        policy("reservoir(samples=300)")


@pytest.mark.parametrize(
    "text", ["dense", "h2o(8)", "h2o(budget=8)", "uniform(rate=0.5)", "pyramid(h2o(64))"]
)
def test_what_has_a_size_or_none_takes_no_budget(text):
    assert not policy(text).called.takes_budget
    assert policy("uniform(weighted=false)").called.takes_budget


# --- name and pools in one line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("reservoir(64)", "reservoir(budget=64) = sink(4) | recent(44) | reservoir(16)"),
        ("kcenter(8)", "kcenter(budget=8) = recent(4) | kcenter(4)"),
        ("uniform(n=9)", "uniform(n=9)"),
        ("recent(3) | reservoir(64)", "recent(3) | reservoir(64)"),
        ("dense", "dense = recent(none)"),
        ("recompute(8)", "recompute(budget=8)"),
        (
            "pyramid(h2o(64), beta=8)",
            "pyramid(pipe=h2o(64), beta=8.0) = pyramid(recent(32) | heavy(32), beta=8.0)",
        ),
    ],
)
def test_a_policy_shows_its_name_and_what_it_stands_for(text, shown):
    made = policy(text)
    assert repr(made) == shown
    assert str(made) == text  # results and sessions store the text as written
    assert policy(made.stands_for) == made


def test_policies_made_in_python_show_the_same():
    assert repr(h2o(64)) == "h2o(budget=64) = recent(32) | heavy(32)"
    assert repr(uniform(rate=0.5)) == (
        "uniform(rate=0.5) = sink(32) | recent(32) | uniform(none, rate=0.5, weighted=true)"
    )
    assert repr(Pipe((Sink(4), Recent(3)))) == "sink(4) | recent(3)"
