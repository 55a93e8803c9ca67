"""The decode kernel's figure: skipped without a GPU, and run on the CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from weir import kernels
from weir_bench.figure import Setting, Skipped
from weir_bench.figures.kernels import DIM, GROUP, HEADS, kernel, reached


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_figure_is_skipped() -> None:
    with pytest.raises(Skipped, match="no GPU"):
        next(kernel(Setting()))


def test_without_a_kernel_the_figure_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "reference")
    with pytest.raises(Skipped, match=r"no decode kernel for cpu.*\.\[gpu\]"):
        reached(torch.device("cpu"), 1, 8, rounds=1)


def test_both_bandwidths_are_of_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="not installed: pip install '.[gpu]'")
    if torch.cuda.is_available():
        pytest.skip("on a GPU the kernel is compiled and the CPU has no interpreter")
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    batch, slots = 2, 70
    times = {"ours": [4.0], "copy": [1.0]}
    timed = "weir_bench.figures.kernels.in_turns"
    monkeypatch.setattr(timed, lambda both, rounds, warm: ran(both, times))
    row = reached(torch.device("cpu"), batch, slots, rounds=1)
    heads = batch * HEADS
    moved = 2 * heads * GROUP * DIM + 2 * 2 * heads * slots * DIM + 2 * 4 * heads * slots
    assert row.ours == moved / 4e9
    assert row.peer == moved / 1e9
    assert row.ratio == 0.25
    assert row.met is False
    assert "triton" in row.note


def ran(both: dict, times: dict) -> dict:
    """Run each step once, and return times that the test has chosen."""
    for step in both.values():
        step()
    return times
