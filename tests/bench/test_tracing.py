"""Traces of what is timed."""

from __future__ import annotations

import json

import pytest
import torch

from weir.errors import WeirError
from weir_bench.timing import Doing, in_turns
from weir_bench.tracing import trace, traced


def names(path) -> list[str]:
    return [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]


def test_one_step_of_each_contender_is_in_the_trace_by_its_name(tmp_path):
    numbers, done = torch.ones(3), []
    ways = {
        name: Doing(lambda name=name: done.append((name, float((numbers + 1).sum()))))
        for name in ("mine", "theirs")
    }
    with traced(tmp_path / "trace.json"):
        taken = in_turns(ways, rounds=3, warm=2)
    seen = names(tmp_path / "trace.json")
    assert (seen.count("mine"), seen.count("theirs"), seen.count("aten::add")) == (1, 1, 2)
    assert [len(times) for times in taken.values()] == [3, 3]
    assert len(done) == 10  # the traced step is the last of those that are not timed


def test_nothing_is_traced_that_nobody_asked_for(tmp_path):
    with traced(None):
        trace("never", lambda: pytest.fail("a step too many"))


def test_what_was_traced_before_an_error_is_written(tmp_path):
    def fails() -> None:
        with traced(tmp_path / "trace.json"):
            trace("once", lambda: torch.ones(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert "once" in names(tmp_path / "trace.json")


def test_a_file_that_cannot_be_written_is_found_before_anything_is_measured(tmp_path):
    problem = "cannot write the trace .*: Is a directory"
    with pytest.raises(WeirError, match=problem), traced(tmp_path):
        pytest.fail("measured")
