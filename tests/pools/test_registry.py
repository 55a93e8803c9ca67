"""A registered pool can be written in a policy and used. What is no pool cannot be registered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from weir.errors import WeirError
from weir.policies import policy
from weir.pools import POOLS, Fold, Pool, Ranked, Recent, Sink, pool
from weir.slab import Slots

pytestmark = pytest.mark.usefixtures("pools_as_before")


def made(name: str = "Keep", module: str = "a_module", **more: Any) -> type[Pool]:
    """A new class of a pool that keeps what it holds, as if defined in a module."""

    class Whole(Pool):
        def slots(self) -> int:
            return 3

        def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
            return held, new

    kind: type[Pool] = type(name, (Whole,), {"__module__": module, "__qualname__": name, **more})
    return dataclass(frozen=True)(kind)


def test_the_name_of_another_pool_is_refused_and_the_other_stays():
    with pytest.raises(WeirError) as error:
        pool("sink")(made())
    assert str(error.value) == (
        "a pool called sink already exists: weir.pools.sink.Sink. Use another name."
    )
    assert POOLS["sink"] is Sink
    assert policy("sink(2) | recent(3)").pools == (Sink(2), Recent(3))


def test_the_same_class_may_be_registered_again_and_the_later_one_counts():
    first, second = made(), made()
    assert pool("keep")(first) is first
    assert pool("keep")(second) is POOLS["keep"] is second
    for other in (made(module="another"), made(name="Other")):
        with pytest.raises(WeirError, match=r"keep already exists: a_module\.Keep"):
            pool("keep")(other)


@pytest.mark.parametrize("name", ["", "2nd", "a-b", "a b", "a(b)", "a|b", "a=1", "é!", " x", "x\n"])
def test_a_name_that_a_policy_cannot_be_written_with_is_refused(name):
    with pytest.raises(WeirError, match=r"a pool cannot be called .* letters, digits and under"):
        pool(name)


@pytest.mark.parametrize("name", ["true", "False", "NONE"])
def test_a_name_that_is_a_value_is_refused(name):
    with pytest.raises(WeirError, match=f"a pool cannot be called {name}, which is a value"):
        pool(name)


def test_the_name_of_tokens_that_wait_is_refused():
    with pytest.raises(WeirError, match="a pool cannot be called new: that is the name of tokens"):
        pool("new")


def test_a_decorator_without_a_name_is_refused():
    with pytest.raises(WeirError, match=r"Write @pool\(\"name\"\) above "):
        pool(made())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["résumé", "_x", "K9", "nothing"])
def test_whatever_a_policy_can_be_written_with_is_a_name(name):
    pool(name)(made())
    assert policy(f"recent(2) | {name}").slots == 5


@pytest.mark.parametrize("thing", [int, Slots, 5, Recent(3), lambda: None])
def test_what_is_no_pool_is_refused(thing):
    with pytest.raises(WeirError, match=r"the pool odd must be a subclass of weir\.pools"):
        pool("odd")(thing)
    assert "odd" not in POOLS


def test_a_pool_that_lacks_a_method_is_refused():
    @dataclass(frozen=True)
    class Unfinished(Pool):
        n: int

    with pytest.raises(WeirError) as error:
        pool("odd")(Unfinished)
    assert str(error.value) == (
        "the pool odd cannot be used, because Unfinished lacks fold() and "
        "slots(). Define what is missing."
    )


def test_a_ranked_pool_without_a_parameter_is_refused():
    class Bare(Ranked):
        def score(self, slots: Slots, fold: Fold) -> Tensor:
            return slots.a

    with pytest.raises(WeirError) as error:
        pool("odd")(dataclass(frozen=True)(Bare))
    assert str(error.value) == (
        "the pool odd has no parameters, but the first parameter of a pool that derives from "
        "Ranked is its number of slots. Write n: int in the class Bare."
    )
    assert "odd" not in POOLS


@pytest.mark.parametrize(
    ("name", "more"),
    [("needs_mas", ", did you mean 'needs_mass'?"), ("needs_" + "z" * 20, ".")],
)
def test_a_declaration_that_pools_do_not_have_is_refused(name, more):
    with pytest.raises(WeirError) as error:
        pool("odd")(made(**{name: True}))
    assert str(error.value) == (
        f"the pool odd sets {name}, which weir does not know{more} Use one of needs_mass, "
        "needs_queries, needs_shares, needs_gates, needs_marks, or a name that does not begin "
        "with needs_."
    )
    assert "odd" not in POOLS


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("is_stochastc", True, "is_stochastic"),
        ("drop", True, "drops"),
        ("inorder", False, "in_order"),
        ("tie_margn", 0.0, "tie_margin"),
        ("tie_margins", 0, "tie_margin"),
    ],
)
def test_a_declaration_that_is_misspelt_is_refused(key, value, meant):
    body = {"score": lambda self, slots, fold: slots.a, "__annotations__": {"n": int}}
    kind = dataclass(frozen=True)(type("Odd", (Ranked,), {**body, key: value}))
    with pytest.raises(WeirError) as error:
        pool("odd")(kind)
    assert str(error.value) == (
        f"the pool odd sets {key}, which weir does not know, did you mean {meant!r}? Write "
        f"{meant}, or use a name that is less similar."
    )
    assert "odd" not in POOLS


def test_other_names_are_no_misspelt_declarations():
    others = {
        "weights": 0.5,
        "weighted": True,
        "drop": 3,
        "log": True,
        "_drop": True,
        "margin": 0.1,
    }
    pool("other")(made(tie_margn=0.5, keeps_runs=lambda self: True, **others))

    @pool("another")
    @dataclass(frozen=True)
    class Another(Ranked):
        """Its parameters have names that are almost those of declarations."""

        n: int
        drop: bool = True
        tie_margins: float = 0.5

        def score(self, slots: Slots, fold: Fold) -> Tensor:
            return slots.a


def test_a_pool_that_is_no_dataclass_is_refused():
    class Plain(Pool):
        def slots(self) -> int:
            return 3

        def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
            return held, new

    with pytest.raises(WeirError, match=r"the pool odd is not a dataclass, .* class Plain"):
        pool("odd")(Plain)
    assert "odd" not in POOLS
