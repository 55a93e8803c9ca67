"""Machine code is stored for later processes until the kernel's files change. Kernels read and
write the rows of tensors in place.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from weir.errors import WeirError

compilation = pytest.importorskip(
    "weir.kernels.cpu.compilation",
    reason="not installed: pip install '.[fast]'",
    exc_type=ImportError,
)
SHARED = "from numba import njit\n@njit\ndef number():\n    return {}\n"
KERNEL = "from shared import number\ndef write(out):\n    out[0] = number()\n"


@pytest.fixture
def written(tmp_path: Path, monkeypatch) -> Iterator[Callable[[int], float]]:
    """A function that loads a kernel as a new process would, and returns the number it writes.

    The number is in a second file, which the kernel imports.
    """
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "kept"))
    (tmp_path / "kernel.py").write_text(KERNEL)

    def write(number: int) -> float:
        (tmp_path / "shared.py").write_text(SHARED.format(number))
        for name in ("shared", "kernel"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        out = np.zeros(1)
        compilation.compile_kernel(importlib.import_module("kernel").write)(out)
        return float(out[0])

    yield write
    for name in ("shared", "kernel"):
        sys.modules.pop(name, None)


def test_a_kernel_is_made_anew_when_what_it_shares_with_others_has_changed(written, monkeypatch):
    monkeypatch.setattr(compilation, "source_digest", lambda _path: "before")
    assert written(1) == 1
    assert written(2) == 1  # stored code: numba checks only the kernel's own file
    monkeypatch.setattr(compilation, "source_digest", lambda _path: "after")
    assert written(2) == 2


def test_every_file_below_a_kernel_tells_and_no_other(tmp_path):
    def stamp(name: str, text: str) -> str:
        path = tmp_path / "weir" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        compilation.source_digest.cache_clear()
        return compilation.source_digest(tmp_path / "weir" / "native" / "one.py")

    stamp("kernels/three", "x = 1\n")
    stamp("kernels/cpu/two", "from weir.kernels.three import x\n")
    first = stamp("native/one", "import math\nfrom weir.kernels.cpu.two import (\n    x,\n)\n")
    assert stamp("kernels/cpu/other", "y = 1\n") == first
    second = stamp("kernels/three", "x = 2\n")
    assert second != first
    last = stamp("kernels/cpu/two", "from weir.kernels.three import x as y\n")
    assert last not in (first, second)


def test_a_full_disk_keeps_nothing_and_the_kernel_runs(written, monkeypatch):
    def full(*_args: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(compilation._CodeFiles, "save", full)
    assert written(3) == 3


def test_what_was_kept_and_is_broken_is_made_and_kept_anew(written, tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "source_digest", lambda _path: "the same")
    assert written(4) == 4
    assert written(5) == 4
    (file,) = (tmp_path / "kept").rglob("*.nbc")
    file.write_bytes(file.read_bytes()[:40])  # as after a power cut
    assert written(5) == 5
    assert written(6) == 5


def test_code_for_two_types_that_two_processes_keep_at_once_is_kept_apart(written, tmp_path):
    assert written(7) == 7
    kernel, outs = sys.modules["kernel"].write, [np.zeros(1, np.int32), np.zeros(1, np.float32)]
    for out in outs:
        for index in (tmp_path / "kept").rglob("*.nbi"):  # so that each sees an empty cache
            index.unlink()
        compilation.compile_kernel(kernel)(out)
    again = compilation.compile_kernel(kernel)
    for out in (*outs, np.zeros(1)):
        again(out)
        assert out[0] == 7
    assert sum(again.stats.cache_hits.values()) == 3


@pytest.mark.parametrize("to_write", [False, True])
def test_lines_are_found_in_the_memory_they_lie_in(to_write):
    held = torch.arange(2 * 3 * 9 * 5, dtype=torch.float32).view(2, 3, 9, 5)
    parts = held[:, 1:, 2:7], held[..., 3:4], held[:1, :, 8:], held.transpose(1, 2)
    for part in parts:  # one of them has lines of a single number
        lines = compilation.with_unit_stride(part, writable=to_write)
        where, steps = compilation.address_of(lines)
        place = sum((n - 1) * step for n, step in zip(part.shape, steps, strict=False))
        assert lines is part
        assert where + 4 * place == part[-1, -1, -1].data_ptr()


def test_what_would_be_written_to_a_copy_is_refused():
    turned = torch.zeros(1, 1, 4, 3).mT
    with pytest.raises(WeirError, match="last dimension is contiguous"):
        compilation.with_unit_stride(turned, writable=True)
    lines = compilation.with_unit_stride(turned)
    assert torch.equal(lines, turned)
    assert compilation.address_of(lines) == (lines.data_ptr(), (12, 12, 4))


def test_the_private_names_that_are_replaced_exist():
    """If a release of numba moves one of these names, this test fails and shows the name."""
    from numba.core.caching import FunctionCache
    from numba.core.registry import cpu_target

    for name in ("_index_key", "load_overload", "save_overload"):
        assert callable(getattr(FunctionCache, name))
    assert callable(cpu_target.target_context.codegen().magic_tuple)
