"""The tokenizer that `weir train` makes, and books as token ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from weir.stream.text import encode
from weir.train import corpus

LINES = st.text(st.sampled_from("ab1 \n\n\t\r'.é\x0c\u2028"), max_size=40)
"""Text with ends of lines, empty and indented lines, and digits at the start of lines."""


@pytest.fixture(scope="session")
def reloaded(tokenizer, tmp_path_factory):
    """Return the tokenizer as it is loaded from a model's folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_every_digit_is_a_token_of_its_own(tokenizer):
    ids = tokenizer("In 1812, or 482x9.", add_special_tokens=False)["input_ids"]
    pieces = [tokenizer.decode([i]) for i in ids]
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == list("18124829")
    with_digits = [p for p in tokenizer.get_vocab() if any(c in "0123456789" for c in p)]
    assert sorted(with_digits) == list("0123456789")


@pytest.mark.parametrize(
    "text", ["", "Anna", "<|start|>", "a<|start|>b <|start|><|pad|>\n<|start|>"]
)
def test_the_start_token_stands_in_front_and_nowhere_else(tokenizer, reloaded, text):
    for reader in (tokenizer, reloaded):
        ids = reader(text)["input_ids"]
        assert ids[0] == reader.bos_token_id == reader.convert_tokens_to_ids("<|start|>")
        assert not {reader.bos_token_id, reader.pad_token_id} & set(ids[1:])
        assert reader.decode(ids[1:]) == text


def test_rows_are_padded_on_the_left_as_generate_wants_them(tokenizer, reloaded):
    for it in (tokenizer, reloaded):
        rows = it(["One day", "It was a very fine day"], padding=True).input_ids
        assert rows[0][0] == it.pad_token_id
        assert rows[0][-1] != it.pad_token_id


def test_the_ids_of_books_hold_no_start_token(tokenizer, books, tokens):
    assert tokens.dtype == np.uint16
    assert not (tokens == tokenizer.bos_token_id).any()


@given(text=st.text(max_size=60) | LINES)
def test_text_comes_back_as_it_was(reloaded, text):
    assert reloaded.decode(reloaded(text)["input_ids"], skip_special_tokens=True) == text


@given(books=st.lists(LINES, min_size=1, max_size=4))
def test_books_make_the_ids_that_reading_them_whole_makes(tokenizer, books):
    whole = [tokenizer(book, add_special_tokens=False)["input_ids"] for book in books]
    assert corpus.encode(books, tokenizer).tolist() == [i for ids in whole for i in ids]


def test_a_real_book_makes_the_ids_that_evaluation_reads(tokenizer, books, tokens):
    read = encode(tokenizer, books[0]).numpy()
    assert read[0] == tokenizer.bos_token_id
    np.testing.assert_array_equal(tokens[: len(read) - 1], read[1:])


def test_training_a_tokenizer_again_gives_the_same(tokenizer, books):
    again = corpus.with_sinks(corpus.train_backend(books, len(tokenizer)), 1)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_ids_are_kept_and_not_made_again(tokenizer, books, tokens, tmp_path):
    kept = tmp_path / "tokens.npy"
    np.testing.assert_array_equal(corpus.load_or_encode(kept, books, tokenizer), tokens)
    np.testing.assert_array_equal(corpus.load_or_encode(kept, ["another book"], tokenizer), tokens)
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.npy"]


def test_a_write_that_breaks_off_leaves_nothing_to_be_taken_for_the_ids(
    tokenizer, books, tokens, tmp_path, monkeypatch
):
    def half(path, ids):
        path.write_bytes(ids.tobytes()[:100])
        raise KeyboardInterrupt

    kept = tmp_path / "tokens.npy"
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", half)
        with pytest.raises(KeyboardInterrupt):
            corpus.load_or_encode(kept, books, tokenizer)
    assert not list(tmp_path.iterdir())
    np.testing.assert_array_equal(corpus.load_or_encode(kept, books, tokenizer), tokens)
