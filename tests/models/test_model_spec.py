"""What weir reads off a model, and which models it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from reference.models import CONFIGS, make, randomized, tokens
from reference.streaming import streaming_logits
from roundings import close_runs, largest, run_off
from torch import nn

from weir import StreamingCache, WeirError
from weir.models.model_spec import describe


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("bloom", {"n_head": 8}),
        ("mpt", {"n_heads": 8}),
        ("falcon-alibi", {"num_attention_heads": 8}),
    ],
)
def test_alibi_slopes_are_those_of_the_paper(name: str, heads: dict[str, int]) -> None:
    # Press et al. 2022, section 3: for 8 heads 1/2, 1/4, ... 1/256, exact in every format.
    alibi = describe(make(name, **heads)).layers[0].positions.alibi
    assert alibi is not None
    assert alibi.slopes.tolist() == [2.0**-n for n in range(1, 9)]


SMALL = {"vocab_size": 97, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 97, "d_model": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4, "d_ff": 32},
        "t5 is an encoder-decoder, and weir streams only decoders",
    ),
    "BartForConditionalGeneration": (
        "BartConfig",
        {"vocab_size": 97, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
        "bart is an encoder-decoder, and weir streams only decoders",
    ),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config",
        {**SMALL, "kv_lora_rank": 8, "q_lora_rank": 8, "first_k_dense_replace": 2},
        "deepseek_v3 uses multi-head latent attention: it caches compressed latents, not keys and "
        "values that a pool could choose from",
    ),
    "MambaForCausalLM": (
        "MambaConfig",
        {"vocab_size": 97, "num_hidden_layers": 2, "hidden_size": 32},
        "mamba is a state-space or linear-attention model: its memory already has a fixed "
        "size, and holds no tokens that a pool could choose from",
    ),
    "JambaForCausalLM": (
        "JambaConfig",
        {**SMALL, "num_key_value_heads": 2, "use_mamba_kernels": False},
        "jamba is a state-space or linear-attention model: its memory already has a fixed "
        "size, and holds no tokens that a pool could choose from",
    ),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4},
        "gpt2 adds a position to each token before its first layer",
    ),
    "OPTForCausalLM": (
        "OPTConfig",
        {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        "opt adds a position to each token before its first layer",
    ),
    "BertLMHeadModel": (
        "BertConfig",
        {**SMALL},
        "bert is an encoder, whose tokens also see later tokens, and weir streams only decoders",
    ),
    "CohereForCausalLM": (
        "CohereConfig",
        {**SMALL, "pad_token_id": 0},
        "weir does not know the attention of cohere. It knows apertus, arcee, bloom",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_weir_cannot_serve_is_refused_in_one_sentence(kind: str) -> None:
    config, values, sentence = REFUSED[kind]
    with torch.device("meta"):
        model = getattr(transformers, kind)(getattr(transformers, config)(**values))
    with pytest.raises(WeirError) as refusal:
        StreamingCache(model, "window(20)")
    assert str(refusal.value).startswith(sentence)
    assert "\n" not in str(refusal.value)
    assert not model._forward_pre_hooks


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("HunYuanDenseV1Config", "a norm with weights follows the rotation"),
        ("CohereConfig", "neighboring dimensions turn together"),
        ("HeliumConfig", "neighboring dimensions turn together"),
    ],
)
def test_a_family_that_rotates_otherwise_would_be_noticed(
    kind: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # weir streams none of these families. If somebody added one because it resembles Llama, the
    # tests in `test_families` would fail: random models are enough to show the difference.
    config = getattr(transformers, kind)(**{**CONFIGS["llama"][1], "head_dim": 8})
    model, ids = randomized(transformers.AutoModelForCausalLM.from_config(config)), tokens(2, 60)
    with pytest.raises(WeirError, match="does not know the attention of"):
        StreamingCache(model, "dense")
    monkeypatch.setattr("weir.models.model_spec.INTERFACE_FAMILIES", frozenset({config.model_type}))
    if kind == "CohereConfig":  # its cosines are in another order, which a cache notices
        with pytest.raises(
            WeirError, match="computes other cosines and sines than those of its frequencies"
        ):
            StreamingCache(model, "dense")
        return
    cache = StreamingCache(model, "streaming_llm(budget=24, sinks=4)", chunk=1)
    ours = model(input_ids=ids, past_key_values=cache).logits
    apart = largest(ours - streaming_logits(model, ids, 4, 24))
    assert apart > 100 * run_off(model) * largest(ours), reason


@torch.no_grad()
@pytest.mark.parametrize("order", [[0, 2], [1, 0, 2], [0, 1, 1, 2]])
def test_layers_that_were_moved_need_numbers_of_their_places(order: list[int]) -> None:
    model, ids = make("llama", num_hidden_layers=3), tokens(1, 12)
    model.model.layers = nn.ModuleList(copy.deepcopy(model.model.layers[at]) for at in order)
    model.config.num_hidden_layers = len(order)
    with pytest.raises(WeirError, match=r"has layer_idx .*, from 0 to"):
        StreamingCache(model, "window(20)")
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    ours = model(input_ids=ids, past_key_values=StreamingCache(model, "window(20)")).logits
    close_runs(ours, model(input_ids=ids, use_cache=False).logits, model)


def test_attention_that_would_not_ask_for_weirs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    StreamingCache(model)
    monkeypatch.delattr("transformers.models.llama.modeling_llama.ALL_ATTENTION_FUNCTIONS")
    with pytest.raises(WeirError, match="the attention of this llama cannot be replaced"):
        StreamingCache(model)


def test_only_caches_that_generate_would_drop_are_false() -> None:
    assert StreamingCache(make("llama"))
    assert not StreamingCache(make("phi3"))
