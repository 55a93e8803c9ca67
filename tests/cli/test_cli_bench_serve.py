"""`weir bench serve`: tables, one JSON object, and errors in one line."""

from __future__ import annotations

import json

import pytest
from terminal import run

QUICK = ("bench", "serve", "--quick", "--only", "disk")


def test_figures_stand_beside_what_was_asked_for_and_the_command(capsys, tmp_path):
    out = tmp_path / "here" / "it goes.json"
    ended = run(capsys, *QUICK, "--out", out)
    assert ended.code == 0, ended.err
    told = " ".join(ended.out.split())
    assert "back from disk" in told
    assert "kernels:" in told
    facts = json.loads(out.read_text("utf-8"))
    assert [row["figure"] for row in facts["rows"]] == ["disk", "disk"]
    back, saved = facts["rows"]
    assert back["ours"] > 0
    assert saved["peer"] == back["ours"]
    assert facts["runs"] == facts["skipped"] == []


def test_json_is_one_object_and_nothing_else(capsys):
    ended = run(capsys, *QUICK, "--json")
    assert ended.code == 0, ended.err
    facts = json.loads(ended.out)
    assert facts["quick"] is True
    assert facts["command"].startswith("weir")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ("bench", "serve", "--quick", "--only", "speed"),
            "part 'speed'. Use one of attack, ",
        ),
        (("bench", "--quick", "serve"), "--quick has no effect before serve. Write it after"),
        (("bench", "serve", "/nowhere", "--only", "disk"), "/nowhere"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, arguments, problem):
    ended = run(capsys, *arguments)
    assert ended.code == 1
    assert ended.err.startswith("weir: ")
    assert problem in ended.err
    assert ended.err.count("\n") == 1
