"""Families of models that can be read from GGUF files, and the meaning of their keys.

A key is `<architecture>.<suffix>`, and the tables hold suffixes. A family *follows* a suffix if the
model computes what the value says. A key that is in no table, or has a value that no table of the
family allows, is refused by name (`config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COMMON = frozenset(
    """block_count embedding_length context_length attention.head_count vocab_size
    attention.head_count_kv attention.key_length attention.value_length
    feed_forward_length""".split()
)
"""Suffixes that every family follows."""

ROPE = frozenset(
    """rope.freq_base rope.dimension_count rope.scale_linear rope.scaling.type rope.scaling.factor
    rope.scaling.attn_factor rope.scaling.original_context_length rope.scaling.yarn_ext_factor
    rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    rope.scaling.yarn_log_multiplier""".split()
)
"""Suffixes that every family with rotary embeddings follows."""

RMS, PLAIN = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
"""Suffixes of the epsilon of RMS norms, and of norms that also subtract the mean. Some files have
both.
"""

DESCRIBING = frozenset(
    f"{RMS} {PLAIN} rope.scaling.finetuned pooling_type classifier.output_labels "
    "classifier.pooling_type".split()
)
"""Suffixes that do not change what a decoder computes, in families that do not follow them. Every
family follows one of `RMS` and `PLAIN`, the epsilon of its norms.
"""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.q_lora_rank": (0,),
    "attention.kv_lora_rank": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.value_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "n_deepstack_layers": (0,),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "router_logit_softcapping": (0,),
}
"""Values with which a suffix changes nothing, in families that do not follow it."""

SOFTMAX, SIGMOID = 1, 2
"""Numbers of `expert_gating_func`."""


@dataclass(frozen=True)
class Family:
    """Table of the keys of one architecture and their meaning for transformers.

    Attributes:
        kind: transformers' model type.
        epsilon: suffix of the norms' epsilon.
        keys: for each suffix whose value becomes an attribute of the configuration, the name of the
            attribute; "" for values that are converted first (`config`).
        values: for each suffix, the values that the family's code computes with; other values are
            refused.
        attributes: values of attributes that apply unless a key of the file gives another value.
        biases: attributes that say whether a layer has certain tensors, mostly biases, and the
            names of these tensors.
        names: this family's names of attributes, by the names that most families use; "" for
            attributes that the configuration does not have.
        head_size: whether a head may have another size than the hidden size divided by the number
            of heads.
        partial: whether only a part of each head may be rotated.
        rotary: whether positions are rotary embeddings.
        windows: if the file does not say which layers have a window, one layer in this many has
            none. None if the family has no windows, 0 if all layers have one.
        swa_base: RoPE base of layers with a window, if the file does not say; None for the base of
            the other layers, and 0 if all layers of the family have the same base.
    """

    kind: str
    epsilon: str = RMS
    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    head_size: bool = True
    partial: bool = False
    rotary: bool = True
    windows: int | None = None
    swa_base: float | None = 0

    def followed(self) -> frozenset[str]:
        """Return all suffixes that the family follows; those in `values` are followed only with one
        of the values there.
        """
        found = COMMON | {self.epsilon} | set(self.keys) | set(self.values)
        if self.rotary:
            found |= ROPE
        if self.windows is not None:
            found |= {"attention.sliding_window"}
            if self.windows:
                found |= {"attention.sliding_window_pattern"}
        if self.swa_base != 0:
            found |= {"rope.freq_base_swa"}
        return frozenset(found)


_ATTENTION = tuple(f"attn_{part}.bias" for part in ("q", "k", "v", "output"))
_MLP = tuple(f"ffn_{part}.bias" for part in ("gate", "up", "down"))
_META_LAYOUT = {"tensor_data_layout": ("Meta AI original pth",)}
_GRANITE = {
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
}
_GRANITE_ONES = {"logits_scaling": 1.0, "residual_multiplier": 1.0, "embedding_multiplier": 1.0}
# In Granite's files, this key says whether the model has rotary embeddings at all.
_GRANITE_VALUES = {"rope.scaling.finetuned": (True,)}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "llama",
        values=_META_LAYOUT,
        biases={"attention_bias": _ATTENTION, "mlp_bias": _MLP},
    ),
    # A file cannot express that a Mistral has windows, and only the first Mistral had them.
    "mistral3": Family("mistral", attributes={"sliding_window": None}),
    "arcee": Family("arcee", biases={"attention_bias": _ATTENTION, "mlp_bias": _MLP}),
    "qwen2": Family("qwen2"),
    "qwen2moe": Family(
        "qwen2_moe",
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        values={
            "expert_gating_func": (SOFTMAX,),
            "expert_weights_norm": (False,),
        },
        attributes={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3": Family("qwen3", biases={"attention_bias": _ATTENTION}),
    "qwen3moe": Family(
        "qwen3_moe",
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        values={
            "expert_gating_func": (SOFTMAX,),
            "expert_weights_norm": (True,),
        },
        attributes={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        biases={"attention_bias": _ATTENTION},
    ),
    "gemma": Family("gemma"),
    "gemma2": Family(
        "gemma2",
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        attributes={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        windows=2,
    ),
    "gemma3": Family(
        "gemma3_text",
        keys={"final_logit_softcapping": "final_logit_softcapping"},
        attributes={"final_logit_softcapping": None},
        windows=6,
        swa_base=10000.0,
    ),
    "phi2": Family(
        "phi",
        PLAIN,
        names={"rms_norm_eps": "layer_norm_eps"},
        attributes={"qk_layernorm": False, "hidden_act": "gelu_new"},
        partial=True,
    ),
    "phi3": Family("phi3", partial=True, windows=0),
    "smollm3": Family("smollm3", biases={"attention_bias": _ATTENTION, "mlp_bias": _MLP}),
    "granite": Family(
        "granite",
        keys=_GRANITE,
        values=_GRANITE_VALUES,
        attributes=_GRANITE_ONES,
        biases={"attention_bias": _ATTENTION, "mlp_bias": _MLP},
    ),
    "granitemoe": Family(
        "granitemoe",
        keys={
            **_GRANITE,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        values={**_GRANITE_VALUES, "expert_gating_func": (SOFTMAX,)},
        attributes=_GRANITE_ONES,
        biases={"attention_bias": _ATTENTION},
    ),
    "olmo": Family(
        "olmo",
        PLAIN,
        keys={"attention.clamp_kqv": "clip_qkv"},
        # transformers' class has this epsilon as a constant.
        values={PLAIN: (1e-5,)},
        attributes={"clip_qkv": None},
        names={"rms_norm_eps": ""},
        biases={"attention_bias": _ATTENTION},
    ),
    "olmo2": Family("olmo2", biases={"attention_bias": _ATTENTION}, windows=4, swa_base=None),
    "olmoe": Family(
        "olmoe",
        keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        values={"expert_gating_func": (SOFTMAX,), "expert_weights_norm": (False,)},
        attributes={"norm_topk_prob": False, "clip_qkv": None},
        biases={"attention_bias": _ATTENTION},
    ),
    "starcoder2": Family(
        "starcoder2",
        PLAIN,
        names={"rms_norm_eps": "norm_epsilon"},
        attributes={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
        biases={"use_bias": (*_ATTENTION, *_MLP)},
    ),
    "stablelm": Family(
        "stablelm",
        PLAIN,
        # The tensors decide, because converters write true for this key if a model does not say.
        values={"use_parallel_residual": (True, False)},
        names={"rms_norm_eps": "layer_norm_eps"},
        biases={
            "use_qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
            "qk_layernorm": ("attn_q_norm.weight", "attn_k_norm.weight"),
        },
        head_size=False,
        partial=True,
    ),
    "gpt-oss": Family(
        "gpt_oss",
        attributes={"attention_bias": True},
        keys={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        # Router weights are a softmax over the chosen experts, which newer files write as 3.
        values={"expert_gating_func": (SOFTMAX, 3)},
        windows=2,
    ),
    "gptneox": Family(
        "gpt_neox",
        PLAIN,
        keys={"use_parallel_residual": "use_parallel_residual"},
        attributes={"hidden_act": "gelu"},
        names={"rms_norm_eps": "layer_norm_eps", "num_key_value_heads": ""},
        biases={"attention_bias": ("attn_qkv.bias", "attn_output.bias")},
        head_size=False,
        partial=True,
    ),
    "falcon": Family(
        "falcon",
        PLAIN,
        values={"tensor_data_layout": ("jploski",)},
        names={
            "rms_norm_eps": "layer_norm_epsilon",
            "num_key_value_heads": "num_kv_heads",
            "intermediate_size": "ffn_hidden_size",
        },
        attributes={"alibi": False, "bias": False, "parallel_attn": True},
        head_size=False,
    ),
    "mpt": Family(
        "mpt",
        PLAIN,
        keys={"attention.max_alibi_bias": "", "attention.clamp_kqv": ""},
        names={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "rms_norm_eps": "layer_norm_epsilon",
            "num_key_value_heads": "",
            "intermediate_size": "",
        },
        attributes={"no_bias": True},
        head_size=False,
        rotary=False,
    ),
    "bloom": Family(
        "bloom",
        PLAIN,
        names={
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "seq_length",
            "rms_norm_eps": "layer_norm_epsilon",
            "num_key_value_heads": "",
            "intermediate_size": "",
        },
        head_size=False,
        rotary=False,
    ),
    "exaone4": Family("exaone4", windows=4),
    "nemotron": Family(
        "nemotron",
        PLAIN,
        names={"rms_norm_eps": "norm_eps"},
        attributes={"hidden_act": "relu2"},
        biases={"attention_bias": _ATTENTION, "mlp_bias": _MLP},
        partial=True,
    ),
    "seed_oss": Family(
        "seed_oss",
        biases={
            "attention_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
            "attention_out_bias": ("attn_output.bias",),
            "mlp_bias": _MLP,
        },
    ),
}
"""Families by the name of their architecture in GGUF files."""

MIXTRAL = Family(
    "mixtral",
    keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    values={**_META_LAYOUT, "expert_gating_func": (SOFTMAX,)},
    attributes={"sliding_window": None},
)
"""The family of files that have the architecture `llama` and experts."""

SAME = {
    "rope.freq_base_swa": "rope.freq_base",
    "rope.dimension_count_swa": "rope.dimension_count",
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
}
"""Suffixes of layers with a window, and the suffixes whose values they must repeat. A family
whose `Family.swa_base` is not 0 follows `rope.freq_base_swa` instead.
"""

OTHER_FILES = ("adapter.", "clip.", "diffusion.", "imatrix.", "xielu.", "general.tensor_extra.")
"""Beginnings of keys, besides the architecture's own, that change what is computed or say that the
file holds no model."""
