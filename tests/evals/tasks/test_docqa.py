"""`docqa`: the document with the answer is at the requested place; answers are compared exactly."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from reference.answers import plain_answer
from reference.subjects import quiet, stranger

import weir
from weir.errors import WeirError
from weir.evals.answers import GeneratedAnswer
from weir.evals.scores import contains, is_exact, normalize
from weir.evals.tasks.docqa import DocumentQA

OFFICIAL = Path(__file__).parents[2] / "data" / "evals" / "documents.jsonl.gz"
ROWS = [json.loads(line) for line in gzip.decompress(OFFICIAL.read_bytes()).splitlines()]


def titles(prompt: str) -> list[str]:
    return re.findall(r"^Document \[\d\] \(Title: The (\w+)\)", prompt, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, ["mill", "river", "tower", "fair"]),
        ({"gold": 2}, ["river", "tower", "mill", "fair"]),
        ({"gold": "3"}, ["river", "tower", "fair", "mill"]),
        ({"gold": 1, "documents": 2}, ["river", "mill"]),
        ({"documents": 3}, ["mill", "river", "tower"]),
        ({"documents": 1}, ["mill"]),
    ],
)
def test_the_document_with_the_answer_stands_where_it_is_wanted(
    options: dict[str, int], order: list[str]
) -> None:
    case = DocumentQA(file=str(OFFICIAL), **options).cases()[0]
    assert titles(case.prompt) == order
    gold = ROWS[0]["ctxs"][0]
    assert f"(Title: {gold['title']}) {gold['text']}\n" in case.prompt
    assert case.prompt.endswith(f"\n\nQuestion: {ROWS[0]['question']}\nAnswer:")


def test_several_places_are_run_one_by_one() -> None:
    swept = DocumentQA(file=str(OFFICIAL), gold="0 3 1")
    assert [one.gold for one in swept.settings()] == [0, 3, 1]
    assert list(DocumentQA(file=str(OFFICIAL)).settings()) == [DocumentQA(file=str(OFFICIAL))]


@pytest.mark.parametrize(
    ("text", "plain"),
    [("The  Old-Mill!", "oldmill"), ("an apple, a day", "apple day"), ("Theatre", "theatre")],
)
def test_the_normal_form_is_squad_s(text: str, plain: str) -> None:
    assert normalize(text) == plain


def test_right_answers_are_exact_or_contained() -> None:
    right = ["Anna Holm", "Holm"]
    assert is_exact("the holm.", right) and not is_exact("Miss Holm", right)
    assert contains("It was Miss Holm.", right) and not contains("Anna", right)


def test_exact_matches_are_counted_on_the_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(["\nThe Holm.\nAnd so on", "It is green"])

    def told(*args: object, **kwargs: object) -> GeneratedAnswer:
        return GeneratedAnswer(next(said), kv_bytes=8, held=None, seen=4)

    monkeypatch.setattr("weir.evals.answers.ask", told)
    found = DocumentQA(file=str(OFFICIAL), chat=True).run(stranger(), quiet)
    assert found["answers"] == ["The Holm.", "It is green"]
    assert (found["exact_match"], found["contains"], found["right"]) == (0.5, 1.0, 1)


@pytest.mark.slow
def test_dense_answers_as_a_plain_loop() -> None:
    one = stranger()
    task = DocumentQA(file=str(OFFICIAL))
    plain = [
        plain_answer(one.model, one.tokenizer, case.prompt, 100, stop="\n").strip()
        for case in task.cases()
    ]
    found = task.run(one, quiet)
    assert found["answers"] == plain and len(set(plain)) == 2
    small = replace(one, policy=weir.policy("streaming_llm(budget=32)"))
    assert task.run(small, quiet)["answers"] != plain


def test_what_is_not_in_the_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    contexts = ROWS[0]["ctxs"]
    for wrong, said in [
        ({"ctxs": contexts[1:]}, "line 2: the field 'ctxs' must have one document with isgold"),
        ({"ctxs": [{"title": "x"}]}, r"line 2: the field 'ctxs\[0\].isgold' is missing"),
        ({"answers": []}, "line 2: the field 'answers' must have at least 1 entry"),
        ({"answers": [" "]}, r"line 2: the field 'answers\[0\]' is empty"),
        ({"question": None}, "line 2: the field 'question' must be a text, got null"),
    ]:
        path.write_text(f"{json.dumps(ROWS[0])}\n{json.dumps({**ROWS[0], **wrong})}\n")
        with pytest.raises(WeirError, match=said):
            DocumentQA(file=str(path)).run(stranger(), quiet)
    for options, said in [
        ({"gold": 4}, "has 4 documents, so gold must be at most 3, got 4"),
        ({"documents": 5}, "has 4 documents, but the task asks for documents=5"),
    ]:
        with pytest.raises(WeirError, match=f"line 1: the field 'ctxs' {said}"):
            DocumentQA(file=str(OFFICIAL), **options).run(stranger(), quiet)
    with pytest.raises(WeirError, match=r'gold must be places like 4 or "0 4 9", got .²'):
        DocumentQA(file=str(OFFICIAL), gold="²")
    for options in ({"gold": "first"}, {"gold": 2, "documents": 2}, {"samples": 0}):
        with pytest.raises(WeirError):
            DocumentQA(file=str(OFFICIAL), **options)
