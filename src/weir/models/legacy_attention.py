"""The families outside transformers' attention interface: Falcon, MPT and Bloom.

Their attention modules score, mask and sum by themselves, so what `hooks` switches for the others
does nothing here. While weir is attached, the `forward` of these modules is replaced, on that one
model object: in a call with a cache of weir it makes queries, keys and values as the family does,
leaves the rest to weir and projects what comes back. In any other call it is the family's own.

Knows how a family lays out its projections; nothing about caches or policies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weir.models.method_patch import MethodPatch
from weir.slab import AttentionParams


class Runner(Protocol):
    """Who attends: `hooks.Attachment`."""

    @property
    def running(self) -> object | None:
        """The call that is under way with a cache of weir; None in any other."""

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """One layer's attention, as `hooks.Attending.attend` has it."""


Attend = Callable[[int, Tensor, Tensor, Tensor, AttentionParams], Tensor]


def falcon(module: Any, attend: Attend, hidden: Tensor) -> tuple[Tensor, None]:
    """The forward of a `FalconAttention`, whichever of its four architectures.

    One projection makes queries, keys and values, group by group: a KV head's queries, then its
    key, then its value. With multi-query attention all heads are one group, without it each is its
    own; the new decoder architecture says how many groups there are. There, transformers repeats
    keys and values for every query head before it caches them; here each is kept once.

    Args:
        module: the attention module.
        attend: `Runner.attend`.
        hidden: [batch, length, hidden].

    Returns:
        ([batch, length, hidden], None): the module's output, and no attention weights.
    """
    queries, keys, values = grouped(
        module.query_key_value(hidden), module.num_kv_heads, module.head_dim
    )
    params = AttentionParams(scale=module.inv_norm_factor)
    out = attend(module.layer_idx, queries, keys, values, params)
    return module.dense(merged(out)), None


def bloom(module: Any, attend: Attend, hidden: Tensor, residual: Tensor) -> tuple[Tensor, None]:
    """The forward of a `BloomAttention`; it adds the residual itself.

    Args:
        module, attend, hidden: as for `falcon`.
        residual: added to the output [batch, length, hidden].

    Returns:
        ([batch, length, hidden], None).
    """
    queries, keys, values = grouped(
        module.query_key_value(hidden), module.num_heads, module.head_dim
    )
    params = AttentionParams(scale=module.inv_norm_factor)
    out = module.dense(merged(attend(module.layer_idx, queries, keys, values, params)))
    return residual + F.dropout(out, module.hidden_dropout, module.training), None


def mpt(module: Any, attend: Attend, hidden: Tensor) -> tuple[Tensor, None]:
    """The forward of an `MptAttention`; arguments as for `falcon`.

    All queries come first, then all keys, then all values; some models clip them.
    """
    mixed = module.Wqkv(hidden)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    split = mixed.unflatten(2, (3, module.n_heads, module.head_dim))
    queries, keys, values = split.transpose(1, 3).unbind(2)
    params = AttentionParams(scale=module.softmax_scale)
    return module.out_proj(merged(attend(module.layer_idx, queries, keys, values, params))), None


FORWARDS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "falcon": falcon,
    "bloom": bloom,
    "mpt": mpt,
}
"""What takes the place of an attention module's forward, by model type."""


def grouped(mixed: Tensor, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a projection that holds, per KV head, its queries and the two.

    Args:
        mixed: [batch, length, kv_heads * (group + 2) * dim].
        kv_heads: how many groups there are.
        dim: of a head.

    Returns:
        [batch, kv_heads * group, length, dim] and twice [batch, kv_heads, length, dim].
    """
    split = mixed.unflatten(2, (kv_heads, -1, dim)).permute(0, 2, 3, 1, 4)
    return split[:, :, :-2].flatten(1, 2), split[:, :, -2], split[:, :, -1]


def merged(out: Tensor) -> Tensor:
    """[batch, heads, length, dim] to [batch, length, heads * dim]."""
    return out.transpose(1, 2).flatten(2)


def install(
    kind: str, decoder: nn.Module, attentions: tuple[nn.Module, ...], runner: Runner
) -> Callable[[], None]:
    """Replace the forwards of a model's attention modules.

    Args:
        kind: the model type; for any but those of `FORWARDS` nothing is done.
        decoder: the module that builds what its layers share.
        attentions: each layer's attention module.
        runner: asked at each call whether weir attends in it.

    Returns:
        What undoes it; the model is then as it was.
    """
    arounds: list[MethodPatch] = []
    if kind in FORWARDS:
        for module in attentions:
            arounds.append(
                MethodPatch(module, "forward", _attending(FORWARDS[kind], runner, module))
            )
    if kind == "mpt":
        # A bias for max_seq_len columns, made at every step, that weir does not read.
        arounds.append(MethodPatch(decoder, "build_mpt_alibi_tensor", _unbuilt(runner)))

    def remove_all() -> None:
        for around in arounds:
            around.remove()

    return remove_all


def unmasked(kind: str, alibi: bool, tokens: Tensor) -> Tensor | None:
    """The attention mask to pass to a decoder so that it builds nothing as long as the stream.

    weir has read the real one and does its own masking. Most decoders ask their attention
    implementation for a mask and get none. MPT must have one, and takes a 4D one as it is. Falcon,
    and Bloom in older versions of transformers, make biases for the columns of their mask, and for
    those of the whole stream if they get none.

    Args:
        kind: the model type.
        alibi: whether it uses ALiBi.
        tokens: ids [batch, length] or embeddings [batch, length, hidden].
    """
    if kind == "mpt":
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
    if kind in ("falcon", "bloom") and alibi:
        return torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
    return None


def _attending(
    make: Callable[..., tuple[Tensor, None]], runner: Runner, module: nn.Module
) -> Callable[..., Any]:
    def forward(own: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if runner.running is None:
            return own(hidden, *args, **kwargs)
        # What else comes by position is the residual (Bloom).
        return make(module, runner.attend, hidden, *args)

    return forward


def _unbuilt(runner: Runner) -> Callable[..., Any]:
    def build(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return None if runner.running is not None else own(*args, **kwargs)

    return build
