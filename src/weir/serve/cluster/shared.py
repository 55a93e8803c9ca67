"""Files that several machines share: through fsspec, or on a file system that all of them mount.

All that a ledger needs of a storage is that a file which is made where there may be none is made by
one of those who try, and is whole; and that who lists a folder then sees what was made before.
Knows nothing about what the files hold.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from weir.errors import WeirError


class Shared(Protocol):
    """A storage; paths are of names with slashes between them."""

    def create(self, path: str, data: bytes) -> bool:
        """Make a file; False where there is one. What is made is whole and stays."""

    def write(self, path: str, data: bytes) -> None:
        """Make a file or replace it."""

    def read(self, path: str) -> bytes | None:
        """A file; None if there is none."""

    def names(self, path: str) -> list[str]:
        """The files in a folder, by name; none if there is no folder."""

    def delete(self, path: str) -> None:
        """Remove a file, if it is there."""


def shared_at(place: str) -> Shared:
    """A storage.

    Args:
        place: a folder that every replica has at this path, or an address of fsspec's, as in
            `s3://bucket/folder`.

    Raises:
        WeirError: there is no such storage, or it cannot make a file only where there is none.
    """
    scheme, found, rest = place.partition("://")
    if not found:
        return SharedFolder(Path(place))
    if scheme == "file":
        return SharedFolder(Path(rest))
    return SharedObjects(place)


class SharedFolder:
    """A folder of a file system that all machines mount.

    Args:
        root: the folder; made if there is none.

    Raises:
        WeirError: it cannot be made.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise WeirError(f"{root} cannot be used: {error.strerror}") from None

    def create(self, path: str, data: bytes) -> bool:
        """Make a file; False where there is one.

        A link to a whole file is made by one of those who try, on NFS too (link(2)).
        """
        part = self._written(path, data)
        try:
            os.link(part, self._root / path)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        _sync(part.parent)
        return True

    def write(self, path: str, data: bytes) -> None:
        """Make a file or replace it."""
        part = self._written(path, data)
        os.replace(part, self._root / path)
        _sync(part.parent)

    def read(self, path: str) -> bytes | None:
        """A file; None if there is none."""
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            return None

    def names(self, path: str) -> list[str]:
        """The files in a folder, by name; those that are being written are none."""
        try:
            found = os.listdir(self._root / path)
        except FileNotFoundError:
            return []
        return sorted(name for name in found if not name.endswith(".part"))

    def delete(self, path: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            (self._root / path).unlink()

    def _written(self, path: str, data: bytes) -> Path:
        """A file beside the one that is meant, whole and safe."""
        part = (self._root / path).parent / f"{secrets.token_hex(8)}.part"
        part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(part, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return part


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class SharedObjects:
    """Any storage that fsspec knows, where it can make a file only where there is none.

    Args:
        address: of a folder.

    Raises:
        WeirError: fsspec does not know the storage, or lacks a package for it.
    """

    def __init__(self, address: str) -> None:
        import fsspec

        try:
            self._files: Any
            self._files, root = fsspec.url_to_fs(address, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise WeirError(f"{address} cannot be used: {error}") from None
        self._root = str(root).rstrip("/")

    def create(self, path: str, data: bytes) -> bool:
        """Make a file; False where there is one. Who of two makes it is for the storage to say."""
        try:
            self._files.pipe_file(f"{self._root}/{path}", data, mode="create")
        except FileExistsError:
            return False
        return True

    def write(self, path: str, data: bytes) -> None:
        """Make a file or replace it."""
        self._files.pipe_file(f"{self._root}/{path}", data)

    def read(self, path: str) -> bytes | None:
        """A file; None if there is none."""
        try:
            found: bytes = self._files.cat_file(f"{self._root}/{path}")
        except FileNotFoundError:
            return None
        return found

    def names(self, path: str) -> list[str]:
        """The files in a folder, by name."""
        try:
            found = self._files.ls(f"{self._root}/{path}", detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in found)

    def delete(self, path: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{path}")
