"""A piece of a prompt in a layer that keeps a window: attended in one call, and folded once.

Where pools keep the first tokens and the newest, what each chunk of a piece sees is known before
the first is read, and one fold of all chunks keeps what a fold behind each would have kept: each
token is quantized once, and keys of the front are rotated from their masters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from weir import kernels
from weir.cache.layer.layer_state import LayerSpec, LayerState, Layout, lay_out
from weir.cache.layer.plan import Segment
from weir.slab import AttentionParams, Slots, as_read


class WindowPiece:
    """New tokens of all rows, in segments that each but the first follow a fold.

    Tokens are counted from the oldest of the run, or of what comes where there is none.

    Args:
        state: the slots, which are not changed.
        lies: their layout before each segment.
        keys, values: new ones [batch, kv_heads, length, dim].
        segments: each a slice of all rows.
    """

    def __init__(
        self,
        state: LayerState,
        lies: Sequence[Layout],
        keys: Tensor,
        values: Tensor,
        segments: Sequence[Segment],
    ) -> None:
        assert state.slab is not None
        self._slab, self._spec, self._segments = state.slab, state.spec, segments
        self._lies = lies
        first, self._waiting = lies[0], segments[0].waiting[0]
        tail = slice(first.used - first.first, first.used - first.first + self._waiting)
        held = self._slab.keys[:, :, tail], self._slab.values[:, :, tail]
        self._new = [torch.cat(pair, dim=2) for pair in zip(held, (keys, values), strict=True)]

    @classmethod
    def of(
        cls, state: LayerState, keys: Tensor, values: Tensor, segments: Sequence[Segment]
    ) -> WindowPiece | None:
        """Describe a piece; None where the layer keeps no window."""
        spec = state.spec
        if len(segments) == 1 or not spec.keeps_window:
            return None
        tokens = sum(state.lengths[0])
        lies = [_layout_after(spec, tokens + c * spec.chunk) for c in range(len(segments))]
        if any(tuple(row) != lies[0].lengths for row in state.lengths):
            return None
        return cls(state, lies, keys, values, segments)

    def answer(
        self, kernel: Callable[..., Tensor], queries: Tensor, params: AttentionParams
    ) -> Tensor:
        """Answer queries [batch, kv_heads, group, length, key_dim] with a kernel of
        `kernels.attend_window`.
        """
        first, chunk = self._lies[0], self._spec.chunk
        done, chunks = 0, []
        for fold, (lies, segment) in enumerate(zip(self._lies, self._segments, strict=True)):
            front, own = lies.front - lies.first, first.run + self._waiting + done
            start = first.run + fold * chunk - lies.run
            seen = front, start, start + lies.quantized, own
            chunks.append(kernels.WindowChunk(done, segment.width, *seen))
            done += segment.width
        exact, coded = self._tokens(chunks[-1].boundary)
        answers = kernel(queries, exact, coded, self._front(), chunks, params.scale)
        return answers.to(queries.dtype)

    def folded(self) -> tuple[Segment, Slots]:
        """Return the tokens that fold, as one segment and as slots."""
        before, last = self._segments[0], self._segments[-1]
        count = len(self._segments) * self._spec.chunk
        batch = len(before.counts)
        if not last.due:
            count -= self._spec.chunk
        segment = replace(before, counts=[count - self._waiting] * batch, due=list(range(batch)))
        keys, values = (t[:, :, :count] for t in self._new)
        weights = torch.zeros(keys.shape[:3], device=keys.device)
        position = self._place[:, None, None] + torch.arange(count, device=keys.device)
        position = position.expand(-1, keys.shape[1], -1)
        return segment, Slots(keys, values, weights, weights.clone(), position)

    def rest(self) -> tuple[Tensor, Tensor] | None:
        """Return keys and values that fill the tail after the fold; None where there are none."""
        last = self._segments[-1]
        if last.due:
            return None
        keys, values = (t[:, :, -last.width :] for t in self._new)
        return keys, values

    @cached_property
    def _place(self) -> Tensor:
        """Each row's place in the stream of the first token of the tail [batch]."""
        return self._segments[0].start - self._waiting

    def _tokens(self, boundary: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of all tokens of run, tail and piece; and of those before `boundary`, as
        they are read once they are quantized.
        """
        slab, first = self._slab, self._lies[0]
        run = slice(first.front - first.first, first.used - first.first)
        exact = [
            torch.cat([t[:, :, run], new], dim=2)
            for t, new in zip((slab.keys, slab.values), self._new, strict=True)
        ]
        if slab.quantized is None:
            return exact, [t[:, :, :0] for t in exact]
        stored = slab.quantized.keys, slab.quantized.values
        held = [read(0, first.quantized) for read in stored]
        later = max(0, boundary - first.quantized)
        codes = slab.quantized.format.keys, slab.quantized.format.values
        coded = [
            torch.cat([read, as_read(t[:, :, :later], code)], dim=2)
            for read, t, code in zip(held, exact, codes, strict=True)
        ]
        return [torch.cat(pair, dim=2) for pair in zip(held, exact, strict=True)], coded

    def _front(self) -> tuple[Tensor, Tensor]:
        """Keys of the front as each segment sees them [batch, kv_heads, segments, front, dim], and
        its values.
        """
        slab, lies = self._slab, self._lies
        held, count = lies[0].front - lies[0].first, lies[-1].front - lies[-1].first
        keys, values = (
            torch.cat([t[:, :, :held], new[:, :, : count - held]], dim=2)
            for t, new in zip((slab.keys, slab.values), self._new, strict=True)
        )
        rotary, positions = self._spec.positions.rotary, self._spec.positions
        if rotary is None or not positions.rolling or not count:
            return keys[:, :, None].expand(-1, -1, len(lies), -1, -1), values
        masters = keys
        if slab.masters is not None:
            masters = torch.cat([slab.masters[:, :, :held], keys[:, :, held:]], dim=2)
        came = torch.arange(count - held, device=keys.device) + self._place[:, None]
        came = came[:, None].expand(-1, keys.shape[1], -1)
        position = torch.cat([slab.position[:, :, lies[0].first : lies[0].front], came], dim=2)
        folds = [
            fold * self._spec.chunk - lay.run - (lay.front - lay.first)
            for fold, lay in enumerate(lies[1:], 1)
        ]
        first = self._place[:, None] + torch.tensor(folds, device=keys.device)
        frames = first[:, None, :, None] + torch.arange(count, device=keys.device)
        by = (frames - position[:, :, None]).flatten(2)
        # One call for all frames: there are many, of few keys each.
        copies = masters[:, :, None].expand(-1, -1, len(folds), -1, -1).flatten(2, 3)
        moved = rotary.move(copies, by).unflatten(2, (len(folds), count))
        return torch.cat([keys[:, :, None], moved], dim=2), values


def _layout_after(spec: LayerSpec, tokens: int) -> Layout:
    """The layout of a row after so many tokens, each of which went to the first pool with room."""
    lengths = []
    for pool in spec.pipe.pools:
        lengths.append(min(tokens, pool.slots() or 0))
        tokens -= lengths[-1]
    return lay_out(spec.pipe, lengths)
