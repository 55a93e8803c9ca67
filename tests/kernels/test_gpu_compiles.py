"""Triton's compiler accepts the kernels, and not only its interpreter; this needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="not installed: pip install '.[gpu]'")
pytestmark = pytest.mark.slow


def test_kernels_compile_to_machine_code(tmp_path: Path) -> None:
    program = Path(__file__).with_name("compiling.py")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, program, "80", "90"], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    sizes = [int(line.split()[-1]) for line in result.stdout.splitlines()]
    assert len(sizes) == 2 * 11
    assert min(sizes) > 1000
