"""Computes a call of attention with the fastest function that supports it.

The result of attention for a query is called its answer. With any function, the answers equal those
of `two_weight_attention`, the readable reference, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from weir import kernels
from weir.slab.attention import (
    AttentionParams,
    AttentionResult,
    fused_attention,
    observed_attention,
    split_attention,
    two_weight_attention,
)
from weir.slab.quantization import block_size, hadamard
from weir.slab.slots import QuantizedStorage, read_slots

AT_ONCE = 1 << 24
"""Largest number of logits that are in memory at once when attention is observed or added up."""


@dataclass(slots=True)
class AttendedSlots:
    """The slots that a call of attention reads, from `start` to `stop`.

    Attributes:
        keys, values: all exact slots of a layer [batch, kv_heads, slots, dim].
        quantized: the quantized slots, which come before the exact ones; None if there are none.
        a, b: log-weights of all slots [batch, kv_heads, slots], quantized ones first.
        split: a and b in the form that `split_attention` reads; None for pipes in which a always
            equals b.
        start, stop: the first slot that any row uses, and the slot after the last.
        plain: whether every slot that a query may see holds one token that counts once, so that
            weights do not have to be read.
    """

    keys: Tensor
    values: Tensor
    quantized: QuantizedStorage | None
    a: Tensor
    b: Tensor
    split: tuple[Tensor, Tensor, Tensor] | None
    start: int
    stop: int
    plain: bool = False

    @property
    def first(self) -> int:
        """The first exact slot."""
        return 0 if self.quantized is None else len(self.quantized)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return keys and values [batch, kv_heads, stop - start, dim], dequantized if necessary."""
        return read_slots(self.keys, self.values, self.quantized, self.start, self.stop)

    @property
    def reads_rotated(self) -> bool:
        """Whether some of these slots are stored rotated, multiplied by a Hadamard matrix."""
        return (
            self.quantized is not None and self.quantized.format.rotated and self.start < self.first
        )

    def rotated(self) -> AttendedSlots:
        """Return these slots with all keys and values as rotated vectors. The caller must then
        rotate queries before attention, and answers after it.
        """
        assert self.quantized is not None
        keys, values = (
            hadamard(t[:, :, : self.stop - self.first]) for t in (self.keys, self.values)
        )
        return replace(self, keys=keys, values=values, quantized=self.quantized.unrotated())

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return a and b of these slots [batch, kv_heads, stop - start]."""
        some = slice(self.start, self.stop)
        return self.a[:, :, some], self.b[:, :, some]

    def split_weights(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return `split` of these slots; None if a equals b."""
        if self.split is None:
            return None
        mask, above, below = (t[:, :, self.start : self.stop] for t in self.split)
        return mask, above, below

    def crop(self, bias: Tensor | None) -> Tensor | None:
        """Return the part of a bias that belongs to these slots. `bias` covers all slots up to
        `stop`, or broadcasts over them.
        """
        if bias is None or not self.start or bias.shape[4] == 1:
            return bias
        return bias[..., self.start :]

    def as_stored(self) -> tuple[tuple[Tensor, Tensor], kernels.Coded | None]:
        """Return these slots for kernels that read vectors of 8 bits without dequantizing them.

        Returns:
            Exact keys and values, and the quantized slots before them as they are stored. If no
            slots are stored in whole numbers of 8 bits, the second is None, and the first has all
            slots, dequantized if necessary.
        """
        stored = None
        if self.quantized is not None and self.start < self.first:
            stored = self.quantized.bytes_of(self.start, self.first)
        start = self.start if stored is None else self.first
        return read_slots(self.keys, self.values, self.quantized, start, self.stop), stored


Observe = Literal["", "received", "shares"]
"""Which attention to record while answers are computed. "received": the attention that each slot
receives, summed over the queries. "shares": the same, separately for each query. "": none.
"""


def compute_attention(
    queries: Tensor,
    slots: AttendedSlots,
    params: AttentionParams,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    observe: Observe = "",
    by: Literal["kernels", "torch"] = "kernels",
) -> AttentionResult:
    """Compute the attention of queries over slots.

    Args:
        queries: [batch, kv_heads, group, length, key_dim].
        slots: the slots to read.
        params: the parameters of the layer's attention.
        bias: numbers that are added to the logits, -inf where a query does not see a slot [batch,
            kv_heads, group, length, slots up to `stop`], or a shape that broadcasts to it; None for
            none.
        causal: whether the queries belong to the last slots, and each sees all slots up to its own.
            The bias must then hide later slots, too, because only some functions use `causal`.
        observe: what to observe in addition to the answers. The result has it only if a function
            can observe it while it computes the answers: in float32 on a CPU, for pipes in which a
            always equals b, without a cap or sinks, with at most `AT_ONCE` logits, if every query
            sees something, and if kernels are allowed.
        by: which functions are allowed: weir's kernels and PyTorch, or only PyTorch, as in a step
            under `torch.compile`.

    Returns:
        The answers [batch, kv_heads, group, length, value_dim], and what was observed.
    """
    uncapped = params.softcap is None
    weighted = slots.split is not None and not slots.plain
    if slots.reads_rotated and queries.shape[3] > 1:
        # Rotate queries, answers and the few exact slots instead of all quantized ones.
        wide = torch.promote_types(queries.dtype, torch.float32)
        queries, slots = hadamard(queries.to(wide)).to(queries.dtype), slots.rotated()
        found = compute_attention(
            queries, slots, params, bias, causal=causal, observe=observe, by=by
        )
        answers = hadamard(found.answers.to(wide)).to(found.answers.dtype)
        return found._replace(answers=answers)
    if by == "kernels" and queries.dtype != torch.float64:  # no kernel supports float64
        if uncapped and params.sinks is None:
            result = _observed(queries, slots, params, bias, causal, observe)
            if result is not None:
                return result
            out = _by_causal_kernel(queries, slots, params) if causal else None
            out = _by_decode_kernel(queries, slots, params, bias) if out is None else out
            if out is not None:
                return AttentionResult(out)
        kernel = kernels.decode(queries.device) if queries.shape[3] == 1 else None
        if kernel is not None:  # a kernel for GPUs, which supports all weights, caps and sinks
            given = queries, *slots.read(), *slots.weights()
            how = params.scale, params.softcap, params.sinks
            return AttentionResult(kernel(*given, *how, slots.crop(bias)))
    bias, (keys, values) = slots.crop(bias), slots.read()
    if not uncapped:
        out = two_weight_attention(queries, keys, values, *slots.weights(), params, bias)
    elif weighted:
        split = slots.split_weights()
        assert split is not None
        out = split_attention(queries, keys, values, *split, params, bias)
    else:
        if not slots.plain:
            below = slots.weights()[1][:, :, None, None]
            bias = below if bias is None else bias + below
        out = fused_attention(queries, keys, values, params, bias)
    return AttentionResult(out)


def _observed(
    queries: Tensor,
    slots: AttendedSlots,
    params: AttentionParams,
    bias: Tensor | None,
    causal: bool,
    observe: Observe,
) -> AttentionResult | None:
    """Compute answers and what to observe at once. None if this is not possible.

    It is possible in float32 on a CPU, for pipes in which a always equals b, with at most `AT_ONCE`
    logits, and if every query sees something.
    """
    fits = queries.dtype == torch.float32 and queries.device.type == "cpu"
    if not observe or slots.split is not None or not fits:
        return None
    if queries.shape[:4].numel() * slots.stop > AT_ONCE:
        return None
    result, kernel = None, None
    b = slots.weights()[1]
    if causal and observe == "received":
        kernel = kernels.causal_and_received(queries, slots.values)
    if kernel is not None:
        exact, stored = slots.as_stored()
        counted = kernel(queries, *exact, b, params.scale, stored)
        result = None if counted is None else AttentionResult(*counted)
    if result is None:
        if bias is not None and bias.shape[4] > 1:
            # The bias is cropped to the slots that are read. If the queries are causal, only the
            # part for their own slots is left, because each query sees everything before these.
            bias = bias[..., -queries.shape[3] if causal else slots.start :]
        result = observed_attention(queries, *slots.read(), b, params, bias)
    if result is None or not slots.start:
        return result
    assert result.received is not None
    return result._replace(received=F.pad(result.received, (slots.start, 0)))


def _by_causal_kernel(
    queries: Tensor, slots: AttendedSlots, params: AttentionParams
) -> Tensor | None:
    """Compute the answers of the newest tokens over all slots on a CPU; None without a kernel."""
    kernel = kernels.causal(queries, slots.values)
    if kernel is None:
        return None
    mask: Tensor | None = None
    factors: tuple[Tensor, Tensor] | None = None
    if not slots.plain:
        split = slots.split_weights()
        if split is None:
            mask = slots.weights()[1]
        else:
            mask, above, below = split
            factors = above, below
    exact, stored = slots.as_stored()
    return kernel(queries, *exact, mask, params.scale, factors, stored)


def _by_decode_kernel(
    queries: Tensor, slots: AttendedSlots, params: AttentionParams, bias: Tensor | None
) -> Tensor | None:
    """Compute the answer of one query per head, without converting keys and values first. None if
    no kernel supports the call, for example because a may differ from b.
    """
    if queries.shape[3] != 1 or (bias is not None and bias.shape[2] > 1):
        return None
    if slots.split is not None and not slots.plain:
        return None
    exact, first = (slots.keys, slots.values), slots.first
    if slots.start >= first:
        by_numbers = kernels.decode_exact(slots.keys.device, slots.keys.dtype)
        if by_numbers is None:
            return None
        mask = _mask_of(slots, bias)
        mask = mask if mask is None else mask[:, :, first:]
        span = slots.start - first, slots.stop - first
        return by_numbers(queries, *exact, mask, params.scale, span)
    assert slots.quantized is not None
    if slots.quantized.format.rotated:
        rotated = kernels.decode_int4(queries, slots.values.shape[3])
        if rotated is None:
            return None
        return _by_rotated_kernel(rotated, queries, slots, params, bias)
    by_codes = kernels.decode_quantized(queries.device)
    if by_codes is None:
        return None
    mask, span = _mask_of(slots, bias), (slots.start, slots.stop)
    return by_codes(queries, slots.quantized.stored, *exact, mask, params.scale, span)


def _by_rotated_kernel(
    kernel: kernels.RotatedDecodeKernel,
    queries: Tensor,
    slots: AttendedSlots,
    params: AttentionParams,
    bias: Tensor | None = None,
) -> Tensor:
    assert slots.quantized is not None
    blocks = block_size(queries.shape[4]), block_size(slots.values.shape[3])
    given = queries, slots.quantized.stored, blocks, slots.keys, slots.values
    out = kernel(*given, _mask_of(slots, bias), params.scale, (slots.start, slots.stop))
    return out.to(slots.values.dtype)


def _mask_of(slots: AttendedSlots, bias: Tensor | None) -> Tensor | None:
    """Return what is added to the logits of all slots up to `stop` [batch, kv_heads, slots]: the
    log-weights and the bias. None for nothing.
    """
    if slots.plain and bias is None:
        return None
    mask = slots.b[:, :, : slots.stop]
    return mask if bias is None else mask + bias[:, :, 0, 0]
