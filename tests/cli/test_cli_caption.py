"""`weir eval --task caption`: a model that sees, policies side by side, images left out by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reference.drawings import captioner
from terminal import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("captioner")
    captioner(path)
    (path / "images" / "0003.png").unlink()
    return path


def words(folder: Path, task: str, out: Path) -> list[object]:
    return [
        "eval", "--model", folder, "--task", task, "--captions", folder / "captions.json",
        "--images", folder / "images", "--policies", "dense, balancekv", "--budgets", "32",
        "--chunk", 8, "--out", out,
    ]  # fmt: skip


def test_policies_side_by_side(capsys: Any, folder: Path, tmp_path: Path) -> None:
    ended = run(capsys, *words(folder, "caption(most=4)", tmp_path / "r.jsonl"), "--json")
    assert ended.code == 0
    records = json.loads(ended.out)["records"]
    assert [record["policy"] for record in records] == ["dense", "balancekv(budget=32)"]
    assert all(record["metric"] == "cider" for record in records)
    assert all(record["result"]["asked"] == 3 for record in records)
    assert "caption: 1 images were left out: 0003.png is not there" in ended.err


def test_files_are_put_into_a_task_that_has_none(capsys: Any, folder: Path, tmp_path: Path) -> None:
    bare = run(capsys, *words(folder, "caption", tmp_path / "r.jsonl"), "--json")
    assert bare.code == 0
    twice = words(folder, 'caption(captions="x")', tmp_path / "s.jsonl")
    ended = run(capsys, *twice)
    assert ended.code == 2
    assert "written without them" in ended.err
    other = run(capsys, *words(folder, "ppl", tmp_path / "t.jsonl"))
    assert other.code == 2
