"""Writes GGUF files that consist almost only of a header: keys from a test, and small tensors."""

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
    """Return the GGUF type that converters use for a value. Numbers have 32 bits."""
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
    """Write a file. The architecture's name is put in front of keys that begin with a dot.

    A tensor is given as an array, or as its shape, whose last dimension is the contiguous one.
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
