"""The kernels of the balancing walk return exactly the signs of the PyTorch version."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import need_triton
from torch import Tensor

from weir import kernels
from weir.pools.balance import halving
from weir.pools.balance.halving import Halving, Sets

LIBRARIES = {"numba": "fast", "triton": "gpu"}


@pytest.fixture(params=["numba", pytest.param("triton", marks=pytest.mark.slow)])
def library(request: pytest.FixtureRequest) -> str:
    """Return the library whose kernel is tested; skip the test if it is not installed."""
    extra = LIBRARIES[request.param]
    pytest.importorskip(request.param, reason=f"not installed: pip install '.[{extra}]'")
    if request.param == "triton":
        need_triton()
    return request.param


@pytest.fixture
def walk(library: str) -> Callable[..., Tensor]:
    """Return the function `walk` of the tested library's kernel."""
    return import_module(f"weir.kernels.{'cpu' if library == 'numba' else 'gpu'}.walk").walk


@st.composite
def walks(draw, blocks: int = 4, tokens: int = 70) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw arguments of a walk: products that are far from symmetric, sums in which large terms
    cancel, and gains of any size.
    """
    shape = draw(st.sampled_from([(draw(st.integers(1, blocks)),), (2, draw(st.integers(0, 2)))]))
    n = draw(st.integers(1, tokens))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    size = 2.0 ** torch.randint(-20, 20, (*shape, n, 1), generator=generator)
    products = torch.randn(*shape, n, n, generator=generator) * size
    gain = 10.0 ** (torch.rand(shape, generator=generator) * 12 - 9)
    u = torch.rand(*shape, n, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        u[..., 0] = -1.0  # the value that halves=authors uses
    free = torch.rand(*shape, n, generator=generator) < draw(st.sampled_from([0.0, 0.7, 1.0]))
    return products, gain, u, free


@settings(max_examples=40)
@given(case=walks())
def test_the_signs_are_those_of_the_reference(walk, case) -> None:
    expected = halving.walk(*case)
    found = walk(*case)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@settings(max_examples=10)
@given(case=walks(blocks=2, tokens=40))
def test_only_products_above_the_diagonal_are_read(walk, case) -> None:
    products, *rest = case
    above = torch.ones_like(products).triu(1).bool()
    spoilt = products.where(above, torch.nan)
    assert torch.equal(walk(spoilt, *rest), walk(products, *rest))
    assert torch.equal(halving.walk(spoilt, *rest), halving.walk(products, *rest))


def test_tensors_may_lie_in_memory_in_any_way(walk) -> None:
    generator = torch.Generator().manual_seed(0)
    products = torch.randn(20, 20, 3, generator=generator).permute(2, 1, 0)
    u = torch.rand(20, 3, generator=generator, dtype=torch.float64).T
    free = torch.ones(20, 6, dtype=torch.bool)[:, ::2].T
    gain = torch.rand(6, generator=generator)[::2]
    expected = halving.walk(products, gain, u, free)
    assert torch.equal(walk(products, gain, u, free), expected)


def test_many_blocks_go_over_several_threads_and_leave_pytorch_its_own() -> None:
    pytest.importorskip("numba", reason="not installed: pip install '.[fast]'")
    from weir.kernels.cpu import walk as walk_kernel

    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    shape = (75, 130)
    products = torch.randn(*shape, 130, generator=generator)
    assert products.numel() > walk_kernel._WORTH_A_THREAD
    gain, u = torch.rand(75, generator=generator), torch.rand(shape, generator=generator)
    free = torch.rand(shape, generator=generator) < 0.9
    torch.set_num_threads(3)
    try:
        found = walk_kernel.walk(products, gain, u, free)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, halving.walk(products, gain, u, free))


@pytest.mark.parametrize("halves", ["pairs", "authors", "paper"])
@pytest.mark.parametrize("gamma", [4.0, None])
def test_halves_are_the_same_whoever_walks(
    library: str, halves: str, gamma: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    sets, blocks, tokens = 3, 2, 37
    there = torch.rand(sets, blocks, tokens, generator=generator) < 0.8
    weight = torch.randint(0, 2, there.shape, generator=generator).float() * 0.7
    weight = weight.masked_fill(~there, -torch.inf)
    held = Sets(
        torch.randn(sets, blocks, tokens, 8, generator=generator),
        torch.randn(sets, blocks, tokens, 5, generator=generator),
        weight,
        weight.clone(),
        torch.rand(there.shape, generator=generator, dtype=torch.float64),
    )
    rule = Halving(halves, gamma)
    found = {}
    for wanted in ("reference", library):
        monkeypatch.setenv(kernels.VARIABLE, wanted)
        found[wanted] = rule.halve(held, 0.4)
    for one, other in zip(found["reference"], found[library], strict=True):
        assert torch.equal(one, other)
