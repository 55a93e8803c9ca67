"""Trainable models: Llama's shape, Qwen3's with QK norm, and MPT's with ALiBi.

They differ in the keys that a cache stores: rotated keys, rotated keys that were normalized before,
and keys without positions. This module knows nothing about text or the training loop.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from weir.models import set_sink
from weir.train.exercises import front_of
from weir.train.recipe import TrainingRecipe


def new_model(recipe: TrainingRecipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Make a model of the recipe's shape with random weights, and the recipe's sink in the
    configuration.

    The weights do not depend on the sink, except for the embeddings of the sink's own tokens.
    """
    config = _config(recipe, tokenizer)
    front = front_of(tokenizer).tolist()
    set_sink(config, recipe.kind.kind, front if recipe.kind.kind == "learnable" else ())
    torch.manual_seed(recipe.seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    # Each matrix has a separate seed, so a longer vocabulary does not change the other matrices.
    for index, weight in enumerate(p for p in model.parameters() if p.ndim == 2):
        draw = torch.Generator().manual_seed(1000 * recipe.seed + index)
        with torch.no_grad():
            weight.normal_(0.0, config.initializer_range, generator=draw)
    return model


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a model made by `new_model`."""
    decoder: Any = model.base_model
    layers: nn.ModuleList = decoder.blocks if hasattr(decoder, "blocks") else decoder.layers
    return layers


def _config(recipe: TrainingRecipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Return the configuration of the recipe's shape."""
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if recipe.shape == "alibi":
        sizes |= {"d_model": recipe.width, "n_heads": recipe.heads, "n_layers": recipe.layers}
        return AutoConfig.for_model("mpt", max_seq_len=recipe.window, use_cache=True, **sizes)
    if recipe.shape == "qwen3":
        sizes["head_dim"] = recipe.width // recipe.heads
    return AutoConfig.for_model(
        recipe.shape,
        hidden_size=recipe.width,
        intermediate_size=recipe.inner,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=recipe.window,
        attn_implementation="sdpa",
        **sizes,
    )
