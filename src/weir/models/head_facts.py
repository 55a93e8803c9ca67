"""Measurements of each KV head of a model, made once by reading random tokens, and cached in a
file.

Some heads look for an earlier occurrence of a token, or of its context, and copy what followed
(Olsson et al. 2022, "In-context Learning and Induction Heads", arXiv:2209.11895). And in some
models a few channels of the keys are so large that slots of 4 bits lose the others.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.errors import WeirError
from weir.models.fingerprints import digest_rows, fingerprint
from weir.models.kept_files import cache_folder, read_json, write_json
from weir.models.model_spec import (
    OWN_FAMILIES,
    describe,
    input_device,
    window_of,
)
from weir.models.observing import AttentionInputs, bias_of, observe_attention
from weir.slab import FORMATS, as_read, attention_softmax, compute_logits

REPEATED = 128
"""Number of random tokens that are read twice."""
FILE = "head_facts.json"
"""File with the facts of some models, in weir's assets. A file of the same name in `cache_folder`
has those of others.
"""
_SHIPPED = Path(str(files("weir"))) / "assets" / FILE
_FIRST = 8
"""Number of tokens at the beginning that are not scored, because many heads attend to them whatever
they are.
"""
EXACT = 4
"""Number of tokens at the beginning that a policy keeps exact, as sinks."""


@dataclass(frozen=True)
class HeadFacts:
    """Measurements of the layers to which a policy applies: those without a sliding window, or all
    if every layer has one.

    Attributes:
        lookup: for each KV head of each layer, how much it looks up earlier tokens, from 0 to 1.
        shift: how much attention changes if keys are stored in 4 bits, in the head where it changes
            most: the Kullback-Leibler divergence of the shares of attention in nats, averaged over
            the queries; infinity if keys or values of this size cannot be stored in 4 bits.
    """

    lookup: tuple[tuple[float, ...], ...]
    shift: float


_KNOWN: weakref.WeakKeyDictionary[PreTrainedModel, HeadFacts | None] = weakref.WeakKeyDictionary()


def find_head_facts(model: PreTrainedModel) -> HeadFacts | None:
    """Find the facts of a model's heads (`measure_heads`).

    Returns None for a model with weights on the device `meta`, such as offloaded ones, or if its
    heads cannot be measured. Facts are cached in `cache_folder`, by the model's weights.
    """
    if model not in _KNOWN:
        _KNOWN[model] = _find(model)
    return _KNOWN[model]


def _find(model: PreTrainedModel) -> HeadFacts | None:
    if any(weight.is_meta for weight in model.parameters()):
        return None
    name, kept = _name(model), cache_folder() / FILE
    for file in (_SHIPPED, kept):
        known = _read(read_json(file).get(name))
        if known is not None:
            return known
    found = measure_heads(model)
    if found is not None:
        write_json(kept, read_json(kept) | {name: asdict(found)})
    return found


def _name(model: PreTrainedModel) -> str:
    """Return the name of a model's facts: its fingerprint, and a checksum of its attention."""
    modules = describe(model).attentions  # of a model that sees images, those of its text decoder
    return f"{fingerprint(model)['weights']}-{digest_rows(modules)}"


def _read(kept: Any) -> HeadFacts | None:
    """Read the facts of one model from JSON; None if they are not valid."""
    try:
        lookup = tuple(tuple(float(score) for score in layer) for layer in kept["lookup"])
        return HeadFacts(lookup, float(kept["shift"]))
    except (LookupError, TypeError, ValueError):
        return None


def measure_heads(model: PreTrainedModel) -> HeadFacts | None:
    """Measure the KV heads of each layer to which a policy applies.

    The model reads random tokens twice. The score of a token in a KV head is the largest share of
    attention that it gets from the second reading, as in KVzip (Kim et al. 2025, section 3.2;
    arXiv:2505.23416). The score of the head is the mean over the tokens. How much keys in 4 bits
    change attention is measured over the queries of both readings. Returns None if the model's
    context window or vocabulary is too small, if its attention cannot be observed
    (`observe_attention`), or if its heads are distributed over processes.
    """
    spec = describe(model)
    window, config = window_of(model.config), model.config.get_text_config(decoder=True)
    count = min(REPEATED, (window or 2 * REPEATED) // 2)
    own = config.model_type in OWN_FAMILIES  # their attention cannot be observed
    if own or count <= 2 * _FIRST or config.vocab_size < REPEATED:
        return None
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size // 16, config.vocab_size, (1, count), generator=draw)
    modules = spec.attentions
    training = [module for module in model.modules() if module.training]
    found: dict[int, tuple[tuple[float, ...], float]] = {}

    def hear(seen: AttentionInputs) -> None:
        found[id(seen.module)] = _measure(seen)

    with torch.no_grad(), observe_attention(config, hear):
        try:
            model.eval()
            # Use the text decoder of a model that sees images, because the whole model treats some
            # ids as images.
            text = model.get_decoder()
            text(input_ids=ids.repeat(1, 2).to(input_device(model)), use_cache=False)
        except WeirError:
            return None
        finally:
            for each in training:
                each.training = True
    layers = list(zip(modules, spec.layers, strict=True))
    held = [layer for layer in layers if layer[1].positions.window is None] or layers
    if any(layer.shares > 1 or id(module) not in found for module, layer in held):
        return None
    lookup, shifts = zip(*(found[id(module)] for module, _ in held), strict=True)
    return HeadFacts(lookup, max(shifts))


def _measure(seen: AttentionInputs) -> tuple[tuple[float, ...], float]:
    """Return the lookup of each KV head and the shift of one layer (`HeadFacts`).

    The second half of the queries reads the same tokens as the first half.
    """
    query, key, params = seen.queries, seen.keys, seen.params
    half, heads = query.shape[2] // 2, key.shape[1]
    bias = None if seen.mask is None else bias_of(seen.mask[:, None])

    def shares_of(key: Tensor) -> Tensor:
        """Return the shares of attention [1, kv_heads, group, queries, keys]."""
        logits = compute_logits(query.unflatten(1, (heads, -1)), key, params, bias)
        return attention_softmax(logits, logits.new_zeros(1, 1, 1), params)

    shares = shares_of(key)
    largest = shares[0, :, :, half:, _FIRST:half].amax(dim=(1, 2))
    form, shift = FORMATS["int4"], math.inf
    if form.wrong(key.shape[3], seen.values.shape[3]) is None:
        rounded = torch.cat([key[:, :, :EXACT], as_read(key[:, :, EXACT:], form.keys)], dim=2)
        there = shares_of(rounded)
        # Both functions treat a share of 0 as contributing nothing.
        nats = (-torch.special.entr(shares) - torch.special.xlogy(shares, there)).sum(-1)
        if params.sinks is not None:  # a learned sink gets the rest of the attention
            rest, other = ((1 - one.sum(-1)).clamp(min=0) for one in (shares, there))
            nats += torch.special.xlogy(rest, rest) - torch.special.xlogy(rest, other)
        shift = round(float(nats.mean(-1).max()), 4)
    scores = tuple(round(score, 4) for score in largest.mean(dim=-1).tolist())
    return scores, shift
