"""Log-probabilities of tokens, with their bytes."""

from __future__ import annotations

from servers import make_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from weir.serve import SampledToken
from weir.serve.api.logprobs import LogprobFormatter


def bytes_of(tokenizer: PreTrainedTokenizerFast, token: int) -> list[int] | None:
    sampled = SampledToken(token, -1.0, ((token, -1.0),))
    (entry,) = LogprobFormatter(tokenizer, frozenset()).entries(sampled)
    assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
    return entry["bytes"]


def test_pieces_of_characters_have_their_bytes_from_which_the_text_is_put_together():
    tokenizer = make_tokenizer()  # each byte is a token
    text = "Grüße, \U0001f600 \u4e16\u754c \ufffd\n" + "".join(map(chr, range(256)))
    ids = tokenizer(text)["input_ids"]
    assert (
        bytes(byte for token in ids for byte in bytes_of(tokenizer, token) or ()) == text.encode()
    )


def with_bytes(decoder) -> PreTrainedTokenizerFast:
    known = {token: n for n, token in enumerate(["<unk>", "<0xE2>", "<0x41>", "a", "\ufffd"])}
    backend = Tokenizer(models.BPE(known, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_tokens_that_are_bytes_where_there_are_no_others_say_which():
    fallback = with_bytes(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]))
    assert [bytes_of(fallback, token) for token in (1, 2, 3)] == [[0xE2], [0x41], [0x61]]


def test_bytes_that_a_tokenizer_does_not_say_are_null():
    assert bytes_of(with_bytes(decoders.Fuse()), 4) is None
