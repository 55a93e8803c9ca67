"""The engine's kernels are found where they can be used, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from weir import kernels
from weir.native import dispatch

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_cpu_has_all_kernels_of_the_engine_and_a_gpu_none(monkeypatch) -> None:
    pytest.importorskip("numba", reason="not installed: pip install '.[fast]'")
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    paths = dispatch.paths(CPU)
    assert {paths["linear"], paths["decode_step"]} == {"numba"}
    assert set(dispatch.paths(GPU).values()) == {"reference"}
    assert dispatch.decode_step(GPU) is None


def test_the_environment_may_ask_for_none_of_them(monkeypatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "reference")
    assert set(dispatch.paths(CPU).values()) == {"reference"}
    assert dispatch.linear(CPU) is dispatch.decode_step(CPU) is None
    assert dispatch.linear_blocks(torch.zeros(1, 32)) is None


def test_blocks_have_no_kernel_on_a_processor_without_their_instruction(monkeypatch) -> None:
    blocks = pytest.importorskip("weir.native.kernels.linear_blocks")
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    monkeypatch.setattr(blocks, "SUPPORTED", False)
    kernels.forget_kernels()
    try:
        assert dispatch.linear_blocks(torch.zeros(1, 32)) is None
        assert dispatch.paths(CPU)["linear_blocks"] == "reference"
    finally:
        kernels.forget_kernels()
