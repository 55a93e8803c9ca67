"""The faults of `tests/mutants` can still be inserted. An outdated list would prove nothing."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
MUTANTS = runpy.run_path(str(ROOT / "tests" / "mutants" / "run.py"))["read_mutants"]()


def test_the_text_of_every_fault_occurs_once() -> None:
    stale = {}
    for mutant in MUTANTS:
        path = ROOT / mutant["file"]
        found = path.read_text("utf-8").count(mutant["old"]) if path.is_file() else 0
        if found != 1:
            stale[mutant["name"]] = f"{found} times in {mutant['file']}"
    assert stale == {}


def test_the_tests_that_must_notice_a_fault_are_there() -> None:
    missing = []
    for mutant in MUTANTS:
        assert mutant["tests"], mutant["name"]
        for test in mutant["tests"]:
            file, _, name = test.partition("::")
            path = ROOT / file
            if not path.exists():
                missing.append((mutant["name"], test))
            elif name:
                tree = ast.parse(path.read_text("utf-8"))
                names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
                if name.partition("[")[0] not in names:
                    missing.append((mutant["name"], test))
    assert missing == []
