"""The caches that are timed: they hold the number of tokens they report, and count folds once."""

from __future__ import annotations

import pytest
import torch
from roundings import close_runs

from weir_bench.caches import Dynamic, Static, Weir
from weir_bench.figure import QUICK, Setting
from weir_bench.model import bandwidth, config, model_of, weight_bytes


@pytest.fixture(scope="module")
def model():
    return model_of(Setting(QUICK))


@pytest.mark.parametrize("peer", [Dynamic, Static])
def test_a_peer_holds_as_many_tokens_in_every_step(model, peer):
    made = peer(model, 40)
    seen = []
    made.cache.update, update = (
        lambda *given, **more: seen.append(given[0].shape[2]) or update(*given, **more),
        made.cache.update,
    )
    with torch.no_grad():
        for _ in range(3):
            assert int(made.cache.get_seq_length()) == 39
            made.step()
            assert int(made.cache.get_seq_length()) == 40
            made.rewind()
    assert set(seen) == {1}


def test_a_peer_gives_the_same_logits_after_it_was_rewound(model):
    ids = torch.tensor([[3]])
    for peer in (Dynamic, Static):
        made = peer(model, 40)
        with torch.no_grad():
            one = model(ids, past_key_values=made.cache, use_cache=True).logits
            made.rewind()
            two = model(ids, past_key_values=made.cache, use_cache=True).logits
        close_runs(one, two, model)


def test_folds_are_timed_one_by_one(model):
    made = Weir(model, "streaming_llm(32)", chunk=8)
    made.fill(40)
    made.fill(3)
    assert (len(made.folds), made.waiting) == (1, 3)  # one time, however often the call folded
    made.start_afresh()
    assert (made.folds, made.waiting) == ([], 0)
    with torch.no_grad():
        for _ in range(17):
            made.step()
    assert (len(made.folds), made.waiting) == (2, 1)
    assert all(taken > 0 for taken in made.folds)


def test_a_step_reads_the_slots_that_are_in_use(model):
    made = Weir(model, "streaming_llm(32)", chunk=8)
    made.fill(80)
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    assert made.read_bytes == QUICK.layers * 2 * (32 + 4) * heads * dim * 4


def test_the_model_has_the_shape_of_smollm2(model):
    shape = config(Setting().sizes)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (9, 3, 64)
    layer = 576 * (576 + 2 * 192 + 576) + 3 * 576 * 1536 + 2 * 576
    assert 30 * layer + 49152 * 576 + 576 == 134_515_008  # SmolLM2-135M's count on the Hub
    # The embedding is also the output head. It is counted once.
    assert weight_bytes(model) == 4 * sum(p.numel() for p in model.parameters())


def test_a_copy_has_a_bandwidth():
    assert 1e8 < bandwidth(1 << 20) < 1e13
