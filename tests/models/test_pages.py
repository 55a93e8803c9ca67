"""Weights that are moved into large pages of memory are the same weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from weir.models import pages, products
from weir.models.pages import LARGE, into_large_pages

CONFIG = LlamaConfig(
    vocab_size=9000,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=True,
)


@pytest.fixture
def offered(monkeypatch, tmp_path):
    """A system that has large pages; the one at hand may not."""
    mode = tmp_path / "enabled"
    mode.write_text("always [madvise] never\n")
    monkeypatch.setattr(pages, "MODE", mode)
    return mode


@pytest.fixture
def weight():
    return nn.Parameter(torch.randn(1100, 500))  # 2.2 MB


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def test_a_weight_stays_the_same_object_and_has_the_same_numbers(offered, weight):
    before, lay = weight.detach().clone(), weight.data_ptr()
    assert into_large_pages([weight]) >= weight.nbytes
    assert weight.data_ptr() != lay
    assert weight.data_ptr() % LARGE == 0
    assert torch.equal(weight, before)
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(weight, before * 2)


def test_what_was_moved_is_not_moved_again_until_it_lies_elsewhere(offered, weight):
    into_large_pages([weight])
    lies = weight.data_ptr()
    assert into_large_pages([weight]) == 0
    assert weight.data_ptr() == lies
    weight.data = weight.detach().clone()
    assert into_large_pages([weight]) > 0


def test_linux_gives_large_pages(weight):
    if not pages._offered():
        pytest.skip("this system has no large pages")
    weights = [nn.Parameter(torch.randn(1100, 500)) for _ in range(8)]
    into_large_pages(weights)
    start, inside = weights[0].data_ptr(), False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        first = line.split()[0]
        if "-" in first:
            low, high = (int(each, 16) for each in first.split("-"))
            inside = low <= start < high
        if inside and first == "AnonHugePages:":
            assert int(line.split()[1]) * 1024 >= 4 * LARGE  # of eight: memory may be in pieces
            return
    pytest.fail("the weights lie nowhere")


@pytest.mark.parametrize("why", ["never", "no file", "no memory", "refused", "small"])
def test_without_large_pages_nothing_happens(offered, monkeypatch, weight, why):
    if why == "never":
        offered.write_text("always madvise [never]\n")
    elif why == "no file":
        offered.unlink()
    elif why == "no memory":
        monkeypatch.setattr(pages, "free_memory", lambda device: weight.nbytes)
    elif why == "refused":

        def refuse(*args, **kwargs):
            raise OSError("Cannot allocate memory")

        monkeypatch.setattr(pages.mmap, "mmap", refuse)
    else:
        weight = nn.Parameter(torch.randn(10, 10))
    lay = weight.data_ptr()
    assert into_large_pages([weight]) == 0
    assert weight.data_ptr() == lay


def test_a_model_is_saved_copied_and_loaded_as_before(offered, monkeypatch, model, tmp_path):
    ids = torch.tensor([[1, 2, 3]])
    model.save_pretrained(tmp_path / "before")
    with torch.no_grad():
        said = model(ids).logits
    monkeypatch.setattr(products, "_gains", lambda *_: (0.5, 0.5))
    products.choose_products(model, remembered=tmp_path / "products.json")
    assert all(each.data_ptr() == pages._MOVED.get(each) for each in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(model(ids).logits, said)
    model.save_pretrained(tmp_path / "after")
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("before", "after")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})
        assert torch.equal(other(ids).logits, said)
        assert not torch.equal(model(ids).logits, said)
    assert model.to(torch.bfloat16).lm_head.weight.dtype is torch.bfloat16


def test_memory_that_somebody_else_uses_stays_where_it_is(offered, monkeypatch, model, tmp_path):
    layer = model.model.layers[0]
    first, second = layer.mlp.gate_proj, layer.mlp.up_proj
    second.weight = nn.Parameter(first.weight.data)
    shared = layer.self_attn.q_proj.weight
    shared.data.share_memory_()
    monkeypatch.setattr(products, "_gains", lambda *_: (0.5, 0.5))
    products.choose_products(model, remembered=tmp_path / "products.json")
    assert first.weight.data_ptr() == second.weight.data_ptr()
    assert shared.is_shared()
    assert model.lm_head.weight in pages._MOVED
