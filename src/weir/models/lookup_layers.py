"""Which layers of a model look up earlier occurrences of what they read.

Heads of such layers find an earlier occurrence of a token, or of its context, and copy what
followed (Olsson et al. 2022, "In-context Learning and Induction Heads", arXiv:2209.11895).
"""

from __future__ import annotations

import weakref
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import sdpa_mask

from weir.errors import WeirError
from weir.models.cache_folder import cache_folder, read_json, write_json
from weir.models.fingerprints import fingerprint
from weir.models.forward_lock import forward_lock_of
from weir.models.model_spec import attention_modules, describe, input_device, window_of

REPEATED = 128
"""Random tokens that are read twice."""
LOOKS_UP = 0.08
"""Score from which on a layer looks things up: 12 of the 30 of SmolLM2-135M, whose best has .93."""
FILE = "lookup_layers.json"
"""The layers of some models, in weir's assets; a file of this name in `cache_folder` has others."""
_SHIPPED = Path(str(files("weir"))) / "assets" / FILE
ATTENTION = "weir_lookup_scores"
"""The name under which transformers finds `_attend`."""
_FIRST = 8
"""Tokens at the beginning that are not counted: many heads look at them for no reason."""
_KNOWN: weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, ...]] = weakref.WeakKeyDictionary()


def find_lookup_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """Find the layers of a model that look up earlier tokens (`lookup_scores`).

    Returns their numbers among the layers that a policy holds, from 0; none of a model without
    weights, or where scores cannot be measured. They are kept by the model's weights in
    `cache_folder`.
    """
    if model not in _KNOWN:
        _KNOWN[model] = _find(model)
    return _KNOWN[model]


def _find(model: PreTrainedModel) -> tuple[int, ...]:
    if any(weight.is_meta for weight in model.parameters()):
        return ()
    name = str(fingerprint(model)["weights"])
    kept = cache_folder() / FILE
    known = _read_layers(_SHIPPED) | _read_layers(kept)
    if name not in known:
        found = [n for n, score in enumerate(lookup_scores(model)) if score >= LOOKS_UP]
        if not found:
            return ()
        write_json(kept, _read_layers(kept) | {name: found})
        return tuple(found)
    return tuple(known[name])


def lookup_scores(model: PreTrainedModel) -> list[float]:
    """Measure how much each layer that a policy holds looks up earlier tokens, from 0 to 1.

    The model reads random tokens twice. Of each KV head, every token's largest share of attention
    from the second reading is averaged over the tokens, as KVzip (Kim et al. 2025, section 3.2;
    arXiv:2505.23416) scores them; a layer has the score of its best head. Returns none where the
    model is too small to be asked, or outside transformers' attention interface.
    """
    facts = describe(model)
    window, config = window_of(model.config), model.config.get_text_config(decoder=True)
    count = min(REPEATED, (window or 2 * REPEATED) // 2)
    if count <= 2 * _FIRST or config.vocab_size < REPEATED:
        return []
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size // 16, config.vocab_size, (1, count), generator=draw)
    modules = attention_modules(facts.decoder)
    training = [module for module in model.modules() if module.training]
    scores = {id(module): -1.0 for module in modules}
    with forward_lock_of(config), torch.no_grad():
        previous = config._attn_implementation
        try:
            model.eval()
            config._attn_implementation = {"": ATTENTION}
            for module in modules:
                vars(module)[_SCORES] = scores
            facts.decoder(input_ids=ids.repeat(1, 2).to(input_device(model)), use_cache=False)
        except WeirError:
            return []
        finally:
            for module in modules:
                vars(module).pop(_SCORES, None)
            config._attn_implementation = {"": previous}
            for each in training:
                each.training = True
    layers = zip(modules, facts.layers, strict=True)
    held = [module for module, layer in layers if layer.positions.window is None] or modules
    found = [scores[id(module)] for module in held]
    return found if min(found) >= 0 else []


_SCORES = "_weir_lookup_scores"
"""Attribute of a module of attention that is being scored: the scores, by the module's id."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention for transformers, by its formula in float32, that scores its layer."""
    group, length = query.shape[1] // key.shape[1], query.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = query.float() @ repeat_kv(key, group).float().transpose(2, 3) * scale
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    later = torch.ones(length, length, dtype=torch.bool, device=key.device).triu(1)
    logits = logits.masked_fill(later, -torch.inf)
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.float()[None, :, None, None].expand(1, -1, length, 1)], 3)
    shares = logits.softmax(dim=-1)[..., :length]
    half = length // 2
    largest = shares[0, :, half:, _FIRST:half].unflatten(0, (-1, group)).amax(dim=(1, 2))
    vars(module)[_SCORES][id(module)] = float(largest.mean(dim=-1).max())
    out = shares.to(value.dtype) @ repeat_kv(value, group)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _read_layers(file: Path) -> dict[str, list[int]]:
    """Read the layers of models by a digest of their weights; none where there is no such file."""
    return {
        name: layers
        for name, layers in read_json(file).items()
        if isinstance(layers, list) and all(type(n) is int and n >= 0 for n in layers)
    }
