"""Attention of one query a head in what is being compiled for a CPU: a call of weir's kernel.

PyTorch's compiler makes loops of attention (`slab.looped`), which for several rows may take nearly
twice as long as the kernel over exact slots: in that the sums of a KV head stay in registers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weir import kernels
from weir.slab.attention import Form, fused_attention, fuses

ROWS = 2
"""Rows from which on the kernel is called; a step of one calls nothing."""
GROUP = 3
"""Query heads of a KV head from which on it is called. With 16 rows, nine query heads over three KV
heads and 1,088 slots loops took 1.7 times as long; with two over each of two KV heads and 320 slots
0.9 of the call (`docs/speed.md`)."""


def calls(queries: Tensor, keys: Tensor, form: Form) -> bool:
    """Whether queries [batch, kv_heads, group, 1, key_dim] are answered so, over slots whose
    weights are the same in both sums.
    """
    if not torch.compiler.is_compiling() or queries.device.type != "cpu":
        return False
    if not fuses(form) or form.sinks is not None:
        return False
    if queries.shape[0] < ROWS or queries.shape[2] < GROUP:
        return False
    if keys.dtype not in (torch.float32, torch.bfloat16) or queries.dtype != keys.dtype:
        return False
    heads = queries.shape[0] * queries.shape[1]
    return _there(keys.dtype, heads)


def called_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, form: Form
) -> Tensor:
    """`fused_attention`, its sums in float32.

    Args:
        queries: [batch, kv_heads, group, 1, key_dim].
        keys, values: [batch, kv_heads, slots, dim].
        mask: log-weights of both sums [batch, kv_heads, slots]; -inf leaves a slot out.
        form: the layer's scale, without capping or sinks.

    Returns:
        [batch, kv_heads, group, 1, value_dim]; zero for a query that sees nothing.
    """
    out: Tensor = _CALLED(queries, keys, values, mask, form.scale)
    return out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _there(dtype: torch.dtype, heads: int) -> bool:
    """Whether there is a kernel to call; asked while a step is compiled, and not in it."""
    return kernels.decode_exact(torch.device("cpu"), dtype, heads) is not None


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The kernel, or PyTorch where a program that was kept runs without it."""
    kernel = kernels.decode_exact(keys.device, keys.dtype, queries.shape[0] * queries.shape[1])
    if kernel is None:
        bias = mask[:, :, None, None]
        return fused_attention(queries, keys, values, Form(scale), bias).contiguous()
    out: Tensor = kernel(queries, keys, values, mask, scale, (0, keys.shape[2]))
    return out


def _like(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """What it returns, but for its numbers."""
    return values.new_empty(*queries.shape[:4], values.shape[3])


# Not `torch.library.custom_op`, whose checks in every call take as long as a few slots.
torch.library.define(
    "weir::attend",
    "(Tensor queries, Tensor keys, Tensor values, Tensor mask, float scale) -> Tensor",
)
torch.library.impl("weir::attend", "CPU", _attend)
torch.library.register_fake("weir::attend", _like)
_CALLED: Callable[..., Tensor] = torch.ops.weir.attend.default
