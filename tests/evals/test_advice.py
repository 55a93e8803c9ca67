"""Advice: budgets that just fit the memory, tried on the text, the best first."""

from __future__ import annotations

import pytest
from roundings import nll_off

import weir
from weir.errors import WeirError
from weir.evals import advice
from weir.evals.advice import advise
from weir.evals.measures.perplexity import read
from weir.stream.text import BOOK, encode, read_text


@pytest.fixture(scope="module")
def nano():
    return weir.load("nano")


def test_the_policies_are_tried_on_the_text_and_the_best_is_named(nano, monkeypatch):
    model, tokenizer = nano
    monkeypatch.setattr(advice, "CANDIDATES", ("window", "streaming_llm", "subgen"))
    told: list[tuple[str, float]] = []
    found = advise(
        model, tokenizer, str(BOOK), 1_000_000, tokens=900,
        on_step=lambda policy, share: told.append((policy, share)),
    )  # fmt: skip
    assert found.best.policy.startswith("streaming_llm(")
    assert [one.ppl for one in found.tries] == sorted(one.ppl for one in found.tries)
    assert all(one.kv_bytes <= 1_000_000 for one in found.tries)
    ids = encode(tokenizer, read_text(BOOK), 900)
    wanted = read(weir.Stream(model, found.best.policy), ids).ppl
    assert found.best.ppl == pytest.approx(wanted, rel=nll_off(model, 899))
    assert (found.tokens, found.window, found.everything) == (900, 512, False)
    assert told[-1][1] == 1.0
    assert [share for _, share in told] == sorted(share for _, share in told)


def test_more_memory_than_the_window_needs_is_left(nano, monkeypatch):
    monkeypatch.setattr(advice, "CANDIDATES", ("streaming_llm",))
    found = advise(*nano, str(BOOK), 10**9, tokens=600)
    assert found.best.budget == 512 - 64


def test_a_text_that_fits_needs_no_policy(nano, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("It was a bright morning, and they walked on. " * 5)
    found = advise(*nano, str(path), 10**7)
    assert found.everything
    assert found.best.policy == "dense"
    assert not advise(*nano, str(path), 700_000).everything


def test_too_little_memory_is_refused_with_what_it_takes(nano):
    with pytest.raises(WeirError, match=r"10,000 bytes are too few .* takes 675,840\. A smaller"):
        advise(*nano, str(BOOK), 10_000)


def test_a_chunk_that_leaves_no_room_in_the_window_is_named(nano):
    with pytest.raises(WeirError, match=r"a chunk of 600 .* than the model's window of 512"):
        advise(*nano, str(BOOK), 10**9, chunk=600)


def test_a_text_that_is_shorter_than_the_sample_is_refused(nano, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("It was a bright morning, and they walked on. " * 60)
    count = len(encode(nano[1], read_text(path)))
    with pytest.raises(WeirError, match=f"the text has {count} tokens, .* tried on 5,000"):
        advise(*nano, str(path), 10**6, tokens=5000)


def test_it_is_said_whether_anything_was_evicted(nano, monkeypatch):
    monkeypatch.setattr(advice, "CANDIDATES", ("window", "pyramidkv"))
    few = advise(*nano, str(BOOK), 10**9, tokens=448 + 64 - 1)
    # Of a pyramid some layers have less than the budget.
    assert {one.policy.partition("(")[0]: one.evicted for one in few.tries} == {
        "window": False,
        "pyramidkv": True,
    }
    more = advise(*nano, str(BOOK), 10**9, tokens=448 + 64)
    assert all(one.evicted for one in more.tries)
