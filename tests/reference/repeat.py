"""KVzip's score by plain transformers: what a second reading is checked against.

Kim et al. 2025, arXiv:2505.23416: the model reads a text and then the last part of it once more.
A token of that part scores the largest share of attention that a query of the repetition gives it,
over all queries and the query heads of a KV head. The softmax is over everything the query sees.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def scores_of(model: PreTrainedModel, tokens: Tensor, last: int) -> list[Tensor]:
    """By layer, the scores [kv_heads, last] of the last tokens of a text [1, length]."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    length, heads = tokens.shape[1], model.config.num_key_value_heads
    again = torch.cat([tokens, tokens[:, length - last :]], dim=1)
    shares = plain(again, output_attentions=True, use_cache=False).attentions
    part = slice(length - last, length)
    return [
        of_layer[0].unflatten(0, (heads, -1))[:, :, length:, part].amax(dim=(1, 2))
        for of_layer in shares
    ]
