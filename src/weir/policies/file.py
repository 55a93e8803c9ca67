"""Policy files: TOML with a policy for each layer, as they were measured on a model."""

from __future__ import annotations

import json
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weir.errors import WeirError, quote

FORMAT = 1
MOST_BYTES, MOST_LAYERS, MOST_CHARACTERS = 1_000_000, 2000, 16_384
"""Bytes of a policy file, layers in it, and characters of the policy of one layer, which has a few
hundred. Reading more takes long.
"""
DEEPEST = 16
"""Parts of a dotted key that are too many: reading one takes the square of their number in time."""
SUFFIX = ".toml"
MODEL = {"kind": str, "layers": int, "width": int, "vocabulary": int, "dtype": str, "weights": str}
"""The fingerprint of a model in a file, as `models.fingerprint` makes it."""
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_DEEP = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:\.[ \t]*+{_PART}){{{DEEPEST - 1}}}")
"""A key of too many parts."""
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
"""Kinds of paths that are no regular files, by the type in their mode; others are devices."""


@dataclass(frozen=True)
class PolicyFile:
    """The contents of a policy file: of each layer the policy as text, the fingerprint of the model
    that they were measured on, and tokens between two folds, None if the file does not say.
    """

    layers: tuple[str, ...]
    model: dict[str, Any]
    chunk: int | None = None


def is_file(text: str) -> bool:
    """Whether the text of a policy is the name of a policy file."""
    return text.strip().lower().endswith(SUFFIX)


def expand_home(name: str | Path) -> Path:
    """Expand the ~ of a path."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise WeirError(f"nobody knows whose home is meant by {name}") from None


def check_regular(path: Path, what: str) -> None:
    """Refuse a path that is no regular file: reading a pipe blocks, and some devices have no end.

    A file that is missing or may not be read is not refused here; opening it will fail. `what` is
    what it should be, as in "a policy file".
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        raise WeirError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, and not {what}")


def read_policy_file(name: str) -> PolicyFile:
    """Read a policy file."""
    path = expand_home(name)
    check_regular(path, "a policy file")
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise WeirError(
                f"{name} has {size:,} bytes, and a policy file has at most {MOST_BYTES:,}; give "
                "one that weir calibrate wrote"
            )
        # Editors may put a byte order mark in front, which is no TOML.
        text = path.read_text("utf-8-sig")
        if (deep := _DEEP.search(text)) is not None:
            raise WeirError(
                f"{name} is no policy file, for it has the key {quote(deep[0])} of {DEEPEST} parts "
                "or more"
            )
        facts = tomllib.loads(text)
    except OSError as error:
        raise WeirError(f"cannot read the policy file {name}: {error.strerror}") from None
    except RecursionError:
        raise WeirError(f"{name} is no policy file, for it is nested too deep") from None
    except ValueError as error:
        raise WeirError(f"{name} is no policy file, for it is no TOML: {error}") from None
    if "format" not in facts or "layers" not in facts:
        raise WeirError(f"{name} is TOML, but no policy file; weir calibrate writes those")
    if facts["format"] != FORMAT:
        found = quote(facts["format"])
        raise WeirError(f"{name} has policy file format {found}; this weir reads format {FORMAT}")
    model, layers = facts.get("model"), facts["layers"]
    if not isinstance(model, dict) or any(
        type(model.get(key)) is not kind for key, kind in MODEL.items()
    ):
        raise WeirError(f"{name} is damaged: it does not say of which model it is")
    if not isinstance(layers, list) or not layers:
        raise WeirError(f"{name} is damaged: its layers are no list of tables")
    if len(layers) > MOST_LAYERS:
        raise WeirError(
            f"{name} is damaged: it has policies for {len(layers):,} layers, and no model has more "
            f"than {MOST_LAYERS:,}"
        )
    for number, layer in enumerate(layers):
        if not isinstance(layer, dict) or not isinstance(layer.get("policy"), str):
            raise WeirError(f"{name} is damaged: layer {number} has no policy")
        if len(layer["policy"]) > MOST_CHARACTERS:
            raise WeirError(
                f"{name} is damaged: the policy of layer {number} has {len(layer['policy']):,} "
                f"characters, and a policy has at most {MOST_CHARACTERS:,}"
            )
    chunk = facts.get("chunk")
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise WeirError(f"{name} is damaged: its chunk is no whole number from 1 on")
    return PolicyFile(
        tuple(layer["policy"] for layer in layers), {key: model[key] for key in MODEL}, chunk
    )


def format_policy_file(
    facts: Mapping[str, Any], model: Mapping[str, Any], layers: Iterable[Mapping[str, Any]]
) -> str:
    """Write a policy file, as text.

    Args:
        facts: what was measured and how, for people: numbers, texts, and tables of these, by name.
        model: the fingerprint of the model.
        layers: for each layer its `policy`, and more facts for people.
    """
    tables = {key: value for key, value in facts.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in facts.items() if key not in tables}
    parts = ["# Budgets that were measured: give this file where weir takes a policy."]
    parts += _format_table({"format": FORMAT, **plain})
    for name, table in {**tables, "model": model}.items():
        parts += ["", f"[{name}]", *_format_table(table)]
    for layer in layers:
        parts += ["", "[[layers]]", *_format_table(layer)]
    return "\n".join(parts) + "\n"


def _format_table(table: Mapping[str, Any]) -> list[str]:
    """Format names and values. TOML writes texts, numbers and lists of them as JSON does."""
    # TOML wants one character escaped that JSON leaves as it is.
    return [
        f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
        for key, value in table.items()
    ]
