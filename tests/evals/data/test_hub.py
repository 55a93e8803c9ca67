"""Data sets of the Hub. A folder of files takes the place of an id, so no network is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weir.errors import WeirError
from weir.evals.records import read_records
from weir.evals.tasks.choice import Question, question_of

ARC = {
    "id": "1",
    "question": "Which melts?",
    "choices": {"text": ["ice", "stone"], "label": ["A", "B"]},
    "answerKey": "A",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set with a split `test` of three questions, in the format of the Hub."""
    pytest.importorskip("datasets", reason='datasets is not installed: ".[eval]"')
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "arc"
    data.mkdir()
    rows = [ARC, {**ARC, "id": "2"}, {**ARC, "id": "3", "answerKey": "C"}]
    (data / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return data


def test_rows_of_a_data_set_are_records_like_lines_of_a_file(folder: Path) -> None:
    records = read_records(f"hub:{folder}:test")
    assert [record.text("id") for record in records] == ["1", "2", "3"]
    assert len(read_records(f"hub:{folder}:default:test", most=2)) == 2
    right = Question("Which melts?", (("A", "ice"), ("B", "stone")), "A")
    assert question_of(records[0]) == right
    with pytest.raises(WeirError, match="test, row 3: the field 'answerKey' must be one of A, B"):
        question_of(records[2])


def test_a_data_set_that_is_not_there_is_one_clear_line(folder: Path) -> None:
    for name in (f"hub:{folder}:dev", f"hub:{folder}/nowhere:test"):
        with pytest.raises(WeirError, match=r"the data set .* cannot be loaded") as refused:
            read_records(name)
        assert "\n" not in str(refused.value)
    for name in ("hub:arc", "hub:", "hub:a:b:c:d", "hub:a::test"):
        with pytest.raises(WeirError, match="must be written hub:ID:SPLIT"):
            read_records(name)
