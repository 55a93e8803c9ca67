"""The results file: intact after any crash, for one grid, with one line for each cell."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from weir.errors import WeirError
from weir.evals.results.file import ResultsFile, read_results

GRID = {"grid": "abc", "cells": [{"policy": "dense"}] * 5}


def record(number: int, **more: object) -> dict[str, object]:
    return {
        "cell": number, "model": "m", "task": "t", "setting": "t", "policy": "dense", "seed": 0,
        "protocol": None, "weir": "0.1.0", "status": "done", "metric": "t", "value": number / 3,
        "better": "lower", "kv_bytes": 8, "result": {}, **more,
    }  # fmt: skip


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


@pytest.mark.parametrize("step", [41, pytest.param(1, marks=pytest.mark.slow)])
def test_cut_off_at_any_byte_the_whole_lines_are_taken_up_again(tmp_path, step):
    path = tmp_path / "r.jsonl"
    write(path, 0, 1)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in sorted({*range(0, len(whole), step), *ends[:-1], *(end - 1 for end in ends)}):
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
    with pytest.raises(WeirError, match=r"already exists. Use --resume"):
        ResultsFile(path, GRID)
    with pytest.raises(WeirError, match="the results of another grid"):
        ResultsFile(path, {**GRID, "grid": "other"}, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "text", ["hello", "hello\n", '{"a": 1}\n', "[]\n", '{"grid": "abc", "cells": []}\n{}\n']
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
        with pytest.raises(WeirError, match=r"no room left on the disk\. .* Use --resume"):
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


def test_some_records_are_kept_and_put_in_order_in_place(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, GRID) as results:
        for number in (3, 0, 2):
            results.append(record(number))
        results.keep({n: one for n, one in results.records.items() if n != 2})
        assert [r["cell"] for r in read_results(path)[1]] == [3, 0]
        results.append(record(1))
        results.keep(dict(sorted(results.records.items())))
        assert [r["cell"] for r in read_results(path)[1]] == [0, 1, 3]
        results.append(record(4))  # goes into the file that has replaced the first
        with pytest.raises(WeirError, match="another weir"):
            ResultsFile(path, GRID, resume=True)
    assert [r["cell"] for r in read_results(path)[1]] == [0, 1, 3, 4]
    assert os.listdir(tmp_path) == ["r.jsonl"]


def test_what_is_missing_or_empty_is_named(tmp_path):
    with pytest.raises(WeirError, match=r"the results file .* does not exist"):
        read_results(tmp_path / "r.jsonl")
    (tmp_path / "r.jsonl").touch()
    with pytest.raises(WeirError, match="contains no results"):
        read_results(tmp_path / "r.jsonl")
    with pytest.raises(WeirError, match="cannot write"):
        ResultsFile(tmp_path / "r.jsonl" / "below", GRID)


@pytest.mark.parametrize("resume", [False, True])
def test_what_is_no_regular_file_is_refused_before_anything_is_read(tmp_path, resume):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in ("/dev/full", "/dev/null", pipe):
        with pytest.raises(WeirError, match=f"{path} is not a regular file but a device or a pipe"):
            ResultsFile(Path(path), GRID, resume=resume)
        with pytest.raises(WeirError, match=f"{path} is not a regular file"):
            read_results(path)
    with pytest.raises(WeirError, match="is not a regular file but a folder"):
        ResultsFile(tmp_path, GRID, resume=resume)


BLOCKS = {"ppl_by_block": [1.0, None], "block": 1, "tokens": 2}
WHOLE = {
    **BLOCKS,
    "by_distance": [{"distance": 1, "asked": 2, "right": 1}],
    "cells": [{"length": 1, "depth": 0.5, "accuracy": 1}],
}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"value": "1.5"}, "the field 'value' must be a number or null, got \"1.5\""),
        ({"value": True}, "the field 'value' must be a number or null, got true"),
        ({"kv_bytes": []}, "the field 'kv_bytes' must be a number or null"),
        ({"policy": None}, "the field 'policy' must be a text, got null"),
        ({"status": "odd"}, "the field 'status' must be done or failed, got 'odd'"),
        ({"status": "failed"}, "the field 'reason' is missing"),
        ({"better": "worse"}, "the field 'better' must be higher or lower, got 'worse'"),
        ({"protocol": 3}, "the field 'protocol' must be a text"),
        ({"result": None}, "the field 'result' must be an object, got null"),
        ({"result": {"ppl_by_block": None}}, "'result.ppl_by_block' must be a list, got null"),
        ({"result": {**BLOCKS, "block": "x"}}, "'result.block' must be a whole number"),
        ({"result": {**BLOCKS, "ppl_by_block": ["x"]}}, r"'result.ppl_by_block\[0\]' must be a"),
        ({"result": {"by_distance": [{}]}}, r"'result.by_distance\[0\].distance' is missing"),
        (
            {"result": {"cells": [{"length": 1, "depth": 0, "accuracy": None}]}},
            r"'result.cells\[0\].accuracy' must be a number, got null",
        ),
        ({"cell": 5}, "'cell' must be the number of a cell of the grid, 0 to 4, got 5"),
        ({"cell": -1}, "'cell' must be the number of a cell of the grid, 0 to 4, got -1"),
        ({"cell": "1"}, "the field 'cell' must be a whole number"),
        ({"cell": 0}, "the field 'cell' is 0, as in line 2"),
    ],
)
def test_a_damaged_line_is_named_with_its_field(tmp_path, wrong, said):
    path = tmp_path / "r.jsonl"
    rows = [GRID, record(0, result=WHOLE), {**record(1), **wrong}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(WeirError, match=f"r.jsonl, line 3: .*{said}"):
        read_results(path)
    with pytest.raises(WeirError, match="line 3: "):
        ResultsFile(path, GRID, resume=True)


def test_a_field_under_another_name_is_missing_and_so_are_the_cells_of_a_grid(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(f"{json.dumps(GRID)}\n{json.dumps(record(0)).replace('policy', 'polcy')}\n")
    with pytest.raises(WeirError, match=r"line 2: the field 'policy' is missing"):
        read_results(path)
    path.write_text('{"grid": "abc", "cells": 3}\n')
    with pytest.raises(WeirError, match=r"line 1: the field 'cells' must be a list, got 3"):
        read_results(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1" + 400 * "0"])
def test_a_figure_that_is_none_is_named(tmp_path, number):
    path = tmp_path / "r.jsonl"
    line = json.dumps(record(0, value="?")).replace('"?"', number)
    path.write_text(f"{json.dumps(GRID)}\n{line}\n")
    with pytest.raises(WeirError, match="line 2: the field 'value' must be a number or null"):
        read_results(path)


def test_of_another_grid_it_is_said_what_differs(tmp_path):
    path = tmp_path / "r.jsonl"
    there = {"grid": "a", "cells": [{"seed": 0, "policy": p} for p in ("dense", "h2o(8)")]}
    ResultsFile(path, there).__exit__(None, None, None)
    here = {"grid": "b", "cells": [{"seed": s, "policy": "dense"} for s in range(6)]}
    said = r"\(seed: 1, 2, 3 and 2 more new; policy: h2o\(8\) only in the file\)"
    with pytest.raises(WeirError, match=f"the results of another grid {said}. Use another file"):
        ResultsFile(path, here, resume=True)
    turned = {"grid": "c", "cells": there["cells"][::-1]}
    with pytest.raises(WeirError, match="the same values in another order"):
        ResultsFile(path, turned, resume=True)
