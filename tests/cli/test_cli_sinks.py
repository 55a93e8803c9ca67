"""`weir sinks`: the sink experiment from one command, at toy size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from terminal import run

from weir.models.loading import ASSETS
from weir.stream import read_text
from weir.train import PRESETS, Preset


@pytest.fixture
def words(monkeypatch, tmp_path) -> tuple[object, ...]:
    """The command on a short text, with models that take a second to train."""
    toy = replace(
        PRESETS["small"].recipe, tokens=4000, rows=4, length=64, width=32, layers=1, inner=48
    )
    monkeypatch.setitem(PRESETS, "small", Preset(toy, 400))
    text = tmp_path / "book.txt"
    text.write_text(read_text(ASSETS / "war-and-peace.txt.xz")[8000:30000], "utf-8")
    out = tmp_path / "out"
    return ("--text", text, "--out", out, "--no-compiled", "--read", 2000)


@pytest.mark.slow
def test_one_command_trains_streams_and_reports(capsys, words, tmp_path):
    ended = run(capsys, "sinks", *words, "--sink", "none, learnable:2")
    assert ended.code == 0, ended.err
    assert "none: step 15 of 15" in ended.err and "learnable:2: step 15 of 15" in ended.err
    assert "2 Sink Tokens, paper" in ended.out and "25.73" in ended.out
    assert "Vanilla needs initial tokens to stream (none: 0+y against 4+y" in ended.out
    out = tmp_path / "out"
    for name in ("sinks.md", "sinks.json", "sinks.csv", "sinks-ppl.png", "sinks-loss.png"):
        assert str(out / name) in ended.out.replace("\n", "")
        assert (out / name).stat().st_size > 100
    again = run(capsys, "sinks", *words, "--sink", "none, learnable:2", "--json")
    assert again.code == 0 and "step" not in again.err, "what is trained is not trained again"
    facts = json.loads(again.out)
    assert list(facts["models"]) == ["none", "learnable:2"]
    assert facts == json.loads((out / "sinks.json").read_text("utf-8"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (("--sink", "none,some"), "a sink is none"),
        (("--text", "nowhere.txt"), "cannot read nowhere.txt"),
        (("--held-out", "nowhere.txt"), "cannot read nowhere.txt"),
        (("--budget", 63), "63 slots"),
        (("--preset", "tiny"), "not 'tiny'"),
        (("--read", 10), "10 tokens are too few"),
    ],
)
def test_what_cannot_be_run_is_one_line(capsys, words, tmp_path: Path, changes, says):
    ended = run(capsys, "sinks", *words, *changes)
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1), ended
    assert says in ended.err
    assert not (tmp_path / "out").exists()
