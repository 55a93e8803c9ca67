"""`babi`, `mtbench` and `loop`: the tasks over text that only real models can do."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from reference.subjects import quiet, stranger

import weir
from weir.errors import WeirError
from weir.evals.task import Subject
from weir.evals.tasks import babi, loop, mtbench
from weir.evals.tasks.babi import Babi, answer_beginning, read_stories
from weir.evals.tasks.loop import Loop
from weir.evals.tasks.mtbench import MTBench, share_distinct
from weir.evals.tasks.natural_facts import Facts

STORIES = """1 Mary moved to the hallway.
2 John went to the garden.
3 Where is Mary? |hallway|1
4 Mary went to the office.
5 Where is Mary? |office|4
1 Daniel took the football there.
2 Where is the football? |kitchen|1
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "qa1.txt"
    path.write_text(STORIES)
    return str(path)


def test_a_story_is_read_up_to_its_first_question(file):
    first, second = read_stories(file, 9)
    assert first.sentences == ("Mary moved to the hallway.", "John went to the garden.")
    assert (first.question, first.answer) == ("Where is Mary?", "hallway")
    assert second.sentences == ("Daniel took the football there.",)
    assert len(read_stories(file, 1)) == 1


@pytest.mark.parametrize(
    ("question", "begun"),
    [
        ("Where is Mary?", "Mary is in the"),
        ("Where is the football?", "The football is in the"),
        ("Where was the apple before the garden?", "Before the garden the apple was in the"),
        ("What is north of the office?", "North of the office is the"),
        ("What is the hallway north of?", "The hallway is north of the"),
        ("Who gave the milk?", "Answer:"),
    ],
)
def test_the_answers_sentence_is_begun(question, begun):
    assert answer_beginning(question) == begun


def test_facts_are_scattered_in_order_and_the_question_comes_last(file, monkeypatch):
    subject, fed, asked = stranger(), [], []
    own = weir.Stream.feed
    monkeypatch.setattr(
        weir.Stream, "feed", lambda s, ids, **o: fed.append(ids) or own(s, ids, **o)
    )

    def right(stream, prompts, answers):
        asked.extend(prompts)
        return [answers[0], answers[1] + 1]

    monkeypatch.setattr(babi, "likeliest_answers", right)
    found = Babi(file, length=200).run(subject, quiet)
    assert (found["right"], found["asked"], found["tokens"]) == (1, 2, 200)
    assert fed[0].shape == (2, 200)
    text = subject.tokenizer.decode(fed[0][0])
    assert (
        0
        < text.index("\nMary moved to the hallway.\n")
        < text.index("\nJohn went to the garden.\n")
    )
    assert subject.tokenizer.decode(asked[0]) == "\n\nWhere is Mary? Mary is in the"
    with pytest.raises(WeirError, match="line 1, is not in the format of bAbI"):
        read_stories(__file__, 1)


def test_a_text_that_is_shorter_than_a_passage_is_refused(file, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("It was a dark night.")
    subject = stranger()
    said = r"length of babi is 1,000, but the text has only \d+ tokens\. Use a longer text or"
    with pytest.raises(WeirError, match=said):
        Babi(file, text=str(short)).run(subject, quiet)
    said = r"the text has only \d+ tokens, but a passage of {} tokens .* Use a longer text"
    with pytest.raises(WeirError, match=said.format(100)):
        Loop(tokens=250, text=str(short)).run(subject, quiet)
    with pytest.raises(WeirError, match=said.format(r"\d+")):
        Facts(text=str(short)).run(subject, quiet)


def test_distinct_runs_are_counted():
    assert share_distinct([1, 2, 3, 4]) == 1.0
    assert share_distinct([1, 2] * 4) == 2 / 6
    assert share_distinct([1]) == 1.0


def test_a_loop_is_found_and_text_that_goes_on_is_none(monkeypatch):
    monkeypatch.setattr(loop, "SPAN", 40)
    new, again = list(range(40)), [3, 4] * 20
    rows = iter([[new, again, new], [again, new, new]])
    monkeypatch.setattr(loop, "generate_rows", lambda *a: torch.tensor(next(rows)))
    found = Loop(tokens=80, samples=3).run(stranger("streaming_llm(budget=32)"), quiet)
    assert (found["looped"], found["tokens"]) == (2 / 6, 80)
    assert found["distinct_by_block"] == [(2 + 2 / 37) / 3] * 2
    assert found["begins"] == [40, 0, None]


def test_greedy_rows_go_on_where_they_were():
    subject = stranger("streaming_llm(budget=32)")
    ids = torch.randint(1, 4000, (2, 9), generator=torch.Generator().manual_seed(0))
    whole = loop.generate_rows(subject.stream(), ids, 12)
    stream = subject.stream()
    first = loop.generate_rows(stream, ids, 5)
    assert torch.equal(whole, torch.cat([first, loop.generate_rows(stream, first[:, -1:], 7)], 1))
    alone = subject.stream()
    alone.feed(ids[0])
    assert whole[0].tolist() == list(alone.generate(12, stop=[]))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.slow
def test_all_dialogues_stand_on_one_stream_and_are_judged_alone(tmp_path, monkeypatch, alone):
    model, tokenizer = weir.load("nano")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    path = tmp_path / "bench.jsonl"
    turns = [[f"Tell me about {word}.", "And more of it."] for word in "rain sun sea war".split()]
    path.write_text("\n".join(json.dumps({"turns": pair}) for pair in turns))
    judged, own = [], mtbench._judge
    monkeypatch.setattr(mtbench, "_judge", lambda *a: judged.append(a[1][:]) or own(*a))
    subject = Subject("nano", model, tokenizer, weir.policy("streaming_llm(budget=64)"))
    found = MTBench(str(path), most=6, alone=alone).run(subject, quiet)
    assert found["asked"] == len(found["answers"]) == 8
    assert {len(history) for history in judged} == {1, 3}
    for name in ("nll", "distinct"):
        first, last = found[name][:2], found[name][-2:]
        assert found[f"{name}_first"] == pytest.approx(np.mean(first))
        assert found[f"{name}_last"] == pytest.approx(np.mean(last))
        reach = 12.706 * abs(last[0] - last[1]) / 2  # Student's t with one degree of freedom
        assert found[f"{name}_last_reach"] == pytest.approx(reach, rel=1e-3)
    assert 0 < found["distinct_last"] <= 1


def test_answers_that_were_given_before_are_counted(tmp_path, monkeypatch):
    model, tokenizer = weir.load("nano")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = tmp_path / "bench.jsonl"
    path.write_text("\n".join(json.dumps({"turns": ["Tell me.", "More."]}) for _ in range(4)))
    given = iter(["a", "b", "a", "c", "d", "c", "c", "d"])
    monkeypatch.setattr(mtbench.Conversation, "say", lambda *_, **__: iter([next(given)]))
    found = MTBench(str(path)).run(Subject("nano", model, tokenizer, weir.policy("dense")), quiet)
    assert (found["repeated_first"], found["repeated_last"]) == (0.0, 1.0)


def test_turns_that_get_something_recalled_are_counted(tmp_path):
    model, tokenizer = weir.load("nano")
    path = tmp_path / "bench.jsonl"
    told = "The secret access code of Alice Moreau is 48213."
    asked = "What is the secret access code of Alice Moreau?"
    pairs = [
        [f"{told} {'The river is wide and slow here. ' * 70}", asked],
        ["Tell me about the rain.", "More."],
    ] * 2
    path.write_text("\n".join(json.dumps({"turns": pair}) for pair in pairs))
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    subject = Subject("nano", model, tokenizer, weir.policy("recent(400)"), chunk=16)
    found = MTBench(str(path), most=8, recall=128).run(subject, quiet)
    assert found["recalls"] == [0, 2]
    assert [told in texts[0] for texts in found["recalled"] if texts] == [True, True]
    assert MTBench(str(path), most=8).run(subject, quiet)["recalls"] == [0, 0]


def test_an_answer_without_words_is_not_judged():
    ends = mtbench._compare_ends("nll", [1.0, None, 2.0, 3.0, 4.0])
    assert ends == {
        "nll_first": 1.0,
        "nll_first_reach": None,
        "nll_last": 4.0,
        "nll_last_reach": None,
    }


def test_a_run_whose_answers_are_all_empty_has_no_figures_of_them(tmp_path, monkeypatch):
    model, tokenizer = weir.load("nano")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = tmp_path / "bench.jsonl"
    path.write_text("\n".join(json.dumps({"turns": ["Tell me."]}) for _ in range(4)))
    monkeypatch.setattr(mtbench.Conversation, "say", lambda *_, **__: iter([""]))
    found = MTBench(str(path)).run(Subject("nano", model, tokenizer, weir.policy("dense")), quiet)
    assert (found["nll_last"], found["distinct_last"], found["nll_first_reach"]) == (None,) * 3
    assert (found["nll"], found["repeated_last"], found["asked"]) == ([None] * 4, 1.0, 4)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Babi("qa1.txt", length=10),
            ("length of babi must be a whole number of at least 100"),
        ),
        (lambda: Loop(tokens=300), "multiple of 250"),
        (
            lambda: MTBench("bench.jsonl", samples=2),
            "samples of mtbench must be a whole number of at least 4",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(make, said):
    with pytest.raises(WeirError, match=said):
        make()
