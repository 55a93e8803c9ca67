"""Wilson's and Student's intervals, compared with printed tables and with their definitions."""

from __future__ import annotations

import math
from statistics import NormalDist, fmean, stdev

import pytest

from weir.evals.scores import count_right, mean_interval, student, wilson


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [
        # Newcombe 1998, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),  # mirrored: the table has 0 of 29
    ],
)
def test_known_intervals(right, asked, low, high):
    assert wilson(right, asked) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("right", "asked"), [(3, 17), (90, 100)])
def test_its_ends_are_where_the_share_seen_is_just_likely_enough(right, asked):
    for end in wilson(right, asked):
        z = (right / asked - end) / math.sqrt(end * (1 - end) / asked)
        assert abs(z) == pytest.approx(1.9599640, abs=5e-8)


def test_nothing_asked_says_nothing():
    assert count_right(0, 0) == {"right": 0, "asked": 0, "accuracy": None, "low": 0.0, "high": 1.0}
    assert count_right(3, 4)["accuracy"] == 0.75


@pytest.mark.parametrize(
    ("freedom", "confidence", "t"),
    [
        # From the usual table of Student's t: two-sided, three decimals.
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (3, 0.95, 3.182),
        (4, 0.99, 4.604),
        (7, 0.95, 2.365),
        (8, 0.90, 1.860),
        (30, 0.95, 2.042),
        (101, 0.99, 2.625),
    ],
)
def test_students_table(freedom, confidence, t):
    assert student(freedom, confidence) == pytest.approx(t, abs=5e-4)


def test_with_many_figures_the_interval_of_a_mean_is_the_normal_one():
    figures = [float(n % 7) for n in range(3000)]
    mean, reach = mean_interval(figures)
    assert mean == fmean(figures)
    assert reach is not None
    z = NormalDist().inv_cdf(0.975)
    assert reach == pytest.approx(z * stdev(figures) / math.sqrt(3000), rel=1e-3)


def test_one_figure_has_no_interval():
    assert mean_interval([3.5]) == (3.5, None)
