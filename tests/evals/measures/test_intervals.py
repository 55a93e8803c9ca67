"""Wilson's interval, against figures worked out by hand and its own definition."""

from __future__ import annotations

import math

import pytest

from weir.evals.measures.intervals import counted, wilson


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [
        # Newcombe 1998, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),  # 0 of 29 there, mirrored
    ],
)
def test_known_intervals(right, asked, low, high):
    assert wilson(right, asked) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("right", "asked"), [(3, 17), (90, 100)])
def test_its_ends_are_where_the_share_seen_is_just_likely_enough(right, asked):
    for end in wilson(right, asked, 0.9):
        z = (right / asked - end) / math.sqrt(end * (1 - end) / asked)
        assert abs(z) == pytest.approx(1.6448536, abs=5e-8)


def test_nothing_asked_says_nothing():
    assert counted(0, 0) == {"right": 0, "asked": 0, "accuracy": None, "low": 0.0, "high": 1.0}
    assert counted(3, 4)["accuracy"] == 0.75
