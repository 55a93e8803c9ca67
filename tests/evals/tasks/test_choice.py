"""`choice`: questions on one stream get the answers of one plain forward over the whole stream."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import make, tokens
from reference.subjects import nano, quiet

import weir
from weir.errors import WeirError
from weir.evals.task import Subject
from weir.evals.tasks.choice import Choice, answer_in_place

OFFICIAL = Path(__file__).parents[2] / "data" / "evals" / "arc.jsonl"
ROWS = [json.loads(line) for line in OFFICIAL.read_text().splitlines()]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def question(row: dict[str, Any]) -> str:
    choices = [f"{c['label']}. {c['text']}" for c in row["question"]["choices"]]
    return "\n".join([f"Question: {row['question']['stem']}", *choices, "Answer:"])


def likeliest(subject: Subject, parts: list[tuple[str, str]]) -> list[int]:
    """Whether each answer is the likeliest, from one forward over all questions and answers."""
    ids, places = [], []
    for i, (asked, answer) in enumerate(parts):
        ids += subject.tokenizer(asked, add_special_tokens=i == 0)["input_ids"]
        right = subject.tokenizer(answer, add_special_tokens=False)["input_ids"]
        places.append((len(ids), right))
        ids += right
    with torch.no_grad():
        said = subject.model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    return [int(said[at - 1 : at - 1 + len(right)] == right) for at, right in places]


def yielding(labels: list[str]) -> Subject:
    """A model whose likeliest next token is one of these labels, wherever it stands."""
    one = nano()
    model = make("llama", vocab_size=4096, max_position_embeddings=1024)
    with torch.no_grad():
        # The logits of these ids are always the largest. Which is first depends on the text.
        rows = [
            one.tokenizer(f" {label}", add_special_tokens=False)["input_ids"][0] for label in labels
        ]
        model.lm_head.weight[rows] *= 30
    return replace(one, model=model)


def test_dense_answers_as_one_forward_over_the_whole_stream() -> None:
    one = yielding(["A", "B", "C", "1"])
    found = Choice(file=str(OFFICIAL)).run(one, quiet)
    parts = [
        (("" if i == 0 else "\n\n") + question(row), f" {row['answerKey']}")
        for i, row in enumerate(ROWS)
    ]
    assert found["answers"] == likeliest(one, parts)
    assert found["one_shot_answers"] == [
        likeliest(one, [(question(row), f" {row['answerKey']}")])[0] for row in ROWS
    ]
    assert found["tokens"] == 1 + sum(
        len(one.tokenizer(part, add_special_tokens=False)["input_ids"])
        for both in parts
        for part in both
    )
    assert 0 < found["right"] < found["asked"] == 5
    assert found["accuracy"] == sum(found["answers"]) / 5
    assert found["one_shot"] == sum(found["one_shot_answers"]) / 5


def test_an_answer_of_several_tokens_is_right_if_each_of_them_is() -> None:
    model = make("llama")
    asked = tokens(1, 9, seed=4)
    right = model.generate(asked, max_new_tokens=3, do_sample=False)[0, 9:].tolist()
    assert len(set(right)) == 3
    assert answer_in_place(weir.Stream(model, "dense"), asked[0].tolist(), right) == 1
    for place in range(3):
        wrong = [*right]
        wrong[place] = (wrong[place] + 1) % 90
        assert answer_in_place(weir.Stream(model, "dense"), asked[0].tolist(), wrong) == 0


@pytest.mark.slow
def test_only_the_stream_outgrows_the_cache() -> None:
    """One question fits into the budget, so one-shot answers are those of dense; five do not."""
    one = yielding(["A", "B", "C", "1"])
    dense = Choice(file=str(OFFICIAL)).run(one, quiet)
    small = replace(one, policy=weir.policy("sink(4) | recent(60)"), chunk=1)
    found = Choice(file=str(OFFICIAL)).run(small, quiet)
    assert found["one_shot_answers"] == dense["one_shot_answers"]
    assert found["tokens"] == dense["tokens"] > 180
    assert found["kv_bytes"] < dense["kv_bytes"]


def test_in_a_chat_each_question_is_a_turn() -> None:
    one = yielding(["A", "B", "C", "1"])
    with pytest.raises(WeirError, match="no chat template"):
        Choice(file=str(OFFICIAL), chat=True).run(one, quiet)
    one.tokenizer.chat_template = TEMPLATE
    found = Choice(file=str(OFFICIAL), samples=3, chat=True).run(one, quiet)
    more = "\nAnswer with the letter of the right choice alone.[end][assistant]"
    parts = [
        (
            ("[user]" if i == 0 else "[end][user]")
            + question(row).removesuffix("\nAnswer:")
            + more,
            row["answerKey"],
        )
        for i, row in enumerate(ROWS[:3])
    ]
    length = sum(
        len(one.tokenizer(part, add_special_tokens=False)["input_ids"])
        for two in parts
        for part in two
    )
    assert (found["tokens"], found["asked"]) == (length, 3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"answerKey": "E"}, "the field 'answerKey' must be one of A, B, C, D, got 'E'"),
        ({"question": "?"}, "the field 'question' must be an object"),
        (
            {"question": {"stem": "x", "choices": []}},
            "'question.choices' must have at least 2 entries",
        ),
        (
            {"question": {"stem": "x", "choices": 2 * [{"text": "a", "label": ""}]}},
            r"the field 'question.choices\[0\].label' is empty",
        ),
        (
            {"question": {"stem": "x", "choices": [{"text": "a"}, {"text": "b"}]}},
            r"the field 'question.choices\[0\].label' is missing",
        ),
    ],
)
def test_what_is_not_in_the_format_is_named(tmp_path: Path, wrong: dict, said: str) -> None:
    path = tmp_path / "arc.jsonl"
    path.write_text(f"{json.dumps(ROWS[0])}\n{json.dumps({**ROWS[0], **wrong})}\n")
    with pytest.raises(WeirError, match=f"line 2: .*{said}"):
        Choice(file=str(path)).run(nano(), quiet)
