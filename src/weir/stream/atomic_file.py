"""Atomic replacement of a file, which also clears what killed writes have left.

The new file is written in a folder of its own, `NAME.xxxxxxxx.part`, which the writer locks. The
system drops the lock with the process, so a folder without a lock can be cleared.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART = ".part"


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield the path of a file that replaces `path` when the block ends without an error.

    Several processes may write at once: the last to end wins. Raises OSError if it cannot be
    written.
    """
    _clear(path)
    folder, lock = _own_folder(path)
    try:
        new = folder / path.name
        yield new
        with open(new, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _own_folder(path: Path) -> tuple[Path, int]:
    """Make a folder beside `path`, and return it with the descriptor that holds its lock."""
    while True:
        folder = tempfile.mkdtemp(prefix=f"{path.name}.", suffix=PART, dir=path.parent)
        # Another process may find and clear the folder before the lock is there: then once more.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            with contextlib.suppress(OSError):  # without locks, nothing is cleared either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(folder):
                return Path(folder), lock
            os.close(lock)


def _clear(path: Path) -> None:
    """Remove the folders of killed writes to `path`."""
    name = re.compile(re.escape(path.name) + r"\.[a-z0-9_]{8}" + re.escape(PART))
    with contextlib.suppress(OSError):
        for left in [entry.path for entry in os.scandir(path.parent) if name.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):
                _clear_unless_locked(left)


def _clear_unless_locked(folder: str) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
