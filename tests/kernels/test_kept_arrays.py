"""Arrays that kernels access by address stay alive until the address is no longer used."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import weir.kernels

FILES = sorted(Path(weir.kernels.__file__).parent.glob("cpu/*.py"))
MAKERS = ("empty", "zeros", "ones")


def _freed_too_early(function: ast.FunctionDef) -> set[str]:
    """Return the arrays that a function creates, takes the address of, and does not mention again
    in or after its last loop. numba could free them before that loop.
    """
    made: set[str] = set()
    addressed: set[str] = set()
    last: dict[str, int] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[-1], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            made |= {
                name.id
                for name, value in pairs
                if isinstance(name, ast.Name)
                and isinstance(value, ast.Call)
                and isinstance(value.func, ast.Attribute)
                and value.func.attr in MAKERS
            }
        if isinstance(node, ast.Attribute) and node.attr == "ctypes":
            addressed |= {node.value.id} if isinstance(node.value, ast.Name) else set()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            last[node.id] = max(node.lineno, last.get(node.id, 0))
    loops = [each.lineno for each in function.body if isinstance(each, ast.For | ast.While)]
    return {name for name in made & addressed if loops and last[name] < loops[-1]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_array_is_freed_before_its_address_is_done_with(path):
    functions = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    early = {function.name: _freed_too_early(function) for function in functions}
    assert {name: arrays for name, arrays in early.items() if arrays} == {}


def test_kept_arrays_are_not_given_to_others():
    numba = pytest.importorskip("numba")
    from weir.kernels.cpu.compilation import keep

    def count(size: int, kept: bool) -> int:
        array = np.zeros(size, np.float32)
        address, same = array.ctypes.data, 0
        for _ in range(4):
            same += np.zeros(size, np.float32).ctypes.data == address
        if kept:
            keep(array)
        return same

    compiled = numba.njit(count)
    assert compiled(2000, True) == 0
