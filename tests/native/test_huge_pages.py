"""Weights that are moved into large pages of memory are the same weights."""

from __future__ import annotations

import copy
import mmap
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from weir.native import dispatch, huge_pages, linear_kernels, quantize_weights
from weir.native.huge_pages import move_to_huge_pages
from weir.slab import LARGE_PAGE

pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="only Linux gives large pages on request"
)
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
    """Pretend that this system has large pages, because it may not."""
    mode = tmp_path / "enabled"
    mode.write_text("always [madvise] never\n")
    monkeypatch.setattr(huge_pages, "MODE", mode)
    return mode


@pytest.fixture
def choose(offered, monkeypatch, tmp_path):
    """`choose_products` with a kernel that is never faster than PyTorch."""
    monkeypatch.setattr(dispatch, "linear", lambda device: nn.functional.linear)
    monkeypatch.setattr(linear_kernels, "_gain", lambda *_: 0.5)
    return partial(linear_kernels.choose_products, remembered=tmp_path / "products.json")


@pytest.fixture
def weight():
    return nn.Parameter(torch.randn(1100, 500))  # 2.2 MB


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def test_a_weight_stays_the_same_object_and_has_the_same_numbers(offered, weight):
    before, lay = weight.detach().clone(), weight.data_ptr()
    assert move_to_huge_pages([weight]) >= weight.nbytes
    assert weight.data_ptr() != lay
    assert weight.data_ptr() % LARGE_PAGE == 0
    assert torch.equal(weight, before)
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(weight, before * 2)


def test_what_was_moved_is_not_moved_again_until_it_lies_elsewhere(offered, weight):
    move_to_huge_pages([weight])
    lies = weight.data_ptr()
    assert move_to_huge_pages([weight]) == 0
    assert weight.data_ptr() == lies
    weight.data = weight.detach().clone()
    assert move_to_huge_pages([weight]) > 0


def test_weights_in_blocks_are_moved_too(offered):
    model = LlamaForCausalLM(LlamaConfig(**CONFIG.to_dict() | {"vocab_size": 40_000}))
    quantize_weights(model, "q8_0")
    head, embedding = model.lm_head, model.model.embed_tokens
    assert head.codes is embedding.codes and head.scales is embedding.scales
    for layer in (head, model.model.layers[0].mlp.up_proj):
        for held in (layer.codes, layer.scales):
            assert huge_pages._MOVED[held] == held.data_ptr()


def test_tensors_without_numbers_are_left_where_they_are(offered, weight):
    """For example, 16-bit weights in blocks have no scales."""
    none = torch.empty(2, 0, 16)
    assert move_to_huge_pages([none, weight]) >= weight.nbytes
    assert none.shape == (2, 0, 16)
    assert huge_pages.LargePages().empty((2, 0, 16), torch.int16).shape == (2, 0, 16)


def test_linux_gives_large_pages(weight):
    if not huge_pages._has_large_pages():
        pytest.skip("this system has no large pages")
    weights = [nn.Parameter(torch.randn(1100, 500)) for _ in range(8)]
    move_to_huge_pages(weights)
    start, inside = weights[0].data_ptr(), False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        first = line.split()[0]
        if "-" in first:
            low, high = (int(each, 16) for each in first.split("-"))
            inside = low <= start < high
        if inside and first == "AnonHugePages:":
            if not int(line.split()[1]):
                pytest.skip("the machine's free memory is in small pieces")
            return
    pytest.fail("no memory map contains the weights")


@pytest.mark.parametrize("why", ["never", "no file", "no memory", "refused", "small"])
def test_without_large_pages_nothing_happens(offered, monkeypatch, weight, why):
    if why == "never":
        offered.write_text("always madvise [never]\n")
    elif why == "no file":
        offered.unlink()
    elif why == "no memory":
        monkeypatch.setattr(huge_pages, "free_memory", lambda device: weight.nbytes)
    elif why == "refused":

        def refuse(*args, **kwargs):
            raise OSError("Cannot allocate memory")

        monkeypatch.setattr(huge_pages.mmap, "mmap", refuse)
    else:
        weight = nn.Parameter(torch.randn(10, 10))
    lay = weight.data_ptr()
    assert move_to_huge_pages([weight]) == 0
    assert weight.data_ptr() == lay


def test_a_model_is_saved_copied_and_loaded_as_before(choose, model, tmp_path):
    ids = torch.tensor([[1, 2, 3]])
    model.save_pretrained(tmp_path / "before")
    with torch.no_grad():
        said = model(ids).logits
    choose(model)
    assert all(each.data_ptr() == huge_pages._MOVED.get(each) for each in model.parameters())
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


def test_memory_that_somebody_else_uses_stays_where_it_is(choose, model):
    layer = model.model.layers[0]
    first, second = layer.mlp.gate_proj, layer.mlp.up_proj
    second.weight = nn.Parameter(first.weight.data)
    shared = layer.self_attn.q_proj.weight
    shared.data.share_memory_()
    choose(model)
    assert first.weight.data_ptr() == second.weight.data_ptr()
    assert shared.is_shared()
    assert model.lm_head.weight in huge_pages._MOVED


def test_parts_and_buffers_stay_of_the_memory_they_are_of(choose, model):
    layer = model.model.layers[0]
    part = model.lm_head.weight.data.view(-1)[: 64 * 96].view(64, 96)
    layer.mlp.down_proj.weight = nn.Parameter(part)
    layer.register_buffer("seen", layer.self_attn.k_proj.weight.data)
    layer.turned = nn.Parameter(layer.mlp.up_proj.weight.data.T)  # not contiguous
    layer.register_buffer(
        "pairs", torch.view_as_complex(layer.mlp.gate_proj.weight.data.view(96, 32, 2))
    )
    layer.alone = nn.Parameter(torch.randn(1100, 500))  # otherwise there is too little to move
    choose(model)
    assert layer.alone in huge_pages._MOVED
    for one, other in (
        (layer.mlp.down_proj.weight, model.lm_head.weight),
        (layer.seen, layer.self_attn.k_proj.weight),
        (layer.turned, layer.mlp.up_proj.weight),
        (layer.pairs, layer.mlp.gate_proj.weight),
    ):
        assert one.data_ptr() == other.data_ptr()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_model_can_be_trained_wherever_it_was_moved(choose, model, mode):
    with mode():
        choose(model)
    assert model.lm_head.weight in huge_pages._MOVED
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_a_weight_that_was_made_for_inference_stays_where_it_is(offered):
    with torch.inference_mode():
        made = torch.randn(1100, 500)
    assert move_to_huge_pages([made]) == 0


def test_a_large_weight_has_memory_of_its_own_which_goes_with_it(offered, monkeypatch):
    monkeypatch.setattr(huge_pages, "ALONE", LARGE_PAGE)
    first, second = (nn.Parameter(torch.randn(1100, 500)) for _ in range(2))
    move_to_huge_pages([first, second])
    assert first.data_ptr() % LARGE_PAGE == second.data_ptr() % LARGE_PAGE == 0
    lay = first.data_ptr()
    first.data = first.detach().clone()
    maps = Path("/proc/self/maps").read_text("utf-8").splitlines()
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    assert not any(low <= lay < high for low, high in spans)


def test_odd_parameters_are_left_alone(choose):
    model = nn.ModuleDict({"lazy": nn.LazyLinear(3), "plain": nn.Linear(1100, 500)})
    model.plain.sparse = nn.Parameter(torch.eye(4).to_sparse_csr(), requires_grad=False)
    choose(model)
    assert model.plain.weight in huge_pages._MOVED


def test_memory_for_tensors_to_come_is_large_pages_and_theirs_alone(offered, monkeypatch):
    pages = huge_pages.LargePages()
    monkeypatch.setattr(huge_pages, "CHUNK", 2**22)
    made = [
        pages.empty(shape, dtype)
        for shape, dtype in (
            ((3, 5, 7), torch.uint8),
            ((2**20,), torch.float32),  # does not fit in the rest of a chunk
            ((0, 4), torch.int16),
            ((1100, 500), torch.bfloat16),
        )
    ]
    for number, t in enumerate(made):
        t.fill_(number)
    assert [set(t.unique().tolist()) for t in made] == [{0}, {1}, set(), {3}]
    assert [tuple(t.shape) for t in made] == [(3, 5, 7), (2**20,), (0, 4), (1100, 500)]
    assert all(t.data_ptr() % huge_pages.LINE == 0 for t in made)
    assert move_to_huge_pages(made) == 0  # they are there already


def test_without_large_pages_tensors_get_usual_memory(offered):
    offered.write_text("always madvise [never]\n")
    made = huge_pages.LargePages().empty((4, 4), torch.int16)
    assert made.shape == (4, 4) and made.dtype == torch.int16
