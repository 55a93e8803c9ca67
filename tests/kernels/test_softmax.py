"""The kernels' softmax is exact up to a few roundings of float32, however far apart logits are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

softmax_kernel = pytest.importorskip(
    "weir.kernels.cpu.softmax",
    reason="not installed: pip install '.[fast]'",
    exc_type=ImportError,
)
EPS = 2.0**-24


@pytest.mark.parametrize("count", [2, 33])
def test_shares_are_right_to_rounding(count):
    """The largest logit is 0, so subtracting it rounds nothing. The reduced argument and the
    polynomial are each off by two roundings, the sum by at most one rounding for each number, and
    the sum's inverse and the final product by one each.
    """
    for low in np.linspace(-86, -0.01, 87):
        row = np.linspace(low, 0, count).astype(np.float32)
        exact = torch.softmax(torch.from_numpy(row).double(), 0).numpy()
        softmax_kernel.softmax(row, np.empty(count, np.int32))
        assert (np.abs(row - exact) <= (6 + count) * EPS * exact).all()


def test_the_two_parts_of_ln_2_are_not_added_first():
    """Adding e^-20 or less to 1 does not change the 1, so the only roundings are those of the
    exponential's argument and of its polynomial. If ln 2 were a single number, the result would be
    off by four roundings with FMA (fused multiply-add) and by 68 without.
    """
    for low in np.linspace(-86, -20, 67, dtype=np.float32):
        row, exact = np.array([low, 0], np.float32), np.exp(np.float64(low))
        softmax_kernel.softmax(row, np.empty(2, np.int32))
        assert abs(row[0] - exact) <= 2 * EPS * exact


def test_what_is_next_to_nothing_is_nothing_and_what_is_no_number_spreads():
    for given, wanted in (
        ([0.0, -88.0, -np.inf], [1, 0, 0]),
        ([-np.inf, -np.inf], [0, 0]),
        ([-np.inf, 3e38, -3e38], [0, 1, 0]),
    ):
        row = np.array(given, np.float32)
        softmax_kernel.softmax(row, np.empty(len(row), np.int32))
        assert row.tolist() == wanted
    for wrong in (np.nan, np.inf):
        row = np.array([0.0, wrong, 1.0], np.float32)
        softmax_kernel.softmax(row, np.empty(3, np.int32))
        assert np.isnan(row).all()
