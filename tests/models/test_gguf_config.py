"""Every key of a GGUF file becomes part of the configuration, or is refused with an error that
names the key.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_headers import gguf, write
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from weir.errors import WeirError
from weir.models.gguf import config as reading
from weir.models.gguf import config_of, read_config, read_header
from weir.models.gguf.families import DESCRIBING, FAMILIES, NEUTRAL, PLAIN, RMS, SAME
from weir.models.gguf.header import GGUFHeader

SIZES = {
    ".block_count": 4,
    ".context_length": 256,
    ".embedding_length": 64,
    ".feed_forward_length": 128,
    ".attention.head_count": 4,
    ".attention.head_count_kv": 2,
    ".rope.freq_base": 20000.0,
}
ALL_HEADS = {".attention.head_count_kv": 4}
EXPERTS = {".expert_count": 8, ".expert_used_count": 2}
WIDE_EXPERTS = {".expert_feed_forward_length": 32}
WINDOW = {".attention.sliding_window": 32}
BASE = {"token_embd.weight": (100, 64), "output.weight": (100, 64)} | {
    f"blk.{n}.attn_norm.weight": (64,) for n in range(4)
}
USUAL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "vocab_size": 100,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 20000.0}
SLIDING, FULL = "sliding_attention", "full_attention"
EVERY_SECOND = [SLIDING, FULL, SLIDING, FULL]
EVERY_FOURTH = [SLIDING, SLIDING, SLIDING, FULL]
GRANITE = {
    ".logit_scale": 8.0,
    ".residual_scale": 0.22,
    ".embedding_scale": 12.0,
    ".attention.scale": 0.015625,
}
OF_GRANITE = {
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
}

FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({f".{RMS}": 1e-6, ".rope.dimension_count": 16}, {"rms_norm_eps": 1e-6}),
    "mistral3": ({f".{RMS}": 1e-6}, {"model_type": "mistral", "sliding_window": None}),
    "arcee": ({f".{RMS}": 1e-6}, {"hidden_act": "relu2"}),
    "qwen2": ({f".{RMS}": 1e-6}, {"use_sliding_window": False}),
    "qwen2moe": (
        {f".{RMS}": 1e-6, **EXPERTS, **WIDE_EXPERTS, ".expert_shared_feed_forward_length": 48},
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": False,
        },
    ),
    "qwen3": (
        {f".{RMS}": 1e-6, ".attention.key_length": 32, ".attention.value_length": 32},
        {"head_dim": 32, "attention_bias": False},
    ),
    "qwen3moe": (
        {f".{RMS}": 1e-6, ".attention.key_length": 32, ".attention.value_length": 32}
        | EXPERTS
        | WIDE_EXPERTS,
        {"head_dim": 32, "num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "gemma": (
        {f".{RMS}": 1e-6, ".attention.key_length": 32, ".attention.value_length": 32},
        {"head_dim": 32},
    ),
    "gemma2": (
        {
            f".{RMS}": 1e-6,
            ".attention.key_length": 32,
            ".attention.value_length": 32,
            ".attn_logit_softcapping": 40.0,
            ".final_logit_softcapping": 20.0,
            **WINDOW,
        },
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 40.0,
            "final_logit_softcapping": 20.0,
            "sliding_window": 32,
            "layer_types": EVERY_SECOND,
        },
    ),
    "gemma3": (
        {
            f".{RMS}": 1e-6,
            ".attention.key_length": 32,
            ".attention.value_length": 32,
            ".rope.scaling.type": "linear",
            ".rope.scaling.factor": 8.0,
            ".attention.sliding_window_pattern": 2,
            **WINDOW,
        },
        {
            "model_type": "gemma3_text",
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 32,
            "layer_types": EVERY_SECOND,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 20000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
            "final_logit_softcapping": None,
        },
    ),
    "phi2": (
        {f".{PLAIN}": 1e-6, ".rope.dimension_count": 8, **ALL_HEADS},
        {"model_type": "phi", "layer_norm_eps": 1e-6, "num_key_value_heads": 4, "partial": 0.5},
    ),
    "phi3": (
        {
            f".{RMS}": 1e-6,
            ".rope.dimension_count": 12,
            ".rope.scaling.original_context_length": 256,
            **WINDOW,
        },
        {"sliding_window": 32, "partial": 0.75, "original_max_position_embeddings": 256},
    ),
    "smollm3": ({f".{RMS}": 1e-6}, {"no_rope_layers": [1, 1, 1, 0], "layer_types": [FULL] * 4}),
    "granite": ({f".{RMS}": 1e-6, **GRANITE, ".rope.scaling.finetuned": True}, OF_GRANITE),
    "granitemoe": (
        {f".{RMS}": 1e-6, **GRANITE, **EXPERTS},
        OF_GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "olmo": ({f".{PLAIN}": 1e-5, ".attention.clamp_kqv": 8.0}, {"clip_qkv": 8.0}),
    "olmo2": ({f".{RMS}": 1e-6}, {"rms_norm_eps": 1e-6}),
    "olmoe": (
        {f".{RMS}": 1e-6, **EXPERTS},
        {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False, "clip_qkv": None},
    ),
    "starcoder2": (
        {f".{PLAIN}": 1e-6},
        {"norm_epsilon": 1e-6, "use_bias": False, "sliding_window": None},
    ),
    "stablelm": (
        {f".{PLAIN}": 1e-6, ".rope.dimension_count": 4, ".use_parallel_residual": True},
        {
            "layer_norm_eps": 1e-6,
            "partial": 0.25,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": True,
        },
    ),
    "gpt-oss": (
        {
            f".{RMS}": 1e-6,
            ".attention.key_length": 32,
            ".attention.value_length": 32,
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 32.0,
            ".rope.scaling.original_context_length": 64,
            **EXPERTS,
            **WIDE_EXPERTS,
            **WINDOW,
        },
        {
            "model_type": "gpt_oss",
            "head_dim": 32,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "layer_types": EVERY_SECOND,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 20000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "gptneox": (
        {
            f".{PLAIN}": 1e-6,
            ".rope.dimension_count": 4,
            ".use_parallel_residual": False,
            **ALL_HEADS,
        },
        {
            "model_type": "gpt_neox",
            "layer_norm_eps": 1e-6,
            "partial": 0.25,
            "use_parallel_residual": False,
            "attention_bias": False,
            "num_key_value_heads": "",
        },
    ),
    "falcon": (
        {f".{PLAIN}": 1e-6, ".attention.head_count_kv": 1, ".tensor_data_layout": "jploski"},
        {
            "layer_norm_epsilon": 1e-6,
            "multi_query": True,
            "new_decoder_architecture": False,
            "num_key_value_heads": "",
            "num_kv_heads": 1,
            "intermediate_size": "",
            "ffn_hidden_size": 128,
            "alibi": False,
        },
    ),
    "mpt": (
        {
            f".{PLAIN}": 1e-6,
            ".feed_forward_length": 256,
            ".attention.max_alibi_bias": 8.0,
            ".attention.clamp_kqv": 1.0,
            **ALL_HEADS,
        },
        {
            "hidden_size": 64,
            "num_key_value_heads": "",
            "intermediate_size": "",
            "max_position_embeddings": "",
            "max_seq_len": 256,
            "expansion_ratio": 4,
            "layer_norm_epsilon": 1e-6,
            "rope": "",
        },
    ),
    "bloom": (
        {f".{PLAIN}": 1e-6, ".feed_forward_length": 256, **ALL_HEADS},
        {
            "num_key_value_heads": "",
            "intermediate_size": "",
            "max_position_embeddings": "",
            "seq_length": 256,
            "layer_norm_epsilon": 1e-6,
            "rope": "",
        },
    ),
    "exaone4": (
        {f".{RMS}": 1e-6, **WINDOW},
        {"sliding_window": 32, "layer_types": EVERY_FOURTH},
    ),
    "nemotron": (
        {f".{PLAIN}": 1e-6, f".{RMS}": 1e-5, ".rope.dimension_count": 8},
        {"norm_eps": 1e-6, "partial": 0.5, "attention_bias": False, "mlp_bias": False},
    ),
    "seed_oss": (
        {f".{RMS}": 1e-6, ".attention.key_length": 32, ".attention.value_length": 32},
        {"head_dim": 32, "attention_bias": False, "attention_out_bias": False},
    ),
}
"""For each architecture, the keys of a file (in addition to `SIZES`), and the values that the
configuration must have (in addition to `USUAL`). "" stands for an attribute that is not compared,
"partial" for the share of a head's numbers that is rotated, and "rope": "" for no rotation.
"""


def keys_of(architecture: str) -> dict[str, Any]:
    keys = SIZES | FILES[architecture][0]
    if architecture in ("mpt", "bloom"):
        keys.pop(".rope.freq_base")
    return keys


def read(path: Path, architecture: str, more: dict[str, Any] | None = None, **tensors: Any) -> Any:
    """Write a file with more keys and tensors than usual, and read its configuration. A key whose
    value is None is left out.
    """
    keys = keys_of(architecture) | (more or {})
    keys = {key: value for key, value in keys.items() if value is not None}
    named = {name.replace("_dot_", "."): given for name, given in tensors.items()}
    return read_config(write(path / "tiny.gguf", architecture, keys, BASE | named))


def differs(one: Any, other: Any) -> bool:
    return bool(one.to_dict() != other.to_dict())


def test_every_family_has_a_file() -> None:
    assert FILES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("architecture", FILES)
def test_a_configuration_says_what_the_file_says(architecture: str, tmp_path: Path) -> None:
    config = read(tmp_path, architecture)
    wanted = {"model_type": FAMILIES[architecture].kind} | USUAL | FILES[architecture][1]
    rope: dict[str, Any] | None = dict(ROPE)
    if wanted.pop("rope", None) == "":
        rope = None
    elif (partial := wanted.pop("partial", None)) is not None:
        rope = ROPE | {"partial_rotary_factor": partial}
    wanted = {"rope_parameters": rope} | wanted
    given = {name: getattr(config, name, None) for name, value in wanted.items() if value != ""}
    assert given == {name: value for name, value in wanted.items() if value != ""}
    # Nothing was set that transformers' class does not have.
    plain = AutoConfig.for_model(config.model_type)
    assert vars(config).keys() - vars(plain).keys() <= {"head_dim", "seq_length"}


@pytest.mark.parametrize("architecture", FILES)
def test_a_model_can_be_built(architecture: str, tmp_path: Path) -> None:
    config = read(tmp_path, architecture)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.get_input_embeddings().weight.shape == (100, 64)
    assert model.generation_config.eos_token_id is None


def changed(suffix: str, value: Any) -> Iterator[Any]:
    """Yield a value that another model could have for a key."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, str):
        yield "something else"
    elif isinstance(value, float):
        yield value * 0.75
    elif suffix in ("attention.head_count_kv", "expert_used_count"):
        yield 1 if value != 1 else 2
    else:
        yield value * 2


WITHOUT_EFFECT = {
    ("stablelm", "use_parallel_residual"),  # is found from the tensors
    ("nemotron", RMS),  # has no RMS norm
    ("qwen2moe", "feed_forward_length"),  # all its layers have experts
    ("qwen3moe", "feed_forward_length"),
    ("gpt-oss", "feed_forward_length"),
}


@pytest.mark.parametrize("architecture", FILES)
def test_no_key_is_dropped(architecture: str, tmp_path: Path) -> None:
    config = read(tmp_path, architecture)
    for key, value in keys_of(architecture).items():
        suffix = key[1:]
        for other in changed(suffix, value):
            more = {key: other}
            if key == ".attention.key_length":  # refused if values have another length
                with pytest.raises(WeirError, match=r"attention\.value_length"):
                    read(tmp_path, architecture, more)
                more[".attention.value_length"] = other
            try:
                found = differs(config, read(tmp_path, architecture, more))
            except WeirError as error:
                # If a size changes, the error names another key, which no longer fits this size.
                sizes = suffix in ("attention.head_count", "embedding_length")
                assert f"says {architecture}{'' if sizes else key}" in str(error) or sizes
                found = True
            expected = (architecture, suffix) not in WITHOUT_EFFECT
            assert found or not expected, key


NOT_COMPUTED = {
    "context_length",  # positions beyond it are allowed
    "rope.scaling.original_context_length",  # used only by scalings, which are tested below
    "rope.scaling.finetuned",
}


@pytest.mark.parametrize("architecture", FILES)
def test_every_key_changes_what_the_model_computes(architecture: str, tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "tiny.gguf", architecture, keys_of(architecture), BASE))
    ids = torch.arange(48)[None]

    def build(config: Any) -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and "norm" not in name and "ln" not in name:
                weight.data.normal_()  # biases are 0 in a new model
            elif weight.ndim > 1:
                weight.data.normal_(0, 0.2)
        return model

    model = build(config_of(header))
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    with torch.no_grad():
        logits = model(ids).logits
        for key, value in keys_of(architecture).items():
            if key[1:] in NOT_COMPUTED or (architecture, key[1:]) in WITHOUT_EFFECT:
                continue
            for other in changed(key[1:], value):
                more = {f"{architecture}{key}": other}
                if key.startswith(".attention.key_length"):
                    more[f"{architecture}.attention.value_length"] = other
                if key == ".attention.scale" or key == f".{RMS}" or key == f".{PLAIN}":
                    more = {f"{architecture}{key}": other * 1e4}
                try:
                    given = build(config_of(replace(header, fields={**header.fields, **more})))
                except WeirError:
                    continue
                now = {name: weight.shape for name, weight in given.state_dict().items()}
                if now == shapes:
                    assert not torch.equal(given(ids).logits, logits), key


def defined_keys() -> list[str]:
    """Return the suffixes of all keys of an architecture that llama.cpp defines, as listed by the
    package gguf.
    """
    found = []
    kinds: list[Any] = [gguf.Keys]
    while kinds:
        for value in vars(kinds.pop()).values():
            if isinstance(value, type):
                kinds.append(value)
            elif isinstance(value, str) and value.startswith("{arch}."):
                found.append(value.removeprefix("{arch}.").replace("{dense}", "dense_2"))
    assert len(found) > 90
    return found


@pytest.mark.parametrize("architecture", FILES)
def test_keys_that_llama_cpp_defines_are_followed_or_refused(
    architecture: str, tmp_path: Path
) -> None:
    family = FAMILIES[architecture]
    header = read_header(write(tmp_path / "tiny.gguf", architecture, keys_of(architecture), BASE))
    config = config_of(header)

    def read_with(key: str, value: Any) -> Any:
        return config_of(replace(header, fields={**header.fields, f"{architecture}{key}": value}))

    for suffix in defined_keys():
        key = f".{suffix}"
        if key in keys_of(architecture) or suffix in DESCRIBING | {"vocab_size"}:
            continue
        if suffix in family.followed() or (architecture, suffix) == ("llama", "expert_count"):
            continue  # covered by the tests of scalings, windows and experts
        with pytest.raises(WeirError, match=rf"says {architecture}\.{suffix} = 7"):
            read_with(key, 7)
        for value in NEUTRAL.get(suffix, ()):
            assert not differs(config, read_with(key, value))
    assert not differs(config, read_with(".rope.scaling.finetuned", True))


@pytest.mark.parametrize("suffix", SAME)
def test_layers_with_windows_have_to_be_like_the_others(suffix: str, tmp_path: Path) -> None:
    same = {f".{suffix}": 16, f".{SAME[suffix]}": 16}
    read(tmp_path, "gpt-oss", {".attention.key_length": 16, ".attention.value_length": 16} | same)
    with pytest.raises(WeirError, match=rf"says gpt-oss\.{suffix} = 8, which differs from"):
        read(tmp_path, "gpt-oss", {f".{suffix}": 8})


def test_an_unknown_key_is_refused_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {".attention.telepathy": 3, "somebodys.note": "hello"}
    with pytest.raises(WeirError, match=r"says llama\.attention\.telepathy = 3.*does not support"):
        read(tmp_path, "llama", more)
    monkeypatch.setenv(reading.IGNORED, "llama.other, llama.attention.telepathy")
    assert not differs(read(tmp_path, "llama"), read(tmp_path, "llama", more))


@pytest.mark.parametrize(
    ("more", "ignored"),
    [
        ({".rope.dimension_count": 8}, "llama.rope.dimension_count"),
        (
            {
                ".rope.scaling.type": "warped",
                ".rope.scaling.factor": 2.0,
                ".rope.scale_linear": 3.0,
            },
            "llama.rope.scaling.type,llama.rope.scaling.factor,llama.rope.scale_linear",
        ),
    ],
)
def test_what_an_error_says_to_ignore_is_ignored(
    more: dict[str, Any], ignored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WeirError, match=rf"or set {reading.IGNORED}={ignored} if"):
        read(tmp_path, "llama", more)
    monkeypatch.setenv(reading.IGNORED, ignored)
    assert not differs(read(tmp_path, "llama"), read(tmp_path, "llama", more))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.type", "mmproj"),
        ("general.type", "adapter"),
        ("adapter.lora.alpha", 16.0),
        ("clip.has_vision_encoder", True),
        ("xielu.beta", [0.5, 0.5]),
    ],
)
def test_files_that_hold_something_else_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(WeirError, match=key):
        read(tmp_path, "llama", {key: value})


def test_an_architecture_that_weir_does_not_read_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "mamba", SIZES, BASE)
    with pytest.raises(WeirError, match=r"architecture 'mamba'.*It can read llama, mistral3,"):
        read_config(path)


HOSTILE = [
    ({".block_count": 1 << 31}, r"block_count = 2147483648"),
    ({".block_count": (1 << 31) - 1}, r"block_count = 2,147,483,647, but holds only"),
    ({".block_count": 0}, r"block_count = 0"),
    ({".block_count": None}, r"lacks the key llama\.block_count"),
    ({".attention.head_count": "four"}, r"head_count = 'four'"),
    ({".attention.head_count_kv": 3}, r"4 attention heads, which cannot be divided among 3"),
    (
        {".attention.head_count": 5, ".attention.head_count_kv": 5},
        r"64, which cannot be divided among 5",
    ),
    ({f".{RMS}": None}, r"lacks the key llama\.attention\.layer_norm_rms_epsilon"),
    ({f".{RMS}": float("nan")}, r"epsilon = nan"),
    (
        {".attention.head_count_kv": [2, 2, 1, 2]},
        r"different values of llama\.attention\.head_count_kv",
    ),
    (
        {".feed_forward_length": [128, 64, 128, 128]},
        r"different values of llama\.feed_forward_length",
    ),
    (
        {".attention.head_count_kv": [2, 2, 2]},
        r"head_count_kv = an array of 3, where one number, or one for each layer",
    ),
    ({".block_count": [4, 4, 4, 4]}, r"block_count = an array of 4"),
    ({".context_length": 4.5}, r"context_length = 4\.5, where a whole number from 1 to"),
    ({".rope.dimension_count": 8}, r"dimension_count = 8, .*this family computes with \(16\)"),
    ({".rope.dimension_count": 32}, r"rope\.dimension_count = 32, where an even number up to 16"),
    ({".rope.dimension_count": 7}, r"rope\.dimension_count = 7, where an even number"),
    ({".rope.freq_base": "large"}, r"rope\.freq_base = 'large'.*number of at least 1"),
    ({".rope.freq_base": 0.0}, r"rope\.freq_base = 0\.0"),
    ({".rope.scaling.factor": float("inf")}, r"rope\.scaling\.factor = inf"),
    ({".rope.scaling.factor": -2.0}, r"rope\.scaling\.factor = -2\.0"),
    (
        {".rope.scaling.original_context_length": 1},
        r"context_length = 1, .*whole number of at least 2",
    ),
]


@pytest.mark.parametrize(("more", "message"), HOSTILE)
def test_what_no_model_can_be_is_refused(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(WeirError, match=message):
        read(tmp_path, "llama", more)


def test_an_empty_array_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package gguf cannot write an empty array.
    monkeypatch.setattr(GGUFHeader, "array", lambda header, key: [])
    more = {".attention.head_count_kv": [2] * 4, ".block_count": 0}
    with pytest.raises(WeirError, match=r"block_count = 0|an array of 0"):
        read(tmp_path, "llama", more)


def test_an_array_that_repeats_one_number_is_that_number(tmp_path: Path) -> None:
    more = {".attention.head_count_kv": [2] * 4, ".feed_forward_length": [128] * 4}
    assert not differs(read(tmp_path, "llama"), read(tmp_path, "llama", more))


def test_a_file_without_an_output_is_tied(tmp_path: Path) -> None:
    tensors = {name: given for name, given in BASE.items() if name != "output.weight"}
    config = read_config(write(tmp_path / "tied.gguf", "llama", keys_of("llama"), tensors))
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("architecture", "attribute", "tensor"),
    [
        (architecture, attribute, tensor)
        for architecture, family in FAMILIES.items()
        for attribute, tensors in family.biases.items()
        for tensor in tensors
    ],
)
def test_one_tensor_of_a_kind_says_that_biases_are_there(
    architecture: str, attribute: str, tensor: str, tmp_path: Path
) -> None:
    assert not getattr(read(tmp_path, architecture), attribute)
    assert getattr(read(tmp_path, architecture, **{f"blk.0.{tensor}": (64,)}), attribute)


def test_experts_make_a_mixtral_of_a_llama(tmp_path: Path) -> None:
    config = read(tmp_path, "llama", EXPERTS)
    assert (config.model_type, config.num_local_experts, config.num_experts_per_tok) == (
        "mixtral",
        8,
        2,
    )
    with pytest.raises(WeirError, match=r"llama\.expert_weights_scale = 2\.5"):
        read(tmp_path, "llama", EXPERTS | {".expert_weights_scale": 2.5})
    with pytest.raises(WeirError, match=r"llama\.expert_gating_func = 2"):
        read(tmp_path, "llama", EXPERTS | {".expert_gating_func": 2})


MOE = [name for name, family in FAMILIES.items() if "expert_used_count" in family.keys]


@pytest.mark.parametrize("architecture", ["llama", *MOE])
@pytest.mark.parametrize(
    ("used", "message"),
    [
        (9, "expert_used_count = 9, but has only 8 experts"),
        (0, "expert_used_count = 0, where a whole number from 1"),
        (None, "lacks the key .*expert_used_count"),
    ],
)
def test_a_token_takes_some_of_the_experts(
    architecture: str, used: int | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(WeirError, match=message):
        read(tmp_path, architecture, EXPERTS | {".expert_used_count": used})


def test_windows_make_an_olmo3_of_an_olmo2(tmp_path: Path) -> None:
    yarn = {".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0}
    config = read(tmp_path, "olmo2", WINDOW | yarn)
    assert (config.model_type, config.sliding_window) == ("olmo3", 32)
    assert config.layer_types == EVERY_FOURTH
    assert config.rope_parameters[SLIDING] == ROPE
    assert config.rope_parameters[FULL]["rope_type"] == "yarn"
    other = read(tmp_path, "olmo2", WINDOW | yarn | {".rope.freq_base_swa": 30000.0})
    assert other.rope_parameters[SLIDING]["rope_theta"] == 30000.0


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        (2, EVERY_SECOND),
        (1, [FULL] * 4),
        (0, [SLIDING] * 4),
        ([True, True, False, True], [SLIDING, SLIDING, FULL, SLIDING]),
    ],
)
def test_which_layers_have_windows(pattern: Any, kinds: list[str], tmp_path: Path) -> None:
    more = {".attention.sliding_window_pattern": pattern}
    assert read(tmp_path, "gemma3", more).layer_types == kinds
    assert read(tmp_path, "exaone4", more).layer_types == kinds


def test_without_a_window_every_layer_sees_everything(tmp_path: Path) -> None:
    for architecture in ("exaone4", "gemma3"):
        config = read(tmp_path, architecture, {".attention.sliding_window": 0})
        assert config.layer_types == [FULL] * 4
    assert read(tmp_path, "phi3", {".attention.sliding_window": 0}).sliding_window is None


def test_the_largest_gemmas_scale_queries_by_the_hidden_size(tmp_path: Path) -> None:
    for architecture, layers in (("gemma2", 46), ("gemma3", 62)):
        tensors = BASE | {f"blk.{n}.attn_norm.weight": (64,) for n in range(layers)}
        keys = keys_of(architecture) | {".block_count": layers}
        keys.pop(".attention.sliding_window_pattern", None)
        config = read_config(write(tmp_path / "large.gguf", architecture, keys, tensors))
        assert config.query_pre_attn_scalar == 16
        every = {"gemma2": 2, "gemma3": 6}[architecture]
        assert config.layer_types == [SLIDING if (n + 1) % every else FULL for n in range(layers)]
        assert read(tmp_path, architecture).query_pre_attn_scalar == 32


def test_granite_without_multipliers_computes_as_others_do(tmp_path: Path) -> None:
    none = dict.fromkeys(GRANITE)
    config = read(tmp_path, "granite", none)
    assert (config.logits_scaling, config.residual_multiplier, config.embedding_multiplier) == (
        1.0,
        1.0,
        1.0,
    )
    assert config.attention_multiplier == 16**-0.5
    with pytest.raises(WeirError, match=r"granite\.rope\.scaling\.finetuned = False"):
        read(tmp_path, "granite", {".rope.scaling.finetuned": False})


def test_the_norms_of_stablelm_say_what_is_parallel(tmp_path: Path) -> None:
    assert read(tmp_path, "stablelm").use_parallel_residual
    config = read(tmp_path, "stablelm", **{"blk.0.ffn_norm.weight": (64,)})
    assert not config.use_parallel_residual


def test_falcons_three_decoders(tmp_path: Path) -> None:
    heads = {".attention.head_count_kv": 2}
    two = read(tmp_path, "falcon", heads, **{"blk.0.attn_norm_2.weight": (64,)})
    assert (two.new_decoder_architecture, two.num_ln_in_parallel_attn, two.num_kv_heads) == (
        True,
        2,
        2,
    )
    one = read(tmp_path, "falcon", heads)
    assert (one.new_decoder_architecture, one.num_ln_in_parallel_attn) == (True, 1)
    every = read(tmp_path, "falcon", ALL_HEADS)
    assert (every.new_decoder_architecture, every.multi_query) == (False, False)


def test_mpt_has_alibi_and_clips(tmp_path: Path) -> None:
    attention = read(tmp_path, "mpt").attn_config
    assert (attention.alibi, attention.alibi_bias_max, attention.clip_qkv) == (True, 8, 1.0)
    # transformers' class always uses a bias of 8 and an MLP of four times the hidden size.
    for bias in (0.0, 4.0, None):
        with pytest.raises(WeirError, match=r"max_alibi_bias = "):
            read(tmp_path, "mpt", {".attention.max_alibi_bias": bias})
    with pytest.raises(WeirError, match=r"feed_forward_length = 128"):
        read(tmp_path, "mpt", {".feed_forward_length": 128})


def frequencies(config: Any, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    """Return the frequencies that transformers computes from a configuration, and the factor by
    which it scales attention.
    """
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        dim = config.head_dim
        return rope["rope_theta"] ** -(torch.arange(0, dim, 2) / dim), 1.0
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len)


PLAIN_FREQUENCIES = 20000.0 ** -(torch.arange(0, 16, 2) / 16)


@pytest.mark.parametrize(
    "more",
    [
        {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0},
        {".rope.scaling.factor": 4.0},
        {".rope.scale_linear": 4.0},
    ],
)
def test_linear_scaling(more: dict[str, Any], tmp_path: Path) -> None:
    found, attention = frequencies(read(tmp_path, "llama", more))
    torch.testing.assert_close(found, PLAIN_FREQUENCIES / 4)
    assert attention == 1


def test_no_scaling(tmp_path: Path) -> None:
    for more in ({".rope.scaling.type": "none", ".rope.scaling.factor": 4.0}, {}):
        found, _ = frequencies(read(tmp_path, "llama", more))
        torch.testing.assert_close(found, PLAIN_FREQUENCIES)


YARN = {
    ".rope.scaling.type": "yarn",
    ".rope.scaling.factor": 8.0,
    ".rope.scaling.original_context_length": 64,
}


def test_yarn(tmp_path: Path) -> None:
    config = read(tmp_path, "llama", YARN)
    assert config.rope_parameters["original_max_position_embeddings"] == 64
    found, attention = frequencies(config)
    share = found / PLAIN_FREQUENCIES
    assert share[0] == 1
    torch.testing.assert_close(share[-1].item(), 1 / 8)
    assert attention == pytest.approx(0.1 * math.log(8) + 1)
    longer = YARN | {".rope.scaling.original_context_length": 4096}
    found, _ = frequencies(read(tmp_path, "llama", longer))
    for suffix, value in (("yarn_beta_fast", 4.0), ("yarn_beta_slow", 16.0)):
        other = read(tmp_path, "llama", longer | {f".rope.scaling.{suffix}": value})
        assert other.rope_parameters[suffix.removeprefix("yarn_")] == value
        assert not torch.equal(frequencies(other)[0], found)


@pytest.mark.parametrize(
    ("suffix", "value", "attention"),
    [
        ("attn_factor", 0.5, 0.5 * (0.1 * math.log(8) + 1)),
        ("yarn_attn_factor", 1.25, 1.25),
        ("yarn_log_multiplier", 0.5, (0.1 * math.log(8) + 1) / (0.05 * math.log(8) + 1)),
        ("yarn_ext_factor", 1.0, 0.1 * math.log(8) + 1),
    ],
)
def test_how_yarn_scales_attention(
    suffix: str, value: float, attention: float, tmp_path: Path
) -> None:
    config = read(tmp_path, "llama", YARN | {f".rope.scaling.{suffix}": value})
    assert frequencies(config)[1] == pytest.approx(attention)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (YARN | {".rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({".rope.scaling.attn_factor": 2.0}, "attn_factor"),
        ({".rope.scaling.type": "dynamic"}, "type"),
        (
            YARN | {".rope.scaling.attn_factor": 2.0, ".rope.scaling.yarn_attn_factor": 2.0},
            "attn_factor",
        ),
    ],
)
def test_scalings_that_cannot_be_followed_are_refused(
    more: dict[str, Any], key: str, tmp_path: Path
) -> None:
    with pytest.raises(WeirError, match=rf"llama\.rope\.scaling\.{key}"):
        read(tmp_path, "llama", more)


def of_llama3(factor: float, original: int) -> np.ndarray:
    """Compute Llama 3.1's factors of the rotation frequencies one by one."""
    made = []
    for frequency in PLAIN_FREQUENCIES.tolist():
        length = 2 * math.pi / frequency
        if length < original / 4:
            made.append(1.0)
        elif length > original:
            made.append(factor)
        else:
            smooth = (original / length - 1) / (4 - 1)
            made.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(made, np.float32)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (8.0, 64)])
def test_the_factors_of_llama_3_are_recognized(
    factor: float, original: int, tmp_path: Path
) -> None:
    factors = of_llama3(factor, original)
    config = read(tmp_path, "llama", **{"rope_freqs.weight": factors})
    if factors.max() > 1:
        assert config.rope_parameters["rope_type"] == "llama3"
        assert config.rope_parameters["factor"] == factor
        assert config.rope_parameters["original_max_position_embeddings"] == original
    found, attention = frequencies(config)
    torch.testing.assert_close(found, PLAIN_FREQUENCIES / torch.from_numpy(factors))
    assert attention == 1


def test_any_factors_divide_the_frequencies(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    config = read(tmp_path, "llama", **{"rope_freqs.weight": factors})
    for length in (1, 100, 100_000):  # texts of any length have the same factors
        found, attention = frequencies(config, length)
        torch.testing.assert_close(found, PLAIN_FREQUENCIES / torch.from_numpy(factors))
        assert attention == 1
    ones = read(tmp_path, "llama", **{"rope_freqs.weight": np.ones(8, np.float32)})
    assert ones.rope_parameters == ROPE


def test_factors_for_long_and_short_texts(tmp_path: Path) -> None:
    short, long = np.linspace(1, 2, 6, dtype=np.float32), np.linspace(1, 9, 6, dtype=np.float32)
    more = {".rope.scaling.original_context_length": 64, ".rope.scaling.attn_factor": 1.19}
    factors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    config = read(tmp_path, "phi3", more, **factors)
    base = 20000.0 ** -(torch.arange(0, 12, 2) / 12)
    for length, divided in ((64, short), (65, long)):
        found, attention = frequencies(config, length)
        torch.testing.assert_close(found, base / torch.from_numpy(divided))
        assert attention == pytest.approx(1.19)
    usual = math.sqrt(1 + math.log(4) / math.log(64))
    config = read(tmp_path, "phi3", more | {".rope.scaling.attn_factor": usual}, **factors)
    assert frequencies(config, 1)[1] == usual
    with pytest.raises(WeirError, match=r"rope_factors_short\.weight, but does not have both"):
        read(tmp_path, "phi3", more, **{"rope_factors_long.weight": long})


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (np.ones(7, np.float32), r"rope_freqs\.weight of the shape \(7,\).*8 numbers"),
        (np.ones(8, np.float16), r"rope_freqs\.weight of the shape \(8,\) and type 1"),
        (np.zeros(8, np.float32), r"not positive"),
        (np.full(8, np.nan, np.float32), r"not positive"),
    ],
)
def test_factors_that_cannot_be_are_refused(
    factors: np.ndarray, message: str, tmp_path: Path
) -> None:
    with pytest.raises(WeirError, match=message):
        read(tmp_path, "llama", **{"rope_freqs.weight": factors})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({".rope.scaling.factor": 2.0}, "scaling.factor = 2.0"),
        ({".rope.scale_linear": 2.0}, "scale_linear = 2.0"),
        ({".rope.scaling.type": "yarn"}, "scaling.type = 'yarn'"),
        ({".rope.scaling.attn_factor": 1.5}, "scaling.attn_factor = 1.5"),
    ],
)
def test_factors_beside_another_scaling_are_refused(
    more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    message = re.escape(f"llama.rope.{said}, which cannot be combined with rope_freqs.weight")
    with pytest.raises(WeirError, match=message):
        read(tmp_path, "llama", more, **{"rope_freqs.weight": factors})


def test_factors_of_two_scalings_are_refused(tmp_path: Path) -> None:
    names = ("rope_freqs", "rope_factors_short", "rope_factors_long")
    factors = {f"{name}.weight": np.linspace(1, 3, 8, dtype=np.float32) for name in names}
    with pytest.raises(WeirError, match=r"rope_freqs\.weight and rope_factors_long\.weight, which"):
        read(tmp_path, "llama", **factors)


def test_a_factor_of_phi3_is_refused_by_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(WeirError, match=r"phi3\.rope\.scaling\.factor = 4\.0, which"):
        read(tmp_path, "phi3", {".rope.scaling.factor": 4.0})


WORDS = ["<s>", "</s>", "<unk>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "a", "<|end|>"]


def tokens(**named: int) -> dict[str, Any]:
    found: dict[str, Any] = {f"tokenizer.ggml.{name}_token_id": id for name, id in named.items()}
    return found | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": [1, 1, 2, 3, 1, 3, 1, 4],
    }


def test_every_token_that_ends_an_answer_is_one(tmp_path: Path) -> None:
    # <|im_end|>, <|eom_id|> and <|end|> are recognized by their texts. <|eot_id|> is not, because
    # its token type here is that of an ordinary word.
    config = read(tmp_path, "llama", tokens(bos=0, eos=1, padding=2))
    assert (config.bos_token_id, config.pad_token_id) == (0, 2)
    assert config.eos_token_id == [1, 3, 5, 7]
    more = read(tmp_path, "llama", tokens(eos=6, eot=4, eom=0, fim_sep=2))
    assert more.eos_token_id == [6, 4, 0, 2, 3, 5, 7]
    several = tokens(eos=1) | {"tokenizer.ggml.eos_token_ids": [2, 0, 99]}
    assert read(tmp_path, "llama", several).eos_token_id == [1, 2, 0, 3, 5, 7]
    assert read(tmp_path, "llama", tokens()).eos_token_id == [3, 5, 7]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.generation_config.eos_token_id == [1, 3, 5, 7]


def test_an_end_that_is_no_token_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    config = read(tmp_path, "llama", tokens(eos=1) | {"tokenizer.ggml.eos_token_ids": [2, 99]})
    assert config.eos_token_id == [1, 2, 3, 5, 7]
    assert "eos_token_ids = 99, but has only 8 tokens" in caplog.text


@pytest.mark.parametrize("ids", [[2, -1], [2.0]])
def test_ends_that_cannot_be_ids_are_refused(ids: list[Any], tmp_path: Path) -> None:
    more = tokens(eos=1) | {"tokenizer.ggml.eos_token_ids": ids}
    with pytest.raises(WeirError, match=rf"eos_token_ids = {ids[-1]}, where the id of a token"):
        read(tmp_path, "llama", more)


def test_the_format_of_gpt_oss_goes_on_after_a_message(tmp_path: Path) -> None:
    words = ["<|return|>", "<|call|>", "<|end|>", "a"]
    more = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.eos_token_id": 0,
    }
    assert read(tmp_path, "gpt-oss", more).eos_token_id == [0, 1]


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    more = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [str(n) for n in range(101)]}
    with pytest.raises(WeirError, match="101 tokens but embeddings for only 100"):
        read(tmp_path, "llama", more)


def test_numbers_have_the_digits_of_the_model_they_came_from(tmp_path: Path) -> None:
    assert read(tmp_path, "llama", {f".{RMS}": 1e-5}).rms_norm_eps == 1e-5
    third = float(np.float32(1 / 3))
    config = read(tmp_path, "granite", {".residual_scale": third})
    assert np.float32(config.residual_multiplier) == np.float32(third)
