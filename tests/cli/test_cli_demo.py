"""`weir demo`: figures and a page in a folder, and a table while it reads."""

from __future__ import annotations

import json
import os
import re
import signal
import sys

import pytest
from reference.models import make
from terminal import make_model, run

from weir.cli.common import ProgressLines
from weir.evals import demo
from weir.evals.demo import POLICIES
from weir.evals.perplexity import PerplexityMeter
from weir.evals.tasks.natural_facts import Facts

STORY = {"held", "answers", "knows"}
KEYS = {"policy", "ppl", "ppl_by_block", "kv_bytes", "bytes_by_block", "tokens_per_s", "slots"}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Ask the questions after only 100 tokens."""
    monkeypatch.setattr(demo, "AWAY", 100)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "deep" / "out [1]"


def is_whole(facts: dict, tokens: int) -> bool:
    policies = facts["policies"]
    return (
        facts["tokens"] == tokens
        and facts["model_window"] == 512
        and [policy["policy"] for policy in policies] == list(POLICIES)
        and all(set(policy) >= KEYS for policy in policies)
        and all(len(policy["ppl_by_block"]) == -(-tokens // 500) for policy in policies)
        and all(1 < policy["ppl"] < 10_000 for policy in policies)
    )


@pytest.mark.slow
def test_it_writes_figures_and_a_page_and_prints_the_figures(capsys, out):
    ended = run(capsys, "demo", "--out", out, "--tokens", 1200, "--json")
    assert ended.code == 0
    assert ended.out.count("\n") == 1
    facts = json.loads(ended.out)
    assert is_whole(facts, 1200)
    assert facts["interrupted"] is False
    assert all(set(policy) >= STORY for policy in facts["policies"])
    # `dense` still holds all parts of the text, and a window holds the newest ones only.
    held = {policy["policy"]: policy["held"] for policy in facts["policies"]}
    assert set(held["dense"]) == {1.0}
    assert held["window(budget=90)"][-10:] == [1.0] * 10 and held["window(budget=90)"][0] == 0.0
    assert [len(name) for _, name in facts["story"]["names"]] == [3] * 8
    assert "Right answers 100 tokens later:" in ended.err
    for policy in facts["policies"]:
        assert f"  {policy['policy']:<26}  {policy['knows']} of 8\n" in ended.err
    assert demo.best_of_a_size(facts) in " ".join(ended.err.split())
    assert json.loads((out / "result.json").read_text("utf-8")) == facts
    page = (out / "report.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert "1,200 tokens" in " ".join(page.split())
    assert "1,200 tokens read: 2.3 times the window" in ended.err
    assert f"{out / 'report.html'}\n" in ended.err


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.slow
def test_for_people_it_is_a_table_that_fits_the_terminal(
    capsys, monkeypatch, tmp_path, out, columns
):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("weir.evals.demo._plot", lambda *words, **more: "")
    words = ["weir", "demo", "--out", str(tmp_path), "--tokens", "1000"]
    monkeypatch.setattr(sys, "argv", words)
    from weir.cli import main

    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert (ended.value.code, shown.err) == (0, "")
    table = [line for line in shown.out.splitlines() if "│" in line or "┃" in line]
    assert len(table) == 1 + len(POLICIES)
    assert max(map(len, table)) <= 80
    for policy, line in zip(POLICIES, table[1:], strict=True):
        assert policy in line  # in full
    for head in ("policy", "perplexity", "last block", "cache", "tokens/s"):
        assert head in table[0]
    assert shown.out.splitlines()[-1] == str(tmp_path / "report.html")


@pytest.mark.slow
def test_ctrl_c_ends_it_with_what_was_read_so_far(capsys, monkeypatch, tmp_path):
    take, count = PerplexityMeter.take, 0

    def pressed(self, piece):
        nonlocal count
        count += 1
        if count == len(POLICIES) + 2:  # the second policy's second step
            os.kill(os.getpid(), signal.SIGINT)
        take(self, piece)

    monkeypatch.setattr(PerplexityMeter, "take", pressed)
    ended = run(capsys, "demo", "--out", tmp_path, "--tokens", 2000, "--json")
    facts = json.loads(ended.out)
    assert ended.code == 0
    assert facts["interrupted"] is True
    assert is_whole(facts, 400)
    assert facts["story"] is None
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_a_book_shorter_than_asked_for_is_said_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "read_text", lambda path: "Well, Prince. " * 200)
    ended = run(capsys, "demo", "--out", tmp_path, "--tokens", 9000, "--json")
    tokens = json.loads(ended.out)["tokens"]
    assert tokens < 2000
    assert (
        "the packaged excerpt is shorter than 9,000 tokens, so only "
        f"{tokens:,} tokens are read" in ended.err
    )


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_read(capsys, tmp_path):
    (tmp_path / "file").write_text("here")
    ended = run(capsys, "demo", "--out", tmp_path / "file" / "out")
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert ended.err.startswith(f"weir: cannot make the folder {tmp_path / 'file' / 'out'}: ")


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_named(capsys, tmp_path):
    (tmp_path / "report.html").mkdir()
    ended = run(capsys, "demo", "--out", tmp_path, "--tokens", 1000, "--json")
    assert (ended.code, ended.out) == (1, "")
    assert f"weir: cannot write to {tmp_path}: Is a directory\n" in ended.err


@pytest.fixture
def few(monkeypatch):
    """Two facts, asked for at two distances."""
    monkeypatch.setattr(demo, "FACTS", Facts(distances="100 200", samples=1, facts=2))


@pytest.mark.slow
def test_another_model_is_told_facts_and_asked_for_them_at_several_distances(capsys, few, tmp_path):
    model = make_model(tmp_path / "model")
    ended = run(capsys, "demo", "--model", model, "--out", tmp_path, "--tokens", 1000, "--json")
    facts = json.loads(ended.out)
    assert ended.code == 0
    story, policies = facts["story"], facts["policies"]
    assert (story["kind"], story["count"], story["asked"]) == ("facts", 2, 4)
    assert story["distances"] == [100, 200] and story["read"] == facts["tokens"] == 1000
    dense, *fixed = policies
    assert dense["policy"] == "dense" and dense["slots"] is None and dense["held"] == [1.0] * 240
    # Every other cache has the bytes of the default, or a slot less.
    assert fixed[-1]["policy"].startswith("weir(budget=")
    for policy in policies:
        assert [at["distance"] for at in policy["by_distance"]] == [100, 200]
        assert policy["knows"] == sum(at["right"] for at in policy["by_distance"])
    most = fixed[-1]["kv_bytes"]
    assert all(0.9 * most < policy["kv_bytes"] <= most for policy in fixed)
    assert "Right answers of 2, by tokens since the fact:" in ended.err
    assert demo.best_of_a_size(facts) in " ".join(ended.err.split())
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "200 tokens later" in page and page.count("<svg") == 4
    table = (tmp_path / "table.md").read_text("utf-8").splitlines()
    assert table[0] == "| policy | perplexity | cache | facts after 100 tokens | 200 |"
    assert table[2].startswith("| `dense` | ") and len(table) == 2 + len(policies)
    for name in ("perplexity.svg", "facts.svg"):
        assert (tmp_path / name).read_text("utf-8").startswith("<svg")


@pytest.mark.slow
def test_without_a_terminal_a_line_now_and_then_says_how_far_it_is(
    capsys, few, monkeypatch, tmp_path
):
    monkeypatch.setattr(ProgressLines, "EVERY", 0.0)
    model = make_model(tmp_path / "model")
    ended = run(capsys, "demo", "--model", model, "--out", tmp_path, "--tokens", 1000)
    assert re.search(r"^read 400 of 1,000 tokens, about \d+ \w+ left$", ended.err, re.M)
    assert re.search(r"^asking under weir\(budget=\d+\), about \d+ \w+ left$", ended.err, re.M)


@pytest.mark.slow
def test_ctrl_c_while_it_asks_leaves_the_story_out(capsys, few, monkeypatch, tmp_path):
    tell = demo.FactStory.tell

    def pressed(self, stream, progress):
        os.kill(os.getpid(), signal.SIGINT)
        return tell(self, stream, progress)

    monkeypatch.setattr(demo.FactStory, "tell", pressed)
    model = make_model(tmp_path / "model")
    ended = run(capsys, "demo", "--model", model, "--out", tmp_path, "--tokens", 1000, "--json")
    facts = json.loads(ended.out)
    assert (ended.code, facts["interrupted"], facts["story"]) == (0, True, None)
    assert facts["tokens"] == 1000 and (tmp_path / "report.html").exists()


@pytest.mark.parametrize(("family", "window"), [("mpt", 1024), ("bloom", None)])
@pytest.mark.slow
def test_models_that_name_their_window_otherwise_or_not_at_all(
    capsys, few, tmp_path, family, window
):
    folder = make_model(tmp_path / "model")
    model = make(family, vocab_size=300, **({"max_seq_len": window} if window else {}))
    model.save_pretrained(folder)
    ended = run(capsys, "demo", "--model", folder, "--out", tmp_path, "--tokens", 1000, "--json")
    if window is None:
        assert (ended.code, ended.err.count("\n")) == (1, 1)
        assert "does not say how long its window is" in ended.err
        return
    facts = json.loads(ended.out)
    assert (ended.code, facts["model_window"]) == (0, window)
