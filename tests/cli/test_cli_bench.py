"""`weir bench`: a table, one JSON object, and files that are written as figures come."""

from __future__ import annotations

import json
import os

import pytest
import torch
from terminal import run

from weir_bench.command import figures
from weir_bench.figure import Row

QUICK = ("bench", "--quick", "--only", "decode", "--dtype", "float32", "--threads", 1)


@pytest.fixture(autouse=True)
def threads():
    """Restore the number of threads, which the command changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_figure_stands_beside_its_peer(capsys):
    ended = run(capsys, *QUICK)
    assert ended.code == 0, ended.err
    words = " ".join(ended.out.split())
    for word in ("figure", "peer", "ratio", "1 threads", "kernels:"):
        assert word in words
    assert "these figures say nothing" in words
    assert "≤" not in words and "met" not in words.split()  # targets are for the large model


def test_a_target_stands_beside_its_figure_and_whether_it_is_met():
    rows = [
        Row("a step", 1.0, 2.0, "ms", 0.5, target=0.95),
        Row("a copy", 1.0, 2.0, "ms", 0.5, target=0.7, least=True),
        Row("no target", 1.0, 2.0, "ms", 0.5),
    ]
    table = figures([("decode", "float32", row) for row in rows])
    cells = [list(column.cells) for column in table.columns[-2:]]
    assert cells == [["≤ 0.95", "≥ 0.7", ""], ["yes", "no", ""]]


@pytest.mark.slow
def test_json_is_one_object_and_nothing_else(capsys):
    ended = run(capsys, *QUICK, "--json", "--layers", 1)
    assert ended.code == 0, ended.err
    facts = json.loads(ended.out)
    rows = facts["rows"]
    assert facts["machine"]["layers"] == 1
    # Steps that are not compiled are compared with two caches and with what the memory's bandwidth
    # allows. Compiled steps are compared with the same three, and with a compiled cache.
    assert [row["figure"] for row in rows] == ["decode"] * 7
    assert ["compiled" in row["what"] for row in rows] == [False] * 3 + [True] * 4
    assert [row["dtype"] for row in rows] == ["float32"] * 7
    assert facts["quick"] is True
    assert facts["machine"]["threads"] == 1
    for share in (rows[2], rows[6]):
        assert share["ratio"] == pytest.approx(share["peer"] / share["ours"])


def test_policies_that_are_named_are_the_ones_that_are_timed(capsys):
    asked = ("bench", "--quick", "--only", "folds", "--policies", "weir, streaming_llm", "--json")
    rows = json.loads(run(capsys, *asked).out)["rows"]
    assert [row["what"].split("`")[1] for row in rows] == ["streaming_llm", "weir"]


@pytest.mark.slow
def test_what_was_asked_for_and_cannot_be_measured_is_told(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("weir_bench.peers.process.HOME", tmp_path)
    ended = run(capsys, "bench", "--quick", "--only", "kvpress", "--dtype", "float32")
    assert ended.code == 0
    assert "not measured: kvpress float32: kvpress is not installed; `make peers`" in ended.err


@pytest.mark.slow
def test_the_table_is_written_beside_the_figures(capsys, tmp_path):
    out = tmp_path / "here" / "it goes"
    ended = run(capsys, *QUICK, "--out", out)
    assert ended.code == 0, ended.err
    facts = json.loads((out / "bench.json").read_text("utf-8"))
    table = (out / "bench.md").read_text("utf-8")
    for row in facts["rows"]:
        assert row["what"] in table


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--only", "speed"), "unknown figure 'speed'. Use one of decode, around"),
        (("--flat", "--only", "decode"), "--flat is a separate figure"),
        (
            ("--policies", "weir,wier"),
            "figures compare, got 'wier', did you mean 'weir'?",
        ),
        (("--policies", ","), "names that figures compare, got ','"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, words, problem):
    ended = run(capsys, "bench", "--quick", "--dtype", "float32", *words)
    assert ended.code == 1
    assert ended.err.startswith("weir: ")
    assert problem in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--threads", (os.cpu_count() or 1) + 1), "cores of this machine"),
        (("--out", __file__), "is not a result of weir bench peers"),
    ],
)
def test_what_peers_cannot_be_is_one_line(capsys, words, problem):
    ended = run(capsys, "bench", "peers", *words)
    assert ended.code == 1
    assert problem in ended.err
    assert ended.err.count("\n") == 1


def test_without_a_clone_one_line_says_where_it_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("weir.cli.app.BENCH", tmp_path)
    ended = run(capsys, "bench", "--quick")
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert ended.err.startswith("weir: weir bench is not part of the installed package. Clone weir")
