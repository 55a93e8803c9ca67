"""Headers of GGUF files. The sizes in a header are checked before they are used.

The shards of a split file are read together and give one header.

Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from weir.errors import WeirError, quote

MAX_FIELDS, MAX_TENSORS, MAX_ITEMS, MAX_STRING = 1 << 16, 1 << 17, 1 << 24, 1 << 26
"""Largest counts, and largest string in bytes, that a header may declare."""
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
MAGIC = b"GGUF"
"""First bytes of every GGUF file."""
_FOUND = {
    b"": "is empty",
    b"vers": "is only a pointer of Git LFS, whose file was not fetched (git lfs pull)",
    b"<!DO": "is a web page",
    b"<htm": "is a web page",
    b"ggjt": "has a format older than GGUF",
    b"ggml": "has a format older than GGUF",
    b"ggmf": "has a format older than GGUF",
}
"""Kinds of files by their first bytes, for errors about files that are not GGUF."""
_SHARD = re.compile(
    r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<end>\.gguf)",
    re.DOTALL | re.IGNORECASE,
)
"""File name of a shard, as llama.cpp's `gguf-split` writes it; the first shard has the number 1."""
_LISTED = 4
"""Largest number of names in an error."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in a file's header.

    Attributes:
        name: ggml's name.
        shape: sizes, the contiguous dimension first.
        type: number of its ggml type.
        path: the file that holds its data; of a split file, the shard.
        at: the byte in that file where its data begins.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    path: Path
    at: int


@dataclass(frozen=True)
class GGUFArray:
    """An array among a header's fields, whose items are not read yet (`GGUFHeader.array`).

    Attributes:
        kind: number of the type of its items.
        length: number of items.
        start: the byte in the file where its first item begins.
        stop: the byte after its last item.
    """

    kind: int
    length: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.length

    @property
    def of_texts(self) -> bool:
        """Whether its items are strings."""
        return self.kind == _STRING


@dataclass(frozen=True)
class GGUFHeader:
    """Header of a GGUF file, or the headers of a split file's shards as one.

    Attributes:
        path: the file; of a split file, the first shard.
        paths: all files: `path`, or the shards in order.
        version: version of the format.
        fields: values by key; arrays are not read yet. A split file has its fields in the first
            shard.
        tensors: tensor entries, in file order; of a split file, those of all shards.
    """

    path: Path
    paths: tuple[Path, ...]
    version: int
    fields: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]

    @property
    def architecture(self) -> str:
        """Name of the architecture; "" if the header does not have one."""
        return str(self.fields.get("general.architecture", ""))

    @property
    def parameters(self) -> int:
        """Number of parameters in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    def array(self, key: str) -> list[Any]:
        """Read the items of an array among the fields; strings are decoded.

        Bytes of a string that are not UTF-8 are kept, as lone surrogates.
        """
        field: GGUFArray = self.fields[key]
        with self.path.open("rb") as file:
            file.seek(field.start)
            data = file.read(field.stop - field.start)
        if field.kind != _STRING:
            return list(struct.unpack(f"<{field.length}{_NUMBERS[field.kind]}", data))
        texts, at, length = [], 0, struct.Struct("<Q").unpack_from
        for _ in range(field.length):
            (size,) = length(data, at)
            texts.append(data[at + 8 : at + 8 + size].decode("utf-8", "surrogateescape"))
            at += 8 + size
        return texts


class _Damaged(Exception):
    """Error for a header that contradicts itself or its file."""


def read_header(path: Path) -> GGUFHeader:
    """Read and check a file's header, without vocabulary and weights.

    If the file is a shard of a split file, the headers of all shards are merged.

    Raises WeirError if the file is damaged or is not a GGUF file, or if shards are missing or do
    not belong together.
    """
    named = _SHARD.fullmatch(path.name)
    if named is None:
        header = _read_one(path)
        count = header.fields.get("split.count", 1)
        if type(count) is not int:
            raise WeirError(
                f"{path} says split.count = {quote(count)}, which is not a whole number. Use "
                "another file of the model."
            )
        if count < 0:
            raise WeirError(
                f"{path} says split.count = {count}, which must be at least 0. Use another file of "
                "the model."
            )
        if count > 1:
            raise WeirError(
                f"{path} is one of the {count} shards of a split file, but its name does not say "
                f"which. Rename the shards to {path.stem}-00001-of-{count:05}.gguf and so on."
            )
        return header
    paths = shard_paths(path)
    if missing := [shard.name for shard in paths if not shard.is_file()]:
        raise WeirError(
            f"{path} is one of {len(paths)} shards of a split file, and {len(missing)} of them are "
            f"missing in {path.parent}: {list_some(missing)}. Download those too."
        )
    return _merge([_read_one(shard) for shard in paths])


def shard_paths(path: Path) -> tuple[Path, ...]:
    """Return the paths of all shards of the file that `path` is a shard of, by its name alone.

    For a file that is not named as a shard, that is `path` itself.
    """
    named = _SHARD.fullmatch(path.name)
    if named is None or not 1 <= int(named["number"]) <= int(named["count"]):
        return (path,)
    count = int(named["count"])
    return tuple(
        path.with_name(f"{named['stem']}-{number:05}-of-{count:05}{named['end']}")
        for number in range(1, count + 1)
    )


def list_some(names: Sequence[str]) -> str:
    """List names in an error; the first few if there are many."""
    return ", ".join(names[:_LISTED]) + (" ..." if len(names) > _LISTED else "")


def _read_one(path: Path) -> GGUFHeader:
    """Read and check the header of one file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                found = _FOUND.get(magic, f"begins with {magic!r}, not {MAGIC!r}")
                raise WeirError(f"{path} is not a GGUF file: it {found}. Download it again.")
            return _HeaderReader(path, file, size).read()
    except OSError as error:
        raise WeirError(f"cannot read {path}: {error.strerror}") from None
    except _Damaged as error:
        raise WeirError(f"{path} is damaged or cut off: {error}. Download it again.") from None


def _merge(shards: Sequence[GGUFHeader]) -> GGUFHeader:
    """Merge the headers of all shards of a split file; WeirError if they do not belong together."""
    first, count = shards[0], len(shards)
    total = first.fields.get("split.tensors.count")
    for number, shard in enumerate(shards):
        wanted = {"split.count": count, "split.no": number, "split.tensors.count": total}
        for key, value in wanted.items():
            given = shard.fields.get(key)
            # A file of one shard may say nothing about shards.
            if given != value and (count > 1 or given is not None):
                raise WeirError(
                    f"{shard.path} does not belong to the split file that it is named after: its "
                    f"field {key} is {given}, where {value} is expected. Download all {count} "
                    "shards of one model again."
                )
    tensors = tuple(tensor for shard in shards for tensor in shard.tensors)
    if total is not None and len(tensors) != total:
        raise WeirError(
            f"the {count} shards of {first.path} hold {len(tensors):,} tensors, but the first one "
            f"declares {quote(total)}. Download all of them again."
        )
    holders: dict[str, Path] = {}
    for tensor in tensors:
        if (other := holders.setdefault(tensor.name, tensor.path)) != tensor.path:
            raise WeirError(
                f"{other} and {tensor.path} both hold the tensor {tensor.name}, so they are not "
                "shards of one file. Download all of them again."
            )
    return replace(first, paths=tuple(shard.path for shard in shards), tensors=tensors)


class _HeaderReader:
    """Field-by-field reader of headers that refuses sizes which exceed the file."""

    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self.path = path
        self.file = file
        self.size = size

    def read(self) -> GGUFHeader:
        version = self.number("I")
        if version in (2 << 24, 3 << 24):
            raise WeirError(
                f"{self.path} is stored in big-endian byte order, but weir reads little-endian "
                "GGUF files. Convert it with the script gguf_convert_endian of the package gguf."
            )
        if version not in (2, 3):
            raise WeirError(
                f"{self.path} has version {version} of the GGUF format, but weir reads versions 2 "
                "and 3. Use another file of the model."
            )
        n_tensors, n_fields = self.count(MAX_TENSORS, "tensors"), self.count(MAX_FIELDS, "fields")
        fields: dict[str, Any] = {}
        for _ in range(n_fields):
            key = self.string()
            if key in fields:
                raise _Damaged(f"it has two fields {key[:60]!r}")
            fields[key] = self.value(self.number("I"))
        entries = [self.tensor() for _ in range(n_tensors)]
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 16 or alignment % 8:
            raise _Damaged(f"it declares its data aligned to {alignment!r}")
        data_at = -(-self.file.tell() // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise _Damaged(f"it has two tensors {name[:60]!r}")
            if offset % alignment:
                raise _Damaged(
                    f"its tensor {name[:60]!r} begins at byte {offset:,} of the data, which is not "
                    f"a multiple of {alignment:,}"
                )
            tensors[name] = TensorInfo(name, shape, kind, self.path, data_at + offset)
        return GGUFHeader(self.path, (self.path,), version, fields, tuple(tensors.values()))

    def bytes(self, n: int) -> bytes:
        if n > self.size - self.file.tell():
            raise _Damaged("its header ends beyond the end of the file")
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
        """Read a field's value. The items of an array are skipped, not read."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(self.code(kind))
        item, n = self.number("I"), self.count(MAX_ITEMS, "items of one array")
        start = self.file.tell()
        if item == _STRING:
            self.skip_strings(n)
        elif item == _ARRAY:
            raise _Damaged("it has an array of arrays")
        else:
            self.bytes(n * struct.calcsize("<" + self.code(item)))
        return GGUFArray(item, n, start, self.file.tell())

    def skip_strings(self, n: int) -> None:
        """Skip an array of strings quickly, because a vocabulary has a hundred thousand of them."""
        with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            at, length = self.file.tell(), struct.Struct("<Q")
            for _ in range(n):
                if at + 8 > self.size:
                    break
                (size,) = length.unpack_from(whole, at)
                if size > MAX_STRING:
                    raise _Damaged(f"its header declares {size:,} bytes of one string")
                at += 8 + size
        self.bytes(at - self.file.tell())  # refuses strings that end beyond the file

    @staticmethod
    def code(kind: int) -> str:
        if kind not in _NUMBERS:
            raise _Damaged(f"it has a field of the unknown type {kind}")
        return _NUMBERS[kind]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read a tensor's name, shape, type, and first byte counted from the data's beginning."""
        name, dimensions = self.string(), self.number("I")
        if not 1 <= dimensions <= 4:
            raise _Damaged(f"its tensor {name[:60]!r} has {dimensions} dimensions")
        shape = tuple(self.count(1 << 40, "numbers in one tensor") for _ in range(dimensions))
        return name, shape, self.number("I"), self.number("Q")
