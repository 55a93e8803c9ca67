"""The pool `chunks` keeps the spans with the best average of another pool's scores. It is read and
written like other pools.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pools.streams import fed, places, tokens
from reference.scores import spans
from torch import Tensor

from weir.errors import PolicyError, WeirError
from weir.policies import policy
from weir.pools import Chunks, CounterRNG, Fold, Heavy, KNorm, Ranked, Recent, Sink, Tova
from weir.pools.scores.chunks import whole_spans
from weir.slab import AttentionParams, Slots

FOLD = Fold(CounterRNG(0), torch.tensor([0]), AttentionParams(1.0))


@dataclass(frozen=True)
class Told(Ranked):
    """A pool with given scores, by position in the stream."""

    name: ClassVar[str] = "told"

    n: int
    scores: tuple[float, ...]

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        return torch.tensor(self.scores)[slots.position]


def slots_of(position: list[int]) -> Slots:
    return tokens(torch.tensor(position, dtype=torch.int64)[None, None])


@given(st.data())
def test_the_best_spans_stay_whole_and_the_best_of_the_next_with_what_is_left(data):
    count, n, size = (data.draw(st.integers(*ends)) for ends in ((2, 30), (1, 12), (1, 6)))
    size = min(size, n)
    # Multiples of 2520 / 16, so that no average of up to ten scores is rounded.
    score = tuple(data.draw(st.integers(-48, 48)) / 16 * 2520 for _ in range(count))
    gone = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    there = [p for p in range(count) if p not in gone]
    cut = data.draw(st.integers(0, len(there)))
    held = slots_of([*there[:cut], *[-1] * data.draw(st.integers(0, 2))])
    pool = Chunks(Told(n, score), size)
    kept, rest = pool.fold(held, slots_of(there[cut:]), FOLD)
    all_there = len(held) + len(there) - cut <= n
    wanted = there if all_there else spans({p: score[p] for p in there}, n, size)
    assert places(kept) == [wanted]
    assert places(rest) == [sorted(set(there) - set(wanted))]


def test_spans_are_counted_from_the_beginning_of_the_stream():
    score = (0.0, 0.0, 9.0, 0.0, 0.0, 0.0)
    pool, every = Chunks(Told(2, score), 2), slots_of([0, 1, 2, 3, 4, 5])
    assert places(pool.fold(every.part(0, 0), every, FOLD)[0]) == [[2, 3]]
    began = replace(FOLD, origin=1)
    assert places(pool.fold(every.part(0, 0), every, began)[0]) == [[1, 2]]


def test_a_token_that_has_to_stay_stays_and_lifts_none_of_its_span():
    score = (1.0, 1.0, math.inf, 0.0, 3.0, -math.inf)
    every = slots_of([0, 1, 2, 3, 4, 5])
    first = torch.tensor([[score]])
    assert whole_spans(2, 0, 3, every, (first,))[0, 0].tolist() == [1, 0, 1, 0, 1, 0]
    assert whole_spans(2, 0, 6, every, (first,))[0, 0].tolist() == [1, 1, 1, 1, 1, 0]


def test_spans_of_the_same_average_are_not_mixed():
    every, flat = slots_of(list(range(8))), torch.zeros(1, 1, 8)
    within = torch.tensor([[[0.0, 1, 2, 3, 4, 5, 6, 7]]])
    assert whole_spans(4, 0, 6, every, (flat, within))[0, 0].tolist() == [1, 1, 1, 1, 0, 0, 1, 1]


def test_it_asks_for_what_its_pool_asks_for_and_has_its_slots():
    made = Chunks(Heavy(12), 4)
    assert (made.needs_mass, made.needs_queries, made.slots()) == (True, 0, 12)
    assert made.resized(20) == Chunks(Heavy(20), 4)
    assert Chunks(Tova(12), 4).needs_queries == 1
    held, gone = fed(made, [7, 9, 3, 11])
    assert [len(head) for head in places(held)] == [12, 12]
    assert sum(len(head) for rest in gone for head in places(rest)) == 2 * 18


def test_it_is_written_around_a_pool_and_read_again():
    made = policy("sink(4) | recent(60) | chunks(heavy(64), size=8)")
    assert made.pools == (Sink(4), Recent(60), Chunks(Heavy(64), 8))
    assert made.stands_for == "sink(4) | recent(60) | chunks(heavy(64), size=8)"
    # keydiff is the pool here, and not the policy of the same name, which needs a larger budget.
    assert policy("recent(9) | chunks(keydiff(4), size=2)").pools[1].slots() == 4
    assert policy(str(policy("chunks(pool=knorm(12))"))).pools == (Chunks(KNorm(12)),)
    assert policy("pyramid(sink(4) | recent(60) | chunks(heavy(64), 8), beta=2)").for_layer(0, 2)


@pytest.mark.parametrize(
    ("text", "reason", "at"),
    [
        ("chunks(recent(9), 3)", "needs an inner pool that keeps tokens by a score", 0),
        ("recent(4) | chunks(heavy(6), size=7)", "got 7", 12),
        ("recent(4) | chunks(heavy(0), size=1)", "at least 1 token", 19),
        ("recent(4) | chunks(heavvy(6))", "did you mean 'heavy'", 19),
        ("recent(4) | chunks(6)", "pool of chunks must be a pool, got 6", 19),
        ("recent(4) | chunks(none)", "pool of chunks must be a pool, got none", 19),
        ("chunks(sink(4) | heavy(6))", "expected one pool", 7),
        ("recent(4) | chunks(heavy)", "heavy needs a value for 'n'", 19),
        ("recent(4) | chunks(heavy(6):int8, 2)", "after the outer pool", 19),
        ("recent(4) | chunks(chunks(heavy(6), 2), 2)", "got chunks", 12),
        (
            "recent(4) | knorm(5) | chunks(tova(6), size=2)",
            "but knorm before it keeps different ones",
            23,
        ),
    ],
)
def test_what_it_cannot_go_around_is_pointed_at(text, reason, at):
    with pytest.raises(PolicyError, match=reason) as refusal:
        policy(text)
    assert refusal.value.at == at


def test_a_pool_with_a_fold_of_its_own_is_refused_because_chunks_would_skip_it():
    class Counted(Told):
        def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
            return super().fold(held, new, fold)

    with pytest.raises(WeirError, match=r"Counted has a separate fold\(\), which chunks would not"):
        Chunks(Counted(4, ()), 2)
    assert Chunks(Told(4, ()), 2).slots() == 4
