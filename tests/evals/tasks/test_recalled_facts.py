"""`recalled` and `found`: facts, questions and verdicts, and long runs that are interrupted."""

from __future__ import annotations

import json

import numpy as np
import pytest
from reference.subjects import quiet

import weir
from weir.errors import WeirError
from weir.evals.task import Subject
from weir.evals.tasks.found_facts import FoundFacts
from weir.evals.tasks.lines import ADJECTIVES, NOUNS
from weir.evals.tasks.recalled_facts import (
    FORMS,
    USUAL,
    Recalled,
    RecalledFact,
    draw_recalled,
    judge,
    most_facts,
)
from weir.stream.archive.questions import find_terms


def subject_of(nano, policy="sink(4) | recent(500)"):
    return Subject("nano", *nano, weir.policy(policy), chunk=16)


@pytest.mark.parametrize(
    ("kind", "answer", "said", "verdict"),
    [
        ("code", " 48213", "The code of Al Bo is 48213.", "right"),
        ("code", " 48213", "It is 48,213, I think.", "right"),
        ("code", " 48213", "The code of Al Bo is 48214.", "wrong"),
        ("code", " 48213", "I do not know.", "unsaid"),
        ("code", " 48213", "It was 11111 before, 48213 now.", "stale"),
        ("animal", " otter", "Al Bo likes otters.", "right"),
        ("animal", " otter", "A fox!", "wrong"),
        ("animal", " otter", "A unicorn.", "unsaid"),
        ("city", " Oslo", "He lives in Oslo.", "right"),
        ("city", " Oslo", "In Rome, or Lima.", "wrong"),
        ("words", f" {ADJECTIVES[3]} {NOUNS[5]}", f"The {ADJECTIVES[3]} {NOUNS[5]}!", "right"),
    ],
)
def test_answers_are_judged(kind, answer, said, verdict):
    before = {"code": " 11111"}.get(kind, "")
    fact = RecalledFact("once", kind, ("",), "What is it, Al Bo?", answer, before)
    assert judge(said, fact) == verdict


def test_a_number_of_the_question_is_no_answer():
    fact = RecalledFact("once", "number", ("",), "What is at number 12?", " 345")
    assert judge("At number 12 there is something.", fact) == "unsaid"


def test_facts_are_about_different_people_and_paraphrases_share_only_the_name():
    told, others = draw_recalled(64, np.random.default_rng(0))
    assert len({fact.question for fact in [*told, *others]}) == 5 * 64
    assert {fact.form for fact in told} == {"once", "changed", "several"}
    for fact in others:
        if fact.form == "never":
            assert not fact.told
            continue
        name = {term.word for term in find_terms(fact.question) if term.strong or term.part}
        shared = {t.word for t in find_terms(fact.question)} & {
            t.word for t in find_terms(fact.told[0])
        }
        assert name and shared <= name
    for fact in told:
        assert fact.answer in fact.told[-1]
        if fact.form == "changed":
            assert fact.before in fact.told[0] and fact.before != fact.answer
            assert " now " in fact.told[1]


def test_more_forms_change_nothing_of_the_others():
    usual = draw_recalled(8, np.random.default_rng(0))
    told, others = draw_recalled(8, np.random.default_rng(0), ("sessions", "order", "once"))
    assert (told[: len(usual[0])], others) == usual
    more = told[len(usual[0]) :]
    assert [fact.form for fact in more] == ["sessions"] * 8 + ["order"] * 8
    assert not {fact.question for fact in more} & {fact.question for fact in usual[0]}
    for fact in more:
        first, second = fact.told
        if fact.form == "order":
            assert fact.answer in first and fact.before in second
            assert fact.answer in fact.question and fact.before in fact.question
        else:
            assert fact.beside is not None
            assert fact.beside.answer in first and fact.answer in second
            assert fact.beside.question in fact.question
            numbers = {"code", "number", "year"}
            assert (fact.kind in numbers) != (fact.beside.kind in numbers)


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("The code is 48213, and Al Bo likes the otter.", "right"),
        ("The code is 48213.", "unsaid"),
        ("The code is 48213, and Al Bo likes the fox.", "wrong"),
        ("I do not know.", "unsaid"),
    ],
)
def test_an_answer_to_two_questions_is_right_if_both_are(said, verdict):
    one = RecalledFact("sessions", "code", ("",), "What is the code of Al Bo?", " 48213")
    both = RecalledFact("sessions", "animal", ("", ""), "What?", " otter", beside=one)
    assert judge(said, both) == verdict


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("You told me about the boat of Al Bo first, and then of Cy Dee.", "right"),
        ("The boat of Cy Dee.", "wrong"),
        ("Cy Dee came before Al Bo.", "wrong"),
        ("The boat.", "unsaid"),
    ],
)
def test_the_first_name_of_an_answer_counts(said, verdict):
    fact = RecalledFact("order", "name", ("", ""), "The boat of Cy Dee, or of Al Bo?", "Al Bo")
    assert judge(said, fact._replace(before="Cy Dee")) == verdict


def test_the_search_finds_what_was_told_and_nothing_of_what_was_not(nano):
    with pytest.raises(WeirError, match="half of found must be first or second, got 'third'"):
        FoundFacts(half="third").run(subject_of(nano), quiet)
    found = FoundFacts("1000 20000", samples=16).run(subject_of(nano), quiet)
    by = {(cell["form"], cell["distance"]): cell for cell in found["by_form"]}
    assert found["found"] > 0.9
    for distance in (1000, 20000):
        assert by["never", distance]["none"] >= 15
        assert by["changed", distance]["first"] >= 15
    assert found["search_ms"] > 0 and 4 < found["archive_bytes"] < 40


@pytest.mark.parametrize("forms", [USUAL, FORMS, [*USUAL, "sessions"], [*USUAL, "order"]])
def test_as_many_facts_are_drawn_as_there_are_names(forms):
    most = most_facts(forms)
    draw_recalled(most, np.random.default_rng(0), forms)
    with pytest.raises(StopIteration):
        draw_recalled(most + 1, np.random.default_rng(0), forms)
    words = " ".join(forms)
    Recalled(forms=words, samples=10 * most, per_stream=most)
    Recalled(forms=words, samples=most, per_stream=10 * most)
    advice = f"Use per_stream={most} or less"
    with pytest.raises(WeirError, match=f"per_stream of recalled is {most + 1}, .*{advice}"):
        Recalled(forms=words, samples=10 * most, per_stream=most + 1)
    with pytest.raises(WeirError, match=f"samples of recalled is {most + 1}, .*{advice}"):
        Recalled(forms=words, samples=most + 1, per_stream=10 * most)


def test_found_refuses_more_facts_than_there_are_names():
    FoundFacts(samples=528)
    with pytest.raises(WeirError, match=r"samples of found is 529, .* Use samples=528 or less"):
        FoundFacts(samples=529)


def test_wrong_parameters_are_refused():
    with pytest.raises(WeirError, match="forms of recalled contains the unknown word 'twice'"):
        Recalled(forms="once twice")
    with pytest.raises(WeirError, match="ways of recalled contains the unknown word 'maybe'"):
        Recalled(ways="maybe")
    with pytest.raises(WeirError, match=r"ways of recalled must name at least one of .*, got ' '"):
        Recalled(ways=" ")
    with pytest.raises(WeirError, match=r"forms of recalled must name at least one of .*, got ''"):
        Recalled(forms="")
    with pytest.raises(WeirError, match="distances of recalled must be numbers"):
        Recalled(distances="far")


def test_a_chat_without_a_cache_computes_its_newest_turns_for_every_question(nano):
    task = Recalled("600", 1, 1, forms="once", ways="recall plain none", every=1)
    found = task.run(subject_of(nano), quiet)
    by = {row["way"]: row for row in found["by_form"]}
    assert by["recall"]["found"] == by["plain"]["found"] == 1
    assert by["recall"]["tokens"] == by["plain"]["tokens"] > 0 == by["none"]["tokens"]
    assert by["recall"]["computed"] == by["none"]["computed"] + by["recall"]["tokens"]
    assert by["plain"]["computed"] > by["recall"]["computed"] + 100
    assert found["first_ms"].keys() == {"recall", "plain", "none"}


@pytest.mark.slow
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(nano, tmp_path, monkeypatch):
    monkeypatch.setattr("weir.evals.tasks.recalled_facts.SAVED", 500)
    settings = {"distances": "600", "samples": 2, "per_stream": 2, "ways": "recall none"}
    whole = Recalled(**settings).run(subject_of(nano), quiet)
    task = Recalled(**settings, state=str(tmp_path / "state"))

    class Stop(Exception):
        pass

    calls = 0

    def stop(share: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise Stop

    with pytest.raises(Stop):
        task.run(subject_of(nano), stop)
    saved = json.loads((tmp_path / "state" / "0" / "progress.json").read_text())
    assert saved["stream"].startswith("stream-") and saved["statements"] > 0
    again = task.run(subject_of(nano), quiet)
    assert again["by_form"] == whole["by_form"] and again["tokens"] == whole["tokens"]
    assert again["archived_turns"] == whole["archived_turns"]
    asked = sum(cell["asked"] for cell in whole["by_form"])
    assert asked == 2 * 5 * 2
    recalled = [c for c in whole["by_form"] if c["way"] == "recall" and c["form"] == "once"]
    assert recalled[0]["found"] == 2 and recalled[0]["tokens"] > 0
    other = Recalled(**{**settings, "samples": 3}, state=str(tmp_path / "state"))
    with pytest.raises(WeirError, match="has the state of recalled"):
        other.run(subject_of(nano), quiet)
