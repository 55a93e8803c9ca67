"""Streaming perplexity: blocks add up, figures equal those of a plain loop, texts can be short."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from roundings import nll_off, off
from torch import Tensor
from transformers import AutoTokenizer

import weir
from weir.errors import WeirError
from weir.evals import perplexity as module
from weir.evals.perplexity import PerplexityMeter, read
from weir.evals.report import whole_blocks
from weir.loading.loader import ASSETS
from weir.stream.text import encode

POLICY = "streaming_llm(24)"


class Constant:
    """A stream in which token t costs t / 10 nats, and the very first token has no cost (NaN)."""

    policy = POLICY

    def __init__(self, seen: int = 0) -> None:
        self.seen = seen

    @property
    def nbytes(self) -> int:
        return 1000 + self.seen

    def score(self, ids: Tensor) -> Tensor:
        nll = ids / 10
        if self.seen == 0:
            nll[:, 0] = math.nan
        self.seen += ids.shape[1]
        return nll


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSETS / "nano")


@torch.no_grad()
def plain_nll(model, ids: Tensor) -> list[float]:
    """The negative log-likelihood of each token but the first, from one plain forward."""
    logits = model(ids[None], use_cache=False).logits[0].double()
    return [
        float(logits[place - 1].logsumexp(-1) - logits[place - 1, ids[place]])
        for place in range(1, len(ids))
    ]


def test_perplexity_is_the_exponential_of_the_mean_of_a_plain_loop(llama, ids):
    text = ids(1, 450)[0]
    found = read(weir.Stream(llama, "dense"), text, block=100)
    nll = plain_nll(llama, text)
    assert found.tokens == 450
    assert found.scored == 449
    assert found.ppl == pytest.approx(math.exp(sum(nll) / 449), rel=nll_off(llama, 449, 450))
    blocks = [nll[:99], *(nll[start - 1 : start + 99] for start in range(100, 450, 100))]
    expected = [math.exp(sum(block) / len(block)) for block in blocks]
    assert found.ppl_by_block == pytest.approx(expected, rel=nll_off(llama, 50, 450))


@given(
    length=st.integers(2, 60),
    block=st.integers(1, 70),
    step=st.integers(1, 70),
    before=st.sampled_from([0, 7]),
)
def test_blocks_add_up_to_the_whole_however_text_blocks_and_steps_lie(length, block, step, before):
    text = torch.arange(length) % 13
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STEP", step)
        found = read(Constant(before), text, block=block)
    costs = [None if before == 0 and place == 0 else (place % 13) / 10 for place in range(length)]
    assert len(found.ppl_by_block) == math.ceil(length / block)
    for number, ppl in enumerate(found.ppl_by_block):
        mine = [c for c in costs[number * block : (number + 1) * block] if c is not None]
        if mine:
            assert ppl == pytest.approx(math.exp(sum(mine) / len(mine)), rel=off(2))
        else:
            assert math.isnan(ppl)  # a block that has only the first token
    known = [cost for cost in costs if cost is not None]
    assert found.tokens == length
    assert found.scored == len(known)
    assert found.ppl == pytest.approx(math.exp(sum(known) / len(known)), rel=off(2))
    assert len(found.pace) == math.ceil(length / step)


@pytest.mark.parametrize(
    ("tokens", "last", "whole"), [(650, 50, [0, 1, 2]), (600, 200, [0, 1, 2]), (150, 150, [0])]
)
def test_a_last_block_that_is_short_says_so_and_is_not_compared(tokens, last, whole):
    found = read(Constant(), torch.ones(tokens, dtype=torch.int64), block=200)
    assert found.last_block == found.as_json()["last_block"] == last
    blocks = found.ppl_by_block
    assert whole_blocks(blocks, tokens, 200) == [blocks[n] for n in whole]


def test_the_cache_is_weighed_after_every_block():
    found = read(Constant(), torch.ones(650, dtype=torch.int64), block=200)
    assert found.bytes_by_block == [1200, 1400, 1600, 1650]
    assert found.kv_bytes == 1650


def test_reading_ends_early_with_what_was_read_until_then():
    text = torch.arange(1000) % 13
    steps = []

    def stop(reading: PerplexityMeter) -> bool:
        steps.append(reading.tokens)
        return reading.tokens >= 450

    found = read(Constant(), text, block=250, on_step=stop)
    assert steps == [200, 400, 600]
    expected = read(Constant(), text[:600], block=250)
    assert (found.tokens, found.ppl, found.ppl_by_block, found.bytes_by_block) == (
        expected.tokens,
        expected.ppl,
        expected.ppl_by_block,
        expected.bytes_by_block,
    )


def test_perplexity_is_known_from_the_second_token_on():
    meter = PerplexityMeter(Constant())
    assert math.isnan(meter.ppl)
    meter.take(torch.tensor([5]))
    assert math.isnan(meter.ppl)
    meter.take(torch.tensor([7]))
    assert meter.ppl == pytest.approx(math.exp(0.7), rel=off(2))


def test_a_model_that_breaks_down_is_not_reported_as_a_good_one():
    class Overflowing(Constant):
        """As if half precision overflowed somewhere in the second block."""

        def score(self, ids: Tensor) -> Tensor:
            nll = super().score(ids)
            nll[:, 160:170] = math.nan
            return nll

    found = read(Overflowing(), torch.ones(300, dtype=torch.int64), block=100)
    assert math.isnan(found.ppl)
    assert [math.isnan(ppl) for ppl in found.ppl_by_block] == [False, True, False]


def test_speed_counts_every_token_once_whatever_the_last_step_was(monkeypatch):
    clock = iter(range(0, 100, 2))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    found = read(Constant(), torch.ones(450, dtype=torch.int64))
    assert found.seconds == 6.0  # three steps of two seconds
    assert found.tokens_per_s == 75.0
    assert found.pace == [0.01, 0.01, 0.04]


def test_the_last_thousand_tokens_are_compared_with_the_second_thousand():
    found = PerplexityMeter(Constant())
    found.pace = [9.0] * 5 + [1.0, 2.0, 3.0, 4.0, 5.0] + [9.0] * 4
    assert found.slowdown is None
    found.pace += [6.0, 6.0, 12.0, 1.0, 1.0]
    assert found.slowdown == 2.0


def test_memory_grows_when_it_rises_above_its_most_up_to_token_5000(monkeypatch):
    held = iter([500, 450, 480, 620, 510])
    monkeypatch.setattr(module, "_memory", lambda: next(held))
    meter = PerplexityMeter(Constant())
    grown = []
    for length in (4000, 999, 200, 200, 200):
        meter.take(torch.ones(length, dtype=torch.int64))
        grown.append(meter.memory_growth)
    assert grown == [None, None, 0, 120, 120]


def test_memory_is_that_of_the_process_now():
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not say what a process holds")
    before = module._memory()
    # New pages are needed, because a normal allocation can reuse memory that earlier tests freed.
    with mmap.mmap(-1, 80_000_000) as ballast:
        for page in range(0, len(ballast), mmap.PAGESIZE):
            ballast[page] = 1
        held = module._memory()
    assert held - before > 70_000_000
    assert module._memory() - before < 20_000_000


def test_every_figure_has_a_name_in_json():
    found = read(Constant(), torch.ones(450, dtype=torch.int64)).as_json()
    assert {
        "policy",
        "tokens",
        "block",
        "last_block",
        "ppl",
        "ppl_by_block",
        "kv_bytes",
        "bytes_by_block",
        "tokens_per_s",
        "seconds",
        "memory_growth",
        "last_over_second_thousand",
    } == set(found)


# --- texts


def test_a_text_begins_with_the_tokenizers_start_token(tokenizer):
    ids = encode(tokenizer, "Well, Prince, so Genoa")
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == "Well, Prince, so Genoa"


@pytest.mark.parametrize("most", [2, 3, 50, 1_000, 100_000])
def test_the_first_tokens_of_a_text_are_those_of_the_whole(tokenizer, most):
    text = "Prince Vasíli always spoke languidly, like an actor repeating a stale part.\n" * 80
    whole = encode(tokenizer, text)
    assert torch.equal(encode(tokenizer, text, most), whole[:most])


def test_a_text_of_which_few_characters_make_a_token_is_read_far_enough(tokenizer):
    class Coarse:
        """A tokenizer that makes one token of every 100 characters."""

        def __call__(self, text: str, **kwargs: object) -> dict[str, list[int]]:
            return {"input_ids": list(range(len(text) // 100))}

    assert encode(Coarse(), "-" * 100_000, 500).tolist() == list(range(500))
    assert len(encode(Coarse(), "-" * 100_000, 5_000)) == 1_000


def test_a_text_without_a_token_to_predict_is_refused(tokenizer):
    with pytest.raises(WeirError, match="fewer than 2 tokens"):
        encode(tokenizer, "")
