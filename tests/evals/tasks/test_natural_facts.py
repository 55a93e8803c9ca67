"""`facts`: facts are told at given places, and asked for without a trace in the stream.

Tested with stand-ins that remember a given window.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference.subjects import quiet

import weir
from weir.errors import WeirError
from weir.evals.answers import feed_aside
from weir.evals.task import Subject
from weir.evals.tasks import natural_facts
from weir.evals.tasks.natural_facts import KINDS, Facts, ToldFacts, Wording
from weir.stream import read_stream


class Reader:
    """A stand-in for a stream, which holds the ids of all tokens, and the size of its window."""

    nbytes, cache = 800, None

    def __init__(self, window: int) -> None:
        self.window, self.ids = window, torch.empty(0)

    @property
    def seen(self) -> int:
        return self.ids.shape[-1]

    def feed(self, ids):
        self.ids = torch.cat([self.ids.to(ids), ids], dim=-1) if self.seen else ids


def subject_of(nano, monkeypatch, window, newest=True):
    """A subject that answers with what followed the same words within the window."""

    class Reading(Subject):
        def stream(self, prompt=None, answer=0):
            return Reader(window)

    def answer(reader, ids):
        size = len(natural_facts.KINDS[0][0].split())
        told = []
        for row, asked in zip(reader.ids[:, -reader.window :].tolist(), ids.tolist(), strict=True):
            said = []
            for end in range(len(asked)):
                tail = asked[max(0, end - size) : end + 1]
                places = range(len(row) - len(tail))
                places = [n for n in places if row[n : n + len(tail)] == tail]
                found = places[-1 if newest else 0] + len(tail) if places else 0
                said.append(row[found] if places else 0)
            told.append(said)
        return torch.nn.functional.one_hot(torch.tensor(told), 4096)

    monkeypatch.setattr(natural_facts, "feed_aside", answer)
    return Reading("some", *nano, policy=weir.policy("dense"))


@pytest.mark.parametrize("form", ["sentence", "chat", "changed", "several"])
def test_facts_stand_where_they_are_told_and_are_all_asked_for(nano, form):
    task = Facts(form=form, distances="200 700", facts=5, before=400, every=200)
    wording = Wording(nano[1], form == "chat")
    book = np.array(nano[1]("The river rose and fell. " * 400).input_ids)
    told = ToldFacts(wording, task, book, np.random.default_rng(0))
    last = 400 + 200 * (1 if form == "several" else 9 if form == "changed" else 4)
    assert len(told.ids) == told.schedule[-1][0] == last + 700
    assert sorted((n, d) for _, n, d in told.schedule) == [
        (n, d) for n in range(5) for d in (200, 700)
    ]
    for place, number, distance in told.schedule:
        fact = told.facts[number]
        block = nano[1].decode(told.ids[place - distance - 100 : place - distance])
        assert f"{fact.begun[4:]}{fact.answers[-1]}" in block
        assert (" now " in f"{fact.begun} ") == (form == "changed") or "now lives" in fact.begun
        assert block.endswith(f"{fact.answers[-1]}." if form == "chat" else ".\n\n")
    assert len({fact.begun.split()[1] for fact in told.facts}) == 5
    if form == "chat":
        text = nano[1].decode(told.ids)
        turns = text.count("<user>")
        assert (text.count("<assistant>"), text.count("</>")) == (turns, 2 * turns - 1)


def test_a_fact_that_has_no_room_is_refused_and_not_left_out(nano):
    task = Facts(form="sentence", distances="200", facts=2, before=100, every=100)
    wording = Wording(nano[1], False)
    wording.front = np.zeros(80, np.int64)
    book = np.array(nano[1]("The river rose and fell. " * 400).input_ids)
    with pytest.raises(WeirError, match=r"begins with 80 tokens .* Use before=200 or more"):
        ToldFacts(wording, task, book, np.random.default_rng(0))
    told = ToldFacts(wording, replace(task, before=200), book, np.random.default_rng(0))
    text = nano[1].decode(told.ids)
    assert all(f"{fact.begun[4:]}{fact.answers[-1]}" in text for fact in told.facts)


@pytest.mark.slow
def test_a_rule_is_told_in_the_system_turn_and_marked_for_policies_that_keep_it(nano):
    task = Facts(form="rule", distances="200 300", samples=2, facts=4)
    made = []

    class Noting(Subject):
        def stream(self, prompt=None, answer=0):
            made.append(super().stream())
            return made[-1]

    found = task.run(
        Noting("nano", *nano, policy=weir.policy("pinned(streaming_llm(budget=40))")), quiet
    )
    assert found["asked"] == 16 and 0 <= found["leaked"] <= 1
    told = ToldFacts(
        Wording(nano[1], True), task, read_stream(nano[1]).ids.numpy(), np.random.default_rng(0)
    )
    text = nano[1].decode(told.ids[: told.beginning])
    assert text.startswith("<system>You are the receptionist of a hotel")
    assert all(fact.answers[0] in text for fact in told.facts)
    assert len(told.ids) == told.schedule[-1][0] == 600
    assert made[0].cache.marks[0].beginning == told.beginning


def test_what_is_in_the_window_is_answered_and_nothing_else(nano, monkeypatch):
    task = Facts(distances="200 600", facts=8, samples=9)
    found = task.run(subject_of(nano, monkeypatch, 460), quiet)
    assert [row["right"] for row in found["by_distance"]] == [72, 0]
    assert (found["asked"], found["tokens"], found["kv_bytes"]) == (144, 1600, 800)


@pytest.mark.parametrize(("newest", "accuracy"), [(True, 1.0), (False, 0.0)])
def test_of_changed_facts_the_newest_counts(nano, monkeypatch, newest, accuracy):
    monkeypatch.setattr(natural_facts, "CHANGE", re.compile("(?!)()"))  # tells changes like facts
    task = Facts(form="changed", distances=200, facts=3, samples=2)
    found = task.run(subject_of(nano, monkeypatch, 10_000, newest), quiet)
    assert (found["accuracy"], found["stale"]) == (accuracy, 1.0 - accuracy)


@pytest.mark.parametrize("policy", ["streaming_llm(budget=24)", "recompute(budget=24)"])
def test_a_question_leaves_nothing_in_the_stream(nano, policy):
    stream, alone = (weir.Stream(nano[0], policy, chunk=8) for _ in range(2))
    ids = torch.randint(1, 4000, (2, 90), generator=torch.Generator().manual_seed(0))
    for one in (stream, alone):
        one.feed(ids[:, :50])
    asked = feed_aside(stream, ids[:, 50:63])
    assert torch.equal(stream.feed(ids[:, 70:]), alone.feed(ids[:, 70:]))
    again = weir.Stream(nano[0], policy, chunk=8)
    again.feed(ids[:, :50])
    assert torch.equal(asked, again.feed(ids[:, 50:63], all_logits=True))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"form": "song"}, "form of facts must be sentence or chat or changed or several or rule"),
        ({"distances": "150"}, "multiples of 100"),
        ({"distances": "far"}, "multiples of 100"),
        ({"facts": len(KINDS) + 1}, "facts of facts must be a whole number from 1 to 8"),
    ],
)
def test_what_cannot_be_asked_is_refused(given, said):
    with pytest.raises(WeirError, match=said):
        Facts(**given)


def test_a_chat_needs_a_template(nano):
    with pytest.raises(WeirError, match="no chat template"):
        Wording(weir.load("nano")[1], True)
