"""A folder of snapshot files, each written completely or not at all, and the room on its disk.

Files are opened through one descriptor of the folder, never through a link, and only if their names
have the form that `new_name` makes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weir.errors import WeirError
from weir.serve.sessions.records import DISK_FULL, StorageFull

_FILE = re.compile(r"[0-9a-f]{32}\.safetensors")
_PART = re.compile(r"[0-9a-f]{32}\.part")


def new_name() -> str:
    """Return a random file name."""
    return f"{secrets.token_hex(16)}.safetensors"


def is_full(error: Exception) -> bool:
    """Return whether an error says that the disk is full, or the user's quota is used up."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "is full" in str(error)


def refusal(error: Exception) -> WeirError:
    """Convert an error of a disk or database to an error that says why a turn cannot be saved."""
    if is_full(error):
        return StorageFull(DISK_FULL)
    if isinstance(error, UnicodeEncodeError):
        return WeirError("the name of this session is not valid text. Use another name.")
    return WeirError(f"cannot save the turn: {getattr(error, 'strerror', None) or error}")


def free_bytes(folder: Path | int) -> int:
    """Return the free bytes that the disk of a folder reports."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class SnapshotFolder:
    """A folder, open until `close`. It is created if missing.

    Raises WeirError if the path is a file or a link.
    """

    def __init__(self, path: Path) -> None:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            raise WeirError(
                f"{path} must be a folder, not a file or a link. Remove it, or use another folder."
            ) from None
        # Whether a write failed for lack of room, and `has_room` has not found any since.
        self._refused = False

    def close(self) -> None:
        """Close the folder."""
        os.close(self._fd)

    def list_names(self) -> list[str]:
        """List all entries with names that `new_name` could have made."""
        return sorted(name for name in os.listdir(self._fd) if _FILE.fullmatch(name))

    def delete_parts(self) -> None:
        """Delete partly written files that a killed process left."""
        for name in os.listdir(self._fd):
            if _PART.fullmatch(name):
                self._unlink(name)

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes. None if there is no ordinary file with that name."""
        if not _FILE.fullmatch(name):
            return None
        try:
            found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def used(self, name: str) -> float:
        """Return when a file was last used, in seconds since 1970. 0 if it is missing."""
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return 0.0

    def use(self, name: str) -> None:
        """Note that a file is being used."""
        _check(name)
        os.utime(name, dir_fd=self._fd, follow_symlinks=False)

    def free_bytes(self) -> int:
        """Return the free bytes that the disk reports."""
        return free_bytes(self._fd)

    def has_room(self, size: int) -> bool:
        """Return whether files of `size` bytes together can be written now.

        Because of quotas, a disk may refuse bytes that it reports as free. So after a write that
        failed for lack of room, this tries to reserve the bytes.
        """
        if self.free_bytes() < size:
            return False
        if not self._refused:
            return True
        part = f"{secrets.token_hex(16)}.part"
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._fd)
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(fd, 0, size)
            finally:
                os.close(fd)
                self._unlink(part)
        except OSError:
            return False
        self._refused = False
        return True

    def write(self, name: str, data: bytes) -> None:
        """Write a file that survives a power cut. If this fails, raise OSError and leave no part of
        the file.
        """
        _check(name)
        part = f"{name.partition('.')[0]}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(part, flags, 0o600, dir_fd=self._fd)
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(fd, left) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(part, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            os.fsync(self._fd)
        except Exception as error:
            # An error of another kind does not show that there is room again.
            self._refused = self._refused or is_full(error)
            for left_over in (part, name):
                with contextlib.suppress(OSError):
                    self._unlink(left_over)
            raise

    def read(self, name: str, size: int) -> bytes:
        """Read a file. Raises WeirError if it is not an ordinary file, or has another size."""
        _check(name)
        # Non-blocking, because a pipe in place of the file would make the reader wait.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise WeirError("the file was replaced by a link") from None
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise WeirError("the file is not an ordinary file")
            if found.st_size != size:
                raise WeirError(f"the file has {found.st_size:,} bytes, but {size:,} were written")
            with open(fd, "rb", closefd=False) as file:
                return file.read(size)
        finally:
            os.close(fd)

    def delete(self, name: str) -> None:
        """Delete a file, if there is one with that name."""
        _check(name)
        self._unlink(name)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)


def _check(name: str) -> None:
    if not _FILE.fullmatch(name):
        raise WeirError(f"{name!r} is not a file name of a store")


def lock_file(path: Path) -> int:
    """Lock a file until the returned descriptor is closed or this process ends.

    Raises BlockingIOError if another process or this one already has the lock.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


class DiskReserve:
    """Reserved room on the disk for when it is full, because deleting takes room, too."""

    def __init__(self, path: Path, size: int = 2**19) -> None:
        self._path = path
        self._size = size

    @contextmanager
    def released(self) -> Iterator[None]:
        """Free the reserved room while the `with` block runs, and reserve it again afterwards if
        possible.
        """
        with contextlib.suppress(OSError):
            self._path.unlink()
        try:
            yield
        finally:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with (
                contextlib.suppress(OSError),
                open(os.open(self._path, flags, 0o600), "wb") as file,
            ):
                file.write(bytes(self._size))
