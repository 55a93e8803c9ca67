"""Protocols through which hooks on a model use a cache and a running call.

`cache.StreamingCache` and `cache.Forward`, in a room above, implement them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from weir.models.step_engine import Given
from weir.slab import AttentionParams, Step


class Attending(Protocol):
    """Stores new tokens in a layer, and computes its attention."""

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """Store the keys and values of new tokens [batch, kv_heads, length, dim] in a layer, and
        compute the attention of their queries [batch, heads, length, key_dim].

        Returns [batch, heads, length, value_dim].
        """


class StreamedCall(Attending, Protocol):
    """One call of the model through all layers, which takes effect when it has finished."""

    given: Given
    """The decoder's arguments by name."""

    def rotations(
        self, kind: str | None, width: int, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines [batch or 1, length, width], float32, for a layer type at the
        positions of the call; None if no layer rotates.
        """

    def step(self) -> Step | None:
        """Return the call as a decode step; None if it cannot be one."""

    def commit_step(self, step: Step) -> None:
        """Record that an engine has run the step, so that its token counts."""

    def finish(self) -> StreamedCall | None:
        """Finish a successful call. If it must be repeated without the rows that failed, return the
        call for the other rows, otherwise None.
        """

    def abandon(self, error: BaseException) -> StreamedCall | None:
        """Undo a call that raised an error. If it must be repeated without the rows that failed,
        return the call for the other rows, otherwise None.
        """


class StreamedCache(Protocol):
    """A cache of weir, as hooks see it."""

    def begin(self, given: Given) -> StreamedCall:
        """Begin a call with the decoder's arguments by name."""

    def begin_step(self, tokens: list[int]) -> StreamedCall | None:
        """Begin a call of one token for each row. Return None if the call needs checks that only
        `begin` makes.
        """

    def end(self) -> None:
        """Do the remaining work after a call has finished."""
