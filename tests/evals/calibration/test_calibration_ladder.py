"""The sizes of a pipe that calibration tries, and the splits of its slots among pools."""

from __future__ import annotations

import pytest

import weir
from weir.evals.calibration import EIGHTHS, size_ladder


def tried(text: str, most: int = 10**6, **options) -> list[str]:
    return [pipe.stands_for for pipe in size_ladder(weir.policy(text), most, **options)]


def test_a_pipe_is_tried_from_a_quarter_to_four_times_its_slots():
    found = tried("sink(4) | recent(80)")
    assert found == [f"sink(4) | recent({10 * n})" for n in EIGHTHS]
    assert (found[0], found[-1]) == ("sink(4) | recent(20)", "sink(4) | recent(320)")
    assert tried("sink(4) | recent(80)", most=84) == found[:7]
    assert tried("sink(4) | recent(80)", most=0) == ["sink(4) | recent(80)"]  # always its own
    assert tried("sink(4)") == ["sink(4)"]


@pytest.mark.parametrize(
    ("text", "half"),
    [
        ("sink(4) | recent(60) | kcenter(20)", "sink(4) | recent(30) | kcenter(10)"),
        ("beginning(8) | recent(8) | header(4) | heavy(8)",
         "beginning(8) | recent(4) | header(4) | heavy(4)"),
        ("recent(8):int8 | kcenter(8):int8", "recent(4):int8 | kcenter(4):int8"),
        ("snap(24, window=8)", "snap(16, window=8)"),  # its window stays 8 in every size
    ],
)  # fmt: skip
def test_pools_keep_their_shares_and_what_is_fixed_stays(text, half):
    assert half in tried(text)


def test_a_split_moves_newest_tokens_and_others_against_each_other():
    found = tried("sink(4) | recent(48) | heavy(8) | kcenter(8)", splits=True)
    same = [pipe for pipe in found if weir.policy(pipe).slots == 68]
    assert set(same) == {
        "sink(4) | recent(48) | heavy(8) | kcenter(8)",  # three quarters, as given
        "sink(4) | recent(16) | heavy(24) | kcenter(24)",
        "sink(4) | recent(32) | heavy(16) | kcenter(16)",
        "sink(4) | recent(56) | heavy(4) | kcenter(4)",
    }
    assert tried("sink(4) | recent(80)", splits=True) == tried("sink(4) | recent(80)")


def test_sizes_that_a_pool_does_not_come_in_are_left_out():
    assert tried("recent(2) | kcenter(2)")[0] == "recent(1) | kcenter(1)"  # a half, not a quarter
    found = tried("recent(20) | subgen(samples=16, clusters=8, per_cluster=4)")
    assert "recent(20) | subgen(16, clusters=8)" in found
    assert all(weir.policy(pipe).slots for pipe in found)
