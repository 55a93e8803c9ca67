"""Texts are located among tokens exactly, whatever a chat template puts around them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weir.stream.archive import find_texts

WORDS = st.lists(st.integers(10, 14), min_size=4, max_size=70)
AROUND = st.lists(st.integers(0, 9), max_size=40)


def encode(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def as_text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


@given(st.lists(st.tuples(AROUND, WORDS), min_size=1, max_size=4), AROUND, st.booleans())
def test_texts_are_found_between_the_tokens_of_a_template(parts, after, joined):
    ids: list[int] = []
    places = []
    for around, text in parts:
        ids += around
        places.append((len(ids), len(ids) + len(text)))
        # The ends of a text can be merged with what is next to them.
        ids += [99, *text[1:-1], 99] if joined else text
        ids += [0]
    found = find_texts(ids + after, [as_text(text) for _, text in parts], encode)
    for n, (_, text) in enumerate(parts):
        if len(text) <= 32:
            # If a text repeats one token, or its end is merged, the result can be one token off.
            assert abs(found[n][0] - places[n][0]) <= 1 >= abs(found[n][1] - places[n][1])
        else:  # the beginning of a long text can occur again within it
            assert abs(found[n][1] - places[n][1]) <= 1
            assert abs(found[n][0] - places[n][0]) <= 5


def test_the_definition_of_a_tool_with_the_same_words_is_not_the_message():
    ids = [1, 10, 11, 12, 13, 2, 10, 11, 12, 13, 3]
    assert find_texts(ids, ["10 11 12 13"], encode) == [(6, 10)]


def test_short_texts_are_found_too():
    assert find_texts([1, 2, 10, 3], ["10"], encode) == [(2, 3)]
    assert find_texts([1, 2, 10, 11, 3, 12, 4], ["10 11", "12"], encode) == [(2, 4), (5, 6)]


def test_a_long_text_that_repeats_itself_begins_where_it_is_long_enough():
    text = [10, 11, 12, 13] * 20
    ids = [1] * 50 + text + [2, 3]
    assert find_texts(ids, [as_text(text)], encode) == [(50, 130)]


def test_what_is_not_there_is_estimated_between_its_neighbors():
    ids = [1, 2, *range(20, 30), 3, 10, 11, 12, 13, 4]
    # The two missing texts have the same length. They share the tokens before the one that is
    # found.
    assert find_texts(ids, ["50 51", "60 61", "10 11 12 13"], encode) == [(0, 7), (7, 13), (13, 17)]
    assert find_texts(ids, [""], encode) == [(0, 0)]
    assert find_texts([], ["50"], encode) == [(0, 0)]
