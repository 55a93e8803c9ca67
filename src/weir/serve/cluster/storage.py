"""Files that several machines share, through fsspec or on a file system that all of them mount.

A file is written completely or not at all. Listing a folder shows everything that was written
before.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import Any

from weir.errors import WeirError
from weir.serve.sessions.snapshot_folder import free_bytes, refusal


def open_storage(place: str) -> Storage:
    """Open a folder that every replica has at this path, or an fsspec address such as
    `s3://bucket/folder`.
    """
    scheme, found, rest = place.partition("://")
    if not found or scheme == "file":
        return LocalStorage(Path(rest if found else place))
    return Storage(place)


class Storage:
    """An fsspec storage. Paths are names separated by slashes."""

    def __init__(self, address: str) -> None:
        import fsspec

        try:
            self._files: Any
            self._files, root = fsspec.url_to_fs(address, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise WeirError(f"cannot use {address}: {error}") from None
        self._root = str(root).rstrip("/")

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, completely and durably."""
        try:
            self._write(path, data)
        except OSError as error:
            raise refusal(error) from None

    def _write(self, path: str, data: bytes) -> None:
        self._files.pipe_file(f"{self._root}/{path}", data)

    def read(self, path: str) -> bytes | None:
        """Return the bytes of a file, or None if it does not exist."""
        try:
            found: bytes = self._files.cat_file(f"{self._root}/{path}")
        except FileNotFoundError:
            return None
        return found

    def free_bytes(self) -> int | None:
        """Return the free bytes, or None if they are not known."""
        return None

    def list_names(self, path: str) -> list[str]:
        """List the files in a folder, sorted. Empty if the folder does not exist."""
        try:
            found = self._files.ls(f"{self._root}/{path}", detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in found)

    def age(self, path: str) -> float:
        """Return the seconds since a file was written, or 0 if it does not exist."""
        try:
            written: float = self._files.modified(f"{self._root}/{path}").timestamp()
        except FileNotFoundError:
            return 0.0
        return time.time() - written

    def delete(self, path: str) -> None:
        """Delete a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{path}")


class LocalStorage(Storage):
    """A folder on a file system that all machines mount.

    Files are not written with fsspec, which would not wait until they are on the disk.
    """

    def __init__(self, root: Path) -> None:
        import fsspec

        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise WeirError(f"cannot use {root}: {error.strerror}") from None
        self._files = fsspec.filesystem("file")
        self._root = str(root.absolute())

    def _write(self, path: str, data: bytes) -> None:
        file = Path(self._root) / path
        part = file.parent / f"{secrets.token_hex(8)}.part"
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(part, "xb") as new:
                new.write(data)
                new.flush()
                os.fsync(new.fileno())
            os.replace(part, file)
            _sync(file.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def free_bytes(self) -> int:
        """Return the free bytes of the file system."""
        return free_bytes(Path(self._root))


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
