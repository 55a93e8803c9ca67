"""Small random models of every family that weir supports.

The random weights have a size that keeps activations near one. The weights of norms are not ones,
and biases are not zeros: a model whose norms all multiply by one would hide a rotation on the wrong
side of a norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.nemotron import modeling_nemotron

import weir.models  # noqa: F401  (registers the attention of Zero Sinks with transformers)

VOCABULARY = 97
WINDOW = 24
"""The window of sliding layers in models that also have layers with full attention."""
WIDE_WINDOW = 160
"""The window of models in which every layer is a sliding one."""

_LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_ZERO_SINK = {"weir_sink": {"kind": "zero"}, "attn_implementation": "weir_zero_sink"}
# Every expert is chosen, so that rounding cannot change a router's choice.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 4}
_WIDE = {**_LLAMA_LIKE, "hidden_size": 64}  # heads of 16, for partial rotary embedding
_NO_KV = {name: value for name, value in _WIDE.items() if name != "num_key_value_heads"}
_FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


def _gemma3(**more: Any) -> dict[str, Any]:
    return {**_LLAMA_LIKE, **_MIXED, "head_dim": 16, "query_pre_attn_scalar": 16, **more}


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _LLAMA_LIKE),
    "llama-llama3": (
        "LlamaConfig",
        {
            **_LLAMA_LIKE,
            **_rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    "llama-yarn": (
        "LlamaConfig",
        {**_LLAMA_LIKE, **_rope("yarn", factor=4.0, original_max_position_embeddings=64)},
    ),
    "mistral": ("MistralConfig", {**_LLAMA_LIKE, "sliding_window": None}),
    "mistral-sliding": ("MistralConfig", {**_LLAMA_LIKE, "sliding_window": WIDE_WINDOW}),
    "qwen2": ("Qwen2Config", _LLAMA_LIKE),
    "qwen3": ("Qwen3Config", {**_LLAMA_LIKE, "head_dim": 16}),
    "gemma": ("GemmaConfig", {**_LLAMA_LIKE, "head_dim": 16}),
    "gemma2": ("Gemma2Config", _gemma3(attn_logit_softcapping=5.0)),
    "gemma3": ("Gemma3TextConfig", _gemma3()),
    "gemma3-multimodal": (
        "Gemma3Config",
        {
            "text_config": {"model_type": "gemma3_text", **_gemma3()},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": VOCABULARY - 1,
            "boi_token_index": VOCABULARY - 2,
            "eoi_token_index": VOCABULARY - 3,
        },
    ),
    "phi3": ("Phi3Config", {**_WIDE, **_rope("default", partial_rotary_factor=0.5)}),
    "phi3-longrope": (
        "Phi3Config",
        {
            **_LLAMA_LIKE,
            "original_max_position_embeddings": 192,
            **_rope(
                "longrope",
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[2.0, 3.0, 4.0, 5.0],
                original_max_position_embeddings=192,
            ),
        },
    ),
    "olmo2": ("Olmo2Config", _LLAMA_LIKE),
    "smollm3": ("SmolLM3Config", {**_LLAMA_LIKE, "no_rope_layers": [1, 0]}),
    "gpt-neox": ("GPTNeoXConfig", {**_NO_KV, **_rope("default", partial_rotary_factor=0.25)}),
    "gpt-oss": ("GptOssConfig", {**_LLAMA_LIKE, **_MIXED, **_LOCAL_EXPERTS, "head_dim": 8}),
    "llama-zero-sink": ("LlamaConfig", {**_LLAMA_LIKE, **_ZERO_SINK}),
    "qwen3-zero-sink": ("Qwen3Config", {**_LLAMA_LIKE, "head_dim": 16, **_ZERO_SINK}),
    "gemma2-zero-sink": ("Gemma2Config", _gemma3(attn_logit_softcapping=5.0, **_ZERO_SINK)),
    "apertus": ("ApertusConfig", _LLAMA_LIKE),
    "arcee": ("ArceeConfig", _LLAMA_LIKE),
    "exaone4": ("Exaone4Config", {**_LLAMA_LIKE, **_MIXED}),
    "granite": ("GraniteConfig", {**_LLAMA_LIKE, "attention_multiplier": 0.4}),
    "granitemoe": (
        "GraniteMoeConfig",
        {**_LLAMA_LIKE, **_LOCAL_EXPERTS, "attention_multiplier": 0.4},
    ),
    "ministral": ("MinistralConfig", {**_LLAMA_LIKE, **_MIXED, "head_dim": 8}),
    "mixtral": ("MixtralConfig", {**_LLAMA_LIKE, **_LOCAL_EXPERTS}),
    "nemotron": ("NemotronConfig", _WIDE),
    "olmo": ("OlmoConfig", {**_LLAMA_LIKE, "clip_qkv": 2.0}),
    "olmo3": ("Olmo3Config", {**_LLAMA_LIKE, **_MIXED}),
    "olmoe": ("OlmoeConfig", {**_LLAMA_LIKE, **_EXPERTS}),
    "persimmon": ("PersimmonConfig", _NO_KV),
    "phi": ("PhiConfig", _WIDE),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            **_LLAMA_LIKE,
            **_EXPERTS,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "qwen3-moe": ("Qwen3MoeConfig", {**_LLAMA_LIKE, **_EXPERTS, "moe_intermediate_size": 16}),
    "seed-oss": ("SeedOssConfig", {**_LLAMA_LIKE, "head_dim": 8}),
    "stablelm": ("StableLmConfig", {**_WIDE, "qk_layernorm": True}),
    "starcoder2": ("Starcoder2Config", _LLAMA_LIKE),
    "falcon": ("FalconConfig", _FALCON),
    # With twelve heads, some slopes are no powers of two, and Falcon's bfloat16 rounds them.
    "falcon-alibi": (
        "FalconConfig",
        {**_FALCON, "num_attention_heads": 12, "alibi": True, "parallel_attn": False},
    ),
    "falcon-heads": (
        "FalconConfig",
        {**_FALCON, "alibi": True, "multi_query": False, "bias": True},
    ),
    "falcon-new": (
        "FalconConfig",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon-new-alibi": (
        "FalconConfig",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 3, "alibi": True},
    ),
    "mpt": (
        "MptConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 48,
            "n_layers": 2,
            "n_heads": 6,
            "max_seq_len": 256,
            "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.5},
        },
    ),
    "bloom": (
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 2, "n_head": 6},
    ),
}
"""For each name, as pytest shows it, a configuration class and its values."""

if not hasattr(modeling_nemotron, "ALL_ATTENTION_FUNCTIONS"):
    del CONFIGS["nemotron"]  # older transformers give it separate attention code: refused

PLAINLY_EAGER = ("gemma2",)
"""Families whose fused attention ignores the soft cap in older versions of transformers."""

UNROTATED = {"smollm3": (1,), "exaone4": (1,)}
"""The layers without positions, for families that have such layers."""

MIXED = [
    name for name, (_, values) in CONFIGS.items() if "sliding" in str(values.get("layer_types"))
]
MIXED.append("gemma3-multimodal")
"""Families with both sliding layers and layers with full attention."""

QUICK = {
    *("llama", "llama-yarn", "mistral-sliding", "gemma2", "gemma3", "phi3-longrope"),
    *("gpt-neox", "gpt-oss", "llama-zero-sink", "falcon-alibi", "mpt", "bloom"),
}
"""Families that together have all kinds of positions, windows, soft caps and sinks."""
FAMILIES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS
]
"""All families. Those that are not in `QUICK` are marked as slow."""

OWN_ATTENTION = [name for name in CONFIGS if name.startswith(("falcon", "mpt", "bloom"))]
"""Families outside transformers' attention interface."""


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A new model of the family, in evaluation mode; `changes` go into its configuration."""
    kind, values = CONFIGS[name]
    config = getattr(transformers, kind)(**{**values, **changes})
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    if name == "gemma3-multimodal":
        build = transformers.Gemma3ForConditionalGeneration._from_config
    eager = {"attn_implementation": "eager"} if name in PLAINLY_EAGER else {}
    return randomized(build(config, dtype=dtype, **eager))


@cache
def shared(name: str) -> PreTrainedModel:
    """One float32 model of the family for all tests, which must not change it."""
    return make(name)


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """The model with new weights, always the same ones."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(noise / math.sqrt(weight.shape[-1]))
            else:
                weight.copy_(weight + 0.3 * noise)
    return model.eval()


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Token ids [batch, length], no padding and no image among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY - 3, (batch, length), generator=generator)
