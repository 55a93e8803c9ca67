"""Calibration gives bytes to the layers in which they lower the error most."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weir.evals.calibration import SizeOption, choose_sizes


def choices(*errors: float, step: int = 10) -> list[SizeOption]:
    """Sizes of a layer with the given errors, each `step` bytes larger than the one before."""
    return [SizeOption(step * (n + 1), error) for n, error in enumerate(errors)]


def spent(layers, taken) -> tuple[int, float]:
    """Bytes and error of all layers together."""
    each = [sizes[n] for sizes, n in zip(layers, taken, strict=True)]
    return sum(it.nbytes for it in each), sum(it.error for it in each)


def least(layers, total) -> float:
    """The least error of all choices that take at most `total` bytes."""
    ways = itertools.product(*(range(len(sizes)) for sizes in layers))
    return min(error for n, error in (spent(layers, way) for way in ways) if n <= total)


sizes = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=4)


@given(st.lists(sizes, min_size=1, max_size=4), st.integers(0, 60))
def test_no_other_way_to_spend_the_bytes_leaves_less_error(some, more):
    layers = [[SizeOption(*pair) for pair in each] for each in some]
    total = sum(min(option.nbytes for option in each) for each in layers) + more
    nbytes, error = spent(layers, choose_sizes(layers, total))
    assert nbytes <= total
    assert error == least(layers, total)


def test_steps_of_a_hundred_layers_are_shared_out_exactly():
    """Steps of layers cost different numbers of bytes, so a greedy choice may not be the best."""
    layers = [choices(9, 5, 3, 2, step=100 + 7 * (n % 13)) for n in range(100)]
    total = sum(each[0].nbytes for each in layers) + 12345
    nbytes, error = spent(layers, choose_sizes(layers, total))
    # The textbook table of the knapsack problem: for each number of bytes, the least error of the
    # layers so far.
    table = np.full(12346, np.inf)
    table[:] = 0.0
    for each in layers:
        more = [option.nbytes - each[0].nbytes for option in each]
        grown = np.full(12346, np.inf)
        for extra, option in zip(more, each, strict=True):
            there = grown[extra:]
            there[:] = np.minimum(there, table[: len(there)] + option.error)
        table = grown
    assert nbytes <= total
    assert error == table[-1]


def test_by_hand():
    layers = [choices(8, 4, 3), choices(9, 8, 7), choices(6, 1, 0)]
    # The smallest sizes take 30 bytes. The further steps lower the error by 4 and 1 in the first
    # layer, by 1 and 1 in the second, and by 5 and 1 in the third.
    assert choose_sizes(layers, 30) == [0, 0, 0]
    assert choose_sizes(layers, 40) == [0, 0, 1]
    assert choose_sizes(layers, 59) == [1, 0, 1]
    assert choose_sizes(layers, 10**6) == [2, 2, 2]
    assert choose_sizes(layers, 0) == [0, 0, 0]


def test_bytes_are_what_counts_and_not_sizes():
    dear, cheap = choices(8, 4, step=100), choices(8, 7)
    assert choose_sizes([dear, cheap], 200) == [0, 1]  # 4 less error for 100 bytes, 1 less for 10


def test_a_size_that_buys_nothing_hides_none_behind_it():
    assert choose_sizes([choices(5, 5, 5, 0), choices(5, 4, 4, 4)], 50) == [3, 0]


def test_a_layer_that_needs_all_gets_all_and_one_that_needs_nothing_stays_small():
    needs, idle = choices(9, 8, 7, 6, 5), choices(0, 0, 0, 0, 0)
    assert choose_sizes([idle, needs, idle], 70) == [0, 4, 0]


def test_what_costs_no_more_is_taken_if_it_is_better():
    assert choose_sizes([[SizeOption(10, 5.0), SizeOption(10, 3.0), SizeOption(20, 4.0)]], 20) == [
        1
    ]
    assert choose_sizes([[SizeOption(10, 5.0), SizeOption(20, 3.0), SizeOption(20, 2.0)]], 20) == [
        2
    ]
