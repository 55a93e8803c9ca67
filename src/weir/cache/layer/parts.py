"""A layer of the model as its parts, each a stream of its own over some of the KV heads.

Most layers are one part. Where KV heads have different pipes, heads with the same one are a part:
queries, keys and values are shared out by heads, and the answers are put back in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weir.cache.layer.layer import Layer
from weir.errors import WeirError
from weir.slab import AttentionParams

Answer = Callable[[Tensor, Tensor, Tensor, AttentionParams], Tensor]
"""Attention of a part: queries, keys, values and parameters to answers [batch, heads, ...]."""


@dataclass(frozen=True)
class HeadSplit:
    """Which KV heads of a layer each of its parts holds.

    Attributes:
        heads: of each part, its KV heads [n], int64.
        order: the place of each KV head among those of all parts [kv_heads], int64.
    """

    heads: tuple[Tensor, ...]
    order: Tensor

    def on(self, device: torch.device) -> HeadSplit:
        """Return the same on a device."""
        if self.order.device == device:
            return self
        return HeadSplit(tuple(t.to(device) for t in self.heads), self.order.to(device))

    def answer(
        self,
        parts: Sequence[Answer],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        """Let each part answer the queries of its heads; arguments as for `Layer.attend`."""
        queries = queries.unflatten(1, (keys.shape[1], -1))
        answers = []
        for part, heads in zip(parts, self.heads, strict=True):
            q, k, v = (t.index_select(1, heads) for t in (queries, keys, values))
            own = params
            if params.sinks is not None:
                own = replace(params, sinks=params.sinks.index_select(0, heads))
            answers.append(part(q.flatten(1, 2), k, v, own).unflatten(1, q.shape[1:3]))
        return torch.cat(answers, dim=1).index_select(1, self.order).flatten(1, 2)


class LayerParts:
    """The parts of one layer of the model, which attend as one.

    Attributes:
        parts: for each pipe, the stream of the heads that have it.
        split: which heads each of them holds; None if there is one.
    """

    def __init__(self, parts: Sequence[Layer]) -> None:
        self.parts = parts
        self.split: HeadSplit | None = None
        if len(parts) > 1:
            heads = [torch.tensor(part.spec.heads) for part in parts]
            self.split = HeadSplit(tuple(heads), torch.cat(heads).argsort())

    def answer(
        self,
        method: Callable[..., Tensor],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        params: AttentionParams,
        *more: Any,
    ) -> Tensor:
        """Call `Layer.attend` or `Layer.reread` of the whole layer."""
        if self.split is None:
            return method(self.parts[0], queries, keys, values, params, *more)
        if keys.shape[1] != len(self.split.order):
            raise WeirError(
                f"layer {self.parts[0].spec.index} makes keys of {keys.shape[1]} heads, and this "
                f"cache holds {len(self.split.order)}; a cache serves one model only"
            )
        self.split = self.split.on(keys.device)
        calls = [partial(_call, method, part, more) for part in self.parts]
        return self.split.answer(calls, queries, keys, values, params)


def _call(method: Callable[..., Tensor], part: Layer, more: Sequence[Any], *given: Any) -> Tensor:
    return method(part, *given, *more)
