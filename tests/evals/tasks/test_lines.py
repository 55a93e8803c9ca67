"""`lines`: official and generated cases ask in the same way; answers are parsed as in LongEval."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from reference.answers import plain_answer
from reference.subjects import nano, quiet, stranger

import weir
from weir.errors import WeirError
from weir.evals.answers import GeneratedAnswer
from weir.evals.task import Subject
from weir.evals.tasks.lines import Lines, make_case, number_in

OFFICIAL = Path(__file__).parents[2] / "data" / "evals" / "lines.jsonl"


def test_an_official_file_is_read_as_it_is() -> None:
    rows = [json.loads(line) for line in OFFICIAL.read_text().splitlines()]
    cases = Lines(file=str(OFFICIAL)).cases(seed=0)
    assert [case.prompt for case in cases] == [row["prompt"] for row in rows]
    assert [(case.name, case.number) for case in cases] == [
        (row["random_idx"][0], row["expected_number"]) for row in rows
    ]
    assert len(Lines(file=str(OFFICIAL), samples=2).cases(seed=0)) == 2


def test_a_made_case_has_the_line_it_asks_for_once() -> None:
    case = make_case(200, random.Random(3))
    found = re.findall(r"^line (\S+): REGISTER_CONTENT is <(\d+)>$", case.prompt, re.MULTILINE)
    assert len(found) == len({name for name, _ in found}) == 200
    assert dict(found)[case.name] == str(case.number)
    assert case.prompt.split("\n")[-1].count(case.name) == 1
    assert all(1 <= int(number) <= 50_000 for _, number in found)
    assert make_case(200, random.Random(3)) == case != make_case(200, random.Random(4))


def test_the_line_asked_for_is_anywhere() -> None:
    draw = random.Random(0)
    places = {
        re.findall(r"line (\S+):", case.prompt).index(case.name)
        for case in (make_case(4, draw) for _ in range(60))
    }
    assert places == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [("line 4 says <71>", 4, 71), ("0350.", 350, 350), ("none", None, None)],
)
def test_numbers_are_read_from_answers(text: str, first: int | None, last: int | None) -> None:
    assert (number_in(text, last=False), number_in(text, last=True)) == (first, last)


@pytest.mark.parametrize("chat", [False, True])
def test_the_first_number_counts_and_in_a_chat_the_last(
    monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    answers = ["4022, not 17", " 8", "it is 60000"]
    if chat:
        answers[0] = "line 17 has 4022"
    said, asked = iter(answers), []

    def told(subject: Subject, prompt: str, *how: object) -> GeneratedAnswer:
        asked.append((prompt, how))
        return GeneratedAnswer(next(said), kv_bytes=64, held=8.0, seen=16)

    monkeypatch.setattr("weir.evals.answers.ask", told)
    task = Lines(file=str(OFFICIAL), chat=chat)
    found = task.run(nano(), quiet)
    assert (found["right"], found["asked"], found["answers"]) == (2, 3, answers)
    prompt = task.cases(seed=0)[0].prompt
    if chat:
        assert asked[0] == (prompt, (100, (), True))
    else:
        begun = f"{prompt}\nline red-kite: REGISTER_CONTENT is <"
        assert asked[0] == (begun, (15, (">",), False))
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert (found["kv_bytes"], found["share"]) == (64, 0.5)


@pytest.mark.slow
def test_dense_answers_as_a_plain_loop() -> None:
    one = stranger()
    task = Lines(lines=4, samples=6)
    plain = [
        plain_answer(
            one.model,
            one.tokenizer,
            f"{case.prompt}\nline {case.name}: REGISTER_CONTENT is <",
            most=15,
            stop=">",
        )
        for case in task.cases(seed=0)
    ]
    found = task.run(one, quiet)
    assert found["answers"] == plain and len(set(plain)) == 6 and found["share"] == 1.0
    small = task.run(replace(one, policy=weir.policy("streaming_llm(budget=32)")), quiet)
    assert small["answers"] != plain and small["kv_bytes"] < found["kv_bytes"]


def test_what_is_not_in_the_format_is_named_by_line_and_field(tmp_path: Path) -> None:
    row = json.loads(OFFICIAL.read_text().splitlines()[0])
    path = tmp_path / "lines.jsonl"
    for wrong, said in [
        ({"expected_number": 4023}, "line 2: the field 'correct_line' must be a line with the nu"),
        ({"expected_number": "4022"}, "line 2: the field 'expected_number' must be a whole numb"),
        ({"prompt": 1}, "line 2: the field 'prompt' must be a text, got 1"),
    ]:
        path.write_text(f"{json.dumps(row)}\n{json.dumps({**row, **wrong})}\n")
        with pytest.raises(WeirError, match=said):
            Lines(file=str(path)).run(nano(), quiet)
    with pytest.raises(WeirError, match="no chat template"):
        Lines(samples=1, chat=True).run(nano(), quiet)
    for options in ({"samples": 0}, {"lines": 0}, {"lines": 10**6}):
        with pytest.raises(WeirError):
            Lines(**options)
