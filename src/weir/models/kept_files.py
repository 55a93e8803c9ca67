"""weir's cache folder, for files that can be made again: timings, measurements of models, and
trained gates (`models.gates`).
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Return weir's cache folder, which may not exist yet.

    It is below `XDG_CACHE_HOME` if that is set, otherwise below `~/.cache` or, for a user without a
    home directory, below the system's folder for temporary files.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        caches = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:  # the user has no home directory
        caches = Path(tempfile.gettempdir())
    return caches / "weir"


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file; {} if the file is missing or unreadable, or has no object."""
    try:
        found: Any = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(file: Path, facts: dict[str, Any]) -> None:
    """Write a JSON file atomically; does nothing if it cannot be written."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            made = Path(scratch) / file.name
            made.write_text(json.dumps(facts, indent=1, sort_keys=True), "utf-8")
            made.replace(file)
