"""docs/house.md lists the files that a token and a request pass through."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import request_path, token_path

HOUSE = Path(__file__).parents[1] / "docs" / "house.md"


def listed(heading: str) -> set[str]:
    """Return the files listed below a heading of docs/house.md, each with its folder."""
    section = HOUSE.read_text("utf-8").partition(f"### {heading}\n")[2].partition("\n#")[0]
    found = set()
    for folder, files in re.findall(r"^\| `([\w/]+/)` \| (.*) \|$", section, re.M):
        found |= {folder + name for name in re.findall(r"`([\w/]+\.py)`", files)}
    return found


def test_a_token_that_folds_passes_the_files_that_the_page_lists() -> None:
    assert set(token_path()) == listed("The files of a token")


@pytest.mark.slow
def test_a_request_passes_the_files_that_the_page_lists() -> None:
    passed = {name for name in request_path() if name.startswith("serve/")}
    # The server can compute further until the client has read the first text.
    assert listed("The files of a request") <= passed
    assert len(passed - listed("The files of a request")) <= 4
