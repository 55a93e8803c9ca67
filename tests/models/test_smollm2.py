"""Tests on a real pretrained model, SmolLM2-135M-Instruct, which has 30 layers.

With all layers, the naive loop would take minutes for each policy, so it is compared on a model of
the first three layers. Their weights, keys and attention sink are just as real.
"""

from __future__ import annotations

import copy

import pytest
import torch
from reference.heavy import heavy_of
from reference.hive import hive_of
from reference.kcenter import kcenter_of
from reference.naive import Naive, pipe_of, recent_of, sink_of
from reference.snap import snap_of
from roundings import close_runs

import weir
from weir.policies import NAMED
from weir.stream import read_stream

pytestmark = pytest.mark.models
TOKENS = 300
INSIDE = 100
"""A number of tokens that fits in the budget of every layer, even the smallest of a pyramid."""
LAYERS = 3
APART = {"recompute", "kvzip", "pinned", "pyramid", "quantized"}
"""Policies that wrap another policy, or that a cache alone cannot run."""


@pytest.fixture(scope="module")
def text(smollm2):
    return read_stream(smollm2[1], most=1500).ids


@pytest.fixture(scope="module")
def dense(smollm2, text):
    with torch.no_grad():
        return smollm2[0](text[None, :INSIDE], use_cache=False).logits[0]


@pytest.mark.parametrize("name", sorted(set(NAMED) - APART))
def test_inside_its_budget_a_policy_is_dense(smollm2, text, dense, name):
    exact = ", slots=exact" if name in {"weir", "centers"} else ""
    policy = "dense" if name == "dense" else f"{name}(budget=2048{exact})"
    got = weir.Stream(smollm2[0], policy).feed(text[:INSIDE], all_logits=True)[0]
    close_runs(got, dense, smollm2[0])


@pytest.fixture(scope="module")
def few_layers(smollm2):
    model = copy.deepcopy(smollm2[0])
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    return model


def votes_of(model):
    def logits_of(at, place, token, queries):
        key = at.rotate(token.key[None], [token.position])[0]
        return (queries @ key * model.model.layers[at.layer].self_attn.scaling).tolist()

    return logits_of


TWINS = {
    "sink(4) | recent(60)": lambda model: [sink_of(4), recent_of(60)],
    "recent(32) | heavy(32)": lambda model: [recent_of(32), heavy_of(32)],
    "sink(4) | recent(11) | hive(49)": lambda model: [sink_of(4), recent_of(11), hive_of(49, 5)],
    "recent(32) | kcenter(32)": lambda model: [
        recent_of(32),
        kcenter_of(
            32,
            lambda t, at: at.rotate(t.key[None], t.position)[0].tolist(),
            plain=lambda t: t.key.tolist(),
        ),
    ],
    "snap(64, window=16, kernel=5, frame=stream)": lambda model: [
        snap_of(64, 16, 5, logits_of=votes_of(model))
    ],
}


@pytest.mark.parametrize("policy", TWINS)
def test_a_policy_reads_as_its_naive_twin(few_layers, text, policy):
    pools = TWINS[policy](few_layers)
    twin = Naive(few_layers, pipe_of(*pools), len(pools), chunk=16)
    stream = weir.Stream(few_layers, policy, chunk=16)
    got = stream.feed(text[:TOKENS], all_logits=True)[0]
    close_runs(got, twin.feed(text[:TOKENS].tolist()), few_layers)
    for layer in range(LAYERS):
        for head, places in enumerate(stream.slots(layer).position[0].tolist()):
            held = sorted(place for place in places if place >= 0)
            assert held == sorted(token.position for token in twin.slots(layer, head))


@pytest.mark.parametrize("policy", ["weir(budget=128)", "snapkv(budget=128)"])
def test_a_saved_stream_goes_on_bit_for_bit(smollm2, text, policy, tmp_path):
    stream = weir.Stream(smollm2[0], policy)
    stream.feed(text[:430])
    stream.save(tmp_path / "session.safetensors")
    restored = weir.Stream.restore(smollm2[0], tmp_path / "session.safetensors")
    assert torch.equal(stream.feed(text[430:560]), restored.feed(text[430:560]))
    assert list(stream.generate(8)) == list(restored.generate(8))
