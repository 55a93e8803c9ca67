"""KVzip by plain transformers and lists, from the paper alone: what `kvzip` is checked against.

Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
arXiv:2505.23416, section 3.2: the model has read a text and is asked to repeat it. A key-value pair
scores the largest share of attention that any query of the repetition gives it, over the query
heads of its KV head. The pairs of the highest score stay, and what comes afterwards attends to them
alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

Scores = list[list[list[float]]]
"""Scores by layer, KV head and token."""


@torch.no_grad()
def scores_of(
    model: PreTrainedModel, text: Sequence[int], part: int, request: Callable[[int], Sequence[int]]
) -> Scores:
    """Score the tokens of a text, which the model repeats in parts of `part` tokens.

    `request` gets the place at which a part begins, and returns the tokens that ask for this part.
    """
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    heads = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    found: Scores = []
    for start in range(0, len(text), part):
        these = list(text[start : start + part])
        fed = [*text, *request(start), *these]
        layers = plain(torch.tensor([fed]), output_attentions=True, use_cache=False).attentions
        found = found or [[[] for _ in range(heads)] for _ in layers]
        for layer, shares in enumerate(layers):
            group = shares.shape[1] // heads
            for head in range(heads):
                mine = shares[0, head * group : (head + 1) * group, len(text) :]
                for token in range(start, start + len(these)):
                    found[layer][head].append(float(mine[:, :, token].max()))
    return found


def highest(scores: Sequence[float], n: int) -> list[int]:
    """The places of the `n` highest scores, in order; of equal ones the older stay."""
    ranked = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    return sorted(ranked[:n])


def fold_of(scores: Scores, n: int, newest: int) -> Callable[..., Any]:
    """The naive fold: the text is folded once to its best tokens, and a window follows."""
    length = len(scores[0][0])

    def fold(held: Any, new: list[Any], at: Any) -> Any:
        best, window = held
        if not best:
            assert len(new) == length
            return [[new[place] for place in highest(scores[at.layer][at.head], n)], []]
        free = max(0, n - len(best))
        return [best + new[:free], (window + new[free:])[-newest:]]

    return fold
