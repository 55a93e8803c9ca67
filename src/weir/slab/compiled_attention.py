"""Attention of one query a head in compiled CPU code: loops over the slots.

PyTorch's fused attention is made for many queries. With one, calls of it take several times as long
as to read keys and values does. Here the query heads of a KV head share one loop over its keys and
one over its values, in the program of the step. The formula is that of `slab.attention`.
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
    """`two_weight_attention`, in float32.

    Args:
        queries: [batch, kv_heads, group, 1, key_dim].
        keys, values: [batch, kv_heads, slots, dim].
        mask: log-weights of both sums [batch, kv_heads, slots]; -inf leaves a slot out.
        params: the layer's scale, capping and sink logits.
        factors: what a slot's weight is multiplied with in numerator and in denominator, as in
            `split_attention` [batch, kv_heads, slots]; None for 1.

    Returns:
        [batch, kv_heads, group, 1, value_dim]; zero for a query that sees nothing.
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
