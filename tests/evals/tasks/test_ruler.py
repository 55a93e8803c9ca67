"""`ruler`: RULER's files, its two metrics, and questions that come before or after the text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from reference.answers import plain_answer
from reference.subjects import quiet, stranger

from weir.errors import WeirError
from weir.evals.records import read_records
from weir.evals.tasks.ruler import Ruler, RulerCase, match_score
from weir.evals.tasks.ruler_recalled import RulerRecalled
from weir.stream import Stream

FILE = Path(__file__).parents[2] / "data" / "evals" / "ruler.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text().splitlines()]


@pytest.mark.parametrize(
    ("answer", "outputs", "every", "some"),
    [
        (" They are 418 and 7.", ("418", "7"), 1.0, 1.0),
        ("418", ("418", "7"), 0.5, 1.0),
        ("the GREEN\x07Door", ("green\ndoor",), 1.0, 1.0),
        ("none", ("418", "7"), 0.0, 0.0),
    ],
)
def test_metrics_are_rulers(answer, outputs, every, some):
    assert match_score(answer, outputs, "all") == every
    assert match_score(answer, outputs, "part") == some


@pytest.mark.parametrize("question", ["after", "within"])
def test_dense_answers_as_a_plain_loop_wherever_the_question_is_fed(question):
    one = stranger()
    prompts = [row["input"] + row["answer_prefix"] for row in ROWS]
    found = Ruler(file=str(FILE), most=12, question=question).run(one, quiet)
    assert found["answers"] == [plain_answer(one.model, one.tokenizer, p, 12) for p in prompts]
    assert (found["asked"], found["score"], found["low"]) == (3, 0.0, 0.0)


def fed(monkeypatch, subject, **options):
    """The text of each feed to the stream of the first record."""
    texts, own = [], Stream.feed

    def feed(stream, ids, *rest, **more):
        if not isinstance(ids, int):
            texts.append(subject.tokenizer.decode(ids))
        return own(stream, ids, *rest, **more)

    monkeypatch.setattr(Stream, "feed", feed)
    Ruler(file=str(FILE), most=1, samples=1, **options).run(subject, quiet)
    return texts


def test_the_question_comes_when_the_text_was_read_or_with_it_or_before_it(monkeypatch):
    subject, row = stranger("streaming_llm(budget=32)"), ROWS[0]
    told, hay, asked = row["input"].split("\n")
    start = subject.tokenizer.decode(subject.tokenizer("")["input_ids"])
    after = fed(monkeypatch, subject)
    assert after[:2] == [f"{start}{told}\n{hay}\n", asked + row["answer_prefix"]]
    within = fed(monkeypatch, subject, question="within")
    assert within[0] == "".join(after[:2])
    before = fed(monkeypatch, subject, question="before")
    assert before[0] == f"{start}{asked}\n\n{told}\n{hay}\n"
    assert before[1] == after[1]


def test_in_a_chat_the_answer_begins_where_the_template_ends(monkeypatch):
    subject, row = stranger(), ROWS[0]
    subject.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    )
    fed_apart = fed(monkeypatch, subject, chat=True)
    told, hay, asked = row["input"].split("\n")
    assert fed_apart[0] == f"[user] {told}\n{hay}\n"
    assert fed_apart[1] == f"{asked}\n[assistant]{row['answer_prefix']}"


def test_a_policy_that_votes_keeps_what_the_question_asks_for_only_if_it_is_there():
    """In a prompt that is read whole, other tokens stay if the question is among the voters."""
    one = replace(stranger("snapkv(budget=48)"), prefill="full")
    answers = [
        Ruler(file=str(FILE), most=8, question=question).run(one, quiet)["answers"]
        for question in ("after", "within")
    ]
    assert answers[0] != answers[1]


def test_records_are_read_as_ruler_and_the_harness_write_them(tmp_path):
    row = {**ROWS[0], "gen_prefix": "It is"}
    del row["answer_prefix"]
    path = tmp_path / "rows.jsonl"
    seen = []
    for it in (row, {**row, "gen_prefix": ""}):
        path.write_text(json.dumps(it))
        (record,) = read_records(path)
        seen.append(RulerCase.of(record))
    assert seen[0].begun == " It is" and seen[1].begun == ""
    assert seen[0].text + seen[0].question == row["input"]
    for wrong, said in [
        ({"input": "one line only"}, "line 1: the field 'input' must end in a separate line"),
        ({"outputs": []}, "line 1: the field 'outputs' must have at least 1 entry"),
        ({"outputs": "418"}, "line 1: the field 'outputs' must be a list"),
    ]:
        path.write_text(json.dumps({**row, **wrong}))
        with pytest.raises(WeirError, match=said):
            Ruler(file=str(path)).run(stranger(), quiet)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samples": 0}, "samples of ruler must be"),
        ({"most": 0}, "most of ruler must be"),
        ({"chat": True}, "no chat template"),
    ],
)
def test_what_makes_no_sense_is_refused(options, said):
    with pytest.raises(WeirError, match=said):
        Ruler(file=str(FILE), **options).run(stranger(), quiet)


def test_what_has_left_the_cache_is_recalled_before_the_question():
    subject = stranger("recent(8)", chunk=8)
    found = RulerRecalled(file=str(FILE), most=4).run(subject, quiet)
    needles = [row["outputs"][0] for row in ROWS]
    passages = [" ".join(texts) for texts in found["recalled"]]
    assert [needle in text for needle, text in zip(needles, passages, strict=True)] == [True] * 3
    plain = Ruler(file=str(FILE), most=4).run(subject, quiet)
    assert found["without"] == plain
    assert all(a != b for a, b in zip(found["answers"], plain["answers"], strict=True))
    # A cache that holds everything leaves nothing to recall, and both answers are the same.
    dense = RulerRecalled(file=str(FILE), most=4).run(stranger(), quiet)
    assert dense["recalled"] == [[], [], []] and dense["answers"] == dense["without"]["answers"]
