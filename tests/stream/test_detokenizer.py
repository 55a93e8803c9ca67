"""The text of a growing answer comes in whole characters, and each token costs the same."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from weir.loading import load
from weir.stream.detokenizer import LONGEST, Detokenizer, cut_at_stop

WORDS = ["the", "▁the", "▁", "▁▁", "quick", "▁dog", "s", "é", "▁é", "日本", "."]


def by_bytes() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, as in GPT-2, and for one pair of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pair = "".join(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("—")[0][0])[:2]
    vocabulary = {c: n for n, c in enumerate([*letters, pair])}
    backend = Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1])]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|call|>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def like_llama() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama's.

    Words begin with ▁, other characters fall back to bytes, and the first space is stripped.
    """
    letters = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), *WORDS, *"abcdefghij"]
    backend = Tokenizer(
        models.BPE(
            {c: n for n, c in enumerate(dict.fromkeys(letters))},
            [],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def of_word_pieces() -> PreTrainedTokenizerFast:
    """Return a tokenizer of word pieces.

    Words are separated by spaces that no token has, unless a piece continues a word.
    """
    pieces = ["[UNK]", "the", "quick", "##ly", "dog", "##s", "!", "日", "##本"]
    backend = Tokenizer(models.WordPiece({c: n for n, c in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, sep_token="[SEP]")


TOKENIZERS = {
    "bytes": by_bytes(),
    "llama": like_llama(),
    "pieces": of_word_pieces(),
    "nano": load("nano")[1],
}


def pieces(name: str, tokens: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    text = Detokenizer(TOKENIZERS[name], stops)
    return [*map(text.add, tokens), text.end()]


TEXTS = st.text(st.sampled_from("the quick dogs é—日本🦉\n. "), max_size=40)


@given(TEXTS)
@pytest.mark.parametrize("name", ["bytes", "llama", "nano"])
def test_the_pieces_of_a_text_are_the_text(name, text):
    tokens = TOKENIZERS[name](text, add_special_tokens=False)["input_ids"]
    whole = TOKENIZERS[name].decode(tokens, skip_special_tokens=True)
    assert "".join(pieces(name, tokens)) == whole
    assert whole == text or name == "llama"


@given(st.data())
@pytest.mark.parametrize("name", ["llama", "pieces"])
def test_spaces_that_a_tokenizer_strips_or_adds_are_where_it_puts_them(name, data):
    """Any tokens can come in any order, also special ones, but bytes only as whole characters."""
    tokenizer = TOKENIZERS[name]
    known = [n for word, n in tokenizer.get_vocab().items() if not word.startswith("<0x")]
    tokens = data.draw(st.lists(st.sampled_from(sorted(known)), max_size=40))
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces(name, tokens)) == whole


@given(st.lists(st.integers(0, 257), max_size=60))
def test_bytes_in_any_order_make_what_the_tokenizer_makes_of_all_of_them(tokens):
    """Bytes at the end that never became a character are not returned."""
    whole = TOKENIZERS["bytes"].decode(tokens, skip_special_tokens=True)
    found = "".join(pieces("bytes", tokens))
    assert whole.startswith(found)
    assert set(whole[len(found) :]) <= {"\ufffd"}


def test_a_character_of_several_tokens_comes_when_it_is_whole_and_what_stands_before_at_once():
    tokens = TOKENIZERS["bytes"]("né 🦉!", add_special_tokens=False)["input_ids"]
    assert pieces("bytes", tokens) == ["n", "", "é", " ", "", "", "", "🦉", "!", ""]
    # If a token ends one character and begins the next, the first is shown without delay.
    tokenizer = TOKENIZERS["llama"]
    half = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "🦉".encode()]
    text = Detokenizer(tokenizer)
    found = [text.add(n) for n in [tokenizer.convert_tokens_to_ids("▁the"), *half]]
    assert found == ["the", "", "", "", "🦉"]


def test_special_tokens_do_not_disturb_the_spaces_around_them():
    tokenizer = TOKENIZERS["llama"]
    the, dog, end = tokenizer.convert_tokens_to_ids(["▁the", "▁dog", "</s>"])
    tokens = [the, *[end] * (3 * LONGEST), dog, end, dog]
    assert [piece for piece in pieces("llama", tokens) if piece] == ["the", " dog", " dog"]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("kind", ["text", "special tokens", "halves of characters"])
def test_a_token_costs_the_same_however_long_the_answer_is(name, kind, monkeypatch):
    tokenizer = TOKENIZERS[name]
    tokens = {
        "text": tokenizer("the dogs. ", add_special_tokens=False)["input_ids"] * 100,
        "special tokens": tokenizer.all_special_ids * 300,
        "halves of characters": tokenizer.encode("日", add_special_tokens=False)[:1] * 500,
    }[kind]
    sizes = []
    decode = type(tokenizer).decode

    def counted(self, given, **how):
        sizes.append(len(given))
        return decode(self, given, **how)

    monkeypatch.setattr(type(tokenizer), "decode", counted)
    pieces(name, tokens)
    assert max(sizes, default=0) <= 2 * LONGEST
    assert len(sizes) <= 2 * len(tokens)


# --- texts that end an answer


@example(".e.", ["e", ".e."])
@given(TEXTS, st.lists(st.text("the \n日.", min_size=1, max_size=4), max_size=3))
def test_an_answer_ends_in_front_of_the_first_stop_and_holds_nothing_else_back(text, stops):
    tokens = TOKENIZERS["bytes"](text, add_special_tokens=False)["input_ids"]
    decode = TOKENIZERS["bytes"].decode
    # The answer ends with the token that completes a stop. A longer stop does not count if it
    # begins before this one and would only be complete later.
    found = (n for n in range(1, len(tokens) + 1) if any(s in decode(tokens[:n]) for s in stops))
    last = next(found, None)
    read = text if last is None else decode(tokens[:last])
    expected = read[: min((read.find(stop) for stop in stops if stop in read), default=len(read))]
    growing = Detokenizer(TOKENIZERS["bytes"], stops)
    given_out, first = "", None
    for count, token in enumerate(tokens, 1):
        given_out += growing.add(token)
        assert expected.startswith(given_out)
        if growing.stopped and first is None:
            first = count
    assert given_out + growing.end() == expected
    assert growing.end() == ""
    assert first == last


def test_what_may_begin_a_stop_is_held_back_until_it_does_not():
    tokens = TOKENIZERS["bytes"]("a<b<|x", add_special_tokens=False)["input_ids"]
    assert pieces("bytes", tokens, ("<|end|>",)) == ["a", "", "<b", "", "", "<|x", ""]
    assert pieces("bytes", tokens[:-1], ("<|end|>",)) == ["a", "", "<b", "", "", "<|"]
    assert pieces("bytes", tokens, ("", "<b")) == ["a", "", "", "", "", "", ""]


@pytest.mark.parametrize(
    ("text", "stops", "left"),
    [
        ("a.b,c", (",", "."), "a"),
        ("abc", ("", "x"), "abc"),
        ("\nab", ("\n",), ""),
        # The stop that begins first, although the other one ends within it.
        ("abcd", ("c", "bcd"), "a"),
    ],
)
def test_a_text_ends_in_front_of_the_first_of_its_stops(text, stops, left):
    assert cut_at_stop(text, stops) == left


def test_special_tokens_that_are_kept_are_part_of_the_text_and_of_stops():
    tokenizer = by_bytes()
    call, start = (tokenizer.convert_tokens_to_ids(t) for t in ("<|call|>", "<s>"))
    tokens = [*tokenizer("a ")["input_ids"], start, call, *tokenizer(" b")["input_ids"]]
    text = Detokenizer(tokenizer, kept=[call])
    assert "".join([*map(text.add, tokens), text.end()]) == "a <|call|> b"
    text = Detokenizer(tokenizer, stops=["|> b"], kept=[call])
    assert "".join([*map(text.add, tokens), text.end()]) == "a <|call"
    assert text.stopped
