"""weir's folder for files that can be made again: timings, and what was read of GGUF files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder, which may not exist: below `XDG_CACHE_HOME`, `~/.cache` or `/tmp`."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        caches = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:  # the user has no home directory
        caches = Path(tempfile.gettempdir())
    return caches / "weir"
