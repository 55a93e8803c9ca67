"""Tables of the documentation show policies as a reader can copy them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")]


def test_no_pipe_in_code_is_escaped() -> None:
    r"""The built pages show the backslash of `a \| b`. Write <code>a &#124; b</code> instead."""
    assert len(PAGES) > 30
    wrong = [
        f"{page.relative_to(ROOT)}: {found}"
        for page in PAGES
        for found in re.findall(r"`[^`\n]*\\\|[^`\n]*`", page.read_text("utf-8"))
    ]
    assert not wrong
