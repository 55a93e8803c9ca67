"""Policies that are lists of layers are named by their slots, if this tells them apart."""

from __future__ import annotations

import pytest
from test_as_loaded import record

from weir.evals.results.file import ResultsFile
from weir.evals.results.naming import read_together, shorten_layered
from weir.evals.results.summary import _means

ONE, OTHER = "[sink(4) | recent(60), h2o(96)]", "[recent(none), recent(8):int8]"


@pytest.mark.parametrize(
    ("policies", "names"),
    [
        ([ONE, "h2o(64)"], ["layers of 64, 96", "h2o(64)"]),
        ([OTHER, ONE], ["layers of all, 8", "layers of 64, 96"]),
        ([ONE, "[recent(64), recent(96)]"], [ONE, "[recent(64), recent(96)]"]),
        (["[gone(4)]"], ["[gone(4)]"]),
    ],
)
def test_lists_are_named_by_their_slots_if_no_other_is_named_so(policies, names):
    given = [record(number, policy, 1.0) for number, policy in enumerate(policies)]
    assert [it["policy"] for it in shorten_layered(given)] == names
    assert [it["policy"] for it in given] == policies


def test_a_mean_over_budgets_still_knows_a_list_by_what_was_written():
    lists = [
        "[streaming_llm(budget=32), h2o(budget=64)]",
        "[streaming_llm(budget=8), h2o(budget=9)]",
    ]
    records = [
        record(number, policy, 4.0 + number, budget=None, setting=f"recall(n={number // 2})")
        for number, policy in enumerate([lists[0], "streaming_llm(budget=64)", lists[1]])
    ]
    named = shorten_layered(records)
    assert [it["policy"] for it in named][::2] == ["layers of 32, 64", "layers of 8, 9"]
    (mean,) = {name for row in _means(named).values() for name in row if name.startswith("[")}
    assert mean == "[streaming_llm, h2o]"


def test_reports_name_them_so_and_the_file_has_them_whole(tmp_path):
    path = tmp_path / "one.jsonl"
    with ResultsFile(path, {"grid": "lists", "cells": [{}]}) as file:
        file.append(record(0, ONE, 2.0))
    assert ONE in path.read_text("utf-8")
    _, records = read_together([path])
    assert [it["policy"] for it in records] == ["layers of 64, 96"]
