"""A model that was loaded in two ways counts as two models in tables, with different names."""

from __future__ import annotations

import pytest

from weir.errors import WeirError
from weir.evals.results.file import ResultsFile
from weir.evals.results.naming import name_loading, read_together
from weir.evals.results.report import write_report
from weir.evals.results.summary import by_distance, overviews

WAYS = [
    ({}, ""),
    ({"dtype": "auto"}, ""),
    ({"dtype": "bfloat16"}, " (dtype bfloat16)"),
    ({"weights": "int8", "device": "cuda:1"}, " (device cuda:1, weights int8)"),
    ({"revision": "v2", "trust_remote_code": True}, " (revision v2, trust remote code)"),
]


def record(number: int, policy: str, value: float, **more: object) -> dict[str, object]:
    rows = [{"distance": 9, "asked": 10, "right": int(value)}]
    return {
        "cell": number, "status": "done", "model": "m", "protocol": None, "task": "recall",
        "setting": "recall(n=9)", "policy": policy, "budget": 64, "seed": 0, "weir": "0.1.0",
        "metric": "ppl", "value": value, "better": "lower", "kv_bytes": 8,
        "result": {"by_distance": rows, "ppl_by_block": [value], "block": 9, "tokens": 9}, **more,
    }  # fmt: skip


FULL = [record(0, "streaming_llm(budget=64)", 2.0), record(1, "h2o(budget=64)", 3.0)]
HALF = [
    record(2, "streaming_llm(budget=64)", 6.0, loading={"dtype": "bfloat16"}),
    record(3, "h2o(budget=64)", 7.0, loading={"dtype": "bfloat16"}),
]
NAMES = ["m", "m (dtype bfloat16)"]


@pytest.mark.parametrize(("loading", "told"), WAYS)
def test_what_is_not_the_default_stands_behind_the_name(loading, told):
    given = record(0, "dense", 1.0, loading=loading)
    before = dict(given)
    (named,) = name_loading([given])
    assert named["model"] == f"m{told}"
    assert given == before
    assert name_loading([named]) == [named]


def test_ways_of_loading_are_no_seeds_of_one_another():
    first, second = overviews(name_loading(FULL + HALF))
    assert [first.title, second.title] == NAMES
    assert (first.columns[0].values, second.columns[0].values) == ((2.0, 3.0), (6.0, 7.0))
    titles = [table.title for table in by_distance(name_loading(FULL + HALF))]
    assert titles == [f"{name}: recall, by distance" for name in NAMES]


def test_a_model_whose_steps_were_compiled_is_named_so():
    both = {"loading": {"dtype": "bfloat16"}, "compiled": True}
    assert (
        name_loading([record(0, "dense", 1.0, **both)])[0]["model"]
        == "m (compiled, dtype bfloat16)"
    )


def test_a_report_has_a_part_for_each_way(tmp_path):
    for name, records in (("full", FULL), ("half", HALF)):
        with ResultsFile(tmp_path / name, {"grid": name, "cells": [{}] * 4}) as file:
            for one in records:
                file.append(one)
    paths = [tmp_path / "full", tmp_path / "half"]
    cells, records = read_together(paths)
    assert (cells, len(records)) == (8, 4)  # equal cells, loaded differently
    (page,) = write_report(paths, tmp_path / "out", ["md"])
    text = page.read_text("utf-8")
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    for name in NAMES:
        assert f"## {name}" in heads
        assert f"## {name}: recall, ppl against bytes" in heads
    assert not any("mean of" in head for head in heads)  # both are the same model
    assert text.splitlines()[2].startswith("2 models, ")


def test_figures_of_one_way_still_contradict_each_other(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        with ResultsFile(tmp_path / name, {"grid": name, "cells": [{}]}) as file:
            file.append(record(0, "dense", value, loading={"weights": "int4"}))
    with pytest.raises(WeirError, match=r"recall\(n=9\) of m \(weights int4\) under dense"):
        read_together([tmp_path / "a", tmp_path / "b"])
