"""Which kernels are used, by device, installed libraries, and the variable WEIR_KERNELS."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import weir
from weir import kernels
from weir.errors import WeirError
from weir.kernels import dispatch

pytestmark = pytest.mark.thinned(3, least=2)

ALL = ("walk", "decode", "farthest_first")
CPU, GPU, OTHER = (torch.device(kind) for kind in ("cpu", "cuda", "mps"))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unset WEIR_KERNELS, and forget the kernels that other tests have used."""
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    kernels.forget_kernels()
    yield
    kernels.forget_kernels()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the libraries that count as installed; tests can change this list."""
    names = ["numba", "triton"]
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name if name in names else None)
    return names


def test_the_device_decides(installed: list[str]) -> None:
    on_cpu, on_gpu = kernels.paths(CPU), kernels.paths(GPU)
    assert (on_cpu["walk"], on_cpu["decode"]) == ("numba", "reference")
    assert (on_gpu["walk"], on_gpu["decode"]) == ("triton", "triton")
    assert set(kernels.paths(OTHER).values()) == {"reference"}


def test_what_is_not_installed_is_not_used(installed: list[str]) -> None:
    installed.clear()
    for device in (CPU, GPU):
        assert set(kernels.paths(device).values()) == {"reference"}
        assert kernels.walk(device) is None
        assert kernels.decode(device) is None


def test_a_library_that_cannot_be_imported_is_not_used(
    monkeypatch: pytest.MonkeyPatch, installed: list[str]
) -> None:
    def broken(name: str) -> None:
        raise ImportError("numba needs NumPy 1.0 or less")

    monkeypatch.setattr(dispatch, "import_module", broken)
    assert set(kernels.paths(CPU).values()) == {"reference"}


def test_a_faster_path_that_is_missing_is_said_once(
    llama, ids, monkeypatch: pytest.MonkeyPatch, installed: list[str]
) -> None:
    kernels.note_missing_kernels.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        weir.Stream(llama, "window(8)")
        assert not said
        installed.clear()
        kernels.forget_kernels()
        kernels.note_missing_kernels.cache_clear()
        for _ in range(2):
            weir.Stream(llama, "window(8)").feed(ids(1, 3))
        assert "numba, which is not installed: pip install '.[fast]'" in str(said[0].message)
        assert len(said) == 1


def test_the_environment_may_ask_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "reference")
    for device in (CPU, GPU):
        assert set(kernels.paths(device).values()) == {"reference"}


def test_the_environment_may_ask_for_a_library(
    monkeypatch: pytest.MonkeyPatch, installed: list[str]
) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    on_cpu = kernels.paths(CPU)
    assert (on_cpu["walk"], on_cpu["decode"]) == ("triton", "triton")
    installed.remove("triton")
    kernels.forget_kernels()
    with pytest.raises(WeirError, match=r"WEIR_KERNELS.*triton.*not installed.*'\.\[gpu\]'"):
        kernels.paths(CPU)


def test_the_environment_may_not_ask_for_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "numpy")
    with pytest.raises(
        WeirError, match="WEIR_KERNELS must be reference, numba or triton, got 'numpy'"
    ):
        kernels.walk(CPU)


def test_a_stream_is_the_same_with_and_without_kernels(
    llama, ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba", reason="numba is not installed: pip install '.[fast]'")
    text = ids(2, 90)
    found = {}
    policy = "sink(2) | recent(8) | balance(16, block=6)"
    for wanted in ("reference", "numba"):
        monkeypatch.setenv(kernels.VARIABLE, wanted)
        # Keys whose positions move are rotated again, and differ by roundings. With original
        # positions, results are bit-identical.
        stream = weir.Stream(llama, policy, chunk=4, positions="original")
        found[wanted] = stream.feed(text, all_logits=True), stream.slots(0).position
    assert torch.equal(found["reference"][0], found["numba"][0])
    assert torch.equal(found["reference"][1], found["numba"][1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_new_tensors_are_elsewhere_is_nothing_to_kernels(
    llama, ids, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    pytest.importorskip("numba", reason="numba is not installed: pip install '.[fast]'")
    text, found = ids(1, 130), []
    policy = "sink(2) | recent(20) | recent(20):int8 | kcenter(3) | balance(16, block=6)"
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            stream = weir.Stream(llama, policy, chunk=16)
            found.append(torch.cat([stream.feed(text), stream.feed(ids(1, 1))]))
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "policy", ["sink(2) | recent(6) | uniform(8)", "balancekv(16)", "kcenter(16)", "subgen(16)"]
)
def test_defaults_of_device_and_dtype_are_no_matter(llama, ids, policy):
    """PyTorch's defaults are for tensors that the program creates, and must not affect weir's."""
    text = ids(1, 60)

    def answers():
        cache = weir.StreamingCache(llama, policy, chunk=4)
        with torch.no_grad():
            parts = text.split([40, *[1] * 20], dim=1)
            return torch.cat([llama(it, past_key_values=cache).logits for it in parts], dim=1)

    wanted = answers()
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.bfloat16)
        found = answers()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, wanted)
