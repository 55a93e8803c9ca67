"""The n-gram baseline against its paper, written out with dictionaries."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from reference.examples import import_example
from reference.kneser_ney import KneserNey
from roundings import off

from weir.errors import WeirError
from weir.stream.text import encode

ngram = import_example("ngram/ngram.py")


def draw(length: int, vocabulary: int, seed: int) -> np.ndarray:
    """Return tokens of very different frequencies, each often one more than the one before it."""
    rng = np.random.default_rng(seed)
    frequencies = 1 / np.arange(1, vocabulary + 1) ** 1.5
    fresh = rng.choice(vocabulary, size=length, p=frequencies / frequencies.sum())
    return np.where(rng.random(length) < 0.5, fresh, (np.roll(fresh, 1) + 1) % vocabulary)


EXACT = off(100, torch.float64)
"""About a hundred roundings: counts, discounts, interpolating five orders, and a logarithm."""


def naive_nll(model: KneserNey, tokens: np.ndarray) -> np.ndarray:
    ids = tokens.tolist()
    return -np.log([model.probability(ids[i], ids[:i]) for i in range(len(ids))])


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize(("length", "vocabulary"), [(5, 3), (60, 4), (1500, 30), (1500, 4096)])
def test_every_token_is_as_likely_as_the_paper_says(order, length, vocabulary):
    text, other = draw(length, vocabulary, seed=order), draw(400, vocabulary, seed=order + 100)
    naive = KneserNey(text.tolist(), order, vocabulary)
    model = ngram.train(text, order, vocabulary)
    for read in (text, other):
        np.testing.assert_allclose(model.nll(read), naive_nll(naive, read), rtol=EXACT, atol=EXACT)


def test_on_real_text_all_discounts_are_the_papers_estimate(tokens, tokenizer):
    text, other = tokens[:12_000], tokens[12_000:12_600]
    naive = KneserNey(text.tolist(), 4, len(tokenizer))
    assert all(naive.estimated), "this text must be long enough to estimate the discounts"
    model = ngram.train(text, 4, len(tokenizer))
    for level, discounts in zip(model.levels, naive.discounts, strict=True):
        np.testing.assert_allclose(
            level.discounts, list(discounts.values()), rtol=EXACT, atol=EXACT
        )
    np.testing.assert_allclose(model.nll(other), naive_nll(naive, other), rtol=EXACT, atol=EXACT)


def test_discounts_that_cannot_be_estimated_are_the_usual_ones():
    model = ngram.train([0, 1, 2, 0, 1, 2], 3, 3)
    assert [level.discounts for level in model.levels] == [ngram.USUAL_DISCOUNTS] * 3


@pytest.mark.parametrize("order", [1, 2, 5])
def test_the_probabilities_of_all_tokens_sum_to_one_after_any_context(order):
    vocabulary = 50
    text = draw(3000, 40, seed=1)  # ten tokens never occur
    model = ngram.train(text, order, vocabulary)
    seen = [text[at : at + 4].tolist() for at in (0, 17, 1000, 2996)]
    half_seen = [[45, *text[5:8].tolist()], [*text[5:8].tolist(), 45]]
    unseen = [[49, 48, 47, 46], [], [44]]
    for context in seen + half_seen + unseen:
        last = [model.nll([*context, token])[-1] for token in range(vocabulary)]
        total = np.exp(-np.array(last)).sum()
        assert total == pytest.approx(1, abs=vocabulary * EXACT), context


def test_a_token_that_follows_one_token_only_is_unlikely_elsewhere():
    # 1 and 2 are equally frequent, but 2 only follows 3. 9 never occurs.
    text = [0, 1, 4, 1, 5, 1, 6, 1, 7, 1, 8, 1, *[3, 2] * 6, 0]
    model = ngram.train(text, 2, 10)
    assert model.nll([9, 2])[-1] > model.nll([9, 1])[-1] + 1


def test_the_longest_n_grams_of_the_largest_tokens_do_not_run_over():
    text = draw(500, 4096, seed=3)
    text[50:400] = 4095 - text[50:400] % 3
    naive = KneserNey(text.tolist(), 5, 4096)
    found = ngram.train(text.astype(np.uint16), 5, 4096).nll(text)
    np.testing.assert_allclose(found, naive_nll(naive, text), rtol=EXACT, atol=EXACT)


def test_reading_nothing_or_less_than_an_n_gram_works():
    model = ngram.train(draw(100, 8, seed=0), 5, 8)
    assert model.nll([]).shape == (0,)
    assert model.nll([3, 1]).tolist() == model.nll([3, 1, 2, 0])[:2].tolist()


@pytest.mark.parametrize(
    ("tokens", "order", "vocabulary", "sentence"),
    [
        ([1, 2, 3] * 9, 5, 8192, r"from 1 to 4.*a token takes 13"),
        ([1, 2, 3] * 9, 6, 4096, r"from 1 to 5.*a token takes 12"),
        ([1, 2, 3] * 9, 0, 4, r"0-grams"),
        ([1, 2, 4], 2, 4, r"from 1 to 4; a vocabulary of 4 has 0 to 3"),
        ([1, -2, 3], 2, 4, r"from -2 to 3"),
        ([1, 2], 3, 4, r"2 tokens holds no 3-gram"),
    ],
)
def test_what_cannot_be_counted_is_refused_in_a_sentence(tokens, order, vocabulary, sentence):
    with pytest.raises(WeirError, match=sentence):
        ngram.train(tokens, order, vocabulary)


def test_a_token_outside_the_vocabulary_cannot_be_read():
    with pytest.raises(WeirError, match="from 0 to 4"):
        ngram.train([0, 1, 2, 3], 2, 4).nll([0, 4])


def test_the_command_prints_the_perplexity_of_the_other_text(
    tmp_path, capsys, books, tokenizer, tokens
):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "books.txt").write_text("\n\0\n".join(books), "utf-8")
    (tmp_path / "other.txt").write_text(books[0][5000:9000], "utf-8")
    options = {"--tokenizer": "tokenizer", "--text": "books.txt", "--on": "other.txt"}
    options = [part for key, name in options.items() for part in (key, str(tmp_path / name))]
    options += ["--order", "3", "--tokens", "300", "--cache", str(tmp_path / "tokens.npy")]
    ids = encode(tokenizer, books[0][5000:9000], 300).numpy()
    assert len(ids) == 300
    assert ids[0] == tokenizer.bos_token_id
    wanted = np.exp(ngram.train(tokens, 3, len(tokenizer)).nll(ids)[1:].mean())

    ngram.main([*options, "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["ppl"] == pytest.approx(wanted, rel=EXACT)
    assert (facts["tokens"], facts["order"], facts["trained_on"]) == (300, 3, len(tokens))
    ngram.main(options)
    assert f"perplexity {wanted:.2f} on 300 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["--tokenizer", "--text"])
def test_the_command_refuses_what_is_not_there(tmp_path, tokenizer, missing):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("Anna has 482. Adam has 14.", "utf-8")
    options = {
        "--tokenizer": tmp_path,
        "--text": tmp_path / "text.txt",
        "--on": tmp_path / "text.txt",
    }
    options[missing] = tmp_path / "nowhere"
    with pytest.raises(SystemExit, match=r"^weir: .*nowhere"):
        ngram.main([str(part) for option in options.items() for part in option])
