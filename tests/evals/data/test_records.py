"""Data files are read plain or compressed, and every fault is named with its line and field."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from weir.errors import WeirError
from weir.evals.records import JsonRecord, read_records

ROWS = [{"question": "Who?", "choices": [{"label": "A"}, {"label": "B"}]}, {"question": "É"}]
LINES = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress), ("a.jsonl.xz", lzma.compress)],
)
def test_a_file_is_read_plain_and_packed(tmp_path: Path, name: str, pack) -> None:
    (tmp_path / name).write_bytes(pack(b"\xef\xbb\xbf" + LINES.encode()))
    assert [record.values for record in read_records(tmp_path / name)] == ROWS
    assert [record.values for record in read_records(tmp_path / name, most=1)] == ROWS[:1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1}\n\n{"a": }', r"line 3: not JSON, Expecting value \(character 7\)"),
        (b'{"a": 1}\n[1, 2]', r"line 2: a record must be a JSON object, got \[1, 2\]"),
        (b'{"a": 1}\n{"a": "\xff"}', "line 2: not UTF-8, byte 8 is 0xff"),
        (b"\n \n", "contains no records"),
        (b"[" * 100_000, "line 1: nested too deeply"),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(WeirError, match=said):
        read_records(path)


def test_a_missing_and_a_torn_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeirError, match=r"cannot read .*nowhere\.jsonl: No such file"):
        read_records(tmp_path / "nowhere.jsonl")
    for name, packed in [("a.gz", gzip.compress(b"{}" * 999)), ("a.xz", lzma.compress(b"{}"))]:
        (tmp_path / name).write_bytes(packed[:-9])
        with pytest.raises(WeirError, match=f"{name} is not a whole"):
            read_records(tmp_path / name)
    with pytest.raises(WeirError, match="no file was given"):
        read_records("")
    (tmp_path / "b.gz").write_bytes(b"plain text")
    with pytest.raises(WeirError, match=r"b\.gz is not a whole \.gz file"):
        read_records(tmp_path / "b.gz")


INNER = {
    "n": 3,
    "yes": True,
    "word": "w",
    "words": ["a", "b"],
    "blank": " ",
    "blanks": ["a", ""],
    "none": None,
    "numbers": [1, 0.5, None],
    "in": {"deep": [{"x": 1}, {"x": "1"}]},
}


def test_fields_are_handed_out_by_kind() -> None:
    record = JsonRecord("f, line 7", INNER)
    assert (record.count("n"), record.flag("yes"), record.text("word")) == (3, True, "w")
    assert record.texts("words", least=2) == record.several_words("words") == ["a", "b"]
    assert (record.words("word"), record.number("n"), record.number("none")) == ("w", 3.0, None)
    assert record.numbers("numbers") == [1.0, 0.5, None]
    assert "n" in record and "m" not in record
    assert [inner.path for inner in record.record("in").records("deep")] == [
        "in.deep[0].",
        "in.deep[1].",
    ]


@pytest.mark.parametrize(
    ("take", "said"),
    [
        (lambda r: r.text("m"), "the field 'm' is missing"),
        (lambda r: r.text("n"), "the field 'n' must be a text, got 3"),
        (lambda r: r.count("yes"), "the field 'yes' must be a whole number, got true"),
        (lambda r: r.flag("n"), "the field 'n' must be true or false, got 3"),
        (lambda r: r.number("word"), "the field 'word' must be a number or null, got"),
        (lambda r: r.number("none", known=True), "the field 'none' must be a number, got null"),
        (lambda r: r.numbers("words"), r"the field 'words\[0\]' must be a number or null"),
        (lambda r: r.words("blank"), "the field 'blank' is empty"),
        (lambda r: r.several_words("blanks"), r"the field 'blanks\[1\]' is empty"),
        (
            lambda r: r.texts("words", least=3),
            "the field 'words' must have at least 3 entries, got",
        ),
        (lambda r: r.records("words"), r"the field 'words\[0\]' must be an object, got \"a\""),
        (
            lambda r: r.record("in").records("deep")[1].count("x"),
            r"the field 'in.deep\[1\].x' must be a whole number, got \"1\"",
        ),
    ],
)
def test_a_field_of_another_kind_is_named_with_its_place(take, said: str) -> None:
    with pytest.raises(WeirError, match=f"^f, line 7: {said}"):
        take(JsonRecord("f, line 7", INNER))
