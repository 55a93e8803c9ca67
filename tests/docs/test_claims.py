"""What the pages claim is proved by tests that exist, and of which `make test` runs all cases."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CLAIMS: list[dict[str, Any]] = tomllib.loads((ROOT / "tests" / "claims.toml").read_text("utf-8"))[
    "claim"
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md"]
PAGES += sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "bench" / "results").glob("*.md")])


def marks_of(file: str) -> dict[str, list[str]]:
    """The decorators of each test of a file, as they are written."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    return {
        node.name: [ast.unparse(mark) for mark in node.decorator_list]
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["says"][:40])
def test_a_claim_is_on_its_page_and_its_tests_are_run_whole(claim: dict[str, Any]) -> None:
    page = (ROOT / claim["page"]).read_text("utf-8")
    assert words(claim["says"]) in words(page)
    for test in claim["tests"]:
        file, _, name = test.partition("::")
        if not name:
            assert (ROOT / file).is_file()
            continue
        marks = marks_of(file)
        assert name in marks, f"{file} has no {name}"
        assert "slow" in claim or "pytest.mark.slow" not in marks[name], f"{name} is slow"
        thinned = [mark for mark in marks[name] if mark.startswith("pytest.mark.thinned")]
        assert not thinned or "repeated" in claim, f"{name} is thinned"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_test_that_a_page_names_is_there_and_never_thinned(page: Path) -> None:
    listed = {test for claim in CLAIMS for test in claim["tests"]}
    for file, name in re.findall(r"\b(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text("utf-8")):
        assert (ROOT / file).is_file(), file
        if name:
            assert name in marks_of(file)
            assert f"{file}::{name}" in listed, f"add {file}::{name} to tests/claims.toml"
    for folder in re.findall(r"`(tests/[\w/]+/?)`", page.read_text("utf-8")):
        assert (ROOT / folder).is_dir(), folder


def test_every_method_page_has_claims_that_are_proved() -> None:
    proved = {claim["page"] for claim in CLAIMS}
    methods = {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "methods").glob("*.md")}
    assert methods <= proved
