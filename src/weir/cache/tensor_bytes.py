"""Named tensors and a text as bytes in the safetensors format.

If the bytes are in a tensor, the named tensors are read from it without a copy, where their
alignment allows this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

TensorSize = tuple[tuple[int, ...], torch.dtype]
"""A tensor's shape and dtype."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes that tensors can have, by their names in the format."""
MOST_HEADER = 2**26
"""Bytes of the longest header that is parsed."""


def write_tensors(tensors: Mapping[str, Tensor], key: str, text: str) -> bytes:
    """Write tensors, and a text under a key of the metadata."""
    kept = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    return save(kept, {key: text})


@dataclass(frozen=True)
class TensorBytes:
    """Tensors in a buffer. Their sizes are known; `tensor` returns one of them.

    Attributes:
        metadata: texts by name.
        sizes: shape and dtype of each tensor.
    """

    metadata: dict[str, str]
    sizes: dict[str, TensorSize]
    _data: Tensor
    _starts: dict[str, int]

    @classmethod
    def read(cls, data: bytes | Tensor) -> TensorBytes:
        """Read the header of a buffer, or of a tensor of bytes [bytes], uint8.

        Raises:
            ValueError: the buffer is not in the format, or damaged.
            RecursionError: the header is nested too deeply.
        """
        if not isinstance(data, Tensor):
            data = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        length = int.from_bytes(data[:8].numpy().tobytes(), "little") if len(data) >= 8 else 0
        if not 0 < length <= min(len(data) - 8, MOST_HEADER):
            raise ValueError("it does not begin with a header")
        header = json.loads(data[8 : 8 + length].numpy().tobytes())
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        metadata = header.pop("__metadata__", {})
        texts = isinstance(metadata, dict) and all(isinstance(t, str) for t in metadata.values())
        if not texts:
            raise ValueError("its metadata is not text")
        sizes: dict[str, TensorSize] = {}
        starts: dict[str, int] = {}
        end = 8 + length
        for name, (size, start, stop) in sorted(
            ((name, _read_entry(entry)) for name, entry in header.items()),
            key=lambda one: one[1][1:],
        ):
            if 8 + length + start != end:
                raise ValueError(f"{name} does not begin where the tensor before it ends")
            sizes[name], starts[name], end = size, end, 8 + length + stop
        if end != len(data):
            raise ValueError(f"its tensors end at byte {end:,} of {len(data):,}")
        return cls(metadata, sizes, data, starts)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, which shares its memory with the buffer where alignment allows it."""
        shape, dtype = self.sizes[name]
        start = self._starts[name]
        part = self._data[start : start + prod(shape) * dtype.itemsize]
        aligned = part.storage_offset() % dtype.itemsize == 0 == part.data_ptr() % dtype.itemsize
        return (part if aligned else part.clone()).view(dtype).reshape(shape)


def _read_entry(entry: Any) -> tuple[TensorSize, int, int]:
    """Read a tensor's size, and its first byte and the one after its last, counted from 0."""
    try:
        dtype, shape, (start, stop) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, stop]
    except (KeyError, TypeError, ValueError):
        raise ValueError("its header describes a tensor in an unknown way") from None
    if any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
        raise ValueError(
            "its header has a size or a place that is not a whole number of at least 0"
        )
    if stop - start != prod(shape) * dtype.itemsize:
        raise ValueError(
            "its header gives a tensor a different number of bytes than its shape needs"
        )
    return (tuple(shape), dtype), start, stop
