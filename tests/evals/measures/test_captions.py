"""BLEU, ROUGE-L and CIDEr of captions, against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from weir import WeirError
from weir.evals.measures import caption_scores
from weir.evals.measures.captions import bleu, cider, rouge_l, words


def split(*texts: str) -> list[list[str]]:
    return [text.split() for text in texts]


def test_words_are_told_apart_as_coco_does() -> None:
    found = words("A man’s dog doesn't run; it's well-fed!")
    assert found == ["a", "man", "'s", "dog", "does", "n't", "run", "it", "'s", "well-fed"]


def test_bleu_counts_a_word_no_more_often_than_a_reference_has_it() -> None:
    # "the" once, "cat" once, of four words; longer than the reference, so no penalty.
    assert bleu(split("the the the cat"), [split("the cat sat")], 1) == pytest.approx(2 / 4)
    # Of three pairs one is right: the root of 1/2 times 1/3.
    assert bleu(split("the the the cat"), [split("the cat sat")], 2) == pytest.approx(
        math.sqrt(2 / 4 * 1 / 3)
    )


def test_bleu_takes_the_reference_nearest_in_length() -> None:
    short = bleu(split("the cat"), [split("the cat sat on", "the cat sat")], 1)
    assert short == pytest.approx(math.exp(1 - 3 / 2))


def test_bleu_is_of_the_whole_set_and_images_may_have_different_numbers_of_captions() -> None:
    # 2 of 2 and 1 of 3 words: 3 of 5; lengths 2 + 3 against 2 + 3.
    found = bleu(split("a b", "c x y"), [split("a b"), split("c d e", "q")], 1)
    assert found == pytest.approx(3 / 5)


def test_rouge_takes_the_best_precision_and_the_best_recall() -> None:
    # Common: "a c" of 4 and 2 words, "a b c" of 4 and 6.
    found = rouge_l(split("a b c d"), [split("a c", "a b c x y z")])
    precision, recall, beta = 3 / 4, 2 / 2, 1.2**2
    assert found == pytest.approx((1 + beta) * precision * recall / (recall + beta * precision))
    assert rouge_l(split("q"), [split("a c")]) == 0.0


def test_cider_of_a_caption_that_is_its_reference() -> None:
    # Words and pairs are all the same, longer n-grams there are none: half of 10. The other has 0.
    assert cider(split("a b", "x"), [split("a b"), split("c d")]) == pytest.approx(5 / 2)


def test_cider_takes_off_for_length_and_for_words_that_every_image_has() -> None:
    alike = (2 / math.sqrt(2 * 5) + 1 / math.sqrt(1 * 4)) / 4
    apart = math.exp(-((1 - 4) ** 2) / (2 * 6**2))
    found = cider(split("a b", "q"), [split("a b c d e"), split("z")])
    assert found == pytest.approx(10 * alike * apart / 2)
    # A word of every image weighs nothing.
    assert cider(split("the", "the"), [split("the"), split("the")]) == 0.0


def test_cider_does_not_pay_for_a_word_said_over_and_over() -> None:
    # In place of 3 only the 1 of the reference counts: 1 / sqrt(9 + 0) of one word.
    once = cider(split("a", "x"), [split("a"), split("z")])
    often = cider(split("a a a", "x"), [split("a"), split("z")])
    assert once == pytest.approx(10 / 4 / 2)
    assert often == pytest.approx(10 / 4 / 2 / 3 * math.exp(-((2 - 0) ** 2) / 72))


def test_all_figures_of_a_set() -> None:
    right = [["A red circle.", "a circle"], ["the blue square"]]
    found = caption_scores(["a red circle", "the blue square"], right)
    assert set(found) == {"bleu1", "bleu2", "bleu3", "bleu4", "rougeL", "cider"}
    assert found["bleu1"] == pytest.approx(1.0)
    assert found["rougeL"] == pytest.approx(1.0)
    with pytest.raises(WeirError, match="no captions to compare"):
        caption_scores([], [])
