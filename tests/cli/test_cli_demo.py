"""`weir demo`: figures and a page in a folder, a table on the way there."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from reference.models import make
from terminal import CHATML, make_model, run

from weir.evals import demo
from weir.evals.demo import POLICIES
from weir.evals.perplexity import PerplexityMeter

STORY = {"held", "answers", "knows"}
KEYS = {"policy", "ppl", "ppl_by_block", "kv_bytes", "bytes_by_block", "tokens_per_s", "slots"}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """The questions come soon."""
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
    # What reads everything still holds everything, and of the newest tokens all that fit.
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
        f"the packaged excerpt has only {tokens:,} tokens to read in addition to those before "
        f"the questions, fewer than 9,000" in ended.err
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


@pytest.mark.slow
def test_a_chat_model_is_told_facts_before_the_book_and_asked_for_them(
    capsys, monkeypatch, tmp_path
):
    model = make_model(tmp_path / "model", CHATML)
    monkeypatch.setattr(demo, "CHAT_POLICIES", ("dense", "window(64)"))
    monkeypatch.setattr(demo, "ANSWER", 2)
    ended = run(capsys, "demo", "--model", model, "--out", tmp_path, "--tokens", 1000, "--json")
    facts, told = json.loads(ended.out), len(demo.FACTS)
    assert ended.code == 0 and facts["chat"]
    assert facts["story"]["away"] == facts["tokens"] > 1000
    assert facts["story"]["said"] == facts["told_first"] > 300
    for policy in facts["policies"]:
        assert [len(policy[name]) for name in ("answers", "right")] == [told, told]
        assert policy["knows"] == sum(policy["right"])
    assert facts["policies"][0]["held"] == [1.0] * 240
    assert "Right answers before the text was pasted: 0 of 8." in ended.err
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "What is the door code of Anna?" in page and demo.RULE in page
    table = (tmp_path / "table.md").read_text("utf-8").splitlines()
    assert "right after 1,100 tokens" in table[0]
    assert table[2].startswith("| `dense` | ") and table[2].count("0 of 8") == 2 and len(table) == 4
    assert (tmp_path / "perplexity.svg").read_text("utf-8").startswith("<svg")


@pytest.mark.parametrize(("family", "window"), [("mpt", 1024), ("bloom", None)])
@pytest.mark.slow
def test_models_that_name_their_window_otherwise_or_not_at_all(
    capsys, monkeypatch, tmp_path, family, window
):
    """And whose template has no system turn, as Gemma 2's: then all facts are in the message."""
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    folder = make_model(tmp_path / "model", refusal + CHATML)
    model = make(family, vocab_size=300, **({"max_seq_len": window} if window else {}))
    model.save_pretrained(folder)
    monkeypatch.setattr(demo, "CHAT_POLICIES", ("window(64)",))
    monkeypatch.setattr(demo, "ANSWER", 1)
    ended = run(capsys, "demo", "--model", folder, "--out", tmp_path, "--tokens", 1000, "--json")
    if window is None:
        assert (ended.code, ended.err.count("\n")) == (1, 1)
        assert "does not say how long its window is" in ended.err
        return
    facts = json.loads(ended.out)
    assert (ended.code, facts["model_window"], facts["story"]["in_system"]) == (0, window, 0)
    assert demo.RULE not in (tmp_path / "report.html").read_text("utf-8")


def test_a_model_without_a_chat_template_holds_no_chat(capsys, tmp_path):
    ended = run(capsys, "demo", "--model", make_model(tmp_path), "--out", tmp_path)
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "the demo holds a chat, and " in ended.err and "has no chat template" in ended.err
