"""Layers that look up earlier tokens: found where they are, once, and nowhere else."""

from __future__ import annotations

import json

import pytest
import torch
from reference.models import make

import weir
from weir.cache import fit_to_model
from weir.models import find_lookup_layers, lookup_layers, lookup_scores


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """A folder for what is kept, and nothing shipped."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(lookup_layers, "_SHIPPED", tmp_path / "none.json")
    return tmp_path / "weir" / lookup_layers.FILE


def test_nano_looks_things_up_in_its_third_layer():
    model, _ = weir.load("nano")
    scores = lookup_scores(model)
    assert scores[2] > 0.9 and scores[0] < lookup_layers.LOOKS_UP
    assert list(find_lookup_layers(model)) == [
        n for n, s in enumerate(scores) if s >= lookup_layers.LOOKS_UP
    ]


def test_scores_are_those_of_the_models_own_attention():
    """Against the weights that transformers' eager attention returns."""
    model, _ = weir.load("nano")
    draw, size = torch.Generator().manual_seed(0), model.config.vocab_size
    ids = torch.randint(size // 16, size, (1, 128), generator=draw).repeat(1, 2)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        shares = model(ids, output_attentions=True).attentions
    model.set_attn_implementation(before)
    wanted = [
        layer[0, :, 128:, 8:128].unflatten(0, (2, -1)).amax(dim=(1, 2)).mean(-1).max()
        for layer in shares
    ]
    assert torch.tensor(lookup_scores(model)).allclose(torch.stack(wanted), atol=1e-4)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "qwen3", "phi3", "bloom", "mpt"])
def test_models_without_training_look_nothing_up(name, kept):
    try:
        model = make(name)
    except Exception as error:  # a family that this transformers does not have
        pytest.skip(str(error))
    assert find_lookup_layers(model) == ()
    assert not kept.exists()


def test_a_model_in_training_stays_as_it_is(fresh_llama):
    model = fresh_llama().train()
    model.lm_head.eval()
    lookup_scores(model)
    assert model.training and model.model.training and not model.lm_head.training


def test_what_was_found_is_kept_by_the_weights(kept, monkeypatch):
    model, _ = weir.load("nano")
    lookup_layers._KNOWN.clear()
    found = find_lookup_layers(model)
    assert list(json.loads(kept.read_text()).values()) == [list(found)]
    lookup_layers._KNOWN.clear()
    monkeypatch.setattr(lookup_layers, "lookup_scores", None)
    assert find_lookup_layers(model) == found
    kept.write_text('{"broken": ')
    lookup_layers._KNOWN.clear()
    with pytest.raises(TypeError):  # measured anew
        find_lookup_layers(model)
    lookup_layers._KNOWN.clear()


def test_alike_measures_nothing(fresh_llama, monkeypatch):
    monkeypatch.setattr("weir.cache.default_policy.find_lookup_layers", None)
    stream = weir.Stream(fresh_llama(), "weir(64, layers=alike)")
    assert stream.policy == weir.policy("weir(64)")
    with pytest.raises(TypeError):  # what the same without it does
        weir.Stream(fresh_llama(), "weir(64)")


def test_weir_gives_them_what_the_others_leave():
    model, _ = weir.load("nano")
    looking = find_lookup_layers(model)
    fitted = fit_to_model(weir.policy("weir(320)"), model)
    slots = [fitted.for_layer(n, 4).slots for n in range(4)]
    far = {slots[n] for n in looking}
    assert sum(slots) <= 4 * 320 and far == {
        min(448, (1280 - 256 * (4 - len(looking))) // len(looking))
    }
    assert str(weir.Stream(model, "weir(320)").policy) == str(fitted)
    pinned = fit_to_model(weir.policy("pinned(weir(320), 8, 4)"), model)
    assert pinned.for_layer(2, 4).slots == slots[2]  # no more than the window holds
    whole = weir.policy("pinned(weir(436), 8, 4)")  # with 64 new tokens all that the window holds
    assert fit_to_model(whole, model) is whole
    again = weir.Stream(model, str(fitted))
    assert again.policy == fitted
