"""Splits the KV heads of a layer among its parts, and puts their answers back in order.

A layer whose KV heads have different pipes has one part for each pipe. An answer is the result of
attention for a query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weir.slab.attention import AttentionParams

Answer = Callable[[Tensor, Tensor, Tensor, AttentionParams], Tensor]
"""The attention of a part: a function of queries, keys, values and parameters that returns answers
[batch, heads, ...].
"""


@dataclass(frozen=True)
class HeadSplit:
    """Assignment of a layer's KV heads to its parts.

    Attributes:
        heads: for each part, its KV heads [n], int64.
        order: for each KV head, its place among the heads of all parts [kv_heads], int64.
    """

    heads: tuple[Tensor, ...]
    order: Tensor

    @classmethod
    def of(cls, heads: Sequence[Sequence[int] | None], device: torch.device) -> HeadSplit | None:
        """Make the assignment for parts with these heads; None if there is only one part, which has
        all heads.
        """
        if len(heads) == 1:
            return None
        held = tuple(torch.tensor(each, device=device) for each in heads)
        return cls(held, torch.cat(held).argsort())

    def on(self, device: torch.device) -> HeadSplit:
        """Return the same assignment on another device."""
        if self.order.device == device:
            return self
        return HeadSplit(tuple(t.to(device) for t in self.heads), self.order.to(device))

    def join_answers(
        self,
        parts: Sequence[Answer],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        """Let each part answer the queries of its heads, and join the answers.

        Args:
            parts: the attention of each part.
            queries: [batch, heads, length, key_dim].
            keys, values: keys and values of the new tokens [batch, kv_heads, length, dim].
            params: the parameters of the whole layer.
        """
        queries = queries.unflatten(1, (keys.shape[1], -1))
        answers = []
        for part, heads in zip(parts, self.heads, strict=True):
            q, k, v = (t.index_select(1, heads) for t in (queries, keys, values))
            own = params
            if params.sinks is not None:
                own = replace(params, sinks=params.sinks.index_select(0, heads))
            answers.append(part(q.flatten(1, 2), k, v, own).unflatten(1, q.shape[1:3]))
        return torch.cat(answers, dim=1).index_select(1, self.order).flatten(1, 2)
