"""Observes the attention of a model while it reads: logits and weights, one block of queries at a
time.

Callers keep only sums over the numbers of a block, so a map of a long sequence never exists as a
whole. Models that weir streams are read through a dense cache, which sees queries and keys as the
attention does. All other models, including encoders such as BERT, are read through transformers'
attention interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache import Attention, AttentionCall, ListeningCache
from weir.errors import WeirError
from weir.models import (
    CACHE,
    AttentionInputs,
    cache_of,
    describe,
    input_device,
    observe_attention,
    sink_of,
    transformers_model,
)

PIECE = 256
"""Tokens that a model reads in one call."""

Look = Callable[[Attention], None]
"""A function that is called for every layer of every call, and keeps what it needs."""


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
            raise  # only weir implements this sink
        _watch_another(model, ids, look)
        return

    def hear(call: AttentionCall) -> None:
        """Show the layer's queries and all keys. A call is never longer than a chunk, so a layer
        with its own window still holds all keys of the call.
        """
        look(call.attention())

    # A cache without a limit first allocates five chunks for every row. A shorter chunk saves
    # memory for batches of many short sequences.
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


def _watch_another(model: PreTrainedModel, ids: Tensor, look: Look) -> None:
    """Do the same as `watch`, through transformers' attention interface."""
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

    def show(it: AttentionInputs) -> None:
        nonlocal shown
        index = getattr(it.module, "layer_idx", None)
        index = index if isinstance(index, int) else shown % max(1, layers)
        shown += 1
        # A sliding cache of transformers returns its last keys and the new ones.
        keys, end = it.keys, seen + it.queries.shape[2]
        places = torch.arange(end - keys.shape[2], end, device=keys.device)
        whole = it.queries.unflatten(1, (keys.shape[1], -1))
        look(Attention(index, whole, keys, seen, places, it.params, None, it.mask))

    with torch.no_grad(), observe_attention(model.config, show):
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
