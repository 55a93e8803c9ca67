"""Sessions on disk: one safetensors file with a stream's rows, tensors and facts.

Each row is a tensor of bytes in the file (`RowState.to_bytes`). A checksum over the whole file
detects a single changed bit, but does not prove that the contents are valid. So facts are
validated, and rows are checked against the cache they are for. Rows stay in the file, and no tensor
of a row is copied before its name, shape and dtype have been checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache import RowState, StreamingCache, check_token, located
from weir.errors import PolicyError, WeirError, quote
from weir.models import compare_fingerprints, fingerprint
from weir.policies import (
    FileFacts,
    ListOf,
    Policy,
    Whole,
    check_regular,
    parse_policy,
    read_facts,
    saved_policy,
)

FORMAT = 5
KEY = "weir_session"
CHECKSUM = "sha256"
ROW = "row."
"""Prefix of the names of rows in a file."""

CHUNKS = 2**20
"""The largest chunk that is accepted for a session without tokens. With tokens, the chunk is
checked against the slots.
"""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Session:
    """State of a stream, apart from its model and the arguments it was made with.

    Attributes:
        last: the last token of each row; None if it has no id.
        generator: the state of the stream's random generator.
        logits: logits after the last token [batch, vocabulary]; None before the first token.
        rows: the rows of the stream's cache; none before the first token.
    """

    last: list[int | None]
    generator: Tensor
    logits: Tensor | None
    rows: list[RowState]


class _Made(FileFacts):
    """The arguments of a cache other than model, policy and seed (`StreamingCache.made_with`)."""

    chunk: Annotated[Whole, Field(ge=1)]
    positions: Literal["rolling", "original"]
    prefill: Literal["chunked", "full"]
    origin: Whole


class _Model(FileFacts):
    """A model, as `weir.models.fingerprint` describes it."""

    kind: str
    layers: Whole
    width: Whole
    vocabulary: Annotated[Whole, Field(ge=1)]
    dtype: str
    weights: str


class _SessionFacts(FileFacts):
    """The facts in a file, apart from its tensors.

    Attributes:
        format: the version of the file format.
        model: the model that the session belongs to.
        policy: the policy, possibly a name.
        pools: the pipe that the name of the policy stood for when the session was saved.
        seed: the seed of the cache.
        made_with: the other arguments of the cache.
        last: the last token of each row; None if it has no id.
    """

    format: int
    model: _Model
    policy: str
    pools: str
    seed: Annotated[int, Field(ge=0)]
    made_with: _Made
    last: ListOf[Whole | None]


# --- writing


def write(
    path: str | Path, session: Session, cache: StreamingCache, model: PreTrainedModel
) -> None:
    """Write a session of a cache and its model. If that fails (WeirError), nothing is written."""
    facts = {
        "model": fingerprint(model),
        "policy": str(cache.policy),
        "pools": cache.policy.stands_for,
        "seed": cache.seed,
        "made_with": cache.made_with,
        "last": session.last,
    }
    tensors = {"generator": session.generator}
    if session.logits is not None:
        tensors["logits"] = session.logits
    for index, row in enumerate(session.rows):
        data = bytearray(row.to_bytes())
        tensors[f"{ROW}{index}"] = torch.frombuffer(data, dtype=torch.uint8)
    write_file(path, facts, tensors)


def write_file(path: str | Path, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write facts and tensors with their checksum. If that fails (WeirError), nothing is
    written.
    """
    path = _path(path)
    written = json.dumps({"format": FORMAT, **facts})
    kept = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    metadata = {KEY: written, CHECKSUM: _checksum(written, kept)}
    try:
        # The system refuses to replace a folder, but a device would be replaced by a file.
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise WeirError(f"cannot write the session {path}: it exists and is not a regular file")
        with replace_atomically(path) as new:
            save_file(kept, str(new), metadata=metadata)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeirError(f"cannot write the session {path}: {reason}") from None


# --- reading


class SessionFile:
    """A session file that is open for reading. Its facts have been checked, and its tensors are
    still in the file.

    Attributes:
        path: the file.
        facts: its facts; each has a valid type and range.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a file. Raises WeirError if it does not exist, is damaged, is not a session, has
        another version of the format, or has invalid facts.
        """
        self.path = _path(path)
        check_regular(self.path, "a session")
        if not self.path.is_file():
            raise WeirError(f"the session file {self.path} does not exist")
        try:
            with safe_open(str(self.path), framework="pt") as file:
                metadata = file.metadata() or {}
                if KEY not in metadata:
                    raise WeirError(f"{self.path} is a safetensors file, but not a session of weir")
                facts = json.loads(metadata[KEY])
                # These tensors are views of the mapped file, and nothing is copied yet.
                self._mapped = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise WeirError(f"{self.path} is damaged or not a session of weir ({error})") from None
        found = facts.get("format") if isinstance(facts, dict) else facts
        if found != FORMAT or not isinstance(facts, dict):
            raise WeirError(
                f"{self.path} has session format {quote(found)}, but this version of weir reads "
                f"{FORMAT}"
            )
        if metadata.get(CHECKSUM) != _checksum(metadata[KEY], self._mapped):
            raise WeirError(f"{self.path} is damaged: its checksum does not match its content")
        with self.refusing():
            read_facts(_SessionFacts, facts)
        self.facts: dict[str, Any] = facts

    def check_model(self, model: PreTrainedModel) -> None:
        """Refuse a session of another model (WeirError)."""
        if what := compare_fingerprints(fingerprint(model), self.facts["model"]):
            raise WeirError(f"{self.path} is a session of another model ({what})")

    def policy(self, expected: str | Policy | None) -> Policy:
        """Return the policy of the session. If its name now stands for other pools than when the
        session was saved, return a policy with the old pools.

        Raises WeirError if another policy was expected, or if weir does not know the policy.
        """
        name, pools = self.facts["policy"], self.facts["pools"]
        try:
            named = saved = saved_policy(name)
            if pools != named.stands_for:
                meant = saved_policy(pools)
                saved = named if named == meant else meant
        except PolicyError as error:
            raise WeirError(
                f"{self.path} has a policy that this version of weir does not know: {error}"
            ) from None
        wanted = saved if expected is None else parse_policy(expected)
        if wanted != saved:
            known = "" if saved is named else f", which {name} stood for when it was saved"
            raise WeirError(f"{self.path} has the policy {saved}{known}, not {wanted}")
        return saved

    def read(self, cache: StreamingCache) -> Session:
        """Return the session. `cache` must be empty, and made with the arguments in the file.
        Raises WeirError if the cache cannot have the state in the file.
        """
        facts, made, row_format = self.facts, self.facts["made_with"], cache.row_format
        named = {name for name in self._mapped if name.startswith(ROW)}
        with self.refusing():
            if not named and made["chunk"] > CHUNKS:
                raise WeirError(f"a chunk of {made['chunk']:,} before the first token is too large")
            if named != {f"{ROW}{index}" for index in range(len(named))}:
                raise WeirError(f"its rows are not numbered from 0 on: {quote(sorted(named))}")
            if len(facts["last"]) != len(named):
                raise WeirError(f"last must have {len(named)} entries, got {len(facts['last'])}")
            for index, token in enumerate(facts["last"]):
                check_token(token, row_format.vocabulary, f"last[{index}]")
            own = {name: t for name, t in self._mapped.items() if name not in named}
            _check_stream(own, len(named), row_format.vocabulary)
            rows = []
            for index in range(len(named)):
                data = self._mapped[f"{ROW}{index}"]
                with located(f"row {index}"):
                    if data.dtype != torch.uint8 or data.ndim != 1:
                        raise WeirError("it is not bytes")
                    whole = made["prefill"] == "full"
                    row, _ = RowState.from_bytes(data, row_format, whole_prompt=whole)
                rows.append(row)
        logits = own.get("logits")
        return Session(
            facts["last"],
            own["generator"].clone(),
            None if logits is None else logits.clone(),
            rows,
        )

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Name the file in errors that are raised in the context."""
        try:
            yield
        except WeirError as error:
            raise WeirError(f"{self.path} cannot be restored: {error}") from None


def _check_stream(tensors: dict[str, Tensor], rows: int, vocabulary: int) -> None:
    """Refuse tensors of the stream that do not fit the number of rows."""
    state = torch.Generator().get_state()
    wanted: dict[str, tuple[list[int], tuple[torch.dtype, ...]]] = {}
    wanted["generator"] = list(state.shape), (state.dtype,)
    if rows:
        wanted["logits"] = ([rows, vocabulary], _FLOATS)
    for name in {**wanted, **tensors}:
        if name not in tensors:
            raise WeirError(f"{name} is missing")
        if name not in wanted:
            raise WeirError(f"a session has no tensor {quote(name)}")
        t, (shape, dtypes) = tensors[name], wanted[name]
        if list(t.shape) != shape or t.dtype not in dtypes:
            raise WeirError(
                f"{name} must be {shape} of {dtypes[0]}, got {list(t.shape)} of {t.dtype}"
            )
    if rows:
        highest = tensors["logits"].amax(dim=1)  # NaN if one of the row's logits is NaN
        if not bool(highest.isfinite().all()):
            raise WeirError("logits has numbers from which no token can be drawn")
    try:
        torch.Generator().set_state(tensors["generator"].clone())
    except RuntimeError:
        raise WeirError("generator is not the state of a random generator") from None


def _path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise WeirError(f"a session must be the path of a file, got {quote(path)}")
    return Path(path)


def _checksum(facts: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(facts.encode())
    for name, t in sorted(tensors.items()):
        digest.update(f"{name} {t.dtype} {list(t.shape)}".encode())
        digest.update(t.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


PART = ".part"


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield the path of a file that replaces `path` when the block ends without an error.

    The new file is written in a separate folder, `NAME.xxxxxxxx.part`, which the writer locks. The
    system releases the lock when the process ends, so the folder of a killed write can be removed.
    If several processes write at once, the last to finish wins. Raises OSError if the file cannot
    be written.
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
    """Make a folder next to `path`, and return it with the descriptor that holds its lock."""
    while True:
        folder = tempfile.mkdtemp(prefix=f"{path.name}.", suffix=PART, dir=path.parent)
        # Another process may find and remove the folder before it is locked. Then try again.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            with contextlib.suppress(OSError):  # without locks, nothing is removed either
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
