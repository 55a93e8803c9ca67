"""Skip tests of GPU kernels if Triton can run neither on a GPU nor in its interpreter."""

from __future__ import annotations

from functools import cache

import pytest
import torch


def need_triton() -> None:
    """Skip where Triton is not installed, or cannot run weir's kernels here."""
    pytest.importorskip("triton", reason="not installed: pip install '.[gpu]'")
    if not torch.cuda.is_available() and _refuses_loops():
        pytest.skip(
            "this Triton's interpreter runs no loops with this NumPy: a later Triton, or numpy<2.4",
            allow_module_level=True,
        )


@cache
def _refuses_loops() -> bool:
    """Whether the interpreter fails at a loop whose length is an argument.

    Some versions of Triton use an array of one number as an index, which NumPy refuses since 2.4.
    """
    import triton
    from triton.runtime.errors import InterpreterError

    @triton.jit
    def loop(times):
        for _ in range(times):
            pass

    try:
        loop[(1,)](2)
    except InterpreterError as error:
        if "only 0-dimensional arrays can be converted" not in str(error):
            raise
        return True
    return False
