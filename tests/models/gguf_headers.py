"""GGUF files that are nearly all header: keys that a test names, and tensors of few numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

U32, I32, F32, BOOL, TEXT = (
    gguf.GGUFValueType[name] for name in ("UINT32", "INT32", "FLOAT32", "BOOL", "STRING")
)


def kind_of(value: Any) -> Any:
    """Type in which converters write a value: numbers take 32 bits."""
    for kind, stored in ((bool, BOOL), (str, TEXT), (float, F32), (int, U32)):
        if isinstance(value, kind):
            return stored if stored != U32 or value >= 0 else I32
    raise TypeError(type(value))


def write(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, Sequence[int] | np.ndarray],
) -> Path:
    """Write a file; keys without a dot in front are whole, the others the architecture's.

    A tensor is given by its numbers, or by its sizes, the contiguous one last.
    """
    out = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        name = f"{architecture}{key}" if key.startswith(".") else key
        if isinstance(value, list):
            kind = F32 if isinstance(value[0], float) else kind_of(value[0])
            kind = I32 if kind == U32 else kind
            out.add_key_value(name, value, gguf.GGUFValueType.ARRAY, sub_type=kind)
        else:
            out.add_key_value(name, value, kind_of(value))
    for name, given in tensors.items():
        numbers = given if isinstance(given, np.ndarray) else np.zeros(tuple(given), np.float32)
        out.add_tensor(name, numbers)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
