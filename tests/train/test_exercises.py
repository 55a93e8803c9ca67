"""Exercises: tokens with weight can be known from the row, and questions have the right distance.

The checks here find from the ids alone what a row says. They share no code with the module.
"""

from __future__ import annotations

import numpy as np
import pytest

from weir.errors import WeirError
from weir.train import corpus, exercises
from weir.train.exercises import Words

LENGTH = 320


@pytest.fixture
def blank(tokenizer) -> np.ndarray:
    """A book of padding only, so everything else in a row comes from the exercise."""
    return np.full(5000, tokenizer.pad_token_id, dtype=np.uint16)


@pytest.fixture(scope="module")
def novel(books, tokenizer) -> np.ndarray:
    """A book in which nobody has a number."""
    return corpus.encode(books[:1], tokenizer)


def runs(weight: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs of tokens that have weight: (first, one past the last)."""
    edges = np.flatnonzero(np.diff(weight > 0, prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def places(row: np.ndarray, piece: np.ndarray) -> list[int]:
    """Return the positions of a piece in a row."""
    windows = np.lib.stride_tricks.sliding_window_view(row, len(piece))
    return np.flatnonzero((windows == piece).all(axis=1)).tolist()


def stated(words: Words, row: np.ndarray) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return every complete "Anna has 482." of a row in order: (place, name, number)."""
    found = []
    for i in range(len(row) - 6):
        name, verb, space, *number, stop = row[i : i + 7].tolist()
        if (verb, space, stop) == (words.verb, words.space, words.stop) and name in words.names:
            assert set(number) <= set(words.digits.tolist())
            found.append((i, name, tuple(number)))
    return found


# --- the words


def test_the_words_are_single_tokens_that_say_what_they_should(tokenizer, words):
    assert len(words.names) >= 12
    assert {tokenizer.decode([n]).removeprefix(" ") for n in words.names} <= set(exercises.NAMES)
    assert tokenizer.decode(words.digits) == "0123456789"
    said = words.statement(words.names[0], words.digits[[4, 8, 2]])
    assert tokenizer.decode(said) == f"{tokenizer.decode([words.names[0]])} has 482."
    asked = words.question(words.names[0])
    assert tokenizer.decode(asked) == f"{tokenizer.decode([words.names[0]])} has "
    text = tokenizer(tokenizer.decode(said), add_special_tokens=False)["input_ids"]
    assert text == said.tolist(), "exercises must consist of the tokens of their text"
    assert not {tokenizer.bos_token_id, tokenizer.pad_token_id} & set(words.plain.tolist())
    assert len(words.plain) == len(tokenizer) - 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (" ".join(exercises.NAMES) * 20, "need ' has' to be one token"),
        (
            "He has Anna and Adam. " * 50,
            "need at least 12 names .* has only 2. Train it on more text",
        ),
    ],
)
def test_a_tokenizer_without_the_words_is_refused(text, sentence):
    with pytest.raises(WeirError, match=sentence):
        Words.of(corpus.with_sinks(corpus.train_backend([text], 640), 1))


# --- books


@pytest.mark.parametrize("front", [[], [0], [0, 7, 9]])
def test_a_book_sample_is_what_stands_in_front_and_a_stretch_of_the_book(tokens, front):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        ids, weight = exercises.book_sample(np.array(front, dtype=int), tokens, LENGTH, rng)
        assert ids[: len(front)].tolist() == front
        assert places(tokens, ids[len(front) :])
        assert ids.shape == weight.shape == (LENGTH,)
        nothing_to_predict = max(1, len(front))
        assert not weight[:nothing_to_predict].any() and (weight[nothing_to_predict:] == 1).all()


# --- segments


@pytest.mark.parametrize("seed", range(25))
def test_what_has_weight_in_segments_has_followed_the_same_before(words, seed):
    rng = np.random.default_rng(seed)
    row, weight = exercises.segment_sample(words, LENGTH, 3, 16, rng)
    assert row.shape == weight.shape == (LENGTH,)
    assert row[0] == words.front[0]
    assert set(row[1:].tolist()) <= set(words.plain.tolist())
    assert 0.2 < weight.mean() < 0.6
    for first, end in runs(weight):
        # From the token before, which shows that a segment is repeated, to the end.
        repeated = row[first - 1 : end]
        assert places(row[: first - 1], repeated)


@pytest.mark.parametrize("size", [2, 8, 16])
def test_all_that_can_be_known_in_segments_has_weight(words, size):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        row, weight = exercises.segment_sample(words, 1 + 20 * size, size, size, rng)
        seen, wanted = set(), [0.0]
        for segment in row[1:].reshape(-1, size):
            wanted += [0.0] + [float(tuple(segment) in seen)] * (size - 1)
            seen.add(tuple(segment))
        assert weight.tolist() == wanted


# --- recall


def test_every_answer_with_weight_was_stated_in_full_before(words, novel, blank):
    checked, shapes = 0, set()
    for seed in range(150):
        plainly, book = (1.0, novel) if seed % 2 else (0.0, blank)
        rng = np.random.default_rng(seed)
        row, weight = exercises.recall_sample(words, book, LENGTH, plainly, rng)
        assert row.shape == weight.shape == (LENGTH,)
        assert row[0] == words.front[0]
        for first, end in runs(weight):
            assert set(row[first:end].tolist()) <= set(words.digits.tolist())
            whole = np.append(row[first - 3 : end], words.stop)
            if end == LENGTH:  # an answer cut off
                whole = row[first - 3 : end]
            else:
                assert row[end] == words.stop
                shapes.add((plainly, end - first, row[first - 2] == words.verb))
            assert places(row[: first - 3], whole), f"seed {seed}, place {first}"
            checked += 1
    assert checked > 1000
    # Plain answers have the wording of the exercises. The others have numbers of any length.
    assert {shape for shape in shapes if shape[0]} == {(1.0, 3, True)}
    assert {shape[1:] for shape in shapes if not shape[0]} == {(n, False) for n in range(1, 6)}


def test_every_answer_that_was_stated_before_has_weight(words, blank):
    for seed in range(50):
        rng = np.random.default_rng(seed)
        row, weight = exercises.recall_sample(words, blank, LENGTH, 1.0, rng)
        wanted, known = np.zeros(LENGTH), {}
        # An answer that the end cuts off has weight as well. The padding lets this search find it.
        longer = np.append(row, np.full(7, -1))
        for i in range(LENGTH):
            if row[i] in words.names:
                if row[i] in known:
                    wanted[i + 3 : i + 6] = 1.0
                else:
                    known[row[i]] = longer[i + 3 : i + 6]
        assert weight.tolist() == wanted.tolist()
        assert len(known) >= 3


def test_book_text_that_has_a_name_and_the_verb_states_nothing(words):
    # The book is "Anna has Anna has Boris has ..." without numbers, so only the exercise states
    # any.
    said = np.stack([np.tile(words.names, 40), np.full(40 * len(words.names), words.verb)], axis=1)
    book = np.random.default_rng(0).permutation(said).ravel()
    for seed in range(50):
        rng = np.random.default_rng(seed)
        row, weight = exercises.recall_sample(words, book, LENGTH, 1.0, rng)
        whole, known = np.zeros(LENGTH), set()
        statements = stated(words, row)
        for place, name, _ in statements:
            whole[place + 3 : place + 6] = float(name in known)
            known.add(name)
        # An exercise that is cut off after this is not checked.
        end = max(place for place, _, _ in statements) + 7
        assert weight[:end].tolist() == whole[:end].tolist(), f"seed {seed}"


def test_no_name_has_two_numbers(words, blank):
    for seed in range(50):
        rng = np.random.default_rng(seed)
        row, _ = exercises.recall_sample(words, blank, LENGTH, 1.0, rng)
        facts = {(name, number) for _, name, number in stated(words, row)}
        assert len(facts) == len({name for name, _ in facts})


# --- the exercise that is measured


@pytest.mark.parametrize("length", [168, 200, 509])
def test_the_answer_was_said_exactly_so_far_before_it_is_due(words, blank, length):
    for distance in range(8, length - 3, 1 if length < 300 else 7):
        rng = np.random.default_rng(distance)
        row, answer = exercises.recall_exercise(words, blank, distance, length, rng)
        assert row.shape == (length,)
        assert row[0] == words.front[0]
        facts = stated(words, row)
        assert len(facts) == len({name for _, name, _ in facts}) == 8
        assert row[-2:].tolist() == [words.verb, words.space]
        [(place, number)] = [
            (place, number) for place, name, number in facts if name == row[-1 - 2]
        ]
        assert number == tuple(answer.tolist())
        assert length - (place + 3) == distance
        used = 1 + 8 * 7 + 3
        assert (row == blank[0]).sum() == length - used, "facts and question must not overlap"


def test_exercises_stand_in_book_text(words, tokens):
    row, _ = exercises.recall_exercise(words, tokens, 100, 400, np.random.default_rng(0))
    first = stated(words, row)[0][0]
    assert places(tokens, row[1:first])


def test_every_number_and_name_is_asked_for(words, blank):
    asked, answers = set(), []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        row, answer = exercises.recall_exercise(words, blank, 50, 200, rng)
        asked.add(int(row[-3]))
        answers.append(answer)
    assert asked == set(words.names.tolist())
    assert all(set(place) == set(words.digits.tolist()) for place in np.stack(answers).T)


@pytest.mark.parametrize(
    ("distance", "length", "facts"), [(7, 200, 8), (197, 200, 8), (100, 167, 8), (100, 200, 10)]
)
def test_an_exercise_without_room_is_refused(words, tokens, distance, length, facts):
    with pytest.raises(WeirError, match=f"no room for {facts} facts and distance {distance}"):
        exercises.recall_exercise(words, tokens, distance, length, np.random.default_rng(0), facts)
