"""A policy that holds more tokens than its model was made for causes one warning, and no error."""

from __future__ import annotations

import warnings

import pytest
import torch
from reference.models import make

import weir
from weir.cache import describe_window_excess, size_of
from weir.models import CACHE

WINDOW = 256
"""The window of the model, in tokens."""


@pytest.fixture
def small(fresh_llama):
    return fresh_llama(max_position_embeddings=WINDOW)


def told(make) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make()
    return [it for it in found if str(it.message).startswith("weir: ")]


@pytest.mark.parametrize("make", [weir.Stream, weir.StreamingCache])
def test_more_than_the_window_is_told_where_weir_was_called(small, make):
    assert not told(lambda: make(small))
    (usual,) = told(lambda: make(small, "weir(256)"))
    assert str(usual.message) == (
        "weir: weir(256) and a chunk of 64 hold up to 320 tokens, but this model was made "
        "for 256; beyond that, its answers are unreliable"
    )
    assert usual.filename == __file__
    assert len(told(lambda: make(small, "h2o(249)", chunk=8))) == 1
    assert not told(lambda: make(small, "h2o(248)", chunk=8))


def test_a_policy_without_a_limit_and_places_in_the_stream_are_passed_over(small):
    assert not told(lambda: weir.Stream(small, "dense"))
    assert not told(lambda: weir.Stream(small, "recompute(64)"))
    assert not told(lambda: weir.Stream(small, "h2o(400)", positions="original"))


def test_the_largest_layer_counts(small):
    layers = small.config.num_hidden_layers
    policy = weir.policy("pyramid(h2o(200), beta=20)")
    most = max(size_of(small, policy, chunk=8).slots)
    assert layers > 1 and most + 8 > WINDOW > 208
    assert f"hold up to {most + 8} tokens" in (describe_window_excess(small, policy, 8) or "")


def test_a_policy_without_a_limit_is_told_where_frequencies_change():
    model = make("phi3-longrope")
    said = describe_window_excess(model, weir.policy("dense"), 8) or ""
    assert "past 192 tokens this model changes its rotary frequencies" in said
    # Past 192 tokens, weir and transformers use the same frequencies.
    ids = torch.randint(1, 90, (1, 250), generator=torch.Generator().manual_seed(0))
    logits = weir.Stream(model, "window(248)", chunk=8).feed(ids, all_logits=True)
    assert logits.allclose(model(ids, use_cache=False).logits, atol=1e-4)


def test_frequencies_that_never_change_are_not_said_to_change():
    model = make("phi3-longrope")
    rope = model.config.rope_parameters
    model.config.rope_parameters = {**rope, "long_factor": rope["short_factor"]}
    assert describe_window_excess(model, weir.policy("dense"), 8) is None


@pytest.mark.parametrize(
    ("name", "known", "why"),
    [
        ("phi3-longrope", 192, "past 192 tokens this model changes its rotary frequencies"),
        ("llama", WINDOW, f"this model was made for {WINDOW} tokens"),
    ],
)
def test_places_past_those_of_a_model_are_told_once(name, known, why):
    model = make(name, **({} if "rope" in name else {"max_position_embeddings": WINDOW}))
    stream = weir.Stream(model, "window(16)", chunk=8, positions="original")
    rolling = weir.Stream(model, "window(16)", chunk=8)
    ids = torch.randint(1, 60, (known + 2,), generator=torch.Generator().manual_seed(0))
    assert not told(lambda: stream.feed(ids[:known]))
    (said,) = told(lambda: stream.feed(ids[known:]))
    assert why in str(said.message) and 'positions="rolling"' in str(said.message)
    assert not told(lambda: stream.feed(ids))
    assert not told(lambda: rolling.feed(ids))


def test_places_are_counted_from_the_origin_and_the_caller_is_pointed_at(small):
    cache = weir.StreamingCache(small, "window(16)", positions="original", origin=WINDOW - 2)
    ids = torch.tensor([[3, 1]])
    assert not told(lambda: small(ids, **{CACHE: cache}))
    with pytest.warns(UserWarning, match="passed the last place") as found:
        small(ids, **{CACHE: cache})
    assert found[0].filename == __file__
