"""Compilation of numba kernels, kept between processes, and access to tensors by address."""

from __future__ import annotations

import glob
import hashlib
import pickle
import re
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.serialize import dumps
from numba.extending import intrinsic

from weir.errors import WeirError

ANY_ORDER = ("reassoc", "contract", "nsz")
"""LLVM's names for adding in any order, and rounding once after a product and a sum. Infinities and
NaN keep their meaning."""
Strides = tuple[int, ...]
"""Strides of a buffer, in numbers: of rows, heads, slots and so on."""


def compile_kernel(
    function: Callable[..., Any], fastmath: Collection[str] = ()
) -> Callable[..., Any]:
    """The function in machine code, without the interpreter's lock; kept for the next process.

    Args:
        function: in the part of Python that numba knows.
        fastmath: what LLVM may do to sums and products, by LLVM's own names.
    """
    kernel = numba.njit(function, nogil=True, fastmath=set(fastmath))
    # Nowhere to keep it, neither beside this file nor for the user, or another numba's cache.
    with suppress(RuntimeError, AttributeError):
        kernel._cache = _CodeCache(function)
    return kernel


def compile_callback(function: Callable[..., None], arguments: int = 1, name: str = "") -> Any:
    """The function of some integers in machine code, as C calls it; kept for the next process.

    Args:
        function: in the part of Python that numba knows.
        arguments: how many it takes, addresses or other integers of 64 bits.
        name: tells it from others of the same Python code, which differ in what they call.
    """
    kinds = (types.uintp,) * arguments
    callback: Any = CFunc(function, (kinds, types.void), {}, {"nopython": True})
    with suppress(RuntimeError, AttributeError):
        callback._cache = _CodeCache(function, name)
    callback.compile()
    return callback


@numba.njit(nogil=True)
def keep(array: np.ndarray) -> None:
    """Hold an array up to here: numba frees one behind its last use, and an address is no use."""


@lru_cache
def source_digest(path: Path) -> str:
    """A checksum of a kernel's file and of all files of weir that it imports by their names."""
    if not path.exists():  # weir in an archive; numba looks at the date of that
        return ""
    text = path.read_text(encoding="utf-8")
    digest = hashlib.sha256(text.encode())
    root = next((parent for parent in path.parents if parent.name == "weir"), path.parent)
    for name in re.findall(r"^from weir\.([\w.]+) import", text, re.MULTILINE):
        imported = root.joinpath(*name.split(".")).with_suffix(".py")
        digest.update(source_digest(imported).encode())
    return digest.hexdigest()


class _CodeCache(FunctionCache):  # type: ignore[misc, unused-ignore]
    """A function's machine code on disk, made anew after a change of any file it is made from.

    numba looks at the file of the function alone. Kernels share functions of other files, and the
    code on disk would outlive an upgrade that mends those.
    """

    def __init__(self, function: Callable[..., None], name: str = "") -> None:
        super().__init__(function)
        self._named = name
        path = Path(function.__code__.co_filename)
        stamp = self._impl.locator.get_source_stamp(), source_digest(path)
        base = Path(self.cache_path, self._impl.filename_base + (f"-{name}" if name else ""))
        self._cache_file = _CodeFiles(base, _digest((numba.__version__, stamp)))

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        # numba's key has the variables of a closure in it, and functions that emit code look
        # different in every process.
        if self._named:
            return sig, codegen.magic_tuple(), self._named
        return super()._index_key(sig, codegen)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for some types; None where there is none on disk, or it is broken."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a broken pickle may raise anything; what is kept next replaces it
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep code for the next process, unless the disk is full: then it serves this one."""
        with suppress(OSError):
            super().save_overload(sig, data)


class _CodeFiles:
    """A file for each signature of a function, named after it and after the source.

    numba counts files and keeps an index of them. Two processes that save two signatures at once
    give both the same number there, and the next loads machine code for other types.

    Args:
        base: where they are, and how their names begin.
        source: checksum of the source; files of another source are removed.
    """

    def __init__(self, base: Path, source: str) -> None:
        self._base, self._source = base, source

    def save(self, key: Any, data: Any) -> None:
        """Keep pickled code, in one piece or not at all."""
        path = self._path(key)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}")
        try:
            part.write_bytes(dumps((key, data)))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        for other in path.parent.glob(f"{glob.escape(self._base.name)}.*.nbc"):
            if not other.name.startswith(f"{self._base.name}.{self._source}"):
                other.unlink(missing_ok=True)

    def load(self, key: Any) -> Any:
        """The code of a signature, None if it was not kept."""
        try:
            found, data = pickle.loads(self._path(key).read_bytes())
        except FileNotFoundError:
            return None
        return data if found == key else None

    def _path(self, key: Any) -> Path:
        # The key has numba's processor; kernels also ask PyTorch's, which a user can lessen.
        made_for = _digest((key, torch.backends.cpu.get_cpu_capability()))
        return self._base.with_name(f"{self._base.name}.{self._source}.{made_for}.nbc")


def _digest(value: Any) -> str:
    """Checksum of what is the same in every process by its `repr`."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


# --- memory


def with_unit_stride(t: torch.Tensor, *, writable: bool = False) -> torch.Tensor:
    """The tensor, or a copy where the numbers of a line [..., dim] are not side by side.

    Hold it until the kernel has returned, which gets no more than the `address_of` it.

    Args:
        t: on the CPU.
        writable: the kernel writes to it; a copy would lose that.

    Raises:
        WeirError: it is to be written, and the numbers of a line are not side by side.
    """
    if t.stride(-1) == 1 or t.shape[-1] == 1:
        return t
    if writable:
        raise WeirError("a kernel can write only to tensors whose last dimension is contiguous")
    return t.contiguous()


def address_of(t: torch.Tensor) -> tuple[int, Strides]:
    """Return the address of a tensor of `with_unit_stride`, and its strides.

    To hand an array to numba takes several times as long as to hand it numbers; and to numba an
    array of several dimensions with gaps between its lines may have gaps within lines too, and
    loops over those are not made into vectors.
    """
    return t.data_ptr(), t.stride()[:-1]


def _arrays_of(number: Any) -> Callable[..., Any]:
    """A function for code in numba: an array of such numbers at an address."""

    @intrinsic
    def pointer(_typing: Any, address: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return builder.inttoptr(given[0], context.get_value_type(signature.return_type))

        return types.CPointer(number)(types.uintp), write

    @numba.njit(inline="always")
    def array(address: int, shape: tuple[int, int]) -> Any:
        return numba.carray(pointer(address), shape)

    return array


floats_at, shorts_at, bytes_at = map(_arrays_of, (types.float32, types.int16, types.int8))
ubytes_at = _arrays_of(types.uint8)
longs_at, doubles_at, ints_at = map(_arrays_of, (types.int64, types.float64, types.int32))


def records_at(record: np.dtype) -> Callable[..., Any]:
    """A function as `floats_at` for records, whose fields code in numba reads by their names."""
    return _arrays_of(numba.from_dtype(record))


WHOLE = (1, 2**60)
"""The shape of an array that stands for all memory from an address on, in one line."""
