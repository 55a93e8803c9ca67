"""What weir needs to know of a model: its layers' positions and windows, and whether it can serve it.

All families here keep keys and values of every token and attend to them by softmax; rotary
embeddings are half-split. Anything else is refused in one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from weir.errors import WeirError
from weir.positions import Rotary

INTERFACE_FAMILIES = frozenset(
    """llama mistral qwen2 qwen3 gemma gemma2 gemma3 gemma3_text phi3 olmo2 smollm3 gpt_neox
    gpt_oss""".split()
)
"""Model types whose attention goes through transformers' attention interface."""

OWN_FAMILIES = frozenset({"falcon", "mpt", "bloom"})
"""Model types with attention of their own, replaced on the model object while weir is attached."""


@dataclass(frozen=True)
class LayerFacts:
    """What one layer does with positions.

    Attributes:
        rotary: its rotary embedding; None for none.
        slopes: ALiBi's slopes by query head [heads], float32; None for none.
        window: it only sees this many newest tokens; None for all.
    """

    rotary: Rotary | None
    slopes: Tensor | None
    window: int | None


@dataclass(frozen=True)
class ModelFacts:
    """What weir needs to know of one model.

    Attributes:
        kind: the model type of its configuration.
        decoder: the module that takes token ids and a cache; hooks go there.
        layers: each layer's facts.
        rotaries: modules that make cosines and sines.
        config: the configuration that says which attention is used.
        vocabulary: token ids run from 0 to this, exclusive.
    """

    kind: str
    decoder: nn.Module
    layers: tuple[LayerFacts, ...]
    rotaries: tuple[nn.Module, ...]
    config: Any
    vocabulary: int

    @property
    def sliding(self) -> int | None:
        """The window where every layer slides; None where one layer sees everything."""
        windows = [layer.window for layer in self.layers]
        return None if None in windows else min(w for w in windows if w is not None)


def describe(model: PreTrainedModel, reach: int | None = None) -> ModelFacts:
    """Read a model's facts.

    Args:
        model: a causal language model.
        reach: the highest position attention will meet, where that is known; some scalings of RoPE
            choose their frequencies by it.

    Raises:
        WeirError: the model is of a kind weir cannot serve; the sentence says why.
    """
    if not isinstance(model, PreTrainedModel):
        raise WeirError(f"weir serves transformers models, not a {type(model).__name__}")
    config = model.config.get_text_config(decoder=True)
    _refuse(model, config)
    decoder = model.get_decoder()
    modules = attention_modules(decoder)
    rotary_module = getattr(decoder, "rotary_emb", None)
    layers = []
    for index, module in enumerate(modules):
        kind = _layer_type(config, index)
        rotary = None
        if rotary_module is not None and _rotates(config, module):
            rotary = read_rotary(rotary_module, kind, reach)
        slopes = alibi_slopes(config, decoder) if _has_alibi(config) else None
        layers.append(LayerFacts(rotary, slopes, _window(config, kind)))
    return ModelFacts(
        kind=config.model_type,
        decoder=decoder,
        layers=tuple(layers),
        rotaries=() if rotary_module is None else (rotary_module,),
        config=config,
        vocabulary=config.vocab_size,
    )


def attention_modules(decoder: nn.Module) -> list[nn.Module]:
    """The attention modules of a decoder, in the order of its layers."""
    blocks = next(getattr(decoder, n) for n in ("layers", "h", "blocks") if hasattr(decoder, n))
    names = ("self_attn", "attention", "self_attention", "attn")
    return [next(getattr(b, n) for n in names if hasattr(b, n)) for b in blocks]


def _refuse(model: PreTrainedModel, config: Any) -> None:
    kind = config.model_type
    types = getattr(config, "layer_types", None) or []
    if model.config.is_encoder_decoder or config.is_encoder_decoder:
        raise WeirError(f"{kind} is an encoder-decoder; weir streams decoders only")
    if getattr(config, "kv_lora_rank", None):
        raise WeirError(
            f"{kind} uses multi-head latent attention: it caches compressed latents, not keys and "
            "values that a pool could choose from"
        )
    if getattr(model, "_is_stateful", False) or any("linear" in t or "mamba" in t for t in types):
        raise WeirError(
            f"{kind} is a state-space or linear-attention model: its memory is of fixed size "
            "already and holds no tokens that a pool could choose from"
        )
    if kind not in INTERFACE_FAMILIES | OWN_FAMILIES:
        known = ", ".join(sorted(INTERFACE_FAMILIES | OWN_FAMILIES))
        raise WeirError(f"weir does not know how {kind} attends; it serves {known}")
    if not hasattr(model, "get_decoder"):
        raise WeirError(f"{type(model).__name__} has no decoder that takes token ids")


def _layer_type(config: Any, index: int) -> str | None:
    types = getattr(config, "layer_types", None)
    return None if types is None else types[index]


def _window(config: Any, kind: str | None) -> int | None:
    if kind is not None and kind != "sliding_attention":
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def _rotates(config: Any, module: nn.Module) -> bool:
    if config.model_type == "falcon" and config.alibi:
        return False
    return bool(getattr(module, "use_rope", True))


def _has_alibi(config: Any) -> bool:
    if config.model_type == "mpt":
        return bool(config.attn_config.alibi)
    return config.model_type == "bloom" or bool(getattr(config, "alibi", False))


def read_rotary(module: nn.Module, kind: str | None, reach: int | None) -> Rotary:
    """The rotary embedding of layers of type `kind` (None where a model has but one)."""
    prefix = f"{kind}_" if kind and hasattr(module, f"{kind}_inv_freq") else ""
    frequencies = getattr(module, f"{prefix}inv_freq")
    scaling = getattr(module, f"{prefix}attention_scaling")
    rope_type = getattr(module, "rope_type", "default")
    if rope_type in ("longrope", "dynamic"):
        # These change their frequencies with the length of the call; the reach of a cache is fixed.
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](
            module.config, frequencies.device, seq_len=reach or 1
        )
    return Rotary(frequencies.detach().to(torch.float64), float(scaling))


def alibi_slopes(config: Any, decoder: nn.Module) -> Tensor:
    """ALiBi's slopes by query head [heads], float32, as the model computes them."""
    raise WeirError(f"{config.model_type} has no ALiBi slopes")
