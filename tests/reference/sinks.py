"""Attention with an all-zero key and value in front, as the paper words it.

Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks", section 3.3:
"SoftMax_1 is equivalent to prepending a token with an all-zero Key and Value features in the
attention computation."
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention_after_a_zero_token(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Answers and weights, one head at a time.

    Args:
        queries: [batch, heads, length, dim].
        keys, values: [batch, kv_heads, tokens, dim].
        seen: [batch, length, tokens], true where a query may look.
        scale, softcap: the factor and the cap of logits.

    Returns:
        [batch, heads, length, dim] and, without those of the zero token,
        [batch, heads, length, tokens].
    """
    group = queries.shape[1] // keys.shape[1]
    answers, shares = [], []
    for head in range(queries.shape[1]):
        key, value = keys[:, head // group], values[:, head // group]
        zero = torch.zeros_like(key[:, :1])
        key, value = torch.cat([zero, key], dim=1), torch.cat([zero, value], dim=1)
        logits = torch.einsum("bld,bnd->bln", queries[:, head], key) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        weights = logits.exp() * torch.cat([torch.ones_like(seen[..., :1]), seen], dim=2)
        weights = weights / weights.sum(dim=2, keepdim=True)
        answers.append(torch.einsum("bln,bnd->bld", weights, value))
        shares.append(weights[..., 1:])
    return torch.stack(answers, dim=1), torch.stack(shares, dim=1)
