"""The attention sink a model was trained with, and softmax-off-by-one for a Zero Sink.

StreamingLLM (Xiao et al. 2024), section 3.3, trains models in three ways: as usual; with SoftMax_1,
which adds one to the denominator ("Zero Sink"); or with a learnable token in front of every sample.
The model's configuration records which, so that this is saved with the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import processors
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from weir.errors import WeirError

ATTENTION = "weir_zero_sink"
"""The name of `zero_sink_attention` among transformers' attention implementations."""
SUNK_ATTENTION = "weir_sink"
"""The name of weir's own attention for models with a Zero Sink, in calls with a weir cache."""
KINDS = ("none", "zero", "learnable")
"""Kinds of sinks, as in the paper's Table 3: vanilla, Zero Sink, learnable sink."""


@dataclass(frozen=True)
class ModelSink:
    """The attention sink that a model was trained with.

    Attributes:
        kind: "none", "zero" or "learnable" (StreamingLLM, Table 3).
        tokens: ids in front of every training sample, in order; only a learnable sink has any.

    Raises:
        WeirError: the kind is unknown, or does not go with these tokens, or a token cannot be an
            id.
    """

    kind: str = "none"
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise WeirError(
                f"the sink of a model must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )
        if any(type(token) is not int or token < 0 for token in self.tokens):
            raise WeirError(
                f"the tokens of a sink must be ids of at least 0, got {list(self.tokens)}"
            )
        if (self.kind == "learnable") != bool(self.tokens):
            raise WeirError(
                "a learnable sink must have at least one token, and other sinks must have none, "
                f"got {self.kind} with the tokens {list(self.tokens)}"
            )

    @property
    def slots(self) -> int | None:
        """Number of slots that a cache needs for sinks. None if the model was trained as usual,
        because the number is then not known.
        """
        return None if self.kind == "none" else len(self.tokens)

    def first(self, ids: Sequence[int]) -> list[int]:
        """Return a text's ids with the sink's tokens in front.

        Sink tokens that the tokenizer has already put there are not repeated.

        Args:
            ids: ids of the beginning of a stream.
        """
        there = min(len(ids), len(self.tokens))
        while tuple(ids[:there]) != self.tokens[:there]:
            there -= 1
        return [*self.tokens, *ids[there:]]


def sink_of(config: PreTrainedConfig) -> ModelSink:
    """Read the sink from a model's configuration.

    Args:
        config: the model's configuration; if it has several parts, the text decoder's is read.

    Raises:
        WeirError: the configuration has an entry `weir_sink` that weir cannot read.
    """
    entry = getattr(config.get_text_config(decoder=True), "weir_sink", None)
    if entry is None:
        return ModelSink()
    if not isinstance(entry, dict) or not isinstance(entry.get("tokens", []), list | tuple):
        raise WeirError(
            "weir_sink in the model's configuration must be "
            f'{{"kind": "none", "zero" or "learnable", "tokens": [ids]}}, got {entry!r}'
        )
    return ModelSink(entry.get("kind", "none"), tuple(entry.get("tokens", [])))


def set_sink(config: PreTrainedConfig, kind: str, tokens: Iterable[int] = ()) -> None:
    """Write a model's sink into its configuration; `save_pretrained` keeps it.

    With "zero", the attention becomes `zero_sink_attention`, both in models that are made from the
    configuration and in a model that already uses it. A saved folder asks for that attention too,
    so `AutoModelForCausalLM.from_pretrained(folder)` uses it after `import weir.models`; without
    the import, transformers raises an error for an unknown attention instead of using another one.

    Args:
        config: configuration of a causal language model; if it has several parts, the text
            decoder's is set.
        kind: "none", "zero" or "learnable" (`ModelSink`).
        tokens: ids in front of every training sample; for "learnable" only.

    Raises:
        WeirError: the kind is unknown, or does not go with these tokens, or a token cannot be an
            id.
    """
    sink = ModelSink(kind, tuple(tokens))
    text: Any = config.get_text_config(decoder=True)
    text.weir_sink = {"kind": sink.kind, "tokens": list(sink.tokens)}
    if sink.kind == "zero":
        attend_by_sink(config)
    elif text._attn_implementation == ATTENTION:
        vars(text).pop("attn_implementation", None)
        text._attn_implementation = "sdpa"


def attend_by_sink(config: PreTrainedConfig) -> None:
    """Select `zero_sink_attention` where a configuration says that its model has a Zero Sink."""
    text: Any = config.get_text_config(decoder=True)
    if sink_of(config).kind == "zero":
        # It is set twice: for this process, and as a plain attribute for the saved file, because
        # transformers reads `attn_implementation` from a config.json but does not write it.
        text._attn_implementation = {"": ATTENTION}
        text.attn_implementation = ATTENTION


def sink_at_work(config: PreTrainedConfig) -> ModelSink:
    """Return a loaded model's sink; WeirError if it is a Zero Sink and the model's attention does
    not implement it.
    """
    sink, text = sink_of(config), config.get_text_config(decoder=True)
    # During a call with a weir cache in another thread, the attention is weir's.
    if sink.kind == "zero" and text._attn_implementation not in (ATTENTION, SUNK_ATTENTION):
        raise WeirError(
            "this model was trained with a Zero Sink, but its attention is "
            f"{text._attn_implementation!r}, which has none. Load it with weir.load, or call "
            f"model.set_attn_implementation({ATTENTION!r})."
        )
    return sink


def begin_with_sink(tokenizer: PreTrainedTokenizerBase, sink: ModelSink) -> None:
    """Make a tokenizer put a learnable sink's tokens in front of every text, unless it does so
    already.

    Raises WeirError if the tokenizer does not know the tokens, or cannot be changed.
    """
    count = len(sink.tokens)
    if not count or tuple(tokenizer("a")["input_ids"][:count]) == sink.tokens:
        return
    names = tokenizer.convert_ids_to_tokens(list(sink.tokens))
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or None in names:
        why = "is not a fast one" if backend is None else "does not know all of them"
        raise WeirError(
            f"the tokenizer does not put the tokens of the model's sink, {list(sink.tokens)}, "
            f"before a text, and cannot be changed to do so, because it {why}"
        )
    backend.post_processor = processors.TemplateProcessing(
        single=[*names, "$A"],
        special_tokens=list(dict.fromkeys(zip(names, sink.tokens, strict=True))),
    )


def zero_sink_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function for transformers with SoftMax_1: e^l_i / (1 + sum_j e^l_j).

    The result is the same as with an all-zero key and value before the first token, seen by every
    query (StreamingLLM, section 3.3, equation 2). PyTorch's fused attention computes it that way;
    with `output_attentions` or capped logits the formula is computed directly.

    Args:
        module: the attention module.
        query: [batch, heads, length, key_dim].
        key, value: [batch, kv_heads, tokens, dim].
        attention_mask: [batch, 1 or heads, length, tokens], true where a query may look if it is
            boolean, otherwise a number that is added to the logits; None for causal attention, or
            for a single query that sees everything.
        dropout, scaling, is_causal: as transformers passes them.
        kwargs: `softcap` and `output_attentions` are used, others passed on.

    Returns:
        Outputs [batch, length, heads, value_dim], and the attention weights
        [batch, heads, length, tokens], which sum to less than one. The weights are None unless
        they were requested or logits are capped.

    Raises:
        WeirError: the model has its own sink logits.
    """
    if kwargs.get("s_aux") is not None:
        raise WeirError(
            "a model with its own sink logits, such as gpt_oss, cannot have a Zero Sink"
        )
    length = query.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and length > 1 and attention_mask is None
    softcap = kwargs.get("softcap")
    if softcap is not None or kwargs.get("output_attentions"):
        return _formula(query, key, value, attention_mask, causal, dropout, scaling, softcap)
    if causal:
        # A query is put in front as well, so that PyTorch's own causal mask still fits, and no mask
        # has to be read. Keys beyond the last query belong to slots that are not filled yet.
        query = F.pad(query, (0, 0, 1, 0))
    if attention_mask is not None:
        seen = 1.0 if attention_mask.dtype == torch.bool else 0.0
        attention_mask = F.pad(attention_mask, (1, 0), value=seen)
    out, _ = sdpa_attention_forward(
        module,
        query,
        F.pad(key, (0, 0, 1, 0)),
        F.pad(value, (0, 0, 1, 0)),
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=causal,
        **kwargs,
    )
    return out[:, -length:], None


def _formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute `zero_sink_attention` by its formula, with a softmax in float32, and return the
    attention weights too.
    """
    group = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, group), repeat_kv(value, group)
    logits = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    if causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        logits = logits + mask
    weights = F.pad(logits, (1, 0)).softmax(dim=-1, dtype=torch.float32)[..., 1:]
    weights = F.dropout(weights.to(value.dtype), dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(ATTENTION, zero_sink_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
