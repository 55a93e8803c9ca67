"""`Stream` against plain loops with transformers, what it refuses, and what it never loses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from roundings import close_runs, largest, nll_off, run_off, within
from torch import Tensor
from transformers import BatchEncoding, RepetitionPenaltyLogitsProcessor

import weir
from weir.errors import WeirError
from weir.stream import PIECE
from weir.stream import stream as module

pytestmark = pytest.mark.thinned(3, least=2)

POLICIES = ("dense", "window(64)", "streaming_llm(64)", "recompute(64)")
SMALL = "streaming_llm(24)"


@torch.no_grad()
def plainly(model, ids: Tensor) -> Tensor:
    """Return the logits of one plain forward [batch, length, vocabulary]."""
    return model(ids, use_cache=False).logits


def surprise(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the negative log-likelihood of each token but the first, from the logits before it."""
    return -logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def state(stream: weir.Stream) -> list[Any]:
    """Return everything that a refused call could have changed."""
    held = stream.slots(0)
    kept = [held.position, held.keys, held.values, held.a, held.b]
    return [stream.seen, stream.last, stream.nbytes, *[t.tolist() for t in kept]]


@pytest.fixture
def fed(llama, ids) -> weir.Stream:
    """Return a stream that has folded, and whose tail is partly full."""
    stream = weir.Stream(llama, SMALL, chunk=8, seed=5)
    stream.feed(ids(1, 61))
    return stream


# --- feeding


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_inside_the_budget_every_logit_is_the_models_own(llama, ids, policy, batch):
    text = ids(batch, 60)
    found = weir.Stream(llama, policy, chunk=8).feed(text, all_logits=True)
    close_runs(found, plainly(llama, text), llama)


@pytest.mark.parametrize("policy", POLICIES)
def test_feed_returns_the_logits_after_the_last_token_only(llama, ids, policy):
    text = ids(2, 60)
    found = weir.Stream(llama, policy, chunk=8).feed(text)
    assert found.shape == (2, 61)
    close_runs(found, plainly(llama, text)[:, -1], llama)


@pytest.mark.parametrize("policy", ["dense", "window(24)", SMALL, "recompute(24)"])
@pytest.mark.parametrize("cuts", [[1] * 90, [89, 1], [1, 89], [7, 8, 9, 40, 26]])
def test_it_does_not_matter_how_a_text_is_cut(llama, ids, policy, cuts):
    text = ids(2, 90)
    whole = weir.Stream(llama, policy, chunk=8).feed(text, all_logits=True)
    stream = weir.Stream(llama, policy, chunk=8)
    parts = [stream.feed(part, all_logits=True) for part in text.split(cuts, dim=1)]
    close_runs(torch.cat(parts, dim=1), whole, llama)
    assert stream.seen == 90
    assert stream.last == text[:, -1].tolist()


def test_long_texts_go_through_the_model_in_pieces_of_bounded_size(llama, ids, monkeypatch):
    text = ids(2, 90)
    whole = weir.Stream(llama, SMALL, chunk=8).feed(text, all_logits=True)
    widths = []
    hook = llama.register_forward_pre_hook(
        lambda model, args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        monkeypatch.setattr(module, "PIECE", 40)
        last = weir.Stream(llama, SMALL, chunk=8).feed(text)
        assert widths == [40, 40, 10]
        monkeypatch.setattr(module, "MOST_LOGITS", 2 * 61 * 25)
        widths.clear()
        everything = weir.Stream(llama, SMALL, chunk=8).feed(text, all_logits=True)
        assert widths == [25, 25, 25, 15]
    finally:
        hook.remove()
    close_runs(last, whole[:, -1], llama)
    close_runs(everything, whole, llama)


@pytest.mark.parametrize(
    "form",
    [
        lambda t: t.tolist(),
        lambda t: [tuple(row) for row in t.tolist()],
        lambda t: t.to(torch.uint8),
        lambda t: t.to(torch.int16),
        lambda t: t.numpy(),
        lambda t: t.numpy().astype(np.uint16),
    ],
)
def test_whole_numbers_of_any_kind_are_token_ids(llama, ids, form):
    text = ids(2, 30)
    assert torch.equal(
        weir.Stream(llama, SMALL).feed(form(text)), weir.Stream(llama, SMALL).feed(text)
    )


def test_a_row_of_ids_is_a_batch_of_one(llama, ids):
    text = ids(1, 30)
    found = weir.Stream(llama, SMALL).feed(text[0], all_logits=True)
    assert found.shape == (1, 30, 61)
    assert torch.equal(found, weir.Stream(llama, SMALL).feed(text, all_logits=True))


def test_with_full_prefill_the_first_call_is_exact_and_the_next_is_bounded(llama, ids, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 16)  # a prompt with full attention is never cut in pieces
    text = ids(2, 100)
    stream = weir.Stream(llama, SMALL, chunk=8, prefill="full")
    plain = plainly(llama, text[:, :90])
    close_runs(stream.feed(text[:, :90], all_logits=True), plain, llama, length=90)
    assert int((stream.slots(0).position >= 0).sum(dim=2).max()) == 24
    scored = weir.Stream(llama, SMALL, chunk=8, prefill="full").score(text[:, :90])
    within(scored[:, 1:], surprise(plain, text[:, :90]), nll_off(llama, 1, length=90))
    chunked = weir.Stream(llama, SMALL, chunk=8)
    chunked.feed(text[:, :90])
    one, other = stream.feed(text[:, 90:]), chunked.feed(text[:, 90:])
    assert largest(one - other) > 100 * run_off(llama) * largest(other)


# --- scoring


@pytest.mark.parametrize("policy", POLICIES)
def test_a_score_is_the_negative_log_likelihood_under_the_plain_model(llama, ids, policy):
    text = ids(2, 60)
    found = weir.Stream(llama, policy, chunk=8).score(text)
    assert found.dtype == torch.float32
    within(found[:, 1:], surprise(plainly(llama, text), text), nll_off(llama, 1))


@pytest.mark.parametrize("policy", ["dense", SMALL, "recompute(24)"])
@pytest.mark.parametrize("cuts", [[90], [1] * 90, [1, 50, 39]])
def test_only_the_very_first_token_of_a_stream_has_no_score(llama, ids, policy, cuts):
    text = ids(2, 90)
    stream = weir.Stream(llama, policy, chunk=8)
    found = torch.cat([stream.score(part) for part in text.split(cuts, dim=1)], dim=1)
    assert found[:, 0].isnan().all()
    assert not found[:, 1:].isnan().any()
    logits = weir.Stream(llama, policy, chunk=8).feed(text, all_logits=True)
    within(found[:, 1:], surprise(logits, text), nll_off(llama, 1))


def test_the_first_token_of_a_piece_is_scored_by_the_last_of_the_piece_before(
    llama, ids, monkeypatch
):
    """Where pieces meet, `score` uses logits that `feed` does not return. Here are three pieces."""
    monkeypatch.setattr(module, "PIECE", 32)
    text = ids(2, 2 * module.PIECE + 30)
    found = weir.Stream(llama, SMALL, chunk=8).score(text)
    stream = weir.Stream(llama, SMALL, chunk=8)
    logits = torch.stack([stream.feed(token) for token in text.split(1, dim=1)], dim=1)
    assert found[:, 0].isnan().all()
    within(found[:, 1:], surprise(logits, text), nll_off(llama, 1))


def test_scoring_and_feeding_may_take_turns(llama, ids):
    text = ids(1, 60)
    stream = weir.Stream(llama, SMALL, chunk=8)
    stream.feed(text[:, :20])
    middle = stream.score(text[:, 20:40])
    last = stream.feed(text[:, 40:])
    logits = weir.Stream(llama, SMALL, chunk=8).feed(text, all_logits=True)
    within(middle, surprise(logits, text)[:, 19:39], nll_off(llama, 1))
    close_runs(last, logits[:, -1], llama)


# --- generating


@torch.no_grad()
def continued(
    model: Any,
    prompt: Tensor,
    count: int,
    seed: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float = 0.0,
) -> list[int]:
    """Sample plainly, reading the whole text again for every token."""
    generator = torch.Generator().manual_seed(seed)
    text = prompt
    for _ in range(count):
        logits = plainly(model, text)[0, -1] / temperature
        if top_k is not None:
            logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
        if top_p is not None:
            chances, order = logits.softmax(-1).sort(descending=True)
            before = chances.cumsum(-1) - chances
            logits[order[before >= top_p]] = -torch.inf
        chances = logits.softmax(-1)
        logits[chances < min_p * chances.max()] = -torch.inf
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        text = torch.cat([text, token[None]], dim=1)
    return text[0, prompt.shape[1] :].tolist()


def test_greedy_generation_is_that_of_plain_transformers(llama, ids):
    prompt = ids(1, 20)
    stream = weir.Stream(llama, "streaming_llm(64)", chunk=8)
    stream.feed(prompt)
    plain = llama.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False
    )
    assert list(stream.generate(40)) == plain[0, 20:].tolist()


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.4},
        {"temperature": 3.0, "top_k": 5},
        {"temperature": 2.0, "top_p": 0.7},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9},
        {"temperature": 2.0, "min_p": 0.3},
    ],
)
def test_sampling_is_that_of_a_plain_loop_with_the_same_seed(llama, ids, how):
    prompt = ids(1, 20)
    stream = weir.Stream(llama, "streaming_llm(64)", chunk=8, seed=3)
    stream.feed(prompt)
    assert list(stream.generate(40, **how)) == continued(llama, prompt, 40, 3, **how)


def test_the_same_seed_gives_the_same_tokens_and_another_gives_others(llama, ids):
    def drawn(seed: int) -> list[int]:
        stream = weir.Stream(llama, SMALL, chunk=8, seed=seed)
        stream.feed(ids(1, 40))
        return list(stream.generate(60, temperature=2.0))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize("how", [{"top_k": 1}, {"top_p": 0.0}, {"temperature": 1e-4}])
def test_a_choice_of_one_is_the_greedy_choice(llama, ids, how):
    tokens = []
    for sampling in ({}, {"temperature": 1.0, **how}):
        stream = weir.Stream(llama, SMALL, chunk=8)
        stream.feed(ids(1, 40))
        tokens.append(list(stream.generate(30, **sampling)))
    assert tokens[0] == tokens[1]


def test_generation_ends_with_the_stop_token_which_is_part_of_the_stream(fed, llama, ids):
    free = list(fed.generate(30, temperature=2.0))
    stop = free[11]
    stream = weir.Stream(llama, SMALL, chunk=8, seed=5)
    stream.feed(ids(1, 61))
    cut = list(stream.generate(30, temperature=2.0, stop=[stop, 1000]))
    assert cut == free[: free.index(stop) + 1]
    assert stream.seen == 61 + len(cut)


def test_the_models_own_end_tokens_stop_it_unless_others_are_given(fresh_llama, ids):
    model = fresh_llama()
    stream = weir.Stream(model, SMALL, chunk=8)
    stream.feed(ids(1, 40))
    free = list(stream.generate(20))
    for ends in (free[4], [free[4], free[9]]):
        model.generation_config.eos_token_id = ends
        stream = weir.Stream(model, SMALL, chunk=8)
        stream.feed(ids(1, 40))
        assert list(stream.generate(20)) == free[: free.index(free[4]) + 1]
        stream = weir.Stream(model, SMALL, chunk=8)
        stream.feed(ids(1, 40))
        assert list(stream.generate(20, stop=[])) == free


def test_breaking_off_at_any_token_leaves_the_stream_whole(llama, ids):
    whole = weir.Stream(llama, SMALL, chunk=8, seed=2)
    whole.feed(ids(1, 40))
    expected = list(whole.generate(30, temperature=1.5))
    broken = weir.Stream(llama, SMALL, chunk=8, seed=2)
    broken.feed(ids(1, 40))
    tokens: list[int] = []
    while len(tokens) < 30:
        for count, token in enumerate(broken.generate(30 - len(tokens), temperature=1.5)):
            tokens.append(token)
            if count == len(tokens) % 4:
                break
    assert tokens == expected
    assert state(broken) == state(whole)


@pytest.mark.slow
def test_without_a_limit_it_goes_on_until_an_end_token_comes(fed, llama, ids):
    free = list(fed.generate(300, temperature=2.0))
    stream = weir.Stream(llama, SMALL, chunk=8, seed=5)
    stream.feed(ids(1, 61))
    assert list(itertools.islice(stream.generate(temperature=2.0, stop=[]), 300)) == free
    stream = weir.Stream(llama, SMALL, chunk=8, seed=5)
    stream.feed(ids(1, 61))
    cut = list(stream.generate(None, temperature=2.0, stop=free[200]))
    assert cut == free[: free.index(free[200]) + 1]


def test_a_repetition_penalty_is_that_of_transformers_over_what_was_said(llama, ids):
    stream, plain = (weir.Stream(llama, SMALL, chunk=8) for _ in range(2))
    stream.feed(ids(1, 61))
    logits, said = plain.feed(ids(1, 61)), torch.empty(1, 0, dtype=torch.int64)
    for token in stream.generate(30, repetition_penalty=1.7):
        expected = RepetitionPenaltyLogitsProcessor(1.7)(said, logits.clone()).argmax(-1)
        assert token == int(expected)
        said = torch.cat([said, expected[None]], dim=1)
        logits = plain.feed([token])
    assert len(set(said[0].tolist())) > len(set(fed_greedily(llama, ids(1, 61), 30)))
    with pytest.raises(
        WeirError, match="repetition_penalty must be a number greater than 0, got 0"
    ):
        stream.generate(3, repetition_penalty=0)


def fed_greedily(llama, prompt, count: int) -> list[int]:
    stream = weir.Stream(llama, SMALL, chunk=8)
    stream.feed(prompt)
    return list(stream.generate(count))


@pytest.mark.parametrize("all_logits", [False, True])
def test_an_iterator_of_ids_is_fed_piece_by_piece(llama, ids, all_logits):
    """1,100 tokens are more than two pieces."""
    given = ids(1, 1100)
    whole, parts = (weir.Stream(llama, SMALL, chunk=8) for _ in range(2))
    ahead = 0

    def tokens() -> Iterator[int]:
        nonlocal ahead
        for token in given[0].tolist():
            ahead = max(ahead, 1 + produced[0] - parts.seen)
            produced[0] += 1
            yield token

    produced = [0]
    expected = whole.feed(given, all_logits=all_logits)
    assert torch.equal(parts.feed(tokens(), all_logits=all_logits), expected)
    assert state(parts) == state(whole)
    assert ahead <= PIECE


def test_an_iterator_of_something_else_is_refused_where_that_comes(llama):
    stream = weir.Stream(llama, SMALL, chunk=8)
    for wrong, says in (
        ([], "no tokens"),
        (["a"], "got 'a'"),
        ([[1, 2], [3, 4]], "an iterator of ids"),
        (torch.ones(2, 3, dtype=torch.int64), "an iterator of ids"),
        (torch.ones(3), "an iterator of ids"),
    ):
        with pytest.raises(WeirError, match=says):
            stream.feed(iter(wrong))
    assert stream.seen == 0


def test_nothing_is_fed_before_the_first_token_is_asked_for(fed):
    before = state(fed)
    generator: Iterator[int] = fed.generate(5)
    assert state(fed) == before
    next(generator)
    assert fed.seen == 62
    assert list(fed.generate(0)) == []
    assert fed.seen == 62


# --- bad input


NOT_IDS = {
    "zero tokens": ([], "no tokens"),
    "rows of zero tokens": ([[], []], "no tokens"),
    "an empty tensor": (torch.empty(1, 0, dtype=torch.int64), "no tokens"),
    "a negative id": ([3, -1, 5], "token id -1 is out of range. The model's ids are 0 to 60"),
    "an id too high": ([3, 61], "token id 61 is out of range"),
    "an id too high for 64 bits": ([2**70], "whole numbers"),
    "floats": ([1.0, 2.0], "whole numbers"),
    "a float tensor": (torch.ones(1, 3), "float32"),
    "complex numbers": (torch.ones(3, dtype=torch.complex64), "complex64"),
    "truth": ([True, False], "bool"),
    "ragged rows": ([[1, 2, 3], [1, 2]], "in rows of one length"),
    "one number": (7, "whole numbers"),
    "three dimensions": ([[[1, 2]]], r"\[1, 1, 2\]"),
    "text": ("hello", r"Use tokenizer\(text\)\.input_ids"),
    "a list of words": (["hello", "you"], "whole numbers"),
    "what has no ids": ({"ids": [1, 2]}, r"must be in 'input_ids', got only \['ids'\]"),
    "padding": ({"input_ids": [[0, 1]], "attention_mask": [[0, 1]]}, "cannot have padding"),
    "rows of a tokenizer": ({"input_ids": [[0, 1], [2]]}, "in rows of one length"),
    "an array of objects": (np.array([object()]), "whole numbers"),
    "nothing": (None, "whole numbers"),
    "two rows": ([[1, 2], [3, 4]], "this stream has 1 row, but 2 were fed"),
}


@pytest.mark.parametrize("name", NOT_IDS)
@pytest.mark.parametrize("call", ["feed", "score"])
@pytest.mark.thinned(1)
def test_what_is_no_row_of_token_ids_is_refused_and_nothing_is_lost(fed, llama, ids, name, call):
    given, sentence = NOT_IDS[name]
    before = state(fed)
    with pytest.raises(WeirError, match=sentence) as error:
        getattr(fed, call)(given)
    assert "\n" not in str(error.value)
    assert state(fed) == before
    undisturbed = weir.Stream(llama, SMALL, chunk=8, seed=5)
    undisturbed.feed(ids(1, 61))
    more = ids(1, 30, seed=1)
    assert torch.equal(fed.feed(more), undisturbed.feed(more))


READ_ONLY = np.array([3, 1, 4])
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "given",
    [
        (3, 1, 4),
        [[3, 1, 4]],
        [torch.tensor(3), 1, 4],
        np.array([3, 1, 4], dtype=np.uint16),
        READ_ONLY,
        torch.tensor([3, 1, 4], dtype=torch.int32),
        {"input_ids": [3, 1, 4], "attention_mask": [1, 1, 1]},
        BatchEncoding({"input_ids": torch.tensor([[3, 1, 4]])}),
        BatchEncoding({"input_ids": [[3, 1, 4]], "attention_mask": [[1, 1, 1]]}),
    ],
)
@pytest.mark.filterwarnings("error")
def test_ids_may_come_in_any_form_that_says_what_they_are(llama, given):
    expected = weir.Stream(llama, SMALL).feed([3, 1, 4])
    assert torch.equal(weir.Stream(llama, SMALL).feed(given), expected)


def test_rows_of_a_tokenizer_are_streams_in_step(llama):
    stream = weir.Stream(llama, SMALL)
    stream.feed(BatchEncoding({"input_ids": [[3, 1, 4], [1, 5, 9]]}))
    assert stream.last == [4, 9]


def test_generate_stops_at_one_token_or_at_several(fed, llama, ids):
    text = list(fed.generate(20))
    end = text[7]
    for stop in (end, [end], (end, 1000), {end}, np.int64(end)):
        again = weir.Stream(llama, SMALL, chunk=8, seed=5)
        again.feed(ids(1, 61))
        assert list(again.generate(20, stop=stop)) == text[: text.index(end) + 1]


@pytest.mark.parametrize("stop", ["end", 5.0, [5.0], -1, [3, -1], True, object()])
def test_what_is_no_token_cannot_end_an_answer(fed, stop):
    with pytest.raises(WeirError, match="stop must be a token id or several, got "):
        fed.generate(5, stop=stop)


def test_a_stream_says_in_one_line_what_it_is(fed, llama):
    assert repr(fed) == f"<weir.Stream {SMALL}, chunk 8: 61 tokens seen, {fed.nbytes:,} bytes>"
    recompute = weir.Stream(llama, "recompute(24)")
    recompute.feed([1, 2, 3])
    assert repr(recompute) == "<weir.Stream recompute(24): 3 tokens seen, 24 bytes>"


def test_a_model_without_logits_is_refused(llama):
    for policy in (SMALL, "recompute(24)"):
        with pytest.raises(WeirError, match=r"a LlamaModel does not compute logits\. Use the"):
            weir.Stream(llama.base_model, policy)


@pytest.mark.parametrize("wrong", [[3, -1, 5], [3, 61]])
def test_recompute_refuses_ids_out_of_range_as_every_stream_does(llama, ids, wrong):
    stream, undisturbed = (weir.Stream(llama, "recompute(24)") for _ in range(2))
    for it in (stream, undisturbed):
        it.feed(ids(1, 40))
    with pytest.raises(WeirError, match=r"out of range\. The model's ids are 0 to 60"):
        stream.feed(wrong)
    assert torch.equal(stream.feed([5]), undisturbed.feed([5]))


NOT_SAMPLING = {
    "a negative number of tokens": ({"max_new_tokens": -1}, "max_new_tokens"),
    "half a token": ({"max_new_tokens": 1.5}, "max_new_tokens"),
    "a negative temperature": ({"temperature": -0.1}, "temperature"),
    "a temperature that is no number": ({"temperature": math.nan}, "temperature"),
    "an endless temperature": ({"temperature": math.inf}, "temperature"),
    "a temperature in words": ({"temperature": "hot"}, "temperature"),
    "a choice of none": ({"top_k": 0}, "top_k"),
    "a choice of half a token": ({"top_k": 2.5}, "top_k"),
    "more than certain": ({"top_p": 1.1}, "top_p"),
    "less than impossible": ({"top_p": -0.1}, "top_p"),
    "a probability that is no number": ({"top_p": math.nan}, "top_p"),
    "a word to stop at": ({"stop": "end"}, "stop"),
    "words to stop at": ({"stop": ["end"]}, "stop"),
}


@pytest.mark.parametrize("name", NOT_SAMPLING)
def test_a_wrong_way_to_sample_is_refused_at_once_and_nothing_is_lost(fed, name):
    how, parameter = NOT_SAMPLING[name]
    before = state(fed)
    with pytest.raises(WeirError, match=parameter):
        fed.generate(**{"max_new_tokens": 3, "temperature": 1.0, **how})
    assert state(fed) == before


def test_a_stream_continues_only_what_it_was_fed(llama):
    with pytest.raises(WeirError, match="feed at least one token"):
        weir.Stream(llama, SMALL).generate(3)


def test_a_batch_is_not_generated_from_and_says_what_to_do_instead(llama, ids):
    stream = weir.Stream(llama, SMALL)
    stream.feed(ids(2, 10))
    with pytest.raises(WeirError, match=r"batch of 2\. For batches, use model"):
        stream.generate(3)
    with pytest.raises(WeirError, match="this stream has 2 rows, but 1 were fed"):
        stream.feed(ids(1, 10))
    assert stream.seen == 10


def test_a_first_call_that_is_refused_leaves_a_new_stream(llama, ids):
    stream = weir.Stream(llama, SMALL)
    for wrong in ([], [[1], [61]], [0.5]):
        with pytest.raises(WeirError):
            stream.feed(wrong)
    assert (stream.seen, stream.last, stream.nbytes) == (0, [], 0)
    assert stream.score(ids(2, 10))[:, 0].isnan().all()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"policy": "streaming_lm(64)"}, "did you mean 'streaming_llm'"),
        ({"policy": "streaming_llm(4)"}, "no slots for recent tokens"),
        ({"policy": 256}, "a policy must be a text"),
        ({"chunk": 0}, "chunk"),
        ({"chunk": 2.0}, "chunk"),
        ({"seed": -1}, "seed"),
        ({"origin": -1}, "origin"),
        ({"positions": "absolute"}, "'rolling' or 'original'"),
        ({"prefill": "none"}, "'chunked' or 'full'"),
        ({"model": "nano"}, "transformers models, got a str"),
        ({"model": "nano", "policy": "recompute(64)"}, "transformers models, got a str"),
        ({"policy": "recompute(513)"}, "the model can read only 512"),
    ],
)
def test_a_stream_that_makes_no_sense_is_not_made(llama, changes, sentence):
    with pytest.raises(WeirError, match=sentence):
        weir.Stream(**{"model": llama, "policy": SMALL, **changes})


# --- what a stream reports


def test_bytes_are_fixed_from_the_first_token_on(llama, ids):
    stream = weir.Stream(llama, SMALL, chunk=8)
    assert stream.nbytes == 0
    stream.feed([1])
    first = stream.nbytes
    assert first > 0
    stream.feed(ids(1, 200))
    assert stream.nbytes == first == stream.report()["bytes"]


def test_a_report_says_what_each_layer_holds(fed):
    report = fed.report()
    assert report["policy"] == SMALL
    assert report["seen"] == [61]
    slots = {"sink": 4, "recent": 20, "new": 5}
    assert [layer["slots"] for layer in report["layers"]] == [slots, slots]
    assert fed.slots(1).position[0, 0].tolist() == [0, 1, 2, 3, *range(36, 61)]


def test_recompute_has_nothing_to_show_or_to_save(llama, ids, tmp_path):
    stream = weir.Stream(llama, "recompute(24)")
    stream.feed(ids(1, 30))
    for call in (lambda: stream.slots(0), lambda: stream.save(tmp_path / "session")):
        with pytest.raises(WeirError, match="recompute caches nothing"):
            call()
    report = stream.report()
    reason = "each window is recomputed from its tokens, without a cache"
    assert report.pop("steps") == {"run": "eager", "reason": reason}
    assert report == {"policy": "recompute(24)", "seen": [30], "bytes": 24 * 8}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layer", ["x", None, 1.0, -1, 2, True])
def test_layers_that_are_not_there_are_not_shown(fed, layer):
    with pytest.raises(WeirError, match=r"layer .* does not exist. .* are 0 to 1"):
        fed.slots(layer)


def test_before_the_first_token_there_is_nothing_to_show(llama):
    with pytest.raises(WeirError, match="nothing was fed"):
        weir.Stream(llama, SMALL).slots(0)


# --- interruptions


@pytest.mark.parametrize("width", [2, 3, 30])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_a_forward_that_breaks_off_leaves_the_stream_as_it_was(fed, llama, ids, kind, width):
    before = state(fed)

    def fail(*args: Any) -> None:
        raise kind

    hook = llama.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(kind):
            fed.feed(ids(1, width))  # the tail has room for three more tokens
    finally:
        hook.remove()
    assert state(fed) == before
    undisturbed = weir.Stream(llama, SMALL, chunk=8, seed=5)
    undisturbed.feed(ids(1, 61))
    more = ids(1, 30, seed=1)
    assert torch.equal(fed.feed(more), undisturbed.feed(more))
