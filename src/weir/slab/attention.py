"""Attention over slots with two log-weights: the readable reference and faster versions.

    z(q) = sum_i e^(l_i + a_i) v_i / (e^s + sum_i e^(l_i + b_i))
    l_i = softcap(<q, k_i> * scale) + bias_i

where z(q) is the *answer* to the query q, and s is the sink logit of its head (-inf without sinks).
In every version, the error of an answer is bounded by rounding, whatever the logits are. Unless
said otherwise, queries are [batch, kv_heads, group, length, key_dim], keys and values [batch,
kv_heads, slots, dim], weights [batch, kv_heads, slots], and a bias broadcasts with [batch,
kv_heads, group, length, slots].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class AttentionParams:
    """Parameters of one layer's attention.

    Attributes:
        scale: factor of the products of queries and keys, usually 1/sqrt(key_dim).
        softcap: logits become softcap * tanh(logits / softcap); None for no capping.
        sinks: logits in the denominator only [kv_heads, group], float32; None for none. gpt-oss has
            learned its own; zeros are a Zero Sink (StreamingLLM, section 3.3).
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @classmethod
    def from_call(
        cls,
        query: Tensor,
        key: Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> AttentionParams:
        """Read the parameters from a call of a transformers attention function.

        `query` is [batch, heads, length, key_dim], `key` [batch, kv_heads, length, key_dim], and
        `sinks` [heads].
        """
        return cls(
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            softcap=softcap,
            sinks=None if sinks is None else sinks.float().view(key.shape[1], -1),
        )


def two_weight_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    a: Tensor,
    b: Tensor,
    params: AttentionParams,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute the formula above in float32, or for float64 in float64. Every kernel must give the
    same result.

    A log-weight of -inf leaves a slot out of a sum. A bias of -inf hides a slot from a query.
    Returns [batch, kv_heads, group, length, value_dim], zero for a query that sees nothing.
    """
    logits = _logits(queries, keys, params, bias)
    above, below = logits + _per_slot(a), logits + _per_slot(b)
    top = torch.maximum(above, below).amax(dim=-1, keepdim=True)
    if params.sinks is not None:
        top = torch.maximum(top, params.sinks[:, :, None, None])
    top = top.masked_fill(top.isneginf(), 0.0)
    total = (below - top).exp().sum(dim=-1, keepdim=True)
    if params.sinks is not None:
        total = total + (params.sinks[:, :, None, None] - top).exp()
    weighted = torch.einsum("bhgln,bhnd->bhgld", (above - top).exp(), at_least_float32(values))
    return (weighted / total).masked_fill(total == 0, 0.0).to(values.dtype)


def attention_mass(
    queries: Tensor, keys: Tensor, b: Tensor, params: AttentionParams, bias: Tensor | None = None
) -> Tensor:
    """Compute the attention that each slot receives [batch, kv_heads, slots], float32: the softmax
    of the denominator, summed over the queries and over the query heads of the group.
    """
    if params.softcap is None and params.sinks is None and keys.device.type == "cpu":
        found = _received(_softmax_in_place(_flat_logits(queries, keys, params, b, bias)), b)
        if not bool(found.isnan().any()):  # NaN if a query sees nothing
            return found
    below = _logits(queries, keys, params, _per_slot(b) if bias is None else bias + _per_slot(b))
    # The logits are the largest tensor of a fold. So they are overwritten, and one product weighs
    # and sums them without a second tensor of their size.
    top = below.amax(dim=-1, keepdim=True)
    if params.sinks is not None:
        top = torch.maximum(top, params.sinks[:, :, None, None])
    top = top.masked_fill(top.isneginf(), 0.0)
    below = below.sub_(top).exp_()
    total = below.sum(dim=-1, keepdim=True)
    if params.sinks is not None:
        total = total + (params.sinks[:, :, None, None] - top).exp()
    share = (1 / total).masked_fill(total == 0, 0.0)
    return (share.flatten(2)[:, :, None] @ below.flatten(2, 3))[:, :, 0].float()


def _received(shares: Tensor, b: Tensor) -> Tensor:
    """Sum shares [batch * kv_heads, queries, slots] over the queries; returns the shape of `b`."""
    ones = shares.new_ones((len(shares), 1, shares.shape[1]))
    return (ones @ shares).view(b.shape).float()


class AttentionResult(NamedTuple):
    """The answers of a call of attention, and what was observed during it.

    Attributes:
        answers: [batch, kv_heads, group, length, value_dim].
        received: the queries are cut into one or more parts of equal length, and this is the
            `attention_mass` of each part [batch, kv_heads, parts, slots], float32; None if not
            observed.
        shares: each slot's share of each query's attention [batch, kv_heads, group, length, slots],
            float32; None if not kept.
    """

    answers: Tensor
    received: Tensor | None = None
    shares: Tensor | None = None

    @property
    def mass(self) -> Tensor:
        """The attention that each slot received from all queries [batch, kv_heads, slots],
        float32.
        """
        assert self.received is not None
        return self.received.sum(dim=2)

    def of_last(self, queries: int) -> Tensor | None:
        """Return the attention that each slot received from only the last `queries` queries [batch,
        kv_heads, slots]. None if no parts add up to that number of queries.
        """
        assert self.received is not None
        parts, rest = divmod(queries * self.received.shape[2], self.answers.shape[3])
        return None if rest or not parts else self.received[:, :, -parts:].sum(dim=2)


def observed_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    b: Tensor,
    params: AttentionParams,
    bias: Tensor | None,
) -> AttentionResult | None:
    """Compute answers, received attention and shares with plain products around one softmax.

    On a CPU, this takes as long as `fused_attention`, and the mass is bit-identical to
    `attention_mass`. It is for float32 without capping and sinks, with a = b. The bias can leave
    out the first slots, if it is zero for them. Returns None if a query sees nothing.
    """
    weights = _softmax_in_place(_flat_logits(queries, keys, params, b, bias))
    mass = _received(weights, b)
    if bool(mass.isnan().any()):
        return None
    size = queries.shape[:4]
    answers = weights.bmm(values.reshape(-1, *values.shape[2:]))
    return AttentionResult(answers.view(*size, -1), mass[:, :, None], weights.view(*size, -1))


def compute_logits(
    queries: Tensor, keys: Tensor, params: AttentionParams, bias: Tensor | None = None
) -> Tensor:
    """Compute logits without log-weights, as a new tensor [batch, kv_heads, group, length, slots],
    float32.
    """
    return _logits(queries, keys, params, bias).float()


def attention_weights(logits: Tensor, b: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
    """Compute the share of each slot in each query's attention, and the denominators.

    Returns shares of the shape of `logits` (`compute_logits` over all slots), and the logarithm of
    each denominator, including sinks [batch, kv_heads, group, length], both float32. For a query
    that sees nothing, shares are 0, and the logarithm is -inf or, with sinks, the sink logit.
    """
    below = logits + _per_slot(b)
    top = below.amax(dim=-1, keepdim=True)
    top = top.masked_fill_(top.isneginf(), 0.0)
    weights = below.sub_(top).exp_()
    lse = weights.sum(dim=-1).log_().add_(top[..., 0])
    if params.sinks is not None:
        lse = torch.logaddexp(lse, params.sinks[:, :, None])
    return weights.mul_((top - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp_()), lse


def attention_softmax(logits: Tensor, b: Tensor, params: AttentionParams) -> Tensor:
    """Compute only the shares of `attention_weights`. On a CPU and without sinks, this is one
    softmax, which is faster.
    """
    if params.sinks is not None or logits.device.type != "cpu":
        return attention_weights(logits, b, params)[0]
    weights = _softmax_in_place(logits + _per_slot(b))
    # One column is enough to check: if a query sees nothing, all its shares are NaN.
    blind = weights[..., :1].isnan()
    return weights.masked_fill_(blind, 0.0) if bool(blind.any()) else weights


def attention_shares(logits: Tensor, b: Tensor, lse: Tensor) -> Tensor:
    """Compute the share of some slots in each query's attention, in the shape of their `logits`,
    float32.

    `lse` has the logarithms of the denominators over all slots (`attention_weights`). Shares are 0
    if a query sees nothing.
    """
    below = logits + _per_slot(b)
    return below.sub_(lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp_()


def fused_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    params: AttentionParams,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute attention with PyTorch's fused function, for a = b and logits without a cap. The
    log-weights must be part of `bias`.

    PyTorch's function does not support sink logits. With these, attention is computed by a softmax
    over one more column.
    """
    batch, kv_heads, group, length, _ = queries.shape
    if params.sinks is not None:
        weights, _ = _softmax_with_sinks(
            _flat_logits(queries, keys, params, None, bias), params.sinks, batch, length
        )
        out = weights.bmm(at_least_float32(values.flatten(0, 1)))
        return out.view(batch, kv_heads, group, length, -1).to(values.dtype)
    if bias is not None and (bias.device.type != "cpu" or queries.dtype == torch.float64):
        # Only the CPU accepts a float32 bias for queries of another dtype, and only for queries in
        # half precision. For float64 queries, it silently returns wrong answers (PyTorch 2.9 to
        # 2.13).
        bias = bias.to(queries.dtype)
    gqa = group > 1
    if length == 1:
        # With one query per head, PyTorch can treat the heads of a group as several queries of
        # their KV head.
        bias = None if bias is None else bias.expand(batch, kv_heads, group, 1, -1)[:, :, :, 0]
        queries, gqa = queries[:, :, :, 0], False
    elif bias is not None and bias.shape[2] == 1 and bias.shape[1] > 1:
        # The bias is the same for all heads of a group. If each KV head is a row of the batch, the
        # bias (queries times slots) is not copied for every query head.
        bias = bias.expand(batch, -1, -1, -1, -1).flatten(0, 1)
        queries = queries.flatten(0, 1)
        keys, values = keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None]
    else:
        if bias is not None and bias.shape[1] * bias.shape[2] != 1:
            bias = bias.expand(-1, kv_heads, group, -1, -1)
        bias = None if bias is None else bias.flatten(1, 2)
        queries = queries.flatten(1, 2)
    out = F.scaled_dot_product_attention(
        queries, keys, values, bias, scale=params.scale, enable_gqa=gqa
    )
    return out.view(batch, kv_heads, group, length, -1)


def split_weights(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (m, e^(a-m), e^(b-m)), where m = max(a, b): the weights for `split_attention`.

    The larger of the two factors is 1. Both are 0 in an empty slot, where a = b = -inf.
    """
    mask = torch.maximum(a, b)
    empty = mask.isneginf()
    numerator, denominator = ((log - mask).exp().masked_fill(empty, 0.0) for log in (a, b))
    return mask, numerator, denominator


def split_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    params: AttentionParams,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute both sums from one softmax, as precisely as the formula; for logits without a cap.

        p = softmax(l + m),  z(q) = sum_i p_i e^(a_i-m_i) v_i / sum_i p_i e^(b_i-m_i)

    A slot that is in only one sum adds nothing to the other, however large its logit is. So
    rounding affects only logits and sums of terms of one sign, as in `two_weight_attention`. As
    there, a sum below e^-87 of the other is lost. `mask`, `numerator` and `denominator` are what
    `split_weights` returns.
    """
    batch, kv_heads, group, length, _ = queries.shape
    slots = keys.shape[2]
    # The mask is clamped because a softmax over only -inf is NaN, even where the factors are 0.
    mask = mask.clamp_min(torch.finfo(torch.float32).min)
    logits = _flat_logits(queries, keys, params, mask, bias)
    numerator, denominator = numerator.to(logits.dtype), denominator.to(logits.dtype)
    if params.sinks is None:
        weights = logits.softmax(dim=-1)
        total = weights.bmm(denominator.reshape(-1, slots, 1))
    else:
        weights, sunk = _softmax_with_sinks(logits, params.sinks, batch, length)
        total = weights.bmm(denominator.reshape(-1, slots, 1)) + sunk
    total.masked_fill_(total == 0, torch.inf)
    weights.mul_(numerator.reshape(-1, 1, slots))
    out = weights.bmm(at_least_float32(values.reshape(-1, slots, values.shape[3]))).div_(total)
    if bias is not None:
        out.masked_fill_(logits.amax(dim=-1, keepdim=True).isneginf(), 0.0)
    return out.view(batch, kv_heads, group, length, -1).to(values.dtype)


def _flat_logits(
    queries: Tensor, keys: Tensor, params: AttentionParams, mask: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Compute logits without capping, as a new tensor [batch * kv_heads, group * length, slots].

    The log-weights `mask` [batch, kv_heads, slots] and the bias are added. The result has three
    dimensions, because PyTorch multiplies tensors of three dimensions with less overhead than
    tensors of four, which matters in a decode step. A bias for fewer slots than the keys have
    belongs to the last slots.
    """
    batch, kv_heads, group, length, key_dim = queries.shape
    slots = keys.shape[2]
    queries = at_least_float32(queries.reshape(-1, group * length, key_dim))
    logits = torch.baddbmm(
        queries.new_zeros(()) if mask is None else mask.reshape(-1, 1, slots).to(queries.dtype),
        queries,
        keys.reshape(-1, slots, key_dim).to(queries.dtype).mT,
        beta=0 if mask is None else 1,
        alpha=params.scale,
    )
    if bias is not None:
        last = slots if bias.shape[4] == 1 else bias.shape[4]
        logits.view(batch, kv_heads, group, length, slots)[..., slots - last :].add_(bias)
    return logits


def _softmax_in_place(logits: Tensor) -> Tensor:
    """Compute a softmax over the last dimension on a CPU, overwriting the logits unless gradients
    are needed.

    Allocating a second tensor of that size takes longer than the softmax.
    """
    if logits.requires_grad:
        return logits.softmax(dim=-1)
    return torch.softmax(logits, -1, out=logits)


def _softmax_with_sinks(
    logits: Tensor, sinks: Tensor, batch: int, length: int
) -> tuple[Tensor, Tensor]:
    """Compute a softmax of logits [batch * kv_heads, group * length, slots] over the slots and one
    sink.

    Returns the weights of the slots, and those of the sinks [batch * kv_heads, group * length, 1].
    """
    column = sinks.repeat(batch, 1).repeat_interleave(length, dim=1)[:, :, None]
    weights = torch.cat([logits, column], dim=2).softmax(dim=2)
    return weights[..., :-1], weights[..., -1:]


def _logits(queries: Tensor, keys: Tensor, params: AttentionParams, bias: Tensor | None) -> Tensor:
    """Compute logits, with capping and bias, as a new tensor [batch, kv_heads, group, length,
    slots].
    """
    merged = (at_least_float32(queries) * params.scale).flatten(2, 3)
    logits = (merged @ at_least_float32(keys).mT).unflatten(2, queries.shape[2:4])
    if params.softcap is not None:
        logits = (logits / params.softcap).tanh() * params.softcap
    return logits if bias is None else logits.add_(bias)


def at_least_float32(t: Tensor) -> Tensor:
    """Convert a tensor to the precision in which sums are computed: float64 stays, and all others
    become float32.
    """
    return t if t.dtype == torch.float64 else t.float()


def _per_slot(weight: Tensor) -> Tensor:
    return weight[:, :, None, None, :]
