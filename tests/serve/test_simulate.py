"""A simulated fleet: what rows are found follows from who came where, and from nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weir.errors import WeirError
from weir.serve.simulate import Fleet, arrivals, main, ring, simulate

SMALL = Fleet(sessions=400, replicas=4, rows=400, bursts=24.0, hours=2.0)


def test_turns_come_in_order_as_often_as_was_said_and_apart():
    fleet = replace(SMALL, sessions=20_000)
    at, whose = arrivals(fleet)
    assert (np.diff(at) >= 0).all()
    # 24 bursts a day of 5 turns; those that begin in the last minutes have not all come.
    assert len(at) == pytest.approx(20_000 * 24 / 24 * 2 * 5, rel=0.1)
    once = replace(fleet, bursts=0.01)  # so that nobody has two bursts that overlap
    at, whose = arrivals(once)
    between = [np.diff(at[whose == session]) for session in set(whose.tolist())]
    assert min(gaps.min() for gaps in between if len(gaps)) >= fleet.turn - 1e-6


def test_with_a_row_for_everybody_only_first_turns_are_read_back():
    at, whose = arrivals(SMALL)
    seen = set(whose[at < SMALL.seconds / 2].tolist())
    counted = whose[at >= SMALL.seconds / 2].tolist()
    new = len(set(counted) - seen)
    found = simulate(SMALL)
    assert (found.turns, found.hits) == (len(counted), len(counted) - new)
    assert simulate(SMALL) == found
    assert simulate(replace(SMALL, seed=1)) != found


def test_rows_at_rest_go_in_the_order_they_were_used():
    fleet = replace(SMALL, replicas=1, rows=40, turn=1e-6)
    at, whose = arrivals(fleet)
    order: list[int] = []
    hits = 0
    for now, session in zip(at.tolist(), whose.tolist(), strict=True):
        hits += session in order and now >= fleet.seconds / 2
        order = [*[each for each in order if each != session][-39:], session]
    assert simulate(fleet).hits == hits


def test_to_where_it_was_last_is_as_hashing_until_a_replica_fails():
    few = replace(SMALL, rows=60)
    assert simulate(few) == simulate(replace(few, routing="hash"))
    fails = replace(few, fails=True)
    assert simulate(fails).hits < simulate(few).hits
    assert simulate(replace(few, routing="random")).rate < simulate(few).rate - 0.2


def test_a_replica_that_goes_takes_no_sessions_but_its_own_along():
    fleet = replace(SMALL, sessions=5000)
    before, after = ring(fleet, [0, 1, 2, 3]), ring(fleet, [1, 2, 3])
    assert (before[before != 0] == after[before != 0]).all()
    assert set(after.tolist()) == {1, 2, 3}
    assert np.bincount(before).min() > 5000 / 4 / 2


def test_the_table_has_a_line_for_each_fleet(capsys):
    main(
        ["--sessions", "100", "--replicas", "2", "3", "--rows", "8", "--routing", "hash", "--fails"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("| routing | replicas |")
    assert lines[2].startswith("| hash, one fails | 2 | 8 |")


def test_what_makes_no_sense_is_refused(capsys):
    for wrong in ({"rows": 0}, {"think": float("nan")}, {"turns": 0.5}, {"routing": "x"}):
        with pytest.raises(WeirError):
            replace(SMALL, **wrong)
    with pytest.raises(WeirError, match="there must be two"):
        Fleet(replicas=1, fails=True)
    with pytest.raises(SystemExit):
        main(["--hours", "-1"])
    assert "hours must be over 0, not -1.0" in capsys.readouterr().err
