"""Which pools named policies stand for, and how they divide a budget among these pools."""

from __future__ import annotations

import pytest

from weir.errors import WeirError
from weir.policies import policy

STANDS_FOR = {
    "h2o": "recent(128) | heavy(128)",
    "h2o(budget=9)": "recent(5) | heavy(4)",
    "kcenter": "recent(128) | kcenter(128)",
    "kcenter(budget=7)": "recent(4) | kcenter(3)",
    "kcenter(k=9)": "kcenter(k=9)",
    "balancekv(budget=256)": "sink(32) | recent(32) | balance(192)",
    "balancekv(budget=2048)": "sink(256) | recent(256) | balance(1536)",
    "balancekv(64, sinks=0, recent=10, block=8, halves=authors, gamma=none, sets=flat)": (
        "recent(10) | balance(54, block=8, halves=authors, gamma=none, sets=flat)"
    ),
    "balancekv(256, outliers=0.34)": "sink(32) | recent(32) | outliers(65) | balance(127)",
    "reservoir": "sink(4) | recent(188) | reservoir(64)",
    "reservoir(6, 2, 2)": "sink(2) | recent(2) | reservoir(2)",
    "reservoir(64, sinks=0)": "recent(48) | reservoir(16)",
    "reservoir(64, weighted=true)": "sink(4) | recent(44) | reservoir(16, weighted=true)",
    "reservoir(9, 4, 4, per_head=true)": "sink(4) | recent(1) | reservoir(4, per_head=true)",
    "reservoir(n=9)": "reservoir(n=9)",
    "reservoir(9) | recent(3)": "reservoir(9) | recent(3)",
    "uniform": "sink(32) | recent(32) | uniform(192, weighted=true)",
    "uniform(budget=2048)": "sink(256) | recent(256) | uniform(1536, weighted=true)",
    "uniform(64, sinks=0, recent=10)": "recent(10) | uniform(54, weighted=true)",
    "uniform(64, weighted=false)": "sink(8) | recent(8) | uniform(48)",
    "uniform(rate=.25)": "sink(32) | recent(32) | uniform(none, rate=0.25, weighted=true)",
    "uniform(rate=0.5, sinks=4, recent=60, per_head=false)": (
        "sink(4) | recent(60) | uniform(none, rate=0.5, weighted=true, per_head=false)"
    ),
    "uniform(n=9)": "uniform(n=9)",
    "subgen(budget=320)": "sink(4) | recent(124) | subgen(64)",
    "subgen(50, sinks=0, recent=10, clusters=5, per_cluster=2, delta=1.5, exact=false)": (
        "recent(10) | subgen(30, clusters=5, per_cluster=2, delta=1.5, exact=false)"
    ),
}


@pytest.mark.parametrize("text", STANDS_FOR)
def test_a_name_stands_for_pools(text):
    assert policy(text).stands_for == STANDS_FOR[text]
    assert policy(STANDS_FOR[text]).pools == policy(text).pools


@pytest.mark.parametrize("name", ["balancekv", "subgen", "h2o", "kcenter", "reservoir", "uniform"])
def test_it_has_the_slots_of_its_budget(name):
    for budget in (12, 100, 257, 4999):
        assert policy(f"{name}(budget={budget})").slots == budget
    assert policy("uniform(rate=0.25)").slots is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("balancekv(budget=5)", "leaves fewer than 4 slots for balance"),
        ("balancekv(64, recent=60)", "leaves fewer than 4 slots for balance"),
        (
            "balancekv(64, outliers=0.95)",
            (r"fewer than 4 slots .*sink\(8\), recent\(8\) and " r"outliers\(45\)"),
        ),
        ("subgen(budget=8)", "leaves no slots for samples after 4 sinks"),
        ("subgen(64, recent=60)", "leaves no slots for samples after 4 sinks"),
        ("subgen(64, clusters=30)", "leaves no slots for samples after 4 sinks"),
        ("kcenter(budget=1)", "a budget of 1 leaves no slots"),
        ("kcenter(budget=-4)", "a budget of -4 leaves no slots"),
        ("h2o(budget=1)", "a budget of 1 leaves no slots"),
        ("uniform(2)", r"a budget of 2 leaves no slots for samples after 1 sinks and"),
        ("uniform(64, sinks=4, recent=60)", "samples after 4 sinks and 60 recent tokens"),
        ("uniform(64, 0.5)", "takes either a budget or a rate, got both: budget=64 and rate=0.5"),
        ("reservoir(5)", "no slots for recent tokens after 4 sinks and"),
        ("reservoir(64, samples=60)", "no slots for recent tokens after 4 sinks and"),
    ],
)
def test_a_budget_too_small_for_its_parts_is_refused(text, reason):
    with pytest.raises(WeirError, match=reason):
        policy(text)


@pytest.mark.parametrize(
    ("last", "after"),
    [
        ("balance(16)", "recent(3)"),
        ("subgen(samples=4)", "recent(3)"),
        ("reservoir(8, weighted=true)", "recent(4)"),
        ("reservoir(8, weighted=true)", "reservoir(4)"),
        ("uniform(9, weighted=true)", "recent(4)"),
        ("uniform(rate=0.5, weighted=true)", "recent(4)"),
    ],
)
def test_nothing_can_follow_what_stands_for_all(last, after):
    with pytest.raises(WeirError, match=f"{after.partition('(')[0]} would get no tokens"):
        policy(f"sink(4) | recent(8) | {last} | {after}")
    policy(f"sink(4) | recent(8) | heavy(4) | {after}")
