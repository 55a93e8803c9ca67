"""The results file of an evaluation: JSON lines that survive a crash.

The first line is the grid: a list of all *cells*, one for each combination of model, task, policy,
budget and seed. One line per finished cell follows. A line is written and synced at once. A line
that a crash cut short is removed when the file is opened again. Every field that reports read is
checked when the file is loaded; an error names the file, line and field.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from weir.errors import WeirError
from weir.evals.records import JsonRecord


def for_json(value: Any) -> Any:
    """Make a value fit for JSON: NaN and infinities become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: for_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(item) for item in value]
    return value


def check_cell(line: JsonRecord, cells: int) -> None:
    """Check the record of a cell."""
    number = line.count("cell")
    if not 0 <= number < cells:
        raise line.wrong(
            "cell", f"must be the number of a cell of the grid, 0 to {cells - 1}, got {number}"
        )
    for name in ("model", "setting", "policy", "weir"):
        line.text(name)
    line.count("seed")
    status = _check_word(line, "status", ("done", "failed"))
    if status == "failed":
        line.text("reason")
        return
    for name in ("task", "metric"):
        line.text(name)
    _check_word(line, "better", ("higher", "lower"))
    for name in ("value", "kv_bytes"):
        line.number(name)
    if "protocol" not in line:
        raise line.wrong("protocol", "is missing")
    checks: dict[str, Callable[[str], object]] = {
        **dict.fromkeys(("protocol", "positions", "pools", "stands_for", "equal"), line.text),
        **dict.fromkeys(("chunk", "budget", "memory"), line.count),
        "loading": line.record,
        "compiled": line.flag,
    }
    for name, check in checks.items():
        if line.values.get(name) is not None:
            check(name)
    # Fields that reports read: perplexities by block and by book; right answers by question, by
    # distance, and by the form of the fact and the way to answer; squares of heat maps.
    result = line.record("result")
    if "ppl_by_block" in result:
        result.numbers("ppl_by_block")
        for name in ("block", "tokens"):
            result.count(name)
    if "by_distance" in result:
        for row in result.records("by_distance"):
            for name in ("distance", "asked", "right"):
                row.count(name)
    if "by_book" in result:
        for book in result.records("by_book"):
            book.number("ppl")
    if "marks" in result and set(result.text("marks")) - {"0", "1"}:
        raise result.wrong("marks", "must have a 1 for each right answer and a 0 for all others")
    if "by_form" in result:
        for row in result.records("by_form"):
            row.text("form")
            for name in ("distance", "asked"):
                row.count(name)
            if "way" in row:  # these are answers, not results of a search
                row.text("way")
                row.count("right")
    if "cells" in result:
        for cell in result.records("cells"):
            cell.count("length")
            for name in ("depth", "accuracy"):
                cell.number(name, known=True)


def _check_word(line: JsonRecord, name: str, words: tuple[str, ...]) -> str:
    value = line.text(name)
    if value not in words:
        raise line.wrong(name, f"must be {' or '.join(words)}, got {value!r}")
    return value


CellRecord = dict[str, Any]
"""The record of one cell, with its number in the grid under "cell"."""
MOST = 3
"""Largest number of values that are named for a field in which two grids differ."""


class ResultsFile:
    """A results file that is open for writing; no other process can open it at the same time.

    Args:
        path: the file.
        grid: its first line, with all cells under "cells" and their fingerprint under "grid".
        resume: continue an existing file. Without `resume` and `add`, the file must be new or
            empty.
        add: continue an existing file. If its cells are the first ones of `grid`, replace its first
            line by `grid`.

    Attributes:
        records: the records in the file, by cell number.

    Raises:
        WeirError: the file has lines and `resume` and `add` are false; it belongs to another grid,
            is not a results file or a regular file, is open in another process, or cannot be
            written.
    """

    def __init__(
        self, path: Path, grid: dict[str, Any], *, resume: bool = False, add: bool = False
    ) -> None:
        self.path = path
        self.records: dict[int, CellRecord] = {}
        self._grid = grid
        self._add = add
        try:
            _check_kind(path)
            if not (resume or add) and path.exists() and path.stat().st_size:
                raise WeirError(
                    f"{path} already exists. Use --resume to continue it, --add to add cells to "
                    "it, or another file."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise WeirError(f"cannot write {path}: {error.strerror}") from None
        try:
            self._lock()
            self._take_up()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def append(self, record: CellRecord) -> None:
        """Write the record of a cell. If that fails, nothing is written."""
        self._write(record)
        self.records[record["cell"]] = record

    def keep(self, records: dict[int, CellRecord]) -> None:
        """Replace the records by some of them, or by the same records in another order."""
        if list(records) != list(self.records):
            self.records = records
            self._rewrite(list(records.values()))

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WeirError(f"another weir is writing {self.path}") from None

    def _take_up(self) -> None:
        """Read the file, cut off an unfinished line, and write the first line of a new file."""
        found, whole = _read_lines(self.path)
        if whole < os.fstat(self._file).st_size:
            os.ftruncate(self._file, whole)
        if not found:
            self._write(self._grid)
            return
        there, here = (grid["cells"] for grid in (found[0], self._grid))
        grows = self._add and here[: len(there)] == there
        if found[0]["grid"] != self._grid["grid"] and not grows:
            raise WeirError(
                f"{self.path} has the results of another grid ({_difference(there, here)}). Use "
                "another file, or the same models, tasks, policies, budgets and seeds as before."
            )
        self.records = {record["cell"]: record for record in found[1:]}
        if len(here) > len(there):
            self._rewrite(found[1:])

    def _write(self, record: CellRecord) -> None:
        before = os.fstat(self._file).st_size
        line = _line(record)
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, before)
            raise _cannot_write(self.path, error) from None

    def _rewrite(self, records: list[CellRecord]) -> None:
        """Replace the file atomically, and continue with the new one."""
        from weir.stream import replace_atomically  # imports PyTorch, which reports do not need

        try:
            with replace_atomically(self.path) as new:
                new.write_bytes(b"".join(map(_line, (self._grid, *records))))
                os.chmod(new, os.fstat(self._file).st_mode & 0o777)
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        self._lock()


def read_results(path: str | Path) -> tuple[dict[str, Any], list[CellRecord]]:
    """Read the grid and the records of a file; an incomplete last line is ignored.

    Raises:
        WeirError: there is no such file, it cannot be read, or `weir eval` has not written it.
    """
    path = Path(path)
    _check_kind(path)
    if not path.exists():
        raise WeirError(f"the results file {path} does not exist")
    found, _ = _read_lines(path)
    if not found:
        raise WeirError(f"{path} contains no results")
    return found[0], found[1:]


def failures(records: Iterable[CellRecord]) -> list[CellRecord]:
    """Return the records of cells that failed."""
    return [record for record in records if record["status"] == "failed"]


def unique(values: Iterable[Any]) -> tuple[Any, ...]:
    """Remove duplicates, keeping the order of first occurrence."""
    return tuple(dict.fromkeys(values))


def _check_kind(path: Path) -> None:
    """Refuse devices, pipes and folders (WeirError), because only files can be read to the end."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise WeirError(f"{path} is not a regular file but {kind}, and results need a file")


def _difference(there: list[CellRecord], here: list[CellRecord]) -> str:
    """Describe the differences between the cells of two grids, field by field."""
    found = []
    for name in unique(key for cell in (*there, *here) for key in cell):
        old, new = (unique(str(cell.get(name)) for cell in cells) for cells in (there, here))
        gone = [value for value in old if value not in new]
        come = [value for value in new if value not in old]
        changes = [f"{_few(gone)} only in the file"] * bool(gone) + [f"{_few(come)} new"] * bool(
            come
        )
        if changes:
            found.append(f"{name}: {', '.join(changes)}")
    return "; ".join(found) or "the same values in another order or other combinations"


def _few(values: list[str]) -> str:
    more = len(values) - MOST
    return ", ".join(values[:MOST]) + (f" and {more} more" if more > 0 else "")


def _read_lines(path: Path) -> tuple[list[CellRecord], int]:
    """Read the lines of a file, and the number of bytes in whole lines."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise WeirError(f"cannot read {path}: {error.strerror}") from None
    whole = raw.rfind(b"\n") + 1
    found: list[CellRecord] = []
    lines: dict[int, int] = {}  # line number by cell
    for number, line in enumerate(raw[:whole].splitlines(), 1):
        key = "grid" if number == 1 else "cell"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or key not in record:
            raise WeirError(
                f"{path}, line {number}: not a line that weir eval writes"
                + (", so this is not a results file" if number == 1 else "")
            )
        read = JsonRecord(f"{path}, line {number}", record)
        if number == 1:
            read.text("grid")
            cells = len(read.records("cells"))
        else:
            check_cell(read, cells)
            if (before := lines.setdefault(record["cell"], number)) != number:
                raise read.wrong("cell", f"is {record['cell']}, as in line {before}")
        found.append(record)
    if not found and raw.strip() and not raw.startswith(b'{"grid"'[: len(raw)]):
        raise WeirError(f"{path}, line 1: not a line that weir eval writes")
    return found, whole


def _line(record: CellRecord) -> bytes:
    return (json.dumps(for_json(record), ensure_ascii=False, allow_nan=False) + "\n").encode()


def _cannot_write(path: Path, error: OSError) -> WeirError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    reason = "there is no room left on the disk" if full else error.strerror
    return WeirError(
        f"cannot write {path}: {reason}. The cells in it are complete. Use --resume to continue."
    )
