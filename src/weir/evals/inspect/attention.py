"""The attention of a model while it reads, block of queries by block: logits and weights.

Callers keep sums over a block's numbers only, so a map of a long sequence is never whole anywhere.
What weir streams is read through a dense cache, which sees queries and keys as the attention does;
any other model, encoders such as BERT among them, through transformers' attention interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from weir.cache import Attention, AttentionCall, ListeningCache, bias_of
from weir.errors import WeirError
from weir.models import CACHE, cache_of, describe, input_device, sink_of, transformers_model
from weir.slab import (
    AttentionParams,
    two_weight_attention,
)

PIECE = 256
"""Tokens that a model reads in one call."""
OURS = "weir-inspect"
"""Our attention function's name in transformers."""


Look = Callable[[Attention], None]
"""Is shown every layer of every call, and keeps what it wants of it."""


def watch(model: PreTrainedModel, ids: Tensor, look: Look) -> None:
    """Run a model on sequences from their beginning, and pass its attention to `look`.

    `ids` are [batch, length], without padding; a causal language model reads them in calls of
    `PIECE` tokens, an encoder in one. `look` is called for every layer of every call.
    """
    model = transformers_model(model)
    try:
        describe(model)
    except WeirError:
        if sink_of(model.config).kind == "zero":
            raise  # only weir knows about that sink
        _watch_another(model, ids, look)
        return

    def hear(call: AttentionCall) -> None:
        """Show the layer's queries and all keys; a call never exceeds the tail."""
        look(call.attention())

    # A cache without a limit begins with five chunks, for each of many short sequences.
    chunk = min(PIECE, ids.shape[1])
    watcher = ListeningCache(model, "dense", hear, positions="original", chunk=chunk)
    more = {CACHE: watcher, "use_cache": True, "logits_to_keep": 1}
    try:
        with torch.no_grad():
            for piece in ids.to(input_device(model)).split(PIECE, dim=1):
                model(input_ids=piece, **more)
    finally:
        watcher.close()


def looks_ahead(model: PreTrainedModel) -> bool:
    """Whether tokens attend to later ones, as in an encoder."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return False
    modules = [m for m in model.modules() if isinstance(getattr(m, "is_causal", None), bool)]
    return bool(modules) and not any(m.is_causal for m in modules)


# --- models that weir does not stream

_showing: list[Callable[..., None]] = []
"""Callbacks that the attention function below passes its arguments to; none between calls."""


def _watch_another(model: PreTrainedModel, ids: Tensor, look: Look) -> None:
    """`watch` through transformers' attention interface."""
    kind = model.config.model_type
    if getattr(model.config, "is_encoder_decoder", False):
        raise WeirError(
            f"{kind} is an encoder-decoder, and weir inspects only decoders and encoders"
        )
    ahead = looks_ahead(model)
    pieces = [ids] if ahead else list(ids.split(PIECE, dim=1))
    layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 1))
    seen, shown = 0, 0
    past: Any = None

    def show(
        module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, params: AttentionParams
    ) -> None:
        nonlocal shown
        index = getattr(module, "layer_idx", None)
        index = index if isinstance(index, int) else shown % max(1, layers)
        shown += 1
        # A cache of transformers' that slides gives its last keys and the new ones.
        end = seen + q.shape[2]
        places = torch.arange(end - k.shape[2], end, device=k.device)
        whole = q.unflatten(1, (k.shape[1], -1))
        look(Attention(index, whole, k, seen, places, params, None, mask))

    with torch.no_grad(), _ours(model, show):
        for piece in pieces:
            given: dict[str, Any] = {} if ahead else {"use_cache": True, CACHE: past}
            out = model(input_ids=piece.to(input_device(model)), **given)
            if not shown:
                raise WeirError(
                    f"this {kind} has no attention weights to show: none of its layers asks "
                    "transformers' attention interface for them"
                )
            past = cache_of(out)
            seen += piece.shape[1]


@contextmanager
def _ours(model: PreTrainedModel, show: Callable[..., None]) -> Iterator[None]:
    """Replace a model's attention function by ours."""
    before = model.config._attn_implementation
    model.config._attn_implementation = {"": OURS}
    _showing.append(show)
    try:
        yield
    finally:
        _showing.pop()
        model.config._attn_implementation = {"": before}


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers while `watch` runs a model that weir does not stream."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sinks = None if s_aux is None else s_aux.float().view(key.shape[1], -1)
    params, mask = AttentionParams(scale, softcap, sinks), attention_mask
    if mask is not None and mask.dtype != torch.bool:
        raise WeirError(
            "this model adds numbers to its attention logits, which cannot be distinguished from "
            "a mask"
        )
    _showing[-1](module, query, key, mask, params)
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(
            query, key, value, mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    else:
        none, bias = key.new_zeros(1, 1, 1), None if mask is None else bias_of(mask[:, None])
        group = query.unflatten(1, (key.shape[1], -1))
        out = two_weight_attention(group, key, value, none, none, params, bias).flatten(1, 2)
    return out.transpose(1, 2).contiguous(), None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' mask as booleans: None only where every query sees everything."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(OURS, _attend)
AttentionMaskInterface.register(OURS, _mask)
