"""Policy files: TOML with a policy for each layer, as measured on a model."""

from __future__ import annotations

import json
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from weir.errors import WeirError, quote
from weir.policies.file_facts import FileFacts, ListOf, read_facts

FORMAT = 1
MOST_BYTES, MOST_LAYERS, MOST_CHARACTERS = 1_000_000, 2000, 16_384
"""Limits of a policy file: its bytes, its layers, and the characters of one layer's policy.

A layer's policy usually has a few hundred characters. A file beyond these limits would take long to
read.
"""
DEEPEST = 16
"""Dotted keys with this many parts or more are refused, because the time to read a key is quadratic
in the number of its parts.
"""
SUFFIX = ".toml"
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_DEEP = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:\.[ \t]*+{_PART}){{{DEEPEST - 1}}}")
"""A key with too many parts."""
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
"""Kinds of paths that are not regular files, by the type in their mode. All others are devices."""


class _NotesToo(FileFacts):
    """Facts from a file that can also have other fields, as notes for people."""

    model_config = ConfigDict(extra="ignore")


class MeasuredModel(_NotesToo):
    """The fingerprint of a model in a file, as `models.fingerprint` makes it."""

    kind: str
    layers: int
    width: int
    vocabulary: int
    dtype: str
    weights: str


class LayerFacts(_NotesToo):
    """One layer in a file."""

    policy: str


class PolicyFacts(_NotesToo):
    """The fields of a policy file, as `PolicyFile` describes them."""

    layers: ListOf[LayerFacts]
    model: MeasuredModel
    chunk: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True)
class PolicyFile:
    """The contents of a policy file.

    It has the policy of each layer as text, the fingerprint of the model on which they were
    measured, and the tokens between two folds (None if the file does not say).
    """

    layers: tuple[str, ...]
    model: dict[str, Any]
    chunk: int | None = None


def is_file(text: str) -> bool:
    """Return whether the text of a policy is the name of a policy file."""
    return text.strip().lower().endswith(SUFFIX)


def expand_home(name: str | Path) -> Path:
    """Expand the ~ of a path."""
    if "\0" in str(name):
        raise WeirError(f"{quote(str(name))} is not a path: it contains a NUL character")
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise WeirError(
            f"{name} names a user that does not exist on this machine. Write the full path."
        ) from None


def check_regular(path: Path, what: str) -> None:
    """Refuse a path that is not a regular file. Reading a pipe blocks, and some devices never end.

    A missing or unreadable file is not refused here, because opening it will fail. `what` says what
    the path should be, as in "a policy file".
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        raise WeirError(
            f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, not {what}. Use the path of a "
            "file."
        )


def check_folder(path: Path, what: str) -> None:
    """Refuse the path of a new file if its folder does not exist.

    Nothing is written. `what` says what the file will be, as in "the plot".
    """
    if not path.parent.is_dir():
        raise WeirError(
            f"the folder {path.parent} for {what} does not exist. Create it, or use another path."
        )


def read_policy_file(name: str) -> PolicyFile:
    """Read a policy file."""
    path = expand_home(name)
    check_regular(path, "a policy file")
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise WeirError(
                f"{name} has {size:,} bytes, and a policy file can have at most {MOST_BYTES:,}. "
                "Use a file that weir calibrate wrote."
            )
        # Editors may put a byte order mark at the beginning, which is not valid TOML.
        text = path.read_text("utf-8-sig")
        if (deep := _DEEP.search(text)) is not None:
            raise WeirError(
                f"{name} is not a policy file: the key {quote(deep[0])} has {DEEPEST} or more "
                "parts. Use a file that weir calibrate wrote."
            )
        facts = tomllib.loads(text)
    except OSError as error:
        raise WeirError(f"cannot read the policy file {name}: {error.strerror}") from None
    except RecursionError:
        raise WeirError(
            f"{name} is not a policy file: it is nested too deeply. Use a file that weir "
            "calibrate wrote."
        ) from None
    except ValueError as error:
        raise WeirError(f"{name} is not a policy file: it is not valid TOML: {error}") from None
    if "format" not in facts or "layers" not in facts:
        raise WeirError(
            f'{name} is TOML, but not a policy file: it needs "format" and "layers". Use a file '
            "that weir calibrate wrote."
        )
    if facts["format"] != FORMAT:
        found = quote(facts["format"])
        raise WeirError(
            f"{name} has policy file format {found}, but this version of weir reads format "
            f"{FORMAT}. Run weir calibrate again."
        )
    try:
        stated = read_facts(PolicyFacts, facts)
    except WeirError as error:
        raise WeirError(f"{name} is damaged: {error}. Run weir calibrate again.") from None
    if not 0 < len(stated.layers) <= MOST_LAYERS:
        raise WeirError(
            f"{name} is damaged: it has policies for {len(stated.layers):,} layers, and 1 to "
            f"{MOST_LAYERS:,} are allowed. Run weir calibrate again."
        )
    for number, layer in enumerate(stated.layers):
        if len(layer.policy) > MOST_CHARACTERS:
            raise WeirError(
                f"{name} is damaged: the policy of layer {number} has {len(layer.policy):,} "
                f"characters, and at most {MOST_CHARACTERS:,} are allowed. Run weir calibrate "
                "again."
            )
    layers = tuple(layer.policy for layer in stated.layers)
    return PolicyFile(layers, stated.model.model_dump(), stated.chunk)


def format_policy_file(
    facts: Mapping[str, Any], model: Mapping[str, Any], layers: Iterable[Mapping[str, Any]]
) -> str:
    """Write a policy file as text.

    Args:
        facts: what was measured and how, by name: numbers, texts, and tables of these. Only `chunk`
            is read again, as `PolicyFile.chunk`; the others are for people.
        model: the fingerprint of the model.
        layers: for each layer its `policy` as text, and more facts for people.
    """
    tables = {key: value for key, value in facts.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in facts.items() if key not in tables}
    parts = ["# Measured budgets. To use them, give this file to weir as the policy."]
    parts += _format_table({"format": FORMAT, **plain})
    for name, table in {**tables, "model": model}.items():
        parts += ["", f"[{name}]", *_format_table(table)]
    for layer in layers:
        parts += ["", "[[layers]]", *_format_table(layer)]
    return "\n".join(parts) + "\n"


def _format_table(table: Mapping[str, Any]) -> list[str]:
    """Format names and values. TOML writes texts, numbers and lists of them as JSON does."""
    # TOML requires escaping one character that JSON does not escape.
    return [
        f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
        for key, value in table.items()
    ]
