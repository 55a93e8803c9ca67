"""`weir report` and `weir advise`: pages from results, and a policy for a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from terminal import make_model, run

from weir.evals import advice

WORDS = "The prince was silent, but she looked at him significantly, awaiting a reply. "


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(WORDS * 20)
    return path


@pytest.mark.slow
def test_a_report_is_made_of_what_eval_wrote(capsys, model, text, tmp_path):
    results = tmp_path / "r.jsonl"
    run(
        capsys, "eval", "--model", model, "--tasks", f"ppl(tokens=300, text={text}, block=100)",
        "--policies", "dense, h2o", "--budgets", "24,48", "--out", results,
    )  # fmt: skip
    ended = run(capsys, "report", results, "--out", tmp_path / "pages")
    assert (ended.code, ended.err) == (0, "")
    pages = [tmp_path / "pages" / name for name in ("report.html", "report.md")]
    assert ended.out.split() == [str(page) for page in pages]
    assert "h2o(budget=48)" in pages[0].read_text("utf-8")
    ended = run(capsys, "report", results, results, "--out", tmp_path / "c", "--format", "csv")
    assert ended.out.split() == [str(tmp_path / "c" / "tables.csv")]
    facts = json.loads(run(capsys, "report", results, "--out", tmp_path / "b", "--json").out)
    assert [Path(page).name for page in facts["pages"]] == ["report.html", "report.md"]


def test_what_is_no_results_file_is_one_line(capsys, text, tmp_path):
    ended = run(capsys, "report", text, "--out", tmp_path / "pages")
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "line 1: not a line that weir eval writes" in ended.err
    ended = run(capsys, "report", tmp_path / "none.jsonl")
    assert (ended.code, ended.err) == (
        1,
        f"weir: the results file {tmp_path / 'none.jsonl'} does not exist\n",
    )


def test_advice_names_one_policy_with_its_figures(capsys, model, text, monkeypatch):
    monkeypatch.setattr(advice, "CANDIDATES", ("window", "streaming_llm"))
    words = ("advise", "--text", text, "--model", model, "--memory", "80kB", "--tokens", 700)
    ended = run(capsys, *words)
    assert (ended.code, ended.err) == (0, "")
    facts = json.loads(run(capsys, *words, "--json").out)
    assert f"ommended: {facts['best']}. Perplexity " in ended.out
    assert facts["memory"] == 80_000
    assert len(facts["tries"]) == 2
    assert all(one["kv_bytes"] <= 80_000 for one in facts["tries"])
    assert facts["best"] == min(facts["tries"], key=lambda one: one["ppl"])["policy"]


def test_advice_is_given_among_the_policies_that_are_named(capsys, model, text):
    words = ("advise", "--text", text, "--model", model, "--memory", "80kB", "--tokens", 700)
    ended = run(capsys, *words, "--policies", "window(24), sink(4) | recent(24)", "--json")
    assert ended.code == 0, ended.err
    tried = {one["policy"]: one["budget"] for one in json.loads(ended.out)["tries"]}
    assert tried == {"window(24)": 24, "sink(4) | recent(24)": 28}


def test_advice_names_lists_of_layers_in_its_table(capsys, model, text):
    words = ("advise", "--text", text, "--model", model, "--memory", "80kB", "--tokens", 700)
    listed = "[sink(4) | recent(20)]"
    ended = run(capsys, *words, "--policies", listed)
    assert ended.code == 0, ended.err
    assert f"│ {listed} " in ended.out


@pytest.mark.parametrize("given", [("--budget", 400), ("--memory", "2MB")])
def test_a_text_that_fits_is_said_to_fit_in_what_was_given(
    capsys, model, tmp_path, monkeypatch, given
):
    monkeypatch.setattr(advice, "CANDIDATES", ("window",))
    path = tmp_path / "short.txt"
    path.write_text(WORDS)
    ended = run(capsys, "advise", "--text", path, "--model", model, *given)
    assert ended.code == 0, ended.err
    said = " ".join(ended.out.split())
    assert "of the text fit in the window of " in said
    assert " and in the given size: their cache takes " in said
    assert "Use the policy dense: nothing has to be evicted." in said


@pytest.mark.slow
def test_a_trial_in_which_nothing_was_evicted_is_said_to_tell_nothing(
    capsys, model, text, monkeypatch
):
    monkeypatch.setattr(advice, "CANDIDATES", ("window", "streaming_llm"))
    words = ("advise", "--text", text, "--model", model, "--memory", "1GB", "--tokens")
    assert "too few to compare" not in run(capsys, *words, 700).out
    ended = run(capsys, *words, 300)
    assert "300 tokens are too few to compare policies: " in ended.out
    facts = json.loads(run(capsys, *words, 300, "--json").out)
    assert [one["evicted"] for one in facts["tries"]] == [False, False]


def test_a_text_that_fits_is_said_to(capsys, model, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text(WORDS)
    ended = run(capsys, "advise", "--text", path, "--model", model, "--memory", "1GiB")
    assert "Use the policy dense: nothing has to be evicted" in ended.out


@pytest.mark.parametrize("memory", ["lots", "0", "-2GB", "2 hours", ""])
def test_a_size_that_is_none_is_refused(capsys, model, text, memory):
    ended = run(capsys, "advise", "--text", text, "--model", model, "--memory", memory)
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert (
        "must be a number of bytes, at least 1 and less than 2^63. Write, for example, 80GB, "
        "1.5 TB or 24 GiB"
    ) in ended.err
