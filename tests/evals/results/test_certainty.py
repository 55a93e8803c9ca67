"""How certain a figure is: n, standard deviation and interval, and the tables that show them."""

from __future__ import annotations

import csv
import io
import math
import re
from statistics import stdev
from typing import Any

import pytest

from weir.errors import WeirError
from weir.evals.results import by_distance, overviews
from weir.evals.results.file import ResultsFile
from weir.evals.results.naming import read_together
from weir.evals.results.report import as_csv, as_html, as_latex, as_markdown, write_report
from weir.evals.results.summary import Estimate, estimate_of

T_OF_2 = 4.302652729749464
"""Student's t with 2 degrees of freedom that leaves 2.5 % on either side, from a table."""


def record(policy: str, value: float | None, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "cell": 0, "status": "done", "model": "m", "protocol": None, "task": "ppl",
        "setting": "ppl(tokens=9)", "policy": policy, "budget": None, "seed": seed, "chunk": 64,
        "positions": "rolling", "weir": "0.1.0", "value": value, "metric": "ppl",
        "better": "lower", "kv_bytes": 2_000_000, "result": {}, **more,
    }  # fmt: skip


def counted(policy: str, right: int, asked: int, seed: int = 0) -> dict[str, Any]:
    rows = [{"distance": 16, "right": right, "asked": asked}]
    return record(
        policy, right / asked, seed, setting="recall", task="recall", metric="recall",
        better="higher", result={"right": right, "asked": asked, "by_distance": rows},
    )  # fmt: skip


def test_seeds_have_students_interval_and_a_single_figure_has_none():
    found = estimate_of(
        [record("a", value, seed) for seed, value in enumerate((3.0, 5.0, 10.0))], "value"
    )
    sd = stdev([3.0, 5.0, 10.0])
    assert (found.mean, found.n, found.seeds) == (6.0, 3, 3)
    assert found.sd == pytest.approx(sd, rel=1e-12)
    assert found.low == pytest.approx(6 - T_OF_2 * sd / math.sqrt(3), rel=1e-9)
    assert found.high == pytest.approx(6 + T_OF_2 * sd / math.sqrt(3), rel=1e-9)
    assert estimate_of([record("a", 3.0)], "value") == Estimate(3.0, 1, 1)
    assert estimate_of([record("a", None), record("a", 4.0, 1)], "value") == Estimate(4.0, 1, 1)
    assert estimate_of([record("a", None)], "value") is None


def test_answers_are_counted_over_the_seeds_and_have_wilsons_interval():
    found = estimate_of([counted("a", 8, 10), counted("a", 2, 10, 1)], "value")
    assert (found.mean, found.n, found.seeds) == (0.5, 20, 2)
    assert found.sd == pytest.approx(stdev([0.8, 0.2]), rel=1e-12)
    # Wilson 1927, by hand: z = 1.959964, 20 answers, half of them right.
    z = 1.959963984540054
    reach = z * math.sqrt(0.25 / 20 + z * z / 1600) / (1 + z * z / 20)
    assert (found.low, found.high) == pytest.approx((0.5 - reach, 0.5 + reach), rel=1e-9)
    # A figure that is not the counted share has Student's interval over the seeds.
    other = [
        {**one, "value": one["value"] + 1} for one in (counted("a", 8, 10), counted("a", 2, 10, 1))
    ]
    assert estimate_of(other, "value").n == 2
    assert Estimate.of_counts([{"right": 0, "asked": 0}]) is None


@pytest.fixture
def tables():
    records = [
        record("sink(4) | a_b", 10.25), record("sink(4) | a_b", 20.25, 1), record("b", 40.0),
        counted("sink(4) | a_b", 8, 10), counted("sink(4) | a_b", 9, 10, 1),
    ]  # fmt: skip
    return [*overviews(records), *by_distance(records)]


def test_every_table_says_how_sure_its_figures_are(tables):
    sure = [[column.sure(0) for column in table.columns] for table in tables]
    assert sure == [
        ["-48.3 to 78.8, sd 7.1, n 2", "0.640 to 0.948, sd 0.071, n 20", ""],
        ["0.64 to 0.95, sd 0.07, n 20"],
    ]
    assert "**15.2** <small>-48.3 to 78.8, sd 7.1, n 2</small>" in as_markdown(tables[0])
    assert "<b>15.2</b> <small>-48.3 to 78.8, sd 7.1, n 2</small>" in as_html(tables[0])
    assert "| `b` | 40.0 |" in as_markdown(tables[0])


def test_values_by_commas_are_whole_and_a_line_each(tables):
    lines = list(csv.DictReader(io.StringIO(as_csv(tables))))
    assert len(lines) == 6
    assert lines[0] == {
        "table": "m", "policy": "sink(4) | a_b", "column": "ppl", "mean": "15.25",
        "sd": str(stdev([10.25, 20.25])), "low": lines[0]["low"], "high": lines[0]["high"],
        "n": "2", "seeds": "2",
    }  # fmt: skip
    assert float(lines[0]["low"]) + float(lines[0]["high"]) == pytest.approx(30.5, rel=1e-12)
    assert [(line["policy"], line["mean"], line["sd"]) for line in lines[1:2]] == [
        ("b", "40.0", "")
    ]
    assert lines[-1]["table"] == "m: recall, by distance"


def test_latex_has_a_table_each_with_the_best_marked_and_nothing_left_to_escape(tables):
    text = as_latex(tables)
    assert text.count(r"\begin{tabular}{lrrr}") == text.count(r"\begin{tabular}{lr}") == 1
    assert r"\texttt{sink(4) \textbar{} a\_b} & \textbf{15.2} & 0.850 & 2.00 \\" in text
    assert r"{\scriptsize {\textminus}48.3 to 78.8, sd 7.1, n 2}" in text
    assert r"\texttt{b} & 40.0 & -- & 2.00 \\" in text
    assert re.findall(r"(?<!\\)[_#%$](?! )", text) == []
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.count("&") for line in rows} == {3, 1}


def write(path, records):
    with ResultsFile(path, {"grid": path.name, "cells": [{}] * len(records)}) as file:
        for number, one in enumerate(records):
            file.append({**one, "cell": number})
    return path


def test_files_are_reported_together_and_what_is_in_two_counts_once(tmp_path):
    failed = {**record("c", None), "status": "failed", "reason": "no room"}
    first = write(tmp_path / "a.jsonl", [record("a", 1.0), record("b", 2.0), failed])
    second = write(tmp_path / "b.jsonl", [record("b", 2.0), record("c", 3.0), record("a", 4.0, 1)])
    cells, records = read_together([first, second])
    assert cells == 4
    assert [(r["policy"], r["seed"], r["value"]) for r in records] == [
        ("a", 0, 1.0), ("b", 0, 2.0), ("c", 0, 3.0), ("a", 1, 4.0),
    ]  # fmt: skip
    with pytest.warns(UserWarning, match="^weir: no papers are cited for a, b, c, because"):
        pages = write_report([first, second], tmp_path / "out", ["csv", "latex"])
    assert [page.name for page in pages] == ["tables.csv", "tables.tex"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [p.name for p in pages]
    assert "m,a,ppl,2.5," in pages[0].read_text()
    third = write(tmp_path / "c.jsonl", [record("b", 2.5)])
    with pytest.raises(WeirError, match=r"a.jsonl and .*c.jsonl contradict each other: ppl"):
        read_together([first, third])
    with pytest.raises(WeirError, match=r"'docx'\. Use one of html, md, csv, latex, pdf, bib\."):
        write_report(first, tmp_path / "none", ["docx"])


def test_a_name_that_stood_for_other_pools_is_another_cell(tmp_path):
    one, other, failed = (
        write(tmp_path / pools, [{**record("a", value), "pools": pools, **more}])
        for pools, value, more in (
            ("sink(4)", 1.5, {}),
            ("sink(5)", 1.0, {}),
            ("sink(6)", None, {"status": "failed", "reason": "no room"}),
        )
    )
    cells, records = read_together([one, other, failed])
    assert cells == 3
    assert {r["policy"]: r["value"] for r in records} == {
        "sink(4)": 1.5, "sink(5)": 1.0, "sink(6)": None,
    }  # fmt: skip
