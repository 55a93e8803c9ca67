"""Reads data sets of JSON lines, with errors that name the file, line and field.

Files are UTF-8, plain, `.gz` or `.xz`. Instead of a file, you can name a data set of the Hugging
Face Hub: `hub:EdinburghNLP/xsum:test` is a data set and its split, and
`hub:allenai/ai2_arc:ARC-Easy:test` has a configuration between them. A folder of data files can
replace the id.
"""

from __future__ import annotations

import gzip
import json
import lzma
import sys
import zlib
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from weir.errors import WeirError, describe_missing, first_line


def import_optional(module: str, what: str, extra: str = "eval") -> Any:
    """Import a module of an optional package, which the feature `what` needs.

    Raises:
        WeirError: the module cannot be imported; the message names the extra that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        reason = "" if error.name == module.partition(".")[0] else str(error)
        raise WeirError(describe_missing(what, module, reason=reason, extra=extra)) from None


HUB = "hub:"


def rows_of(name: str, most: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Hub data set, at most `most`."""
    parts = name.removeprefix(HUB).split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise WeirError(
            "a data set of the Hub must be written hub:ID:SPLIT or hub:ID:CONFIGURATION:SPLIT, "
            f"got {name!r}"
        )
    datasets = import_optional("datasets", "reading from the Hub")
    try:
        found = datasets.load_dataset(*parts[:-1], split=parts[-1])
    except Exception as error:  # its exceptions have no common base class
        raise WeirError(f"the data set {name!r} cannot be loaded ({first_line(error)})") from None
    yield from islice(found, most)


LARGEST = sys.float_info.max


class JsonRecord:
    """One JSON object, whose errors say where an invalid field is.

    Each method that reads a field raises a `WeirError` if the field is missing or has another type.

    Args:
        place: the file and line, for errors.
        values: the object.
        path: the path of a nested object, such as `question.choices[2].`.
    """

    def __init__(self, place: str, values: dict[str, Any], path: str = "") -> None:
        self.place = place
        self.values = values
        self.path = path

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str) -> str:
        """The text in a field."""
        return str(self._get(name, str, "a text"))

    def count(self, name: str) -> int:
        """The whole number in a field."""
        return int(self._get(name, int, "a whole number"))

    def flag(self, name: str) -> bool:
        """The truth value in a field."""
        return bool(self._get(name, bool, "true or false"))

    def number(self, name: str, known: bool = False) -> float | None:
        """The number in a field, or None for null. With `known`, null is refused."""
        if name not in self.values:
            raise self.wrong(name, "is missing")
        return self._number(name, self.values[name], known)

    def numbers(self, name: str) -> list[float | None]:
        """The list of numbers in a field, None for each null."""
        return [self._number(at, value, known=False) for at, value in self._items(name)]

    def words(self, name: str) -> str:
        """The non-blank text in a field."""
        return self._words(name, self.text(name))

    def several_words(self, name: str, least: int = 0) -> list[str]:
        """The list of non-blank texts in a field, at least `least`."""
        return [self._words(f"{name}[{i}]", text) for i, text in enumerate(self.texts(name, least))]

    def texts(self, name: str, least: int = 0) -> list[str]:
        """The list of texts in a field, at least `least`."""
        items = self._items(name, least)
        return [str(self._check(at, value, str, "a text")) for at, value in items]

    def record(self, name: str) -> JsonRecord:
        """The object in a field."""
        return JsonRecord(self.place, self._get(name, dict, "an object"), f"{self.path}{name}.")

    def records(self, name: str, least: int = 0) -> list[JsonRecord]:
        """The list of objects in a field, at least `least`."""
        return [
            JsonRecord(self.place, self._check(at, value, dict, "an object"), f"{self.path}{at}.")
            for at, value in self._items(name, least)
        ]

    def wrong(self, name: str, problem: str) -> WeirError:
        """Make the error for an invalid field; `problem` follows the name in the message."""
        return WeirError(f"{self.place}: the field '{self.path}{name}' {problem}")

    def _items(self, name: str, least: int = 0) -> list[tuple[str, Any]]:
        """The entries of a list, each with its name for errors, such as `choices[2]`."""
        items: list[Any] = self._get(name, list, "a list")
        if len(items) < least:
            entries = "entry" if least == 1 else "entries"
            raise self.wrong(name, f"must have at least {least} {entries}, got {len(items)}")
        return [(f"{name}[{i}]", value) for i, value in enumerate(items)]

    def _get(self, name: str, kind: type, words: str) -> Any:
        if name not in self.values:
            raise self.wrong(name, "is missing")
        return self._check(name, self.values[name], kind, words)

    def _check(self, name: str, value: Any, kind: type, words: str) -> Any:
        # In Python, bool is a subclass of int.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.wrong(name, f"must be {words}, got {_shown(value)}")
        return value

    def _number(self, name: str, value: Any, known: bool) -> float | None:
        if value is None and not known:
            return None
        # Reject NaN, and integers too large for a float.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not -LARGEST <= value <= LARGEST:
            raise self.wrong(
                name, f"must be a number{'' if known else ' or null'}, got {_shown(value)}"
            )
        return float(value)

    def _words(self, name: str, value: str) -> str:
        if not value.strip():
            raise self.wrong(name, "is empty")
        return value


def read_records(path: str | Path, most: int | None = None) -> list[JsonRecord]:
    """Read the records of a file, at most `most`; blank lines are skipped.

    `hub:ID:SPLIT` and `hub:ID:CONFIGURATION:SPLIT` are read from the Hub.

    Raises:
        WeirError: no file is named; the file is missing, damaged, not UTF-8 or empty; a line is not
            a JSON object; or the data set cannot be loaded.
    """
    if not str(path):
        raise WeirError("no file was given. Give the path of a file, or hub:ID:SPLIT.")
    if str(path).startswith(HUB):
        rows = enumerate(rows_of(str(path), most), 1)
        found = [JsonRecord(f"{path}, row {number}", row) for number, row in rows]
    else:
        found = _from_file(path, most)
    if not found:
        raise WeirError(f"{path} contains no records")
    return found


def _from_file(path: str | Path, most: int | None) -> list[JsonRecord]:
    found: list[JsonRecord] = []
    for number, line in _numbered_lines(Path(path).expanduser()):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise WeirError(f"{place}: not JSON, {error.msg} (character {error.pos + 1})") from None
        except RecursionError:
            raise WeirError(f"{place}: nested too deeply to be read") from None
        if not isinstance(values, dict):
            raise WeirError(f"{place}: a record must be a JSON object, got {_shown(values)}")
        found.append(JsonRecord(place, values))
        if len(found) == most:
            break
    return found


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield lines of text with their numbers, from 1."""
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    number = 0
    try:
        with openers.get(path.suffix, open)(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                yield number, raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise WeirError(
            f"{path}, line {number}: not UTF-8, byte {error.start + 1} is "
            f"0x{error.object[error.start]:02x}"
        ) from None
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise WeirError(f"{path} is not a whole {path.suffix} file: {error}") from None
    except OSError as error:
        raise WeirError(f"cannot read {path}: {error.strerror or error}") from None


def _shown(value: Any) -> str:
    """Shorten a value for an error."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."
