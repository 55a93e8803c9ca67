"""If an option that the user has typed has no effect, the command says so, and why."""

from __future__ import annotations

import pytest
from terminal import run

NOWHERE = "/nowhere/text.txt"
"""A text that is not there, so that a command ends before a model is loaded."""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "serve nano --disk 1GB --replicas 3",
            "--replicas has no effect: it needs --cluster",
        ),
        (
            f"stream --text {NOWHERE} --policy recompute(8) --chunk 8 --seed 1",
            "--chunk and --seed have no effect: recompute recomputes its window and draws no "
            "random numbers",
        ),
        (
            f"attention-error --text {NOWHERE} --chunk 8",
            "--chunk has no effect: it needs --stream; without it the text is folded at once",
        ),
        (
            "chat --temperature 0 --top-k 3 --policy sink(nobody)",
            "--top-k has no effect: at temperature 0 the likeliest token is always taken",
        ),
        (
            "bench --only nobody --tokens 20000 --policies weir",
            "--tokens has no effect: it is for --flat",
        ),
        (
            "bench --only nobody --policies weir",
            "--policies has no effect: no figure of --only compares policies",
        ),
        (
            "eval --tasks ppl --policies h2o(64) --budgets 32 --out {folder}",
            "--budgets has no effect: every policy here is written with its budget, or takes none",
        ),
        (
            "eval --tasks ppl --protocol subgen --positions original --out {folder}",
            "--positions has no effect: the protocol subgen sets the positions",
        ),
        (
            "eval --tasks ppl --policies h2o(64) --add --out {file}/none",
            "--add has no effect: {file}/none does not exist yet",
        ),
    ],
)
def test_what_nothing_will_read_is_named(capsys, tmp_path, words, told):
    file = tmp_path / "file"
    file.touch()
    names = {"folder": tmp_path, "file": file}
    ended = run(capsys, *words.format(**names).split())
    assert ended.code != 0
    assert told.format(**names) in ended.err.splitlines()


def test_what_was_not_typed_is_not_named(capsys):
    ended = run(capsys, "serve", "nano", "--disk", "1GB")
    assert "no effect" not in ended.err
    ended = run(capsys, "attention-error", "--text", NOWHERE, "--stream", "--chunk", "8")
    assert "no effect" not in ended.err
