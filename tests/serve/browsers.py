"""The system's Chromium, under playwright."""

from __future__ import annotations

import os
import shutil
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str | None:
    """Return the path of the first Chromium on the PATH, or None."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def launch_browser(playwright: Any, path: str) -> Any:
    """Start a browser. Chromium refuses to run as root with its sandbox."""
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    return playwright.chromium.launch(executable_path=path, args=root)
