"""Norms by prompt length, compared with norms computed from transformers' own cache."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
import torch
from reference.models import make, tokens

import weir
from weir.errors import WeirError
from weir.evals.inspect.norms import NAMES, measure, section
from weir.evals.inspect.section import Inspection
from weir.evals.scores import student


@pytest.fixture(scope="module")
def nano():
    return weir.load("nano")


def asked_of(model, **more):
    return Inspection(model, None, "a model", "", **more)


def direct(model, ids, kv_heads=slice(None), heads=slice(None)):
    """Norms of one prompt [heads, length] for each layer and kind, from transformers alone."""
    queries = {}
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(
            lambda module, args, out, n=n: queries.__setitem__(n, out)
        )
        for n, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        cache = model(ids[None], use_cache=True).past_key_values
    for hook in hooks:
        hook.remove()
    found = []
    for n, layer in enumerate(cache.layers):
        q = queries[n][0].view(len(ids), 4, 16).transpose(0, 1)  # rotation changes no norm
        k = layer.keys[0].double()
        shifted = k - k.mean(dim=1, keepdim=True)
        found.append(
            {
                "queries": q.double().norm(dim=2)[heads],
                "keys, shifted": shifted.norm(dim=2)[kv_heads],
                "values": layer.values[0].double().norm(dim=2)[kv_heads],
            }
        )
    return found


def test_norms_are_those_of_what_transformers_caches(llama, ids):
    prompts = ids(3, 40)
    norms = measure(asked_of(llama), prompts)
    assert (norms["tokens"], norms["prompts"]) == (40, 3)
    wanted = [direct(llama, prompt) for prompt in prompts]
    for name, kind in NAMES.items():
        every = [torch.cat([layer[kind].flatten() for layer in layers]) for layers in wanted]
        means = [float(x.mean()) for x in every]
        assert norms[name]["by_prompt"] == pytest.approx(means, rel=1e-5)
        assert norms[name]["mean"] == pytest.approx(fmean(means), rel=1e-5)
        # The paper's interval is that of a mean, with all vectors taken as independent.
        papers = fmean(1.959964 * float(x.std()) / math.sqrt(len(x)) for x in every)
        assert norms[name]["reach"] == pytest.approx(papers, rel=1e-4)
        others = student(2) * stdev(means) / math.sqrt(3)
        assert norms[name]["reach_over_prompts"] == pytest.approx(others, rel=1e-3)
        for n in range(2):
            layer = torch.cat([layers[n][kind] for layers in wanted], dim=1)
            mean = norms[name]["by_layer"][str(n)]
            assert mean == pytest.approx(float(layer.mean()), rel=1e-5)


def test_chosen_layers_and_heads_and_the_kv_heads_they_read(llama, ids):
    prompts = ids(1, 20)
    norms = measure(asked_of(llama, layers=(1,), heads=(3,)), prompts)
    wanted = direct(llama, prompts[0], kv_heads=slice(1, 2), heads=slice(3, 4))[1]
    for name, kind in NAMES.items():
        assert list(norms[name]["by_layer"]) == ["1"]
        assert norms[name]["mean"] == pytest.approx(float(wanted[kind].mean()), rel=1e-5)
        assert norms[name]["reach_over_prompts"] is None  # one prompt


@pytest.mark.parametrize("family", ["bloom", "falcon", "gemma3", "mistral-sliding", "gpt-oss"])
def test_every_kind_of_model_has_norms(family):
    model = make(family)
    norms = measure(asked_of(model), tokens(2, 30))
    for name in NAMES:
        assert len(norms[name]["by_layer"]) == model.config.num_hidden_layers
        assert norms[name]["mean"] > 0


def test_the_section_has_a_row_for_every_length(nano):
    text = "All happy families are alike; each unhappy family is unhappy in its own way. " * 20
    told = section(Inspection(*nano, "nano", text, tokens=64))
    assert told.table is not None
    assert [row[0] for row in told.table.rows] == ["8", "16", "32", "64"]
    assert [row[1] for row in told.table.rows] == ["5", "5", "5", "5"]
    assert [row["tokens"] for row in told.facts["lengths"]] == [8, 16, 32, 64]
    assert told.facts["lengths"][3]["queries"]["reach_over_prompts"] > 0
    (picture,) = told.pictures
    panels = picture.figure.axes
    assert [axes.get_title("left") for axes in panels] == list(NAMES.values())
    assert "tokens" in panels[-1].get_xlabel() and picture.figure.get_supylabel()
    assert all(axes.get_ylim()[0] == 0 for axes in panels)


def test_a_text_too_short_and_prompts_too_long_are_refused(nano):
    with pytest.raises(WeirError, match=r"3 tokens are too few\. Use a text of at least 8"):
        section(Inspection(*nano, "nano", "so it"))
    with pytest.raises(WeirError, match=r"5,000 tokens do not fit in .* Use at most 4,096 tokens"):
        section(Inspection(*nano, "nano", "so it goes " * 50, tokens=5000))
