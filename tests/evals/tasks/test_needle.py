"""`needle`: the hidden needle is found if the cache still holds it, and only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.answers import plain_answer
from reference.subjects import nano, quiet

from weir.errors import WeirError
from weir.evals.scores import words_found
from weir.evals.tasks.needle import Needle, exercise, hide_needle
from weir.stream.text import read_stream
from weir.train.exercises import Words


def by_depth(found: dict[str, Any], length: int) -> list[float]:
    return [cell["accuracy"] for cell in found["cells"] if cell["length"] == length]


@pytest.mark.slow
def test_dense_finds_every_needle_inside_the_window() -> None:
    found = Needle(longest=480, lengths=2, depths=5, samples=2).run(nano(), quiet)
    assert found["accuracy"] == 1.0 and found["format"] == "exercises"
    assert [(cell["length"], cell["depth"]) for cell in found["cells"]] == [
        (length, depth) for length in (240, 480) for depth in (0, 0.25, 0.5, 0.75, 1)
    ]


@pytest.mark.slow
def test_a_window_finds_what_is_near_and_loses_what_has_left() -> None:
    task = Needle(longest=480, lengths=2, depths=5, samples=2)
    found = task.run(nano("streaming_llm(budget=200, sinks=1)", chunk=8), quiet)
    assert by_depth(found, 240)[1:] == [1, 1, 1, 1]
    assert by_depth(found, 480) == [0, 0, 0, 1, 1]
    assert found["accuracy"] == pytest.approx(np.mean([c["accuracy"] for c in found["cells"]]))


def test_the_needle_stands_at_its_depth_and_the_question_at_the_end() -> None:
    words = Words.of(nano().tokenizer)
    hay = np.full(500, words.plain[7])
    for depth, place in [(0.0, 1), (0.5, 45), (1.0, 90)]:
        row, number = exercise(words, hay, 100, depth, np.random.default_rng(0))
        assert len(row) == 100 and row[0] == words.front[0]
        said = words.statement(row[97], number)
        assert (row[place : place + 7] == said).all()
        assert (row[97:] == words.question(row[97])).all()
        assert (np.delete(row, [0, *range(place, place + 7), 97, 98, 99]) == hay[0]).all()


def test_in_words_the_needle_follows_the_sentence_above_its_depth() -> None:
    tokenizer = nano().tokenizer
    hay = tokenizer("One is here. Two is here too! Three", add_special_tokens=False)["input_ids"]
    for depth, right in [
        (0.0, "NEEDLE One is here. Two is here too! Three"),
        (0.2, "NEEDLE One is here. Two is here too! Three"),
        (0.6, "One is here. NEEDLE Two is here too! Three"),
        (1.0, "One is here. Two is here too! Three NEEDLE"),
    ]:
        assert hide_needle(tokenizer, hay, "NEEDLE", depth) == right


@pytest.mark.parametrize(
    ("said", "share"),
    [("A spoonful of chestnut honey.", 1.0), ("Honey!", 1 / 4), ("", 0.0), ("of of OF", 1 / 4)],
)
def test_an_answer_in_words_is_scored_by_the_words_it_has(said: str, share: float) -> None:
    assert words_found(said, "a spoonful of chestnut honey") == share


@pytest.mark.slow
def test_in_words_dense_answers_as_a_plain_loop() -> None:
    one = nano()
    task = Needle(longest=200, lengths=1, depths=2, samples=2, format="text")
    found = task.run(one, quiet)
    hay = read_stream(one.tokenizer, None, 200_000).ids
    rng = np.random.default_rng(0)
    scores = []
    for depth in (0.0, 1.0):
        for _ in range(2):
            place = int(rng.integers(0, len(hay) - 200))
            context = hide_needle(
                one.tokenizer, hay[place : place + 200].tolist(), task.needle, depth
            )
            prompt = (
                f"Read the following book.\n\n{context}\n\nAnswer from what the book says.\n"
                f"Question: {task.question}\nAnswer:"
            )
            text = plain_answer(one.model, one.tokenizer, prompt, 50, stop="\n")
            scores.append(words_found(text, task.answer))
    assert found["accuracy"] == pytest.approx(np.mean(scores)) and found["format"] == "text"


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    for options, said in [
        ({"format": "song"}, "format of needle must be exercises or text or none"),
        ({"depths": 1}, "depths of needle must be a whole number of at least 2"),
        ({"longest": 100, "lengths": 2}, "would be 50 tokens, but hay must have at least 64"),
    ]:
        with pytest.raises(WeirError, match=said):
            Needle(**options)
    book = tmp_path / "short.txt"
    book.write_text("A short book. " * 9)
    with pytest.raises(WeirError, match="needs a longer text"):
        Needle(longest=64, lengths=1, text=str(book)).run(nano(), quiet)
    with pytest.raises(WeirError, match="no chat template"):
        Needle(longest=64, lengths=1, format="text", chat=True).run(nano(), quiet)
