"""`weir train --images`: a folder that the task of examples/captions reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from terminal import run

from weir.evals.task import TASKS, Task

SCRIPT = Path(__file__).parents[2] / "examples" / "captions" / "caption.py"


def test_what_is_trained_can_be_measured(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WEIR_IMPORT", "")
    monkeypatch.setattr("weir.policies.plugins._asked", set())
    monkeypatch.delitem(sys.modules, "caption", raising=False)
    monkeypatch.setitem(TASKS, "caption", Task)  # and taken away at the end
    out = tmp_path / "seer"
    tiny = ("--steps", 2, "--rows", 4, "--width", 16, "--layers", 1)
    ended = run(capsys, "train", "--images", "--out", out, *tiny, "--json")
    assert ended.code == 0
    facts = json.loads(ended.out)
    assert facts["recipe"]["steps"] == 2 and facts["held_out"] == 100
    files = f'captions="{out}/captions.json", images="{out}/images"'
    ended = run(
        capsys, "--import", SCRIPT, "eval", "--model", out,
        "--task", f"caption({files}, samples=2, most=3)",
        "--policies", "streaming_llm", "--budgets", 16, "--chunk", 8,
        "--out", tmp_path / "r.jsonl", "--json",
    )  # fmt: skip
    assert ended.code == 0
    assert json.loads(ended.out)["records"][0]["result"]["asked"] == 2


def test_books_and_drawings_are_not_mixed(capsys: Any, tmp_path: Path) -> None:
    both = run(capsys, "train", "--images", "--text", "books.txt", "--out", tmp_path)
    assert both.code == 2 and "leave out --text" in both.err
    neither = run(capsys, "train", "--out", tmp_path)
    assert neither.code == 2 and "give --text" in neither.err
