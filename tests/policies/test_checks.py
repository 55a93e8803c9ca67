"""What a pool declares and returns is checked before the slab changes. Errors name the pool and the
problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import weir
from weir.errors import PolicyError, WeirError
from weir.policies import Pipe, policy
from weir.pools import POOLS, CounterRNG, Fold, Pool, Recent, pool
from weir.slab import AttentionParams, Slots

FOLD = Fold(CounterRNG(0), torch.tensor([8]), AttentionParams(1.0))
ANSWERS: dict[str, Any] = {}
"""What the methods of `Odd` return: the value of `slots()`, and a function for `fold`."""


@dataclass(frozen=True)
class Odd(Pool):
    """A pool whose methods return what `ANSWERS` says."""

    n: int = 3

    def slots(self) -> int:
        return ANSWERS.get("slots", self.n)

    def state(self, like: Slots) -> dict[str, Tensor]:
        return {"came": like.position.new_zeros(like.position.shape[:2])}

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        return ANSWERS["fold"](held, new, fold)


@pytest.fixture(autouse=True)
def odd() -> Iterator[None]:
    """Register the pool `odd` while a test runs."""
    pool("odd")(Odd)
    yield
    ANSWERS.clear()
    del POOLS["odd"]


def tokens(start: int, n: int, *, mass: bool = False) -> Slots:
    """Return `n` tokens in each of three heads of two rows."""
    position = torch.arange(start, start + n).expand(2, 3, n)
    keys, values, weight = torch.ones(2, 3, n, 4), torch.ones(2, 3, n, 5), torch.zeros(2, 3, n)
    return Slots(keys, values, weight, weight.clone(), position, weight.clone() if mass else None)


def folded(*, mass: bool = False) -> list[Slots]:
    """Fold a pipe of `odd` alone, which holds 2 tokens and gets 6. Return what each pool keeps."""
    held = tokens(0, 2, mass=mass)
    states = [Odd().state(held)]
    return Pipe((Odd(),)).fold([held], tokens(2, 6, mass=mass), FOLD, states)


# --- slots()


@pytest.mark.parametrize("slots", [-1, 2.5, True, "3", torch.tensor(3)])
def test_slots_that_are_no_number_of_slots_are_refused_where_the_pool_stands(slots):
    ANSWERS["slots"] = slots
    with pytest.raises(
        PolicyError, match=r"slots\(\) of the pool odd must be a whole number"
    ) as error:
        policy("recent(4) | odd(3)")
    assert error.value.at == 12
    with pytest.raises(WeirError, match=r"slots\(\) of the pool odd"):
        Pipe((Recent(4), Odd()))


@pytest.mark.parametrize("slots", [0, 7, None])
def test_no_slots_any_number_and_no_limit_are_fine(slots):
    ANSWERS["slots"] = slots
    assert policy("recent(4) | odd").slots == (None if slots is None else 4 + slots)


def test_a_pool_without_a_name_is_refused():
    @dataclass(frozen=True)
    class Nameless(Pool):
        slots = fold = None

    with pytest.raises(WeirError, match=r"Nameless has no name in policies\. Write @pool"):
        Pipe((Nameless(),))


# --- fold()


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (lambda h, n, f: None, "got NoneType"),
        (lambda h, n, f: h, "got Slots"),
        (lambda h, n, f: [h, n], "got list"),
        (lambda h, n, f: (h,), r"got \(Slots\)"),
        (lambda h, n, f: (h, n, n), r"got \(Slots, Slots, Slots\)"),
        (lambda h, n, f: (h, None), r"got \(Slots, NoneType\)"),
        (lambda h, n, f: (h.keys, n.keys), r"got \(Tensor, Tensor\)"),
    ],
)
def test_what_is_no_pair_of_slots_is_refused(answer, what):
    ANSWERS["fold"] = answer
    with pytest.raises(
        WeirError, match=(f"the fold of the pool odd must return two Slots, .* {what}$")
    ):
        folded()


CHANGES = {
    "keys of another size": (
        "keys",
        lambda t: t[..., :3],
        r"the shape \[2, 3, 2, 4\], got \[2, 3, 2, 3\]",
    ),
    "values without a dimension": (
        "values",
        lambda t: t[..., 0],
        r"the shape \[2, 3, 2, .\], got \[2, 3, 2\]",
    ),
    "one row": ("a", lambda t: t[:1], r"\[2, 3, 2\], got \[1, 3, 2\]"),
    "one head": ("b", lambda t: t[:, :1], r"\[2, 3, 2\], got \[2, 1, 2\]"),
    "a slot too few": ("b", lambda t: t[:, :, 1:], r"\[2, 3, 2\], got \[2, 3, 1\]"),
    "weights in double": (
        "a",
        lambda t: t.double(),
        r"must be torch.float32 on cpu, got torch.float64 on cpu",
    ),
    "keys in half": (
        "keys",
        lambda t: t.half(),
        r"must be torch.float32 on cpu, got torch.float16 on cpu",
    ),
    "positions that are no integers": (
        "position",
        lambda t: t.float(),
        r"must be torch.int64 on cpu, got torch.float32",
    ),
    "positions of one row": (
        "position",
        lambda t: t[0],
        r"must have the shape \[2, 3, 4\], got \[2, 3, 2, 4\]",
    ),
    "no tensor": ("values", lambda t: t.tolist(), "must be a tensor"),
    "elsewhere": ("keys", lambda t: t.to("meta"), "on cpu, got .* on meta"),
}


@pytest.mark.parametrize("flows", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_slots_whose_tensors_do_not_go_together_are_refused(change, flows):
    name, make, problem = CHANGES[change]

    def answer(held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        bad = replace(held, **{name: make(getattr(held, name))})
        return (held, bad) if flows else (bad, new)

    ANSWERS["fold"] = answer
    what = "passed on" if flows else "kept"
    with pytest.raises(
        WeirError, match=(f"^[a-z]+ of the slots that the pool odd {what} .*{problem}")
    ):
        folded()


def test_mass_is_there_when_it_is_kept_and_not_when_it_is_not():
    ANSWERS["fold"] = lambda h, n, f: (replace(h, mass=None), n)
    with pytest.raises(
        WeirError, match=("mass of the slots that the pool odd kept must be a tensor")
    ):
        folded(mass=True)
    ANSWERS["fold"] = lambda h, n, f: (replace(h, mass=h.a), n)
    with pytest.raises(WeirError, match="mass of the slots that the pool odd kept is not stored"):
        folded()


def test_more_than_its_slots_is_refused():
    ANSWERS["fold"] = lambda h, n, f: (h.join(n.part(0, 2)), n.part(2, 6))
    with pytest.raises(WeirError, match="the pool odd kept 4 slots, and its limit is 3"):
        folded()


def test_a_token_that_is_kept_and_passed_on_is_refused():
    ANSWERS["fold"] = lambda h, n, f: (n.part(0, 3), n.part(2, 6))
    with pytest.raises(WeirError, match="the pool odd has kept tokens that it has also passed on"):
        folded()


def test_each_pool_of_a_pipe_draws_its_own_numbers():
    draws = []
    ANSWERS["fold"] = lambda h, n, f: draws.append(f.draws.uniform(0, n.position)) or (h, n)
    held, pipe = tokens(0, 2), Pipe((Odd(), Odd()))
    pipe.fold([held, held], tokens(2, 6), FOLD, [Odd().state(held), Odd().state(held)])
    assert not torch.equal(*draws)


def test_a_fold_that_keeps_its_word_is_taken():
    ANSWERS["fold"] = lambda h, n, f: (h.join(n).part(5, 8), h.join(n).part(0, 5))
    (kept,) = folded(mass=True)
    assert kept.position[0, 0].tolist() == [5, 6, 7]


# --- what it remembers


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda state: state["gone"],
            r"the pool odd reads the state 'gone', but its state\(\) declares 'came'\.",
        ),
        (lambda state: state.clear(), "the state of the pool odd has nothing instead of came"),
        (
            lambda state: state.update(more=torch.zeros(1)),
            ("the state of the pool odd has came, more instead of came"),
        ),
        (
            lambda state: state.update(came=7),
            ("the state came of the pool odd must be torch.int64 on cpu, got int"),
        ),
        (
            lambda state: state.update(came=state["came"].float()),
            ("the state came of the pool odd must be torch.int64 on cpu, got torch.float32"),
        ),
    ],
)
def test_a_memory_of_other_names_or_dtypes_is_refused(change, problem):
    def answer(held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        change(fold.state)
        return held, new

    ANSWERS["fold"] = answer
    with pytest.raises(WeirError, match=problem):
        folded()


def test_a_refused_fold_leaves_the_stream_as_it_was(llama, ids):
    stream = weir.Stream(llama, "recent(4) | odd(3)", chunk=4)
    ANSWERS["fold"] = lambda h, n, f: (h, n)
    stream.feed(ids(1, 8))
    before = stream.slots(0).position.clone()
    ANSWERS["fold"] = lambda h, n, f: None
    with pytest.raises(WeirError, match="the fold of the pool odd"):
        stream.feed(ids(1, 9))
    assert torch.equal(stream.slots(0).position, before)
    ANSWERS["fold"] = lambda h, n, f: (h, n)
    stream.feed(ids(1, 9))
    assert stream.slots(0).position.max() == 16
