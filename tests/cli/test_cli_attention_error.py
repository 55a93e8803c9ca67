"""`weir attention-error` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weir.cli.app import app
from weir.errors import WeirError

BOOK = str(Path(__file__).parents[2] / "src/weir/assets/war-and-peace.txt.xz")


def run(*words: str) -> str:
    """Run `weir attention-error`; what it prints on standard output."""
    done = CliRunner().invoke(app, ["attention-error", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_one_json_object_and_nothing_else(tmp_path):
    plot = tmp_path / "errors.svg"
    words = ("--tokens", "256", "--seeds", "2", "--rates", "1/2,0.25", "--layers", "0,2")
    facts = json.loads(run("--text", BOOK, *words, "--json", "--plot", str(plot)))
    assert facts["model"] == "nano"
    assert (facts["tokens"], facts["queries"], facts["exact"]) == (256, 64, 32)
    rows = facts["rows"]
    assert [(row["name"], row["rate"], row["layer"]) for row in rows] == [
        (name, rate, layer)
        for name in ("uniform", "balancekv")
        for rate in (0.5, 0.25)
        for layer in (0, 2)
    ]
    assert all(len(row["errors"]) == 2 and row["error"] > 0 for row in rows)
    assert {mean["name"] for mean in facts["means"]} == {"uniform", "balancekv"}
    drawn = plot.read_text("utf-8")
    assert "layer 2" in drawn and "balancekv" in drawn and "1/4" in drawn


def test_a_table_for_each_policy(tmp_path):
    out = run("--text", BOOK, "--tokens", "200", "--seeds", "1", "--policy", "h2o(40), recent(20)")
    assert out.count("rate") == 2 and "1 seed" in out and "1 seeds" not in out
    assert "recent(20)" in out and "layer 3" in out
    assert "the last 50 of 200 tokens" in out


def test_blocks_stand_beside_the_others():
    words = ("--tokens", "256", "--seeds", "1", "--rates", "1/2", "--blocks", "8,16", "--json")
    facts = json.loads(run("--text", BOOK, *words, "--layers", "1"))
    names = [mean["name"] for mean in facts["means"]]
    assert names == ["uniform", "balancekv", "balancekv(block=8)", "balancekv(block=16)"]
    assert all(mean["seconds"] > 0 for mean in facts["means"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--layers", "9"], "layer 9 does not exist. The layers are 0 to 3"),
        (["--tokens", "90", "--queries", "90"], "fewer than the 90 tokens, got 90. Use a longer"),
        (["--policy", "unifrom"], "did you mean 'uniform'"),
        (
            ["--policy", "h2o(64), uniform"],
            r"uniform has no budget, but h2o\(64\) has one",
        ),
        (["--blocks", "8,3"], "block must be an even number of tokens of at least 2, got 3"),
        (["--tokens", "3"], "3 tokens are too few. The error is measured on the attention of"),
        (["--policy", "recent(5)", "--rates", "1/2"], "takes a budget, and .* does not"),
        (["--plot", "errors.txt"], "the name of a plot must end with .svg or .png or .pdf"),
        (
            ["--plot", "no/such/folder/errors.svg"],
            "no/such/folder for the plot does not exist",
        ),
    ],
)
def test_bad_input_has_a_reason(words, reason):
    with pytest.raises(WeirError, match=reason):
        run("--text", BOOK, *words)


@pytest.mark.parametrize(
    "words",
    [["--rates", "2"], ["--rates", "1/0"], ["--rates", "x"], ["--layers", "a"], ["--seeds", "0"]],
)
def test_wrong_usage_is_told_from_a_wrong_world(words):
    done = CliRunner().invoke(app, ["attention-error", "--text", BOOK, *words])
    assert done.exit_code == 2
