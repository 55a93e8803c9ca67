"""The model that figures are about, and how fast memory can be moved where they are made.

A Llama of SmolLM2-135M's shape with random weights: time does not depend on what they are.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from weir.kernels import paths
from weir_bench.figure import Setting, Sizes
from weir_bench.timing import in_turns, middle

HEAD_DIM = 64
GROUP = 3
"""Query heads over a KV head."""


def config(sizes: Sizes) -> LlamaConfig:
    """SmolLM2-135M's configuration, for `sizes`; the window is long enough for every figure."""
    heads = sizes.width // HEAD_DIM
    return LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // GROUP,
        max_position_embeddings=2 * sizes.fed,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def twin_of(setting: Setting) -> PreTrainedModel:
    """Another object with the same weights, for what is done to one of them only."""
    return _make(setting.sizes, setting.dtype)


def _make(sizes: Sizes, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(config(sizes)).eval().to(dtype)


_made = lru_cache(maxsize=2)(_make)


def model_of(setting: Setting) -> PreTrainedModel:
    """The model of a setting; the same object for the same setting."""
    return _made(setting.sizes, setting.dtype)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that one step reads: all of them, for the embedding is the head too."""
    return sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())


@lru_cache(maxsize=2)
def bandwidth(copied: int) -> float:
    """Bytes a second of a plain copy of `copied` bytes, read and written ones together."""
    source = torch.ones(copied // 4)
    target = torch.zeros_like(source)
    taken = middle(in_turns({"copy": lambda: target.copy_(source)}, rounds=9))
    return 2 * source.nbytes / taken["copy"]


def walk_path() -> str:
    """Which way BalanceKV's walk goes here: a library's name, or `reference`."""
    return paths(torch.device("cpu"))["walk"]
