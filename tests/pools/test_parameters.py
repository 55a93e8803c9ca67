"""Values that parameters cannot have are refused with one sentence that points at the value."""

from __future__ import annotations

import math

import pytest
import torch

from weir.errors import PolicyError, WeirError
from weir.policies import policy
from weir.pools import Balance, Chunks, Hive, KCenter, Ladder, Recent, SubGen, Uniform
from weir.pools.base import FINITE, FROM_0, LOG_WEIGHT, find_outside
from weir.pools.parameters import Bounds

COUNT = "must be a whole number of at least 1"
OUT_OF_BOUNDS = {
    "recent(»0)": COUNT,
    "recent(4) | uniform(»0)": COUNT,
    "recent(4) | uniform(rate=»0.0)": "must be a number above 0 to 1 or none",
    "recent(4) | uniform(rate=»1.5)": "must be a number above 0 to 1 or none",
    "snap(9, window=»0)": COUNT,
    "snap(9, 4, kernel=»4)": "must be a whole number of at least 1 and odd, got 4",
    "snap(9, 4, kernel=»-1)": "must be a whole number of at least 1 and odd, got -1",
    "snap(9, 4, frame=»cache)": "must be read or stream",
    "recent(4) | tail(4, floor=»1.5)": "must be a number from 0 to 1",
    "recent(4) | tail(4, watch=»-1)": "must be a whole number of at least 0",
    "defend(9, window=»0)": COUNT,
    "defend(9, half_life=»0)": COUNT + " or none",
    "defend(9, kernel=»4)": "odd",
    "defend(9, wide=»-1)": "of at least 0",
    "residue(9, half_life=»0)": COUNT + " or none",
    "residue(9, window=»0)": COUNT,
    "match(heavy(9), window=»0)": COUNT,
    "match(heavy(9), half_life=»0)": COUNT + " or none",
    "match(heavy(9), pull=»0)": "must be a number of at least 0.001",
    "outliers(8, over=»1)": "of at least 2",
    "outliers(8, dilate=»-1)": "of at least 0",
    "outliers(8, below=»1.5)": "must be a number from -1 to 1 or none",
    "kcenter(8, spans=»-1)": "of at least 0",
    "kcenter(8, use=»-0.5)": "of at least 0",
    "kcenter(8, fresh=»1.0)": "from 0 to less than 1",
    "kcenter(8, quiet=»-1)": "from 0 to 10000",
    "kcenter(8, half_life=»0)": COUNT + " or none",
    "balance(»3)": "of at least 4",
    "balance(64, halves=»thirds)": "must be pairs or authors or paper",
    "balance(64, sets=»own)": "must be shared or flat or separate",
    "balance(64, gamma=»-1.0)": "of at least 0 or none",
    "balance(64, temperature=»-1)": "of at least 0",
    "balance(64, constant=»-1)": "of at least 0",
    "balance(64, precision=»-0.1)": "of at least 0",
    "subgen(samples=»0)": COUNT,
    "recent(4) | subgen(clusters=»0)": COUNT + " or none",
    "recent(4) | subgen(per_cluster=»0)": COUNT,
    "recent(4) | subgen(delta=»0.0)": "must be a number above 0 or auto",
    "recent(4) | subgen(delta=»-1)": "must be a number above 0 or auto",
    "recent(4) | subgen(delta=»wide)": "must be a number above 0 or auto",
    "curdkv(8, window=»1)": "of at least 2 or none",
    "lagkv(8, lag=»1)": "of at least 2",
    "scissorhands(8, window=»0)": COUNT,
    "keyformer(8, hot=»0.5)": "of at least 1",
    "keyformer(8, over=»0)": COUNT,
    "rkv(8, kernel=»4)": "odd",
    "rkv(8, weight=»1.5)": "from 0 to 1",
    "rkv(8, alike=»-2.0)": "from -1 to 1",
    "critical(8, first=»-0.1)": "from 0 to 1",
    "critical(8, floor=»-1)": "of at least 0",
    "caote(8, window=»-1)": COUNT,
    "vase(8, kernel=»2)": "odd",
    "expected(8, ahead=»0)": "from 1 to 1.04858e+06",
    "expected(8, floor=»-1.0)": "of at least 0",
    "expected(8, queries=»0)": COUNT,
    "tri(8, ahead=»-4)": "from 1 to",
    "qfilters(8, queries=»0)": COUNT,
    "chunks(heavy(6), size=»0)": COUNT,
    "gated(6, kernel=»2)": "odd",
    "balancekv(outliers=»1.0)": "from 0 to less than 1",
}


@pytest.mark.parametrize("marked", OUT_OF_BOUNDS)
def test_a_number_out_of_bounds_is_pointed_at(marked):
    text, at = marked.replace("»", ""), marked.index("»")
    with pytest.raises(PolicyError) as error:
        policy(text)
    assert OUT_OF_BOUNDS[marked] in str(error.value)
    assert error.value.at == at
    assert "\n" not in str(error.value)


PLACES = {
    "»sink(0)": "sink must keep at least 1 token, got 0",
    "»heavy(-3)": "heavy must keep at least 1 token, got -3",
    "»kcenter(k=0)": "kcenter must keep at least 1 token, got 0",
    "recent(4) | »uniform()": "got neither. Write",
    "recent(4) | »uniform(4, 0.5)": "both, n=4 and rate=0.5. Write",
    "»outliers(8, dilate=8)": "needs at least 9 slots, because the newest 8 tokens … got 8",
    "recent(4) | »balance(64, 0)": "an even number of tokens from 2 to 32, got 0",
    "recent(4) | »balance(64, 7)": "an even number of tokens from 2 to 32, got 7",
    "recent(4) | »balance(64, 34)": "an even number of tokens from 2 to 32, got 34",
    "recent(4) | »balance(7, 4)": "an even number of tokens from 2 to 2, got 4",
    "recent(4) | »balance(64, sets=flat)": "sets=flat needs halves=authors",
    "recent(4) | »subgen(clusters=none)": "needs a delta if clusters=none",
    "»ladder(8, 2, 2)": "at least 1 and less than of=2, … a group is kept, got 2",
    "»ladder(8, 0, 4)": "at least 1 and less than of=4, … a group is kept, got 0",
    "»ladder(3, 1, 4)": "a group, at least 4, got 3",
    "»vase(8, wide=9)": "from 0 to n, 8, got 9",
    "»lagkv(8, lag=16)": "put recent(32) before it",
    "recent(4) | knorm(4) | »tova(4)": "knorm before it keeps different ones in each",
    "»snap(32)": "budget of snap must be at least 33, because the newest 32 … got 32",
    "»snapkv(budget=32)": "must be at least 33, because the newest 32 tokens … got 32",
    "recent(8) | »snap(24)": "the newest 24 tokens",
    "heavy(8) | »snap(32)": "the newest 32 tokens",
    "tail(4) | »recent(4)": "no tokens: tail keeps or represents … Put tail last in the pipe",
    "residue(9) | »recent(4)": "residue keeps or represents … Put residue last in the pipe",
    "match(heavy(9)) | »recent(4)": "match keeps or represents … Put match last in the pipe",
    "»match(residue(9))": "has a limit and keeps weights unchanged, … got residue",
    "»match(recent(none))": "has a limit and keeps weights unchanged, … got recent",
    "»match(match(heavy(9)))": "has a limit and keeps weights unchanged, … got match",
    "»match(kcenter(9, quiet=3))": "has a limit and keeps weights unchanged, … got kcenter",
    "recent(4) | »match(sink(4))": "sink",
    "»attention_matching(budget=40)": "a budget of 40 leaves too few slots",
}


@pytest.mark.parametrize("marked", PLACES)
def test_parameters_that_make_no_sense_together_or_there_are_pointed_at(marked):
    text, at = marked.replace("»", ""), marked.index("»")
    with pytest.raises(PolicyError) as error:
        policy(text)
    for part in PLACES[marked].split(" … "):
        assert part in str(error.value)
    assert error.value.at == at


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: KCenter(8, use=math.inf),
            ("use of kcenter must be a number of at least 0, got inf"),
        ),
        (lambda: KCenter(8, fresh=math.nan), "fresh of kcenter must be .*, got nan"),
        (lambda: SubGen(delta=math.inf), "delta of subgen must be a number above 0 or auto"),
        (lambda: Uniform(rate=math.nan), "rate of uniform must be .* got nan"),
        (lambda: Balance(64, temperature=math.inf), "temperature of balance must be"),
        (lambda: Recent(-1), "n of recent must be"),
        (lambda: Hive(20, 2), "stride must be at least 3, got 2"),
        (lambda: Chunks(Recent(4), 2), "an inner pool that keeps tokens by a score"),
        (lambda: Ladder(3, 1, 4), "a slot for each token of a group, at least 4, got 3"),
    ],
)
def test_the_same_is_refused_in_python(make, reason):
    with pytest.raises(WeirError, match=reason):
        make()


def test_bounds_say_what_is_inside():
    assert 1 in Bounds(1)
    assert math.inf not in Bounds(1)
    assert math.nan not in Bounds(0)
    assert 1.0 not in Bounds(0, 1, without=1)
    assert 0.0 not in Bounds(0, 1, without=0)
    assert [n for n in range(-1, 6) if n in Bounds(1, odd=True)] == [1, 3, 5]


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ((0, 4), [0, 4], [-1, 5]),
        (FINITE, [-1e30, 1e30], [math.nan, math.inf, -math.inf]),
        (FROM_0, [0.0, 1e30], [-1e-9, math.nan, math.inf]),
        (LOG_WEIGHT, [-math.inf, -9.0, 1e4], [math.nan, math.inf, 10001.0]),
    ],
)
def test_a_state_out_of_its_bounds_is_found(bounds, good, bad):
    assert find_outside({"x": torch.tensor(good)}, x=bounds, y=bounds) is None
    for number in bad:
        assert find_outside({"x": torch.tensor([*good, number])}, x=bounds).startswith("x is not")
