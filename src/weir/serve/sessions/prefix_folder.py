"""A folder that keeps the shared beginnings of conversations when the server is restarted.

Each beginning is a file with the state of a row and the tokens that the row has read. The name of a
file has the first 32 digits of the file's SHA-256. A file that is damaged, or belongs to another
model or policy, is deleted with a warning, and the model reads the text of this beginning again.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

from weir.cache import RowState
from weir.errors import WeirError
from weir.policies import FileFacts, ListOf, Whole, read_facts
from weir.serve.engine.prefixes import PrefixKey, PrefixState
from weir.serve.sessions.snapshot_folder import SnapshotFolder
from weir.serve.sessions.store_format import StoreFormat

LOG = logging.getLogger("weir.serve")


class _PrefixNotes(FileFacts):
    """The facts in a file, apart from the state of the row: `owner`, `beginning` and `seed` as in
    the `PrefixKey`, and the tokens that the row has read.
    """

    owner: str
    beginning: Whole
    seed: Annotated[int, Field(ge=0)]
    ids: ListOf[Annotated[int, Field(ge=0, lt=2**32)]]


class PrefixFolder:
    """A `PrefixPlace` that keeps states in a folder. A separate thread writes them in the order in
    which they arrive.

    Args:
        path: the folder, created if missing. Its parent folder is used by one server at a time.
        store_format: the format of the rows.
    """

    def __init__(self, path: Path, store_format: StoreFormat) -> None:
        self._store_format = store_format
        self._path = path
        try:
            self._files = SnapshotFolder(path)
        except OSError as error:
            raise WeirError(f"cannot use {path}: {error.strerror}") from None
        self._names: dict[PrefixState, str] = {}  # after `read_all`, only the writer uses it
        self._writer = ThreadPoolExecutor(1, "weir-prefixes")

    def close(self) -> None:
        """Write the added states, and release the folder."""
        self._writer.shutdown()
        self._files.close()

    def read_all(self) -> list[PrefixState]:
        """Return the states in the folder, the most recently used one last."""
        self._files.delete_parts()
        found = []
        names = self._files.list_names()
        for name in sorted(names, key=self._files.used):
            try:
                state = self._read(name)
            except (OSError, WeirError) as error:
                reason = getattr(error, "strerror", None) or error
                LOG.warning(
                    "a shared beginning is read again, because %s/%s cannot be used and is "
                    "deleted: %s",
                    self._path.name,
                    name,
                    reason,
                )
                self._delete(name)
                continue
            self._names[state] = name
            found.append(state)
        return found

    def add(self, state: PrefixState) -> None:
        """Keep a state."""
        self._do(self._write, state)

    def use(self, state: PrefixState) -> None:
        """Note that a state is being used."""
        self._do(self._touch, state)

    def remove(self, state: PrefixState) -> None:
        """Stop keeping a state."""
        self._do(self._remove, state)

    def wait(self) -> None:
        """Wait until all previous work is done."""
        self._writer.submit(lambda: None).result()

    def _do(self, function: Callable[[PrefixState], None], state: PrefixState) -> None:
        self._writer.submit(partial(self._carefully, function, state))

    def _carefully(self, function: Callable[[PrefixState], None], state: PrefixState) -> None:
        try:
            function(state)
        except Exception as error:  # a beginning that is not kept is read again after a restart
            reason = getattr(error, "strerror", None) or error
            LOG.warning("a shared beginning cannot be saved: %s", reason)

    def _write(self, state: PrefixState) -> None:
        key = state.key
        data = state.state.to_bytes(
            owner=key.owner, beginning=key.beginning, seed=key.seed, ids=list(state.ids)
        )
        name = _name_of(data)
        self._files.write(name, data)
        self._names[state] = name

    def _read(self, name: str) -> PrefixState:
        size = self._files.size(name)
        if size is None:
            raise WeirError("it is not an ordinary file")
        data = self._files.read(name, size)
        if _name_of(data) != name:
            raise WeirError("its checksum does not match the file that was written")
        state, notes = RowState.from_bytes(data, self._store_format.rows)
        about = read_facts(_PrefixNotes, notes, "the notes of the row")
        key = PrefixKey(about.owner, None, about.beginning, about.seed)
        found = PrefixState(key, array("I", about.ids), state)
        if not found.is_beginning:
            raise WeirError("its row has not read the whole beginning")
        return found

    def _touch(self, state: PrefixState) -> None:
        if (name := self._names.get(state)) is not None:
            self._files.use(name)

    def _remove(self, state: PrefixState) -> None:
        if (name := self._names.pop(state, None)) is not None:
            self._delete(name)

    def _delete(self, name: str) -> None:
        try:
            self._files.delete(name)
        except OSError as error:
            LOG.warning("%s cannot be deleted: %s", name, error.strerror)


def _name_of(data: bytes) -> str:
    return f"{hashlib.sha256(data).hexdigest()[:32]}.safetensors"
