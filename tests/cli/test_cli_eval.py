"""`weir eval`: a file that survives SIGKILL, tables, one JSON object, and clear refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from terminal import Process, make_model, run

from weir.evals import grid
from weir.evals.grid.grid import NOT_IN_EVERY

WORDS = "The prince was silent, but she looked at him significantly, awaiting a reply. "
TASKS = "ppl(tokens=250, text={text}), ppl(tokens=400, text={text}, block=100)"
POLICIES = "dense, h2o, sink(4) | recent(20), reservoir(sinks=2)"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(WORDS * 20)
    return path


def words_of(model: str, text: Path, out: Path) -> list[object]:
    """The options of a grid of 2 tasks and 4 policies, two of them with two budgets: 12 cells."""
    return [
        "eval", "--model", model, "--tasks", TASKS.format(text=text), "--policies", POLICIES,
        "--budgets", "24,48", "--chunk", 8, "--out", out,
    ]  # fmt: skip


@pytest.fixture
def words(model, text, tmp_path) -> list[object]:
    """The options of a grid, with a results file that does not exist yet."""
    return words_of(model, text, tmp_path / "r.jsonl")


@pytest.fixture(scope="module")
def done(model, text, tmp_path_factory) -> Path:
    """The results file of that grid, written without the command. No test may change it."""
    path = tmp_path_factory.mktemp("done") / "r.jsonl"
    tasks = TASKS.format(text=text)
    grid.run(grid.make_grid([model], tasks, POLICIES, budgets=(24, 48), chunk=8), path)
    return path


WIDE = [f"ppl(tokens={n})" for n in range(250, 258)]
WIDE_POLICIES = "sink(4) | recent(20), h2o(24)"


def on(text: Path) -> str:
    """The tasks of a table with many columns."""
    return ", ".join(f"{task[:-1]}, text={text})" for task in WIDE)


@pytest.fixture(scope="module")
def wide(model, text, tmp_path_factory) -> Path:
    """The file of a grid whose table has many columns."""
    path = tmp_path_factory.mktemp("wide") / "r.jsonl"
    grid.run(grid.make_grid([model], on(text), WIDE_POLICIES, chunk=8), path)
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


def test_json_is_one_object_and_the_file_has_every_cell(capsys, words, tmp_path):
    ended = run(capsys, *words, "--json")
    told = ended.err.splitlines()
    assert (ended.code, len(told)) == (0, 12)
    line = (
        r"2 of 12 cells: ppl\(tokens=250, .*\) of .* under h2o\(budget=24\), seed 0: ppl .*, .* s"
    )
    assert re.fullmatch(line, told[1])
    facts = json.loads(ended.out)
    assert (facts["cells"], facts["failed"]) == (12, 0)
    records = lines(tmp_path / "r.jsonl")
    assert [{k: v for k, v in r.items() if k != "seconds"} for r in facts["records"]] == records[1:]
    assert [(r["policy"], r["budget"], r["chunk"]) for r in records[1:7]] == [
        ("dense", None, 8),
        ("h2o(budget=24)", 24, 8),
        ("h2o(budget=48)", 48, 8),
        ("sink(4) | recent(20)", None, 8),
        ("reservoir(sinks=2, budget=24)", 24, 8),
        ("reservoir(sinks=2, budget=48)", 48, 8),
    ]
    assert len(records[0]["cells"]) == 12


@pytest.mark.slow
def test_the_same_grid_twice_gives_the_same_numbers(capsys, words, tmp_path, done):
    run(capsys, *words)
    assert lines(tmp_path / "r.jsonl") == lines(done)


def test_for_people_it_is_a_table_with_the_best_marked(capsys, words, tmp_path, done):
    shutil.copy(done, tmp_path)
    ended = run(capsys, *words, "--resume", columns=120)
    assert (ended.code, ended.err) == (0, "")
    for word in ("policy", "ppl(tokens=250", "cache, MB", "h2o(budget=24)", "r.jsonl"):
        assert word in ended.out
    assert "1 of " not in ended.out


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
@pytest.mark.slow
def test_a_table_too_wide_for_the_terminal_is_printed_in_parts(
    capsys, model, text, tmp_path, columns, wide
):
    shutil.copy(wide, tmp_path)
    words = [
        "eval", "--model", model, "--tasks", on(text), "--policies", WIDE_POLICIES,
        "--chunk", 8, "--out", tmp_path / "r.jsonl", "--resume",
    ]  # fmt: skip
    ended = run(capsys, *words, columns=columns)
    tables = ended.out.splitlines()[:-1]
    assert max(len(line) for line in tables) <= columns
    heads = [line for line in tables if "policy" in line]
    assert len(heads) > 1
    assert sum("h2o(24)" in line for line in tables) == len(heads)
    # Each part has as many columns as fit. Every column is in one part, whole and in order.
    shown = [word.strip() for line in heads for word in line.split("┃")[2:-1]]
    assert shown == [*WIDE, "cache, MB"]
    assert all(len(line) + len("─ ppl(tokens=250) ┃") > columns for line in heads[:-1])


def test_names_are_printed_as_they_are(capsys, tmp_path):
    tasks = "lines(file=''), lines(file='hub:a:id:no:ne')"
    words = ("eval", "--tasks", tasks, "--policies", "window", "--out", tmp_path / "r.jsonl")
    ended = run(capsys, *words, columns=500)
    assert "no file was given. Give the path of a file, or hub:ID:SPLIT" in ended.err
    assert '"hub:a:id:no:ne"' in ended.err


def test_names_too_long_for_a_terminal_are_broken_and_figures_are_not(
    capsys, words, tmp_path, done
):
    shutil.copy(done, tmp_path)
    ended = run(capsys, *words, "--resume", columns=24)
    facts = json.loads(run(capsys, *words, "--resume", "--json").out)
    for record in facts["records"]:
        assert f"{record['value']:.1f}" in ended.out


@pytest.mark.slow
@pytest.mark.slow
def test_killed_in_the_middle_of_a_cell_and_resumed_the_file_is_the_same(
    capsys, words, tmp_path, done
):
    path, whole = tmp_path / "r.jsonl", lines(done)
    killed = Process(*words)
    killed.wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= 4)
    killed.process.kill()
    killed.end()
    there = path.read_bytes().count(b"\n")
    assert 4 <= there < len(whole)
    ended = run(capsys, *words, "--resume")
    assert (ended.code, ended.err.count("\n")) == (0, len(whole) - there)
    assert lines(path) == whole


@pytest.mark.slow
def test_ctrl_c_says_what_is_done_and_how_to_go_on(words, text, tmp_path):
    path, long = tmp_path / "r.jsonl", tmp_path / "long.txt"
    # Each of the last six cells takes seconds, so that Ctrl-C comes in time on a busy machine too.
    long.write_text(WORDS * 2000)
    tasks = words.index("--tasks") + 1
    words[tasks] = f"ppl(tokens=250, text={text}), ppl(tokens=40000, text={long})"
    process = Process(*words)
    process.wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= 2)
    process.interrupt()
    ended = process.end()
    assert ended.code == 130
    done = len(lines(path)) - 1
    assert 1 <= done < 12
    assert f"{done} of 12 cells are saved in {path}. Use --resume to continue" in ended.err
    assert ended.err.rstrip().endswith("weir: interrupted")
    # Its standard error is a terminal, so progress is shown, with the time that is left.
    assert "\x1b[" in ended.err and "ppl under dense" in ended.err
    assert "0:00:0" in ended.err or "-:--:--" in ended.err


def test_cells_that_fail_are_listed_with_the_reason_and_the_exit_code_is_1(
    capsys, model, text, tmp_path
):
    out = tmp_path / "r.jsonl"
    words = [
        "eval", "--model", f"{model},./none", "--tasks", f"ppl(tokens=250, text={text})",
        "--policies", "h2o(24), recompute(4096)", "--out", out,
    ]  # fmt: skip
    ended = run(capsys, *words)
    assert ended.code == 1
    assert "h2o(24)" in ended.out
    failed = [line for line in ended.err.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 3
    assert "recompute(4096), seed 0: recompute reads 4096 tokens at once" in failed[0]
    assert "of ./none under h2o(24), seed 0: the model folder './none' does not exist" in failed[1]
    assert (
        ended.err.splitlines()[-1] == "weir: 3 of 4 cells failed. Use --resume to try them again."
    )
    assert [record["status"] for record in lines(out)[1:]] == ["done"] + ["failed"] * 3
    facts = json.loads(run(capsys, *words, "--resume", "--json").out)
    assert (facts["cells"], facts["failed"]) == (4, 3)


def test_help_names_the_policies_that_all_leaves_out(capsys):
    shown = " ".join(run(capsys, "eval", "--help").out.split())
    named = shown.split("every named policy but ")[1].split(".")[0]
    assert set(re.findall(r"\w+", named)) - {"and"} == NOT_IN_EVERY


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"--tasks": "pll"}, 1, "no task is called 'pll'; did you mean 'ppl'?"),
        ({"--policies": "h2o, desne"}, 1, "'desne'; did you mean 'dense'?"),
        ({"--protocol": "buz"}, 1, "unknown protocol 'buz', did you mean 'buzz'?"),
        ({"--budgets": "4"}, 1, "a budget of 4 leaves no slots"),
        ({"--budgets": "12,x"}, 2, "--budgets must be whole numbers of at least 1"),
        ({"--seeds": "-1"}, 2, "--seeds must be whole numbers of at least 0"),
        ({"--cluster": "here"}, 1, "--cluster must be 'local', 'host:port'"),
        ({"--model": " , "}, 1, "an evaluation needs at least one model"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, words, changes, code, said, tmp_path):
    if "--cluster" in changes:
        pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    if "--budgets" in changes and code == 1:
        changes = {**changes, "--policies": "streaming_llm"}
    ended = run(capsys, *words, *(word for pair in changes.items() for word in pair))
    assert ended.code == code
    assert said in ended.err
    assert ended.err.count("\n") == 1
    assert ended.out == ""
    assert not (tmp_path / "r.jsonl").exists()


def test_a_file_that_is_there_is_kept(capsys, words, tmp_path, done):
    shutil.copy(done, tmp_path)
    before = (tmp_path / "r.jsonl").read_bytes()
    ended = run(capsys, *words)
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "already exists. Use --resume" in ended.err
    ended = run(capsys, *words, "--seeds", "9", "--resume")
    assert ended.code == 1
    assert "has the results of another grid" in ended.err
    assert (tmp_path / "r.jsonl").read_bytes() == before


def test_list_says_what_there_is(capsys):
    ended = run(capsys, "eval", "--list")
    assert ended.code == 0
    for word in ("ppl(tokens=20000", "recall(", "streameval(", "efficiency(", "balancekv"):
        assert word in ended.out
    facts = json.loads(run(capsys, "eval", "--list", "--json").out)
    (ppl,) = (row for row in facts["tasks"] if row["name"] == "ppl")
    assert ppl["metrics"] == {"ppl": "lower"}
    assert {row["name"] for row in facts["protocols"]} >= {"streaming_llm", "balancekv", "buzz"}
