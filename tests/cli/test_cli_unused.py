"""An option that was typed and that nothing will read is named, with what it is for."""

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
            "--replicas changes nothing here: it is for --cluster",
        ),
        (
            f"stream --text {NOWHERE} --policy recompute(8) --chunk 8 --seed 1",
            "--chunk and --seed change nothing here: recompute reads its window anew and draws "
            "nothing",
        ),
        (
            f"attention-error --text {NOWHERE} --chunk 8",
            "--chunk changes nothing here: it is for --stream, and the text is folded at once",
        ),
        (
            "chat --temperature 0 --top-k 3 --policy sink(nobody)",
            "--top-k changes nothing here: at a temperature of 0 the likeliest token is taken",
        ),
        (
            "bench --only nobody --tokens 20000 --policies weir",
            "--tokens changes nothing here: it is for --flat",
        ),
        (
            "bench --only nobody --policies weir",
            "--policies changes nothing here: no figure of --only compares policies",
        ),
        (
            "eval --tasks ppl --policies h2o(64) --budgets 32 --out {folder}",
            "--budgets changes nothing here: no policy here takes a budget and is written without "
            "one",
        ),
        (
            "eval --tasks ppl --protocol subgen --positions original --out {folder}",
            "--positions changes nothing here: the protocol subgen says where tokens stand",
        ),
        (
            "eval --tasks ppl --policies h2o(64) --add --out {file}/none",
            "--add changes nothing here: there is no {file}/none yet",
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
    assert "nothing here" not in ended.err
    ended = run(capsys, "attention-error", "--text", NOWHERE, "--stream", "--chunk", "8")
    assert "nothing here" not in ended.err
