"""Compiles numba kernels, caches them for other processes, and gives access to tensors by
address.
"""

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
"""LLVM's names for adding in any order, for rounding only once after a product and a sum, and for
ignoring the sign of zeros. Infinities and NaN keep their meaning.
"""
Strides = tuple[int, ...]
"""Strides of a buffer, counted in numbers: of rows, heads, slots and so on."""


def compile_kernel(
    function: Callable[..., Any], fastmath: Collection[str] = ()
) -> Callable[..., Any]:
    """Compile a function to machine code that runs without the interpreter's lock, and cache it for
    the next process.

    Args:
        function: a function in the part of Python that numba supports.
        fastmath: LLVM's names for the allowed transformations of sums and products.
    """
    kernel = numba.njit(function, nogil=True, fastmath=set(fastmath))
    # This fails if there is no place for a cache, neither next to the function's file nor in the
    # user's folder, or if the caches of this numba work differently.
    with suppress(RuntimeError, AttributeError):
        kernel._cache = _CodeCache(function)
    return kernel


def compile_callback(function: Callable[..., None], arguments: int = 1, name: str = "") -> Any:
    """Compile a function of some integers to machine code that C can call, and cache it for the
    next process.

    Args:
        function: a function in the part of Python that numba supports.
        arguments: the number of its arguments: addresses or other integers of 64 bits.
        name: distinguishes the function from others that have the same Python code, but call other
            functions.
    """
    kinds = (types.uintp,) * arguments
    callback: Any = CFunc(function, (kinds, types.void), {}, {"nopython": True})
    with suppress(RuntimeError, AttributeError):
        callback._cache = _CodeCache(function, name)
    callback.compile()
    return callback


@numba.njit(nogil=True)
def keep(array: np.ndarray) -> None:
    """Keep an array alive up to here, because numba frees it after its last use, and taking its
    address does not count as a use.
    """


@lru_cache
def source_digest(path: Path) -> str:
    """Return a checksum of a kernel's file and of all files of weir from which it imports names."""
    if not path.exists():  # weir is imported from a zip file, whose date numba checks
        return ""
    text = path.read_text(encoding="utf-8")
    digest = hashlib.sha256(text.encode())
    root = next((parent for parent in path.parents if parent.name == "weir"), path.parent)
    for name in re.findall(r"^from weir\.([\w.]+) import", text, re.MULTILINE):
        imported = root.joinpath(*name.split(".")).with_suffix(".py")
        digest.update(source_digest(imported).encode())
    return digest.hexdigest()


class _CodeCache(FunctionCache):  # type: ignore[misc, unused-ignore]
    """A function's machine code on disk, which is compiled again after a change of any file it
    depends on.

    numba checks only the file of the function. Kernels use functions of other files, so old code on
    disk would survive an upgrade that fixes these.
    """

    def __init__(self, function: Callable[..., None], name: str = "") -> None:
        super().__init__(function)
        self._named = name
        path = Path(function.__code__.co_filename)
        stamp = self._impl.locator.get_source_stamp(), source_digest(path)
        base = Path(self.cache_path, self._impl.filename_base + (f"-{name}" if name else ""))
        self._cache_file = _CodeFiles(base, _digest((numba.__version__, stamp)))

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        # numba's key includes the variables of a closure. If these are functions that emit code,
        # they look different in every process, so the key of a function with a name has the name
        # instead.
        if self._named:
            return sig, codegen.magic_tuple(), self._named
        return super()._index_key(sig, codegen)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for some types; None if there is none on disk, or it is broken."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a broken pickle can raise anything; it will be replaced
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save code for the next process. If the disk is full, it is used only by this one."""
        with suppress(OSError):
            super().save_overload(sig, data)


class _CodeFiles:
    """Files for the signatures of a function, named after the signature and the source.

    numba numbers its files in an index. If two processes save two signatures at once, both get the
    same number, and the next process loads machine code for the wrong types.

    Args:
        base: their folder, and the beginning of their names.
        source: checksum of the source; files of another source are removed.
    """

    def __init__(self, base: Path, source: str) -> None:
        self._base, self._source = base, source

    def save(self, key: Any, data: Any) -> None:
        """Save pickled code; if that fails, nothing is written."""
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
        """Return the code of a signature; None if it was not saved."""
        try:
            found, data = pickle.loads(self._path(key).read_bytes())
        except FileNotFoundError:
            return None
        return data if found == key else None

    def _path(self, key: Any) -> Path:
        # numba's key names the processor. Kernels also depend on which of its instructions PyTorch
        # uses, and a user can restrict these (ATEN_CPU_CAPABILITY).
        made_for = _digest((key, torch.backends.cpu.get_cpu_capability()))
        return self._base.with_name(f"{self._base.name}.{self._source}.{made_for}.nbc")


def _digest(value: Any) -> str:
    """Return a checksum of values whose `repr` is the same in every process."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


# --- memory


def with_unit_stride(t: torch.Tensor, *, writable: bool = False) -> torch.Tensor:
    """Return the tensor, or a copy if its last dimension is not contiguous.

    Keep the result alive until the kernel has returned, because the kernel gets only its address
    (`address_of`).

    Args:
        t: a tensor on the CPU.
        writable: whether the kernel writes to it; with a copy, the result would be lost.

    Raises:
        WeirError: it must be writable, but its last dimension is not contiguous.
    """
    if t.stride(-1) == 1 or t.shape[-1] == 1:
        return t
    if writable:
        raise WeirError("a kernel can write only to tensors whose last dimension is contiguous")
    return t.contiguous()


def address_of(t: torch.Tensor) -> tuple[int, Strides]:
    """Return the address of a tensor from `with_unit_stride`, and all its strides except the last.

    Passing an array to numba takes several times as long as passing numbers. For numba, an array of
    several dimensions with gaps between its lines may also have gaps within lines, so loops over
    lines are not vectorized.
    """
    return t.data_ptr(), t.stride()[:-1]


def _arrays_of(number: Any) -> Callable[..., Any]:
    """Make a function for numba code that returns an array at an address, given the numba type of
    its numbers.
    """

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
    """Make a function like `floats_at` for records, whose fields numba code reads by name."""
    return _arrays_of(numba.from_dtype(record))


WHOLE = (1, 2**60)
"""The shape of an array with one line, which represents all memory from an address on."""
