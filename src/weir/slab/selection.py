"""Selection of the function that computes a call of attention.

`select_attention` is asked once a call, before a number is computed. What it gives equals
`two_weight_attention`, the readable reference, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

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
from weir.slab.compiled_attention import attend_in_loops
from weir.slab.quantization import block_size, hadamard
from weir.slab.quantized_slots import QuantizedStorage, read_slots

AT_ONCE = 1 << 24
"""Logits held at once."""


@dataclass(slots=True)
class AttendedSlots:
    """The slots that a call of attention reads, from `start` to `stop`.

    Attributes:
        keys, values: all exact slots of a layer [batch, kv_heads, slots, dim].
        quantized: the quantized slots, which come first; None for none.
        a, b: log-weights of all slots [batch, kv_heads, slots], quantized ones first.
        split: a and b as `split_attention` reads them; None for pipes of one weight, where a is b.
        start, stop: from the first slot that any row uses to behind the last.
        plain: whether every slot that a query may see holds one token that counts once, so that
            weights need not be read.
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
        """Keys and values, dequantized where they are quantized."""
        return read_slots(self.keys, self.values, self.quantized, self.start, self.stop)

    @property
    def reads_rotated(self) -> bool:
        """Whether quantized slots are read that are stored rotated."""
        return (
            self.quantized is not None and self.quantized.format.rotated and self.start < self.first
        )

    def rotated(self) -> AttendedSlots:
        """These slots with all keys and values rotated, so that queries and answers have to be."""
        assert self.quantized is not None
        keys, values = (
            hadamard(t[:, :, : self.stop - self.first]) for t in (self.keys, self.values)
        )
        return replace(self, keys=keys, values=values, quantized=self.quantized.unrotated())

    def weights(self) -> tuple[Tensor, Tensor]:
        """a and b of these slots."""
        some = slice(self.start, self.stop)
        return self.a[:, :, some], self.b[:, :, some]

    def split_weights(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """`split` of these slots."""
        if self.split is None:
            return None
        mask, above, below = (t[:, :, self.start : self.stop] for t in self.split)
        return mask, above, below

    def crop(self, bias: Tensor | None) -> Tensor | None:
        """A bias over all slots up to `stop`, from `start` on."""
        if bias is None or not self.start or bias.shape[4] == 1:
            return bias
        return bias[..., self.start :]

    def as_stored(self) -> tuple[tuple[Tensor, Tensor], _Stored | None]:
        """Exact keys and values, and the quantized ones in front of them for a kernel that reads 8
        bits; of another format, all are read as exact.
        """
        stored = None
        if self.quantized is not None and self.start < self.first:
            stored = self.quantized.bytes_of(self.start, self.first)
        start = self.start if stored is None else self.first
        return read_slots(self.keys, self.values, self.quantized, start, self.stop), stored


_Stored = tuple[kernels.QuantizedVectors, kernels.QuantizedVectors]
Attend = Callable[[Tensor, AttendedSlots, AttentionParams, Tensor | None], AttentionResult]
"""Answers queries [batch, kv_heads, group, length, key_dim] over slots; the bias
[batch, kv_heads, group, length, slots up to `stop`], or of a shape that broadcasts to it, says who
sees whom.
"""
Observe = Literal["", "received", "shares"]
"""What a call observes beside its answers: the attention received by slots, or every query's
shares.
"""
By = Literal["kernels", "torch", "loops"]
"""What may compute: kernels of weir's own beside PyTorch, PyTorch alone, or compiled loops."""


def select_attention(
    queries: Tensor,
    slots: AttendedSlots,
    params: AttentionParams,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    observe: Observe = "",
    by: By = "kernels",
) -> Attend:
    """Choose the function for a call of attention; only shapes, dtypes and devices are read.

    Args:
        causal: the queries are of the last slots, and each sees all slots up to its own.
        observe: asked for beside the answers. The result has it where that takes no longer than to
            ask for it later, and holds no more than `AT_ONCE` logits.
        by: what may answer.
    """
    uncapped = params.softcap is None
    weighted = slots.split is not None and not slots.plain
    if by != "loops" and slots.reads_rotated and queries.shape[3] > 1:
        return partial(_in_rotated_space, causal, observe, by)
    if by == "loops" and (uncapped or not weighted):
        return _in_loops
    if by == "kernels" and queries.dtype != torch.float64:  # which no kernel computes in
        found = None
        if uncapped and params.sinks is None:
            found = (
                _select_observed(queries, slots, causal, observe)
                or _select_causal(queries, slots, causal)
                or _select_decode(queries, slots, bias)
            )
        if found is None and queries.shape[3] == 1:
            kernel = kernels.decode(queries.device)  # a GPU's, for all weights, caps and sinks
            found = None if kernel is None else partial(_by_two_weight_kernel, kernel)
        if found is not None:
            return found
    if not uncapped:
        return _by_reference
    return _by_split if weighted else _by_fused


def _select_observed(
    queries: Tensor, slots: AttendedSlots, causal: bool, observe: Observe
) -> Attend | None:
    """A function that answers and observes: float32 on a CPU, one weight a slot."""
    if not observe or slots.split is not None:
        return None
    if queries.dtype != torch.float32 or queries.device.type != "cpu":
        return None
    if queries.shape[:4].numel() * slots.stop > AT_ONCE:
        return None
    kernel = None
    if causal and observe == "received":
        kernel = kernels.causal_and_received(queries, slots.values)
    return partial(_by_observation, kernel, causal)


def _select_causal(queries: Tensor, slots: AttendedSlots, causal: bool) -> Attend | None:
    """The kernel for the newest tokens over all slots, on one thread of a CPU."""
    kernel = kernels.causal(queries, slots.values) if causal else None
    return None if kernel is None else partial(_by_causal_kernel, kernel)


def _select_decode(queries: Tensor, slots: AttendedSlots, bias: Tensor | None) -> Attend | None:
    """A kernel for one query a head over slots as they lie, of one weight each."""
    if queries.shape[3] != 1 or (bias is not None and bias.shape[2] > 1):
        return None
    if slots.split is not None and not slots.plain:
        return None
    if slots.start >= slots.first:
        kernel = kernels.decode_exact(slots.keys.device, slots.keys.dtype)
        return None if kernel is None else partial(_by_exact_kernel, kernel)
    assert slots.quantized is not None
    if slots.quantized.format.rotated:
        kernel = kernels.decode_int4(queries, slots.values.shape[3])
        return None if kernel is None else partial(_by_rotated_kernel, kernel)
    kernel = kernels.decode_quantized(queries.device)
    return None if kernel is None else partial(_by_quantized_kernel, kernel)


# --- PyTorch


def _by_reference(
    queries: Tensor, slots: AttendedSlots, params: AttentionParams, bias: Tensor | None
) -> AttentionResult:
    out = two_weight_attention(queries, *slots.read(), *slots.weights(), params, slots.crop(bias))
    return AttentionResult(out)


def _by_split(
    queries: Tensor, slots: AttendedSlots, params: AttentionParams, bias: Tensor | None
) -> AttentionResult:
    split = slots.split_weights()
    assert split is not None
    return AttentionResult(
        split_attention(queries, *slots.read(), *split, params, slots.crop(bias))
    )


def _by_fused(
    queries: Tensor, slots: AttendedSlots, params: AttentionParams, bias: Tensor | None
) -> AttentionResult:
    bias = slots.crop(bias)
    keys, values = slots.read()
    if not slots.plain:
        below = slots.b[:, :, None, None, slots.start : slots.stop]
        bias = below if bias is None else bias + below
    return AttentionResult(fused_attention(queries, keys, values, params, bias))


def _in_loops(
    queries: Tensor, slots: AttendedSlots, params: AttentionParams, bias: Tensor | None
) -> AttentionResult:
    """For compiled steps, which have masked their weights and know no bias."""
    mask, *factors = slots.split or (slots.b,)
    rotated = slots.quantized is not None and slots.quantized.format.rotated
    plain = not factors and params.softcap is None and params.sinks is None
    sizes = queries.shape[4], slots.values.shape[3]
    if rotated and plain and _has_int4_kernel(queries.device.type, *sizes):
        return _by_rotated_kernel(_decode_int4_in_step, queries, slots, params, None)
    if rotated:  # the few exact slots, in place of all the others at every step
        queries, slots = hadamard(queries.float()), slots.rotated()
    out = attend_in_loops(queries, *slots.read(), mask, params, factors or None)
    return AttentionResult(hadamard(out.float()).to(out.dtype) if rotated else out)


def _in_rotated_space(
    causal: bool,
    observe: Observe,
    by: By,
    queries: Tensor,
    slots: AttendedSlots,
    params: AttentionParams,
    bias: Tensor | None,
) -> AttentionResult:
    """Attention over slots as they are stored: queries, answers and the few exact slots are rotated
    in place of all quantized ones.
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    rotated, slots = hadamard(queries.to(wide)).to(queries.dtype), slots.rotated()
    attend = select_attention(rotated, slots, params, bias, causal=causal, observe=observe, by=by)
    found = attend(rotated, slots, params, bias)
    answers = hadamard(found.answers.to(wide)).to(found.answers.dtype)
    return found._replace(answers=answers)


def _by_observation(
    kernel: Callable[..., Any] | None,
    causal: bool,
    queries: Tensor,
    slots: AttendedSlots,
    params: AttentionParams,
    bias: Tensor | None,
) -> AttentionResult:
    result = None
    b = slots.b[:, :, slots.start : slots.stop]
    if kernel is not None:
        exact, stored = slots.as_stored()
        counted = kernel(queries, *exact, b, params.scale, stored)
        result = None if counted is None else AttentionResult(*counted)
    if result is None:
        some = bias
        if some is not None and some.shape[4] > 1:
            # Of rows that lie alike, a query sees whatever lies in front of the tail.
            some = some[..., -queries.shape[3] if causal else slots.start :]
        result = observed_attention(queries, *slots.read(), b, params, some)
    if result is None:  # a query sees nothing
        attend = select_attention(queries, slots, params, bias, causal=causal)
        return attend(queries, slots, params, bias)
    if not slots.start:
        return result
    assert result.received is not None
    return result._replace(received=F.pad(result.received, (slots.start, 0)))


# --- kernels of weir's own


def _by_two_weight_kernel(
    kernel: Callable[..., Tensor],
    queries: Tensor,
    slots: AttendedSlots,
    params: AttentionParams,
    bias: Tensor | None,
) -> AttentionResult:
    given = queries, *slots.read(), *slots.weights()
    how = params.scale, params.softcap, params.sinks
    return AttentionResult(kernel(*given, *how, slots.crop(bias)))


def _by_causal_kernel(
    kernel: Callable[..., Tensor],
    queries: Tensor,
    slots: AttendedSlots,
    params: AttentionParams,
    bias: Tensor | None,
) -> AttentionResult:
    mask, factors = None, None
    if not slots.plain:
        mask, *factors = slots.split_weights() or (slots.b[:, :, slots.start : slots.stop],)
    exact, stored = slots.as_stored()
    return AttentionResult(kernel(queries, *exact, mask, params.scale, factors or None, stored))


def _by_exact_kernel(
    kernel: Callable[..., Tensor],
    queries: Tensor,
    slots: AttendedSlots,
    params: AttentionParams,
    bias: Tensor | None,
) -> AttentionResult:
    mask, first = _mask_of(slots, bias), slots.first
    mask = mask if mask is None else mask[:, :, first:]
    span = slots.start - first, slots.stop - first
    return AttentionResult(kernel(queries, slots.keys, slots.values, mask, params.scale, span))


def _by_quantized_kernel(
    kernel: Callable[..., Tensor],
    queries: Tensor,
    slots: AttendedSlots,
    params: AttentionParams,
    bias: Tensor | None,
) -> AttentionResult:
    assert slots.quantized is not None
    stored, exact, span = (
        slots.quantized.stored,
        (slots.keys, slots.values),
        (slots.start, slots.stop),
    )
    return AttentionResult(
        kernel(queries, stored, *exact, _mask_of(slots, bias), params.scale, span)
    )


def _by_rotated_kernel(
    kernel: Callable[..., Tensor],
    queries: Tensor,
    slots: AttendedSlots,
    params: AttentionParams,
    bias: Tensor | None,
) -> AttentionResult:
    assert slots.quantized is not None
    exact, span = (slots.keys, slots.values), (slots.start, slots.stop)
    blocks = block_size(queries.shape[4]), block_size(slots.values.shape[3])
    mask = _mask_of(slots, bias)
    out = kernel(queries, slots.quantized.stored, blocks, *exact, mask, params.scale, span)
    return AttentionResult(out.to(slots.values.dtype))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # nothing to trace
def _has_int4_kernel(device: str, dim: int, width: int) -> bool:
    return kernels.decode_int4(torch.empty(dim, device=device), width) is not None


def _decode_int4_in_step(
    queries: Tensor,
    coded: tuple[kernels.QuantizedVectors, kernels.QuantizedVectors],
    blocks: tuple[int, int],
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    slots: tuple[int, int],
) -> Tensor:
    """The kernel `decode_int4` as an operator of a compiled step."""
    (of_keys, peaks, levels), (of_values, value_peaks, value_levels) = coded
    stored = of_keys, peaks, levels, of_values, value_peaks, value_levels
    out: Tensor = torch.ops.weir.decode_int4.default(
        queries, *stored, *blocks, keys, values, mask, scale, *slots
    )
    return out


def _call_decode_int4(
    queries: Tensor,
    of_keys: Tensor,
    peaks: Tensor,
    levels: int,
    of_values: Tensor,
    value_peaks: Tensor,
    value_levels: int,
    key_block: int,
    value_block: int,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    start: int,
    stop: int,
) -> Tensor:
    kernel = kernels.decode_int4(queries, values.shape[3])
    assert kernel is not None
    coded = (of_keys, peaks, levels), (of_values, value_peaks, value_levels)
    blocks = key_block, value_block
    out: Tensor = kernel(queries, coded, blocks, keys, values, mask, scale, (start, stop))
    return out


def _like_decode_int4(queries: Tensor, *others: Any) -> Tensor:
    values = others[9]
    return queries.new_empty((*queries.shape[:4], values.shape[3]), dtype=torch.float32)


# Not `torch.library.custom_op`: its checks take as long as a small product, in every call.
torch.library.define(
    "weir::decode_int4",
    "(Tensor queries, Tensor of_keys, Tensor peaks, int levels, Tensor of_values, "
    "Tensor value_peaks, int value_levels, int key_block, int value_block, Tensor keys, "
    "Tensor values, Tensor mask, float scale, int start, int stop) -> Tensor",
)
torch.library.impl("weir::decode_int4", "CPU", _call_decode_int4)
torch.library.register_fake("weir::decode_int4", _like_decode_int4)


def _mask_of(slots: AttendedSlots, bias: Tensor | None) -> Tensor | None:
    """The bias on the logits of all slots up to `stop` [batch, kv_heads, slots]."""
    if slots.plain and bias is None:
        return None
    mask = slots.b[:, :, : slots.stop]
    return mask if bias is None else mask + bias[:, :, 0, 0]
