"""Headers of GGUF files, checked before anything trusts the sizes that they declare.

Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from weir.errors import WeirError

MAX_FIELDS, MAX_TENSORS, MAX_ITEMS, MAX_STRING = 1 << 16, 1 << 17, 1 << 24, 1 << 26
"""Largest counts, and largest string in bytes, that a header may declare."""
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in a file's header.

    Attributes:
        name: ggml's name.
        shape: sizes, the contiguous dimension first.
        type: number of its ggml type.
        offset: bytes from the beginning of the data.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """Header of a GGUF file.

    Attributes:
        version: version of the format.
        fields: values by key; for an array, its length.
        spans: first byte of each field in the file, and the byte after its end, by key.
        tensors: tensor entries, in file order.
        tensors_at: the byte where the list of tensors begins.
        data_at: the byte where the tensors' data begins.
    """

    version: int
    fields: Mapping[str, Any]
    spans: Mapping[str, tuple[int, int]]
    tensors: tuple[TensorInfo, ...]
    tensors_at: int
    data_at: int

    @property
    def architecture(self) -> str:
        """Name of the architecture; "" where the header names none."""
        return str(self.fields.get("general.architecture", ""))

    @property
    def parameters(self) -> int:
        """Number of parameters in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)


class _Damaged(Exception):
    """Error for a header that contradicts itself or its file."""


def read_header(path: Path) -> GGUFHeader:
    """Read and check a file's header, without vocabulary and weights; WeirError if it is none or
    damaged.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise WeirError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
            return _HeaderReader(file, size).read()
    except _Damaged as error:
        raise WeirError(f"{path} is damaged or cut off: {error}; download it again") from None


class _HeaderReader:
    """Field-by-field reader of headers that refuses sizes which exceed the file."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file = file
        self.size = size

    def read(self) -> GGUFHeader:
        version = self.number("I")
        if version not in (2, 3):
            raise _Damaged(f"it is of version {version} of the format, and 2 and 3 can be read")
        n_tensors, n_fields = self.count(MAX_TENSORS, "tensors"), self.count(MAX_FIELDS, "fields")
        fields: dict[str, Any] = {}
        spans = {}
        for _ in range(n_fields):
            start = self.file.tell()
            key = self.string()
            fields[key] = self.value(self.number("I"))
            spans[key] = start, self.file.tell()
        tensors_at = self.file.tell()
        tensors = tuple(self.tensor() for _ in range(n_tensors))
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 16:
            raise _Damaged(f"its data is aligned to {alignment!r}")
        data_at = -(-self.file.tell() // alignment) * alignment
        return GGUFHeader(version, fields, spans, tensors, tensors_at, data_at)

    def bytes(self, n: int) -> bytes:
        if n > self.size - self.file.tell():
            raise _Damaged("its header ends behind the end of the file")
        return self.file.read(n)

    def number(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code)))
        return value

    def count(self, most: int, what: str) -> int:
        n: int = self.number("Q")
        if n > most:
            raise _Damaged(f"its header declares {n:,} {what}")
        return n

    def string(self) -> str:
        return self.bytes(self.count(MAX_STRING, "bytes of one string")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """Read a field's value; of an array, return the length."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(self.code(kind))
        item, n = self.number("I"), self.count(MAX_ITEMS, "items of one array")
        if item == _STRING:
            self.skip_strings(n)
        elif item == _ARRAY:
            raise _Damaged("it has an array of arrays")
        else:
            self.bytes(n * struct.calcsize("<" + self.code(item)))
        return n

    def skip_strings(self, n: int) -> None:
        """Walk over an array of strings: a vocabulary has a hundred thousand of them."""
        with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            at, length = self.file.tell(), struct.Struct("<Q")
            for _ in range(n):
                if at + 8 > self.size:
                    break
                (size,) = length.unpack_from(whole, at)
                if size > MAX_STRING:
                    raise _Damaged(f"its header declares {size:,} bytes of one string")
                at += 8 + size
        self.bytes(at - self.file.tell())  # refuses what ends behind the file

    @staticmethod
    def code(kind: int) -> str:
        if kind not in _NUMBERS:
            raise _Damaged(f"it has a field of the unknown type {kind}")
        return _NUMBERS[kind]

    def tensor(self) -> TensorInfo:
        name, dimensions = self.string(), self.number("I")
        if not 1 <= dimensions <= 4:
            raise _Damaged(f"its tensor {name[:60]!r} has {dimensions} dimensions")
        shape = tuple(self.count(1 << 40, "numbers in one tensor") for _ in range(dimensions))
        return TensorInfo(name, shape, self.number("I"), self.number("Q"))
