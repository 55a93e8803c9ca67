"""The API page lists the functions that make named policies."""

from __future__ import annotations

import re
from pathlib import Path

from weir.policies import NAMED

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_every_policy_with_a_name_is_listed() -> None:
    listed = re.findall(r"^::: weir\.policies\.\w+\.(\w+)$", PAGE.read_text("utf-8"), re.M)
    own = {name for name, make in NAMED.items() if make.__module__.startswith("weir.")}
    assert len(own) > 20
    assert own == set(listed)
