"""What docs/limits.md says about each model type's decode steps."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
NATIVE = "native"


def families() -> dict[str, str]:
    """For each model type, or type with a setting: `NATIVE`, or why its steps are not native."""
    section = PAGE.read_text("utf-8").partition("## Models")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \| [^|]* \| ([^|]*) \|$", section, re.MULTILINE)
    return {
        name.replace("`", ""): said.replace("`", "").removeprefix("not native: ")
        for name, said in rows
    }
