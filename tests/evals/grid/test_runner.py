"""The runner: each cell is run once, failures are recorded, and resumed runs end up the same."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import weir
from weir.errors import WeirError
from weir.evals.fitting import budget_in
from weir.evals.grid import extend_grid, runner
from weir.evals.grid import grid as grids
from weir.evals.grid.grid import load_cached, make_grid
from weir.evals.grid.runner import failure_reason, run, subject_of
from weir.evals.results import failures
from weir.evals.results.file import read_results
from weir.evals.results.naming import read_together
from weir.evals.task import TASKS, Better, Subject, Task
from weir.models.head_facts import HeadFacts
from weir.policies import NAMED, Policy


@dataclass(frozen=True)
class Toy(Task):
    """A task whose score is n plus the seed. Without n, it is a sweep over 1 and 2."""

    n: int | None = None

    name: ClassVar[str] = "toy"
    metrics: ClassVar[dict[str, Better]] = {"score": "higher", "other": "lower"}
    runs: ClassVar[list[tuple[int | None, str]]] = []
    broken: ClassVar[dict[int, Exception]] = {}

    def settings(self) -> list[Task]:
        return [self] if self.n is not None else [Toy(1), Toy(2)]

    def run(self, subject: Subject, progress: Any) -> dict[str, Any]:
        self.runs.append((self.n, str(subject.policy)))
        progress(0.5)
        if self.n in self.broken:
            raise self.broken[self.n]
        return {"score": (self.n or 0) + subject.seed, "other": 0.5, "kv_bytes": 7, "rows": [1]}


@pytest.fixture
def toys(monkeypatch, llama):
    monkeypatch.setitem(TASKS, "toy", Toy)
    monkeypatch.setattr(runner, "load_cached", lambda name, loading, compiled: (llama, None))
    monkeypatch.setattr(Toy, "runs", [])
    monkeypatch.setattr(Toy, "broken", {})
    return Toy


def grid(tasks: str = "toy", policies: str = "dense, h2o(8)"):
    return make_grid(["m"], tasks, policies, seeds=[0, 5])


def without_times(path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_each_cell_is_recorded_with_what_decides_on_it_and_what_was_found(tmp_path, toys):
    records = run(grid(), tmp_path / "r.jsonl")
    assert [(r["setting"], r["policy"], r["seed"], r["value"]) for r in records] == [
        (f"toy(n={n})", policy, seed, n + seed)
        for n in (1, 2)
        for policy in ("dense", "h2o(8)")
        for seed in (0, 5)
    ]
    assert records[0].pop("seconds") >= 0
    assert records[0] == {
        "cell": 0, "model": "m", "task": "toy", "setting": "toy(n=1)", "policy": "dense",
        "budget": None, "seed": 0, "protocol": None, "chunk": 64, "positions": "rolling",
        "pools": "recent(none)", "weir": weir.__version__, "status": "done", "metric": "score",
        "value": 1, "better": "higher", "kv_bytes": 7,
        "result": {"score": 1, "other": 0.5, "kv_bytes": 7, "rows": [1]},
    }  # fmt: skip
    assert read_results(tmp_path / "r.jsonl")[1][1:] == records[1:]


def test_a_cell_that_fails_is_recorded_and_stops_nothing(tmp_path, toys):
    toys.broken[1] = WeirError("no room\nfor it")
    records = run(grid(), tmp_path / "r.jsonl")
    assert [r["status"] for r in records] == ["failed"] * 4 + ["done"] * 4
    assert [r["reason"] for r in failures(records)] == ["no room for it"] * 4
    assert len(toys.runs) == 8


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_no_finite_number_is_a_cell_that_failed(
    tmp_path, toys, monkeypatch, value
):
    right = toys.run

    def run_toy(self: Toy, subject: Subject, progress: Any) -> dict[str, Any]:
        return right(self, subject, progress) | ({"score": value} if self.n == 1 else {})

    monkeypatch.setattr(toys, "run", run_toy)
    records = run(grid(policies="dense"), tmp_path / "r.jsonl")
    assert [r["status"] for r in records] == ["failed"] * 2 + ["done"] * 2
    assert records[0]["reason"].startswith(
        "score cannot be computed: the model's predictions are infinite or NaN"
    )


def test_resumed_it_runs_what_is_missing_or_failed_and_the_file_is_the_same(tmp_path, toys):
    whole = tmp_path / "whole.jsonl"
    run(grid(), whole)
    lines = whole.read_text().splitlines(keepends=True)
    for cut in (1, 2, 5, 8):
        path = tmp_path / f"{cut}.jsonl"
        path.write_text("".join(lines[:cut]) + lines[cut][:20])
        toys.runs.clear()
        told: list[int] = []
        run(
            grid(),
            path,
            resume=True,
            on_record=lambda record, told=told: told.append(record["cell"]),
        )
        assert len(toys.runs) == 9 - cut
        assert told == list(range(8))
        assert without_times(path) == without_times(whole)
    toys.broken[1] = RuntimeError("not today")
    broken = tmp_path / "broken.jsonl"
    run(grid(), broken)
    toys.broken.clear()
    toys.runs.clear()
    run(grid(), broken, resume=True)
    assert [n for n, _ in toys.runs] == [1] * 4
    assert without_times(broken) == without_times(whole)


def test_a_grid_grows_and_what_is_done_stays_as_it_is(tmp_path, toys):
    path = tmp_path / "r.jsonl"
    first = make_grid(["m"], "toy(n=1)", "h2o(8)", seeds=[0])
    assert extend_grid(path, first) == first  # there is no file yet
    run(first, path, add=True)
    before = path.read_text().splitlines()[1]
    toys.runs.clear()
    more = extend_grid(path, make_grid(["m"], "toy(n=2), toy(n=1)", "h2o(8)", seeds=[3, 0]))
    assert [(cell.task, cell.seed) for cell in more.cells] == [
        ("toy(n=1)", 0), ("toy(n=2)", 3), ("toy(n=2)", 0), ("toy(n=1)", 3),
    ]  # fmt: skip
    records = run(more, path, add=True)
    assert len(toys.runs) == 3
    assert [record["cell"] for record in records] == [0, 1, 2, 3]
    assert path.read_text().splitlines()[1] == before
    assert read_results(path)[0] == more.as_json()
    # If the grid is extended by cells that it has already, nothing is run.
    toys.runs.clear()
    run(extend_grid(path, first), path, add=True)
    assert toys.runs == []
    with pytest.raises(WeirError, match="has the results of another grid"):
        run(make_grid(["m"], "toy(n=7)", "h2o(8)"), path, add=True)
    with pytest.raises(WeirError, match="--resume to continue it, --add to add cells to it"):
        run(more, path)


def test_a_file_whose_cells_are_not_these_does_not_grow(tmp_path, toys):
    path = tmp_path / "r.jsonl"
    grid = make_grid(["m"], "toy(n=1)", "h2o(8)")
    for wrong, said in (
        ({"zeal": 1}, "another version"),
        ({"seed": None}, "missing fields"),
        ({"loading": "ab"}, "missing fields"),
        ({"loading": {"dtype": []}}, "missing fields"),
        ({"loading": {"trust_remote_code": True}}, "pass --trust-remote-code"),
    ):
        cell = {**grid.as_json()["cells"][0], **wrong}
        cell = {name: value for name, value in cell.items() if value is not None or name != "seed"}
        path.write_text(json.dumps({"grid": "x", "cells": [cell]}) + "\n")
        with pytest.raises(WeirError, match=said):
            extend_grid(path, grid)


@pytest.fixture
def changed(monkeypatch):
    """A function that makes the name `h2o` stand for other pools from now on."""
    now = NAMED["h2o"]

    def h2o(budget: int = 256) -> Policy:
        made = now.make(budget)
        assert made.called is not None
        return weir.policy(f"sink({budget})").as_written(made.text, made.called)

    return lambda: monkeypatch.setitem(NAMED, "h2o", replace(now, make=h2o))


def test_a_policy_whose_name_stands_for_other_pools_by_now_is_another(tmp_path, toys, changed):
    path = tmp_path / "r.jsonl"
    run(make_grid(["m"], "toy(n=1)", "h2o(8)"), path)
    changed()
    again = make_grid(["m"], "toy(n=1)", "h2o(8)")
    with pytest.raises(WeirError, match=r"pools: recent.* only in the file, sink\(8\) new"):
        run(again, path, resume=True)
    run(extend_grid(path, again), path, add=True)
    assert toys.runs == [(1, "h2o(8)")] * 2
    rows = [it["policy"] for it in read_together([path])[1]]
    assert rows == ["recent(4) | heavy(4)", "sink(8)"]


def test_what_was_asked_of_other_pools_is_not_measured_under_their_name(tmp_path, toys, changed):
    toys.broken[1] = WeirError("not now")
    path = tmp_path / "r.jsonl"
    grid = make_grid(["m"], "toy(n=1)", "h2o(8)")
    run(grid, path)
    toys.broken.clear()
    changed()
    (record,) = run(grid, path, resume=True)
    said = (
        "h2o(8) stood for recent(4) | heavy(4) when this cell was requested, and stands for "
        "sink(8) now. To measure the earlier pools, name them instead of h2o(8)."
    )
    assert record["status"] == "failed" and said in record["reason"]


def test_models_may_be_objects(tmp_path, monkeypatch, toys, llama):
    monkeypatch.setattr(runner, "load_cached", None)
    given = {"mine": (llama, None)}
    with pytest.raises(WeirError, match="only models loaded by name can be compiled"):
        make_grid(given, "toy(n=1)", "h2o(8)", compiled=True)
    grid = make_grid(given, "toy(n=1)", "h2o", memory=[120_000])
    assert grid.cells[0].budget == budget_in(llama, "h2o", 120_000)
    told: list[Any] = []
    monkeypatch.setattr(toys, "run", lambda self, subject, progress: told.append(subject) or {})
    run(grid, tmp_path / "r.jsonl", models=given)
    assert [(subject.name, subject.model) for subject in told] == [("mine", llama)]
    with pytest.raises(WeirError, match=r"only in this process. Save them to folders"):
        run(grid, tmp_path / "s.jsonl", models=given, work=runner.one_by_one)


def test_compiled_steps_are_another_cell_and_say_so(tmp_path, monkeypatch, toys, llama):
    loaded: list[bool] = []
    monkeypatch.setattr(
        runner, "load_cached", lambda name, loading, on: loaded.append(on) or (llama, None)
    )
    path = tmp_path / "r.jsonl"
    plain, fast = (make_grid(["m"], "toy(n=1)", "h2o(8)", compiled=it) for it in (False, True))
    assert "compiled" not in plain.as_json()["cells"][0]
    assert plain.fingerprint != fast.fingerprint
    run(plain, path)
    records = run(extend_grid(path, fast), path, add=True)
    assert loaded == [False, True]
    assert [record.get("compiled") for record in records] == [None, True]
    assert extend_grid(path, fast).cells == (*plain.cells, *fast.cells)


def test_workers_may_finish_in_any_order(tmp_path, toys):
    def backwards(cells, told):
        yield from reversed(list(runner.one_by_one(cells, told)))

    run(grid(), tmp_path / "a.jsonl")
    run(grid(), tmp_path / "b.jsonl", work=backwards)
    assert without_times(tmp_path / "a.jsonl") == without_times(tmp_path / "b.jsonl")


def test_progress_is_told_by_cell(tmp_path, toys):
    told: list[tuple[int, float]] = []
    run(grid(), tmp_path / "r.jsonl", on_progress=lambda n, share: told.append((n, share)))
    assert told == [(n, 0.5) for n in range(8)]


def test_a_model_that_cannot_be_had_fails_its_cells_only(tmp_path, monkeypatch, toys, llama):
    def load(name: str, loading, compiled):
        if name == "bad":
            raise WeirError("there is no model folder 'bad'")
        return llama, None

    monkeypatch.setattr(runner, "load_cached", load)
    records = run(make_grid(["bad", "m"], "toy", "dense"), tmp_path / "r.jsonl")
    assert [r["status"] for r in records] == ["failed"] * 2 + ["done"] * 2
    assert records[0]["reason"] == "there is no model folder 'bad'"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (WeirError("a clear\nsentence"), "a clear sentence"),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError(), "ValueError"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (torch.OutOfMemoryError("tried to allocate"), "out of memory: tried to allocate"),
        (MemoryError(), "out of memory"),
    ],
)
def test_a_reason_is_one_line(error, said):
    assert failure_reason(error) == said


def test_a_reason_says_where_an_error_was_raised():
    with pytest.raises(ZeroDivisionError) as raised:
        1 / 0  # noqa: B018
    said = failure_reason(raised.value)
    assert re.fullmatch(r"ZeroDivisionError: division by zero \(test_runner\.py, line \d+\)", said)


def test_the_task_of_the_documentation_is_measured(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[3] / "docs" / "measuring.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(from dataclasses.*?)^```$", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    before = dict(TASKS)
    try:
        exec(compile(code, "measuring.md", "exec", dont_inherit=True), {"__name__": "example"})
    finally:
        TASKS.clear()
        TASKS.update(before)
    short, long = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert long < short  # with 64 slots the text is still there


def test_ctrl_c_is_no_failure_of_a_cell(tmp_path, toys):
    toys.broken[2] = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        run(grid(), tmp_path / "r.jsonl")
    assert len(read_results(tmp_path / "r.jsonl")[1]) == 4


def test_a_subject_reads_as_its_protocol_says(toys, ids):
    plain = subject_of(grid().cells[0])
    assert (plain.chunk, plain.prefill, plain.rate, plain.keeps_answers) == (
        64,
        "chunked",
        None,
        False,
    )
    cell = make_grid(["m"], "toy", "streaming_llm, dense, h2o(8)", paper="balancekv").cells
    sized, dense, given = (subject_of(c) for c in cell[:3])
    assert (dense.rate, given.rate) == (None, None)
    assert (sized.rate, sized.prefill, sized.positions) == (0.25, "full", "original")
    prompt = ids(1, 80)
    stream = sized.stream(prompt=80, answer=30)
    stream.feed(prompt)
    held = stream.slots(0).position[0, 0]
    assert sorted(held[held >= 0].tolist()) == [0, 1, 2, 3, *range(64, 80)]  # a quarter of 80
    stream.feed(ids(1, 30, seed=1))
    held = stream.slots(0).position[0, 0]
    assert sorted(held[held >= 0].tolist()) == [0, 1, 2, 3, *range(64, 110)]  # nothing evicted
    with pytest.raises(WeirError, match="this task streams without one"):
        sized.stream()
    assert replace(sized, rate=None).stream().policy == weir.policy("streaming_llm")


def test_steps_of_a_model_are_compiled_once_for_all_of_its_cells(tmp_path, monkeypatch, llama):
    compiled: list[object] = []
    monkeypatch.setattr(grids, "compile_steps", lambda model, strict: compiled.append(model))
    monkeypatch.setattr(grids, "load", lambda name, **given: (llama, None))
    load_cached.cache_clear()
    cells = grid("ppl").cells[:2]
    for cell in cells:
        subject_of(cell)
    assert not compiled
    for cell in cells:
        subject_of(replace(cell, compiled=True))
    load_cached.cache_clear()
    assert compiled == [llama]


@dataclass(frozen=True)
class Streams(Task):
    """A task that only makes a stream."""

    name: ClassVar[str] = "streams"
    metrics: ClassVar[dict[str, Better]] = {"score": "higher"}

    def run(self, subject: Subject, progress: Any) -> dict[str, Any]:
        subject.stream()
        return {"score": 1.0, "kv_bytes": 7}


@pytest.mark.parametrize(
    ("shift", "ran", "not_ran"), [(0.0, "int4", "int8"), (9.0, "int8", "int4")]
)
def test_a_record_has_the_pools_that_ran(tmp_path, toys, monkeypatch, llama, shift, ran, not_ran):
    monkeypatch.setitem(TASKS, "streams", Streams)
    facts = HeadFacts(((0.0,) * llama.config.num_key_value_heads,) * len(llama.model.layers), shift)
    monkeypatch.setattr("weir.cache.default_policy.find_head_facts", lambda model: facts)
    policies = "weir(budget=40), streaming_llm(20), sink(2)|recent(8)"
    asked = make_grid(["m"], "streams", policies)
    records = run(asked, tmp_path / "r.jsonl")
    assert ran in records[0]["pools"]
    assert not_ran not in records[0]["pools"]
    stands_for = asked.cells[0].pools  # int4, as the name alone says
    assert records[0].get("stands_for", records[0]["pools"]) == stands_for
    assert ("stands_for" in records[0]) == (ran == "int8")
    assert (records[1]["pools"], "stands_for" in records[1]) == ("sink(4) | recent(16)", False)
    assert "pools" not in records[2]
    _, together = read_together([tmp_path / "r.jsonl"])
    assert [record["policy"] for record in together] == [cell.policy for cell in asked.cells]
