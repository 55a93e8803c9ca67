"""Attention of one query a head in compiled CPU code: loops over the slots.

PyTorch's fused attention is made for many queries; with one, a call takes several times as long as
to read keys and values. Here the heads of a group share one loop over the keys and one over the
values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weir.kernels import dot_products, register_operator, weighted_sums
from weir.slab.attention import AttentionParams

SHARING = 8
"""Most query heads of a KV head for loops: as many sums as fit into registers."""


def uses_loops(queries: Tensor, kv_heads: int) -> bool:
    """Return whether queries [batch, heads, 1, key_dim] are answered by loops."""
    compiling: bool = torch.compiler.is_compiling()
    return compiling and queries.device.type == "cpu" and queries.shape[1] <= SHARING * kv_heads


def attend_in_loops(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    params: AttentionParams,
    factors: Sequence[Tensor] | None = None,
) -> Tensor:
    """`two_weight_attention` of queries [batch, kv_heads, group, 1, key_dim], in float32.

    `mask` [batch, kv_heads, slots] has the log-weights of both sums, -inf for slots left out;
    `factors` those of numerator and denominator, as in `split_attention`; None for 1.
    """
    above, below = (None, None) if factors is None else factors
    out: Tensor = _ATTEND(
        queries, keys, values, mask, params.scale, params.softcap, params.sinks, above, below
    )
    return out


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    above: Tensor | None,
    below: Tensor | None,
) -> Tensor:
    logits = dot_products(queries[:, :, :, 0].float() * scale, keys)
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    logits = logits + mask[:, :, None]
    top = logits.amax(dim=-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks[..., None])
    top = top.masked_fill(top.isneginf(), 0.0)
    weights = (logits - top).exp()
    upper = weights if above is None else weights * above[:, :, None]
    lower = weights if below is None else weights * below[:, :, None]
    total = lower.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[..., None] - top).exp()
    out = weighted_sums(upper, values) / total.masked_fill(total == 0, torch.inf)
    return out.to(values.dtype)[:, :, :, None]


_ATTEND = register_operator(
    "looped",
    "(Tensor queries, Tensor keys, Tensor values, Tensor mask, float scale, float? softcap, "
    "Tensor? sinks, Tensor? above, Tensor? below) -> Tensor",
    _attend,
    lambda queries, keys, values, *_: values.new_empty(*queries.shape[:4], values.shape[3]),
)
