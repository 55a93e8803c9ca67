"""Attention sinks that a model was trained with: softmax-off-by-one agrees with its formula, and
configurations record the kind of sink.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from reference.models import make, tokens
from reference.sinks import attention_after_a_zero_token
from roundings import close, close_runs, largest, softmax_off, within
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import weir
from weir.errors import WeirError
from weir.loading import skeleton
from weir.models import ModelSink, describe, set_sink, sink_of, zero_sink_attention
from weir.models.attention_sinks import ATTENTION, begin_with_sink

SHAPES = {"heads": (4, 4), "shared heads": (4, 2), "one for all": (6, 1)}
DIM, SCALE = 8, 0.4


class Module(nn.Module):
    """The attributes of an attention layer that an attention function reads."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        self.is_causal = True


def drawn(heads: int, kv_heads: int, length: int, held: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(heads + length)
    sizes = ((2, heads, length, DIM), (2, kv_heads, held, DIM), (2, kv_heads, held, DIM))
    return [torch.randn(size, generator=draw) for size in sizes]


def bound(queries: Tensor, keys: Tensor, values: Tensor) -> float:
    """Bound the error of an output: the rounding of the attention weights, and of the sum of values
    that they weight.
    """
    logit = SCALE * float(queries.norm(dim=-1).max() * keys.norm(dim=-1).max())
    return softmax_off(DIM, logit) * largest(values)


def masks(kind: str, length: int, held: int) -> tuple[Tensor | None, Tensor]:
    """Return a mask in the form in which transformers passes it, and the same as booleans [batch,
    length, tokens], which say what each query sees.
    """
    ahead = torch.arange(held - length, held)[:, None] - torch.arange(held)
    seen = (ahead >= 0).expand(2, -1, -1).clone()
    if kind == "none":
        return None, seen
    if kind == "window":
        seen &= ahead < 3
    if kind != "window":
        seen[1, :, :4] = False  # padding, on the left of one row
    if kind == "added":
        return torch.zeros(2, 1, length, held).masked_fill(~seen[:, None], -torch.inf), seen
    return seen[:, None], seen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["none", "padding", "added", "window"])
@pytest.mark.parametrize(("length", "held"), [(1, 1), (1, 9), (9, 9), (3, 9)])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_it_is_attention_after_an_all_zero_token(shape, kind, length, held, softcap):
    heads, kv_heads = SHAPES[shape]
    if kind == "none" and length not in (1, held):
        pytest.skip("transformers makes a mask here")
    given = drawn(heads, kv_heads, length, held)
    mask, seen = masks(kind, length, held)
    wanted, weights = attention_after_a_zero_token(
        *(t.double() for t in given), seen, SCALE, softcap
    )
    module: Any = Module(heads // kv_heads)
    for more in ({}, {"output_attentions": True}):
        out, shares = zero_sink_attention(
            module, *given, mask, scaling=SCALE, softcap=softcap, **more
        )
        within(out.transpose(1, 2), wanted, bound(*given))
        if more or softcap:
            assert shares is not None
            within(shares, weights, softmax_off(DIM, 20.0))
            assert bool((shares.sum(-1) < 1).all())


@pytest.mark.parametrize("kind", ["none", "padding"])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_its_gradients_are_autograds_of_the_formula(kind, softcap):
    given = [t.requires_grad_() for t in drawn(4, 2, 9, 9)]
    mask, seen = masks(kind, 9, 9)
    exact = [t.detach().double().requires_grad_() for t in given]
    wanted, _ = attention_after_a_zero_token(*exact, seen, SCALE, softcap)
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5))
    (wanted * direction).sum().backward()
    module: Any = Module(2)
    out, _ = zero_sink_attention(module, *given, mask, scaling=SCALE, softcap=softcap)
    (out.transpose(1, 2) * direction).sum().backward()
    for mine, theirs in zip(given, exact, strict=True):
        # A gradient is a sum, over queries or keys, of products of a weight, a value and a key.
        close(mine.grad, theirs.grad, terms=9 * DIM * DIM, size=10 * largest(theirs.grad))


def test_under_autocast_it_is_the_same_in_half_precision():
    given = drawn(4, 2, 9, 9)
    module: Any = Module(2)
    _, seen = masks("none", 9, 9)
    wanted, _ = attention_after_a_zero_token(*(t.double() for t in given), seen, SCALE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = zero_sink_attention(module, *given, None, scaling=SCALE)
        weighed, _ = zero_sink_attention(
            module, *given, None, scaling=SCALE, output_attentions=True
        )
    for got in (out, weighed):
        assert got.dtype == torch.bfloat16
        size = torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps
        within(got.transpose(1, 2), wanted, size * bound(*given))


def test_a_model_with_sink_logits_of_its_own_takes_none():
    module: Any = Module(1)
    with pytest.raises(WeirError, match="its own sink logits"):
        zero_sink_attention(module, *drawn(4, 4, 2, 2), None, s_aux=torch.zeros(4))
    model = make("gpt-oss")
    set_sink(model.config, "zero")
    with pytest.raises(WeirError, match="cannot have"):
        describe(model)


def zero_sink_llama(**more: Any) -> Any:
    return make("llama-zero-sink", **more)


def test_generate_with_transformers_own_caches_is_the_model_read_at_once():
    model, ids = zero_sink_llama(), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    for cache in ("dynamic", "static"):
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=20, do_sample=False,
            cache_implementation=cache, output_logits=True, return_dict_in_generate=True,
            eos_token_id=None,
        )  # fmt: skip
        for row, start in ((0, 0), (1, 5)):
            with torch.no_grad():
                again = model(out.sequences[row : row + 1, start:-1]).logits[0, -20:]
            close_runs(torch.stack([logits[row] for logits in out.logits]), again, model)


def test_the_sink_counts_and_weights_are_told_without_it():
    model, ids = zero_sink_llama(), tokens(1, 12)
    with torch.no_grad():
        told = model(ids, output_attentions=True)
        close_runs(told.logits, model(ids).logits, model)
        model.set_attn_implementation("eager")
        without = model(ids).logits
    assert float((told.logits - without).abs().max()) > 0.1
    assert all(bool((weights.sum(-1) < 0.99).any()) for weights in told.attentions)


def test_a_configuration_says_it_and_a_folder_keeps_it(tmp_path):
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    assert sink_of(config) == ModelSink() == ModelSink("none")
    assert sink_of(config).slots is None
    set_sink(config, "learnable", [3, 5])
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert sink_of(read) == ModelSink("learnable", (3, 5))
    assert sink_of(read).slots == 2
    assert "attn_implementation" not in json.loads((tmp_path / "config.json").read_text())
    set_sink(config, "zero")
    model = AutoModelForCausalLM.from_config(config)
    assert model.config._attn_implementation == ATTENTION
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sink_of(again.config) == ModelSink("zero")
    assert sink_of(again.config).slots == 0
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)
    assert describe(again).sink == ModelSink("zero")
    again.save_pretrained(tmp_path)  # transformers does not save the name of the attention
    without = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(WeirError, match=r"Zero Sink, but its attention is 'sdpa', .*weir\.load"):
        weir.StreamingCache(without, "streaming_llm(16)")
    without.set_attn_implementation(ATTENTION)
    weir.StreamingCache(without, "streaming_llm(16)")
    assert skeleton(str(tmp_path)).config._attn_implementation == ATTENTION
    set_sink(again.config, "none")
    assert sink_of(again.config) == ModelSink()
    assert again.config._attn_implementation == "sdpa"


def test_weir_loads_it_as_it_was_trained(tmp_path):
    model = zero_sink_llama()
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored.pop("attn_implementation", None)
    (tmp_path / "config.json").write_text(json.dumps(stored))
    weir.load("nano")[1].save_pretrained(tmp_path)
    loaded, _ = weir.load(str(tmp_path), device="cpu")
    assert loaded.config._attn_implementation == ATTENTION
    with torch.no_grad():
        assert torch.equal(loaded(tokens(1, 9)).logits, model(tokens(1, 9)).logits)
    loaded.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == ATTENTION


@pytest.mark.slow
def test_without_weir_transformers_says_that_it_does_not_know_the_attention(tmp_path):
    model = make("llama")
    set_sink(model.config, "zero")
    model.save_pretrained(tmp_path)
    code = """
import sys
from transformers import LlamaForCausalLM  # importing only this class is faster
LlamaForCausalLM.from_pretrained(sys.argv[1])
"""
    run = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert run.returncode == 1
    assert ATTENTION in run.stderr


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ("zero", "got 'zero'"),
        ({"kind": "some"}, "one of none, zero, learnable, got 'some'"),
        ({"kind": "zero", "tokens": 3}, "weir_sink"),
        ({"kind": "zero", "tokens": [3]}, "other sinks must have none"),
        ({"kind": "learnable"}, "at least one token"),
        ({"kind": "learnable", "tokens": [-1]}, "ids of at least 0"),
        ({"kind": "learnable", "tokens": ["<s>"]}, "ids of at least 0"),
    ],
)
def test_what_cannot_be_read_is_said(entry, wrong):
    with pytest.raises(WeirError, match=wrong):
        sink_of(LlamaConfig(weir_sink=entry))


@pytest.mark.parametrize("front", [[2], [9, 2], [0, 0]])
def test_a_loaded_tokenizer_begins_every_text_with_a_learnable_sink(tmp_path, front):
    model = make("llama", vocab_size=4096)
    set_sink(model.config, "learnable", front)
    model.save_pretrained(tmp_path)
    plain = weir.load("nano")[1]
    plain.save_pretrained(tmp_path)
    _, tokenizer = weir.load(str(tmp_path), device="cpu")
    bare = plain("Well, Prince", add_special_tokens=False)["input_ids"]
    assert tokenizer("Well, Prince")["input_ids"] == [*front, *bare]
    assert tokenizer("Well, Prince", add_special_tokens=False)["input_ids"] == bare
    tokenizer.save_pretrained(tmp_path)
    assert weir.load(str(tmp_path), device="cpu")[1]("a")["input_ids"][:-1] == front
    assert plain("a")["input_ids"][:-1] == [plain.bos_token_id]


def test_a_sink_that_the_tokenizer_does_not_know_is_refused():
    tokenizer = weir.load("nano")[1]
    begin_with_sink(tokenizer, ModelSink("zero"))
    with pytest.raises(WeirError, match=r"sink, \[99999\], .* does not know all of them"):
        begin_with_sink(tokenizer, ModelSink("learnable", (99999,)))


def test_its_tokens_stand_in_front_once():
    sink = ModelSink("learnable", (7, 8))
    assert sink.first([1, 2]) == [7, 8, 1, 2]
    assert sink.first([7, 1]) == [7, 8, 1]
    assert sink.first([7, 8, 1]) == [7, 8, 1]
    assert sink.first([7, 8, 7, 8]) == [7, 8, 7, 8]
    assert sink.first([]) == [7, 8]
    assert ModelSink("zero").first([1]) == [1]
