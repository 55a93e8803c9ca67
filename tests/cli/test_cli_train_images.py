"""`weir train --images`: a folder that `weir eval --task caption` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from terminal import run


def test_what_is_trained_can_be_measured(capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "seer"
    tiny = ("--steps", 2, "--rows", 4, "--width", 16, "--layers", 1)
    ended = run(capsys, "train", "--images", "--out", out, *tiny, "--json")
    assert ended.code == 0
    facts = json.loads(ended.out)
    assert facts["recipe"]["steps"] == 2 and facts["held_out"] == 100
    ended = run(
        capsys, "eval", "--model", out, "--task", "caption(samples=2, most=3)",
        "--captions", out / "captions.json", "--images", out / "images",
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
