"""The results file: whole after any crash, of one grid, one line a cell."""

from __future__ import annotations

import errno
import json
import math
import os

import pytest

from weir.errors import WeirError
from weir.evals.results import ResultsFile, read_results

GRID = {"grid": "abc", "cells": [{"policy": "dense"}] * 5}


def record(number: int, **more: object) -> dict[str, object]:
    return {"cell": number, "status": "done", "value": number / 3, **more}


def write(path, *numbers: int) -> None:
    with ResultsFile(path, GRID) as results:
        for number in numbers:
            results.append(record(number))


def test_each_record_is_a_line_behind_the_grid(tmp_path):
    path = tmp_path / "new" / "r.jsonl"
    write(path, 0, 1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [GRID, record(0), record(1)]
    assert read_results(path) == (GRID, [record(0), record(1)])


def test_it_is_on_disk_as_soon_as_append_returns(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, GRID) as results:
        results.append(record(0))
        assert read_results(path)[1] == [record(0)]


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, GRID) as results:
        results.append(record(0, value=math.nan, result={"rows": [math.inf, 1.0]}))
    assert read_results(path)[1][0]["value"] is None
    assert read_results(path)[1][0]["result"] == {"rows": [None, 1.0]}


def test_cut_off_at_any_byte_the_whole_lines_are_taken_up_again(tmp_path):
    path = tmp_path / "r.jsonl"
    write(path, 0, 1)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with ResultsFile(path, GRID, resume=True) as results:
            assert list(results.records) == list(range(max(0, sum(e <= cut for e in ends) - 1)))
            for number in (0, 1):
                if number not in results.records:
                    results.append(record(number))
        assert path.read_bytes() == whole


def test_a_file_that_is_there_is_never_overwritten(tmp_path):
    path = tmp_path / "r.jsonl"
    write(path, 0)
    before = path.read_bytes()
    with pytest.raises(WeirError, match="there already; go on with --resume"):
        ResultsFile(path, GRID)
    with pytest.raises(WeirError, match="the results of another grid"):
        ResultsFile(path, {**GRID, "grid": "other"}, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "text", ["hello", "hello\n", '{"a": 1}\n', "[]\n", '{"grid": "abc"}\n{}\n']
)
def test_a_file_of_something_else_is_refused_and_kept(tmp_path, text):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(WeirError, match=r"line [12]: not a line that weir eval writes"):
        ResultsFile(path, GRID, resume=True)
    assert path.read_text() == text


def test_two_processes_cannot_write_one_file(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, GRID), pytest.raises(WeirError, match="another weir is writing"):
        ResultsFile(path, GRID, resume=True)
    with ResultsFile(path, GRID, resume=True) as results:
        results.append(record(0))


def test_a_full_disk_is_one_clear_line_and_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    real = os.write

    def half(file: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[: len(data) // 2])

    with ResultsFile(path, GRID) as results:
        results.append(record(0))
        before = path.read_bytes()
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(WeirError, match=r"no room left on the disk; .* go on with --resume"):
            results.append(record(1))
        assert 1 not in results.records
        monkeypatch.undo()
        assert path.read_bytes() == before


def test_a_write_in_parts_is_still_one_line(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:7]))
    write(path, 0)
    assert read_results(path)[1] == [record(0)]


def test_records_are_forgotten_and_put_in_order_in_place(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, GRID) as results:
        for number in (3, 0, 2):
            results.append(record(number))
        results.forget({2, 4})
        assert [r["cell"] for r in read_results(path)[1]] == [3, 0]
        results.append(record(1))
        results.sort()
        assert [r["cell"] for r in read_results(path)[1]] == [0, 1, 3]
        results.append(record(4))  # the file that took its place is written on
        with pytest.raises(WeirError, match="another weir"):
            ResultsFile(path, GRID, resume=True)
    assert [r["cell"] for r in read_results(path)[1]] == [0, 1, 3, 4]
    assert os.listdir(tmp_path) == ["r.jsonl"]


def test_what_is_missing_or_empty_is_named(tmp_path):
    with pytest.raises(WeirError, match="there is no results file"):
        read_results(tmp_path / "r.jsonl")
    (tmp_path / "r.jsonl").touch()
    with pytest.raises(WeirError, match="holds no results"):
        read_results(tmp_path / "r.jsonl")
    with pytest.raises(WeirError, match="cannot write"):
        ResultsFile(tmp_path / "r.jsonl" / "below", GRID)
