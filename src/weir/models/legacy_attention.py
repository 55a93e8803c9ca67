"""Attention of families outside transformers' attention interface: Falcon, MPT and Bloom.

While weir is attached, the `forward` of their attention modules is replaced. In a call with a weir
cache, the replacement makes queries, keys and values as the family does, lets weir attend, and
projects the result. In any other call, the family's own forward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from weir.models.interception import MethodPatch
from weir.models.streamed_call import Attending
from weir.slab import AttentionParams

Attend = Callable[[int, Tensor, Tensor, Tensor, AttentionParams], Tensor]


def falcon(module: Any, attend: Attend, hidden: Tensor) -> tuple[Tensor, None]:
    """Forward of a `FalconAttention`, in any of its architectures, for `hidden` [batch, length,
    dim].

    One projection makes queries, keys and values, group by group. transformers may repeat keys and
    values for every query head before caching them; here each is stored once.
    """
    queries, keys, values = split_groups(
        module.query_key_value(hidden), module.num_kv_heads, module.head_dim
    )
    params = AttentionParams(scale=module.inv_norm_factor)
    out = attend(module.layer_idx, queries, keys, values, params)
    return module.dense(merge_heads(out)), None


def bloom(module: Any, attend: Attend, hidden: Tensor, residual: Tensor) -> tuple[Tensor, None]:
    """Forward of a `BloomAttention`, which adds the residual [batch, length, dim] itself."""
    queries, keys, values = split_groups(
        module.query_key_value(hidden), module.num_heads, module.head_dim
    )
    params = AttentionParams(scale=module.inv_norm_factor)
    out = module.dense(merge_heads(attend(module.layer_idx, queries, keys, values, params)))
    return residual + F.dropout(out, module.hidden_dropout, module.training), None


def mpt(module: Any, attend: Attend, hidden: Tensor) -> tuple[Tensor, None]:
    """Forward of an `MptAttention`, whose projection has all queries, then all keys, then all
    values; some models clip them.
    """
    mixed = module.Wqkv(hidden)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    split = mixed.unflatten(2, (3, module.n_heads, module.head_dim))
    queries, keys, values = split.transpose(1, 3).unbind(2)
    params = AttentionParams(scale=module.softmax_scale)
    out = merge_heads(attend(module.layer_idx, queries, keys, values, params))
    return module.out_proj(out), None


FORWARDS: dict[str, Callable[..., Any]] = {"falcon": falcon, "bloom": bloom, "mpt": mpt}
"""Replacements of an attention module's forward, by model type."""


def split_groups(mixed: Tensor, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection into queries [batch, heads, length, dim], keys and values [batch,
    kv_heads, length, dim].

    `mixed` is [batch, length, kv_heads * (group + 2) * dim]. It has the queries of a KV head, then
    its key and its value, and then those of the next KV head.
    """
    split = mixed.unflatten(2, (kv_heads, -1, dim)).permute(0, 2, 3, 1, 4)
    return split[:, :, :-2].flatten(1, 2), split[:, :, -2], split[:, :, -1]


def merge_heads(out: Tensor) -> Tensor:
    """Join heads: [batch, heads, length, dim] to [batch, length, heads * dim]."""
    return out.transpose(1, 2).flatten(2)


def install(
    kind: str,
    decoder: nn.Module,
    attentions: tuple[nn.Module, ...],
    running: Callable[[], Attending | None],
) -> list[MethodPatch]:
    """Replace the forwards of a model's attention modules, for types in `FORWARDS`.

    `running` returns the running call with a weir cache (`cache.Forward`), None in any other call.
    """

    def with_weir(module: nn.Module) -> Callable[..., Any]:
        def forward(own: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            call = running()
            if call is None:
                return own(hidden, *args, **kwargs)
            # The only other positional argument is the residual (Bloom).
            return FORWARDS[kind](module, call.attend, hidden, *args)

        return forward

    def without_bias(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return None if running() is not None else own(*args, **kwargs)

    if kind not in FORWARDS:
        return []
    patches = [MethodPatch(module, "forward", with_weir(module)) for module in attentions]
    if kind == "mpt":
        # MPT builds a bias for max_seq_len columns at every step, which weir does not read.
        patches.append(MethodPatch(decoder, "build_mpt_alibi_tensor", without_bias))
    return patches
