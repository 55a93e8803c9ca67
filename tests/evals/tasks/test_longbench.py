"""`longbench`: official files, the harness's prompts and metrics, and prompts cut in the middle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from reference.answers import plain_answer
from reference.subjects import quiet, stranger

import weir
from weir.errors import WeirError
from weir.evals.answers import GeneratedAnswer
from weir.evals.task import Subject
from weir.evals.tasks.longbench import LongBench, without_middle

for package in ("lm_eval", "jieba", "fuzzywuzzy", "rouge"):
    pytest.importorskip(package, reason=f'{package} is not installed: ".[eval]"')

DATA = Path(__file__).parents[2] / "data" / "evals"
HOTPOT, TREC = DATA / "hotpotqa_e.jsonl", DATA / "trec.jsonl"
ROWS = [json.loads(line) for line in HOTPOT.read_text().splitlines()]


def hotpot_prompt(row: dict[str, str]) -> str:
    told = "Answer the question based on the given passages. Only give me the answer and do not "
    told += "output any other words."
    return (
        f"{told}\n\nThe following are given passages.\n{row['context']}\n\n{told}\n\n"
        f"Question: {row['input']}\nAnswer:"
    )


def test_scores_are_longbench_s_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []
    said = iter([" Anna.", "green", "the autumn"])

    def told(subject: Subject, prompt: str, *how: object) -> GeneratedAnswer:
        prompts.append((prompt, *how))
        return GeneratedAnswer(next(said), kv_bytes=8, held=2.0, seen=8)

    monkeypatch.setattr("weir.evals.answers.ask", told)
    found = LongBench(file=str(HOTPOT)).run(stranger(), quiet)
    assert prompts[1] == (hotpot_prompt(ROWS[1]), 32, (), False)
    # F1 over words is 1 for "Anna" and "green", and 0 for "the autumn", where "in spring" is right.
    assert found["score"] == pytest.approx(2 / 3)
    assert found["by_length"] == [
        {"length": "0-4k", "asked": 1, "score": 1.0},
        {"length": "4-8k", "asked": 1, "score": 1.0},
        {"length": "8k+", "asked": 1, "score": 0.0},
    ]
    assert (found["dataset"], found["asked"], found["share"]) == ("hotpotqa", 3, 0.25)


def test_few_shot_prompts_end_at_a_line_and_are_never_put_into_a_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how = []

    def told(subject: Subject, prompt: str, *rest: object) -> GeneratedAnswer:
        how.append(rest)
        return GeneratedAnswer("Person", kv_bytes=8, held=2.0, seen=8)

    monkeypatch.setattr("weir.evals.answers.ask", told)
    assert LongBench(file=str(TREC), chat=True).run(stranger(), quiet)["score"] == 1.0
    LongBench(file=str(HOTPOT), samples=1, chat=True).run(stranger(), quiet)
    assert how == [(64, ("\n",), False), (32, (), True)]


@pytest.mark.slow
def test_dense_answers_as_a_plain_loop() -> None:
    one = stranger()
    plain = [plain_answer(one.model, one.tokenizer, hotpot_prompt(row), 32) for row in ROWS]
    found = LongBench(file=str(HOTPOT)).run(one, quiet)
    assert found["answers"] == plain and len(set(plain)) == 3
    small = replace(one, policy=weir.policy("streaming_llm(budget=32)"))
    assert LongBench(file=str(HOTPOT)).run(small, quiet)["answers"] != plain


def test_a_long_prompt_loses_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = stranger().tokenizer
    text = "one two three four five six seven eight"
    assert without_middle(tokenizer, text, 8) == text
    assert without_middle(tokenizer, text, 4) == "one two seven eight"
    assert without_middle(tokenizer, text, 5) == "one two six seven eight"
    prompts = []

    def told(subject: Subject, prompt: str, *how: object) -> GeneratedAnswer:
        prompts.append(prompt)
        return GeneratedAnswer("", kv_bytes=8, held=2.0, seen=8)

    monkeypatch.setattr("weir.evals.answers.ask", told)
    LongBench(file=str(HOTPOT), samples=1, truncate=20).run(stranger(), quiet)
    ids = [
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (prompts[0], hotpot_prompt(ROWS[0]))
    ]
    assert len(ids[0]) == 20 < len(ids[1])
    assert ids[0][:10] == ids[1][:10] and ids[0][10:] == ids[1][-10:]


def test_what_is_not_in_the_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for wrong, said in [
        ({"answers": "Anna"}, "line 2: the field 'answers' must be a list, got \"Anna\""),
        ({"context": None}, "line 2: the field 'context' must be a text, got null"),
        ({"dataset": "trec"}, "line 2: the field 'dataset' must be 'hotpotqa' in the whole file"),
    ]:
        path.write_text(f"{json.dumps(ROWS[0])}\n{json.dumps({**ROWS[0], **wrong})}\n")
        with pytest.raises(WeirError, match=said):
            LongBench(file=str(path)).run(stranger(), quiet)
    classed = json.loads(TREC.read_text().splitlines()[0])
    for classes, said in [(None, "must be a list, got null"), ([], "must have at least 1 entry")]:
        path.write_text(json.dumps({**classed, "all_classes": classes}))
        with pytest.raises(WeirError, match=f"line 1: the field 'all_classes' {said}"):
            LongBench(file=str(path)).run(stranger(), quiet)
    path.write_text(json.dumps({**ROWS[0], "dataset": "hotpot"}))
    with pytest.raises(WeirError, match="no data set 'hotpot', did you mean 'hotpotqa'"):
        LongBench(file=str(path)).run(stranger(), quiet)
    with pytest.raises(
        WeirError, match=("truncate of longbench must be a whole number of at least 2")
    ):
        LongBench(file=str(path), truncate=1)


def test_a_missing_package_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jieba", None)
    with pytest.raises(WeirError, match=r"needs jieba.*pip install '\.\[eval\]'"):
        LongBench(file=str(HOTPOT)).run(stranger(), quiet)
