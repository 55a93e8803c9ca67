"""`weir stream` and `weir policies`: figures on standard output, the rest on standard error."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from roundings import nll_off
from terminal import Process, make_model, run
from transformers import AutoModelForCausalLM, AutoTokenizer

import weir
from weir.cli import common
from weir.cli import policies as listing
from weir.evals.perplexity import PerplexityMeter, read
from weir.policies import NAMED
from weir.stream.text import encode

pytestmark = pytest.mark.thinned(3, least=2)

SMALL = "sink(4) | recent(20)"
WORDS = "The prince was silent, but she looked at him significantly, awaiting a reply. "


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(WORDS * 20)
    return path


def test_a_budget_past_the_window_is_told(capsys, model, text):
    words = ("stream", "--model", model, "--text", text, "--tokens", 20, "--chunk", 8)
    assert "this model was made for" not in run(capsys, *words, "--policy", "h2o(24)").err
    ended = run(capsys, *words, "--policy", "h2o(5000)")
    assert "hold up to 5,008 tokens, but this model was made for" in ended.err


@pytest.mark.slow
def test_places_past_the_window_are_told_in_one_line(model, text):
    words = ("stream", "--model", model, "--text", text, "--policy", SMALL)
    ended = Process(*words, "--positions", "original", "--json").end()
    assert (ended.code, json.loads(ended.out)["positions"]) == (0, "original")
    assert ended.err.count("weir: a stream has passed the last place") == 1
    assert "UserWarning" not in ended.err


def test_json_is_one_object_with_every_figure_and_nothing_else(capsys, model, text):
    ended = run(
        capsys, "stream", "--text", text, "--model", model, "--policy", SMALL, "--tokens", 900,
        "--chunk", 8, "--block", 250, "--seed", 3, "--json",
    )  # fmt: skip
    assert ended.code == 0
    told = [line.partition(":")[0] for line in ended.err.splitlines()]
    assert told == ["tokens 1 to 250", "tokens 251 to 500", "tokens 501 to 750"]
    assert ended.out.endswith("}\n")
    assert ended.out.count("\n") == 1
    facts = json.loads(ended.out)
    assert {"model", "policy", "tokens", "ppl", "ppl_by_block", "kv_bytes", "tokens_per_s"} <= set(
        facts
    )
    assert (facts["model"], facts["policy"], facts["tokens"]) == (model, SMALL, 900)
    assert (facts["chunk"], facts["seed"], facts["positions"]) == (8, 3, "rolling")
    assert facts["interrupted"] is False

    reader = AutoModelForCausalLM.from_pretrained(model)
    ids = encode(AutoTokenizer.from_pretrained(model), text.read_text(), 900)
    expected = read(weir.Stream(reader, SMALL, chunk=8, seed=3), ids, block=250)
    assert facts["ppl"] == pytest.approx(expected.ppl, rel=nll_off(reader, 899))
    assert facts["ppl_by_block"] == pytest.approx(expected.ppl_by_block, rel=nll_off(reader, 150))
    assert facts["kv_bytes"] == expected.kv_bytes > 0


@pytest.mark.parametrize(
    ("policy", "positions"),
    [
        ("dense", "original"),
        ("window(24)", "rolling"),
        ("recompute(24)", "rolling"),
        ("streaming_llm(24)", "original"),
    ],
)
def test_it_reads_under_every_policy_with_either_positions(capsys, model, text, policy, positions):
    words = ("--policy", policy, "--positions", positions, "--tokens", 300, "--json")
    facts = json.loads(run(capsys, "stream", "--text", text, "--model", model, *words).out)
    assert (facts["policy"], facts["positions"], facts["tokens"]) == (policy, positions, 300)
    assert 1 < facts["ppl"] < 1000


def test_for_people_it_is_a_table_and_a_sentence(capsys, model, text):
    ended = run(capsys, "stream", "--text", text, "--model", model, "--tokens", 900, "--block", 400)
    assert (ended.code, ended.err.count("\n")) == (0, 2), ended.err
    for words in ("1 to 400", "401 to 800", "801 to 900", "perplexity", " of cache", "tokens/s"):
        assert words in ended.out
    assert "\nthe last block has 100 tokens\n" in ended.out
    assert f"{model} under weir(budget=448): perplexity " in ended.out


def test_on_a_narrow_terminal_lines_run_on_and_figures_stay_whole(capsys, model, text):
    words = ("stream", "--text", text, "--model", model, "--tokens", 900, "--block", 400)
    wide, narrow = (run(capsys, *words, columns=n).out for n in (100, 12))
    rows = [re.split(r"[│┃]", line)[1:-1] for line in wide.splitlines() if "│" in line]
    assert len(rows) == 3
    for cell in (cell.strip() for row in rows for cell in row):
        assert cell in narrow


def test_a_text_shorter_than_asked_for_is_read_to_its_end_and_that_is_said(capsys, model, text):
    length = len(WORDS) * 20 + 1
    words = ("--tokens", 5000, "--policy", SMALL, "--json")
    ended = run(capsys, "stream", "--text", text, "--model", model, *words)
    assert ended.code == 0
    assert json.loads(ended.out)["tokens"] == length
    said = f"{text} has only {length:,} tokens, fewer than 5,000. All of them are read."
    assert ended.err.splitlines()[0] == said


def test_a_dash_is_standard_input(capsys, monkeypatch, model, text):
    words = ("--model", model, "--policy", SMALL, "--tokens", 9000, "--json")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes()), "latin-1"))
    piped = run(capsys, "stream", "--text", "-", *words)
    assert piped.err.startswith("standard input has only 1,561 tokens, fewer than 9,000")
    whole = json.loads(run(capsys, "stream", "--text", text, *words).out)
    assert json.loads(piped.out)["ppl"] == whole["ppl"]
    again = run(capsys, "stream", "--text", "-", *words)
    assert (again.code, again.err) == (1, "weir: standard input contains no text\n")


def test_text_in_front_takes_the_place_of_the_start_token(capsys, model, text):
    words = ("--text", text, "--model", model, "--policy", SMALL, "--tokens", 300, "--json")
    plain, front = (
        json.loads(run(capsys, "stream", *words, *more).out) for more in ((), ("--start", "\n\n"))
    )
    assert (plain["start"], front["start"]) == (None, "\n\n")
    reader = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("\n\n" + text.read_text(), add_special_tokens=False)["input_ids"][:300]
    expected = read(weir.Stream(reader, SMALL), torch.tensor(ids))
    assert front["ppl"] == pytest.approx(expected.ppl, rel=nll_off(reader, 299))
    assert front["ppl"] != pytest.approx(plain["ppl"], rel=nll_off(reader, 299))


def test_a_perplexity_that_is_no_number_ends_the_reading_in_one_sentence(capsys, tmp_path, text):
    model = make_model(tmp_path)
    broken = AutoModelForCausalLM.from_pretrained(model)
    broken.lm_head.weight.data[: broken.config.vocab_size // 2] = 1e30
    broken.save_pretrained(model)
    words = ("--text", text, "--model", model, "--tokens", 900)
    for_people, for_programs = (run(capsys, "stream", *words, *more) for more in ((), ("--json",)))
    for ended in (for_people, for_programs):
        assert ended.code == 1
        assert ended.err.splitlines()[-1].startswith(
            "weir: perplexity cannot be computed: the model"
        )
    assert "perplexity inf over 200 tokens" in for_people.out
    assert json.loads(for_programs.out, parse_constant=pytest.fail)["ppl"] is None


@pytest.mark.slow
def test_ctrl_c_reports_what_was_read_so_far(model, tmp_path):
    (tmp_path / "long.txt").write_text(WORDS * 20_000)  # minutes of reading
    words = ("--text", tmp_path / "long.txt", "--model", model, "--policy", SMALL, "--json")
    process = Process("stream", *words)
    process.wait_for("tokens/s", times=3)  # progress is shown, so it is reading
    process.interrupt()
    ended = process.end()
    facts = json.loads(ended.out)
    assert ended.code == 0
    assert facts["interrupted"] is True
    assert 200 <= facts["tokens"] < 1_000_000
    assert len(facts["ppl_by_block"]) == -(-facts["tokens"] // 1000)
    assert facts["ppl"] > 1
    total = len(WORDS) * 20_000 + 1
    assert f"interrupted after {facts['tokens']:,} of {total:,} tokens" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("number", "word", "code"),
    [(signal.SIGINT, "interrupted", 0), (signal.SIGTERM, "terminated", 143)],
)
def test_a_table_says_where_a_signal_ended_it(capsys, model, text, monkeypatch, number, word, code):
    taken = []

    def take(self: PerplexityMeter, piece: torch.Tensor) -> None:
        take_it(self, piece)
        taken.append(len(piece))
        if sum(taken) > 1000:
            os.kill(os.getpid(), number)

    take_it = PerplexityMeter.take
    monkeypatch.setattr(PerplexityMeter, "take", take)
    words = ("--text", text, "--model", model, "--policy", SMALL, "--block", 1000)
    ended = run(capsys, "stream", *words)
    assert ended.code == code
    read = f"{sum(taken):,}"
    assert f"1,001 to {read}, {word}" in ended.out
    assert "1 to 1,000 " in ended.out
    assert f"{word} after {read} of " in ended.out
    assert re.fullmatch(r"tokens 1 to 1,000: perplexity [\d.]+, .* of cache, .*\n", ended.err)
    taken.clear()
    monkeypatch.setattr(PerplexityMeter, "take", take_it)
    assert word not in run(capsys, "stream", *words, "--tokens", 1100).out


# --- policies


@pytest.mark.parametrize("columns", [40, 80])
def test_every_policy_is_listed_once_with_what_it_is_good_for(capsys, columns):
    ended = run(capsys, "policies", columns=columns)
    assert (ended.code, ended.err) == (0, "")
    policies, _, pools = ended.out.partition("Pools, the parts of a pipe\n")
    rows = [line for line in policies.splitlines() if re.match(r"[a-z_0-9]+  ", line)]
    own = {name for name, it in NAMED.items() if it.make.__module__.startswith("weir.")}
    assert sorted(line.split()[0] for line in rows) == sorted(own)
    groups = [
        "Plain",
        "From the papers that weir reproduces",
        "From other papers",
        "weir's own",
        "Around another policy",
    ]
    assert [line for line in policies.splitlines() if line in groups] == groups
    table = (policies + pools).partition("A pipe is")[0].splitlines()
    assert max(map(len, table)) <= columns
    if columns == 80:
        for group in listing.POLICIES.values():
            for name, good in group.items():  # each has one line
                assert re.search(rf"^{name} +{re.escape(good)} *$", policies, re.MULTILINE), name
    assert re.search(r"^sink +the first ", pools, re.MULTILINE)


def test_of_one_policy_all_is_told_and_of_a_pool_of_that_name_too(capsys):
    ended = run(capsys, "policies", "reservoir")
    assert (ended.code, ended.err) == (0, "")
    for told in (
        "reservoir, a policy", "reservoir, a pool", "budget=256", "weighted=false",
        "sink(4) | recent(188) | reservoir(64)", "An Experiment of Implementing Reservoir",
    ):  # fmt: skip
        assert told in ended.out
    facts = json.loads(run(capsys, "policies", "streaming_llm", "--json").out)
    assert [row["name"] for row in facts["policies"]] == ["streaming_llm"] and not facts["pools"]
    ended = run(capsys, "policies", "reservior")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "there is no policy or pool called 'reservior', did you mean 'reservoir'?" in ended.err
    assert "did you mean 'kcenter'?" in run(capsys, "policies", "KCENTER(9)").err


def test_a_terminal_that_says_it_has_no_columns_has_eighty(monkeypatch):
    for columns, width in (("0", 80), ("0 ", 80), ("40", None)):
        monkeypatch.setenv("COLUMNS", columns)
        for console in (common.output, common.messages):
            assert console.__wrapped__().width == (width or int(columns))


def test_policies_as_json_read_back_as_policies(capsys):
    ended = run(capsys, "policies", "--json")
    facts = json.loads(ended.out)
    assert (ended.code, ended.err, ended.out.count("\n")) == (0, "", 1)
    names = {row["name"] for row in facts["policies"]}
    assert {"dense", "window", "streaming_llm", "recompute"} <= names
    assert {"sink", "recent"} <= {row["name"] for row in facts["pools"]}
    for row in facts["policies"]:
        assert row["about"]
        assert row["paper"]
        made = weir.policy(row["name"])
        # The listed parameters can be used in a policy as they are.
        assert weir.policy(f"{row['name']}({row['parameters']})") == made
        assert row["pipe"] is None or weir.policy(row["pipe"]) == made


def test_steps_are_compiled_and_a_token_is_read_in_each(capsys, monkeypatch, model, text):
    compiled: list[object] = []
    read: list[int] = []
    own = weir.Stream.score

    def score(stream: weir.Stream, ids: torch.Tensor) -> torch.Tensor:
        read.append(ids.shape[1])
        return own(stream, ids)

    monkeypatch.setattr(weir.native, "compile_steps", lambda model, **_: compiled.append(model))
    monkeypatch.setattr(weir.Stream, "score", score)
    words = ("stream", "--text", text, "--model", model, "--tokens", 8, "--policy", SMALL, "--json")
    plain, in_steps = run(capsys, *words), run(capsys, *words, "--compile")
    assert len(compiled) == 1
    assert read == [8] + [1] * 8
    found, wanted = (json.loads(ended.out)["ppl"] for ended in (in_steps, plain))
    assert found == pytest.approx(wanted, rel=1e-5)
