"""The attention of the last queries, by which pools rank tokens.

Pools get keys that are rotated to their tokens' places in the stream. Attention reads some of them
at other positions: tokens in the front of a slab are moved up until they precede the run of newest
tokens (`weir.slab.positions`, the rolling frame). A pool that ranks by attention gets keys, queries
and shares of attention *as they are read* from here. They are computed on first use, with the
positions that attention has used since the last fold, so they equal what the model computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.slab import (
    AttentionParams,
    AttentionResult,
    LayerPositions,
    Slots,
    attention_shares,
    attention_softmax,
    attention_weights,
    compute_logits,
    two_weight_attention,
)


class UndeclaredError(WeirError):
    """A pool reads queries that it did not declare. The message begins with "it", the pool."""


class Output(Protocol):
    """The output projection of a layer, as `weir.models` finds it."""

    def __call__(self, value_dim: int, device: torch.device) -> Tensor | None:
        """Return factors R with |R x| = |W_o x| [kv_heads, group, value_dim, value_dim], float32.

        None if the projection is not known.
        """

    def parts(self, value_dim: int, device: torch.device) -> Tensor | None:
        """Return W_o of each query head [kv_heads, group, hidden, value_dim], or None if it is not
        known.
        """


Gating = Callable[[Tensor, Tensor], Tensor]
"""A trained prediction of how much tokens will be needed, as `weir.models` finds it.

Its arguments are the keys of tokens, without rotation, and their values. The tokens must be the
same in all heads. It returns the logarithms of scores [batch, kv_heads, n], float32.
"""


@dataclass(frozen=True)
class ObservedAttention:
    """A layer's slots as the last queries attended to them.

    Methods that need queries raise a `WeirError` if no pool asked for queries
    (`Pool.needs_queries`).

    Attributes:
        slots: returns every slot that the queries may have attended to (`whole`).
        frame: returns the places at which the first slots of `whole`, those of the front, are read
            [batch, kv_heads, front], int64; all others are read at their places in the stream.
        queries: the last queries, each rotated to its place in the stream [batch, kv_heads, group,
            n, key_dim]; None unless a pool of the pipe asks for them.
        next: the place in the stream of the next token [batch], int64.
        form: how the layer attends.
        positions: the positional encoding of the layer.
        projection: the layer's output projection; None if it is not known.
        arrived: how many slots at the end of `whole` hold the newest tokens, in order.
        watched: the attention of the last queries, if the forward has kept it; None to compute it
            again.
        gate: the layer's trained prediction of how much tokens will be needed; None if none was
            trained.
        asked: the number of queries that the pools declared (`Pool.needs_queries`), which no window
            may exceed; None for no such check.
    """

    slots: Callable[[], Slots]
    frame: Callable[[], Tensor]
    queries: Tensor | None
    next: Tensor
    form: AttentionParams
    positions: LayerPositions
    projection: Output | None = None
    arrived: int = 0
    watched: AttentionResult | None = None
    gate: Gating | None = None
    asked: int | None = None

    @cached_property
    def whole(self) -> Slots:
        """Every slot that the last queries may have attended to, in the order of the slab.

        Keys are as they were read.
        """
        return self.slots()

    # --- keys and queries in other places

    def rotate_keys(self, keys: Tensor, by: Tensor) -> Tensor:
        """Rotate keys or queries [batch, heads, n, key_dim] further, by `by` positions [batch,
        heads, n], in float32.

        This uses the layer's rotary embedding, with scaled frequencies, partial rotation and three
        axes if it has them. All axes move by the same amount. Without a rotary embedding, as with
        ALiBi, keys do not change.
        """
        rotary = self.positions.rotary
        return keys if rotary is None else rotary.move(keys, by)

    def places(self, slots: Slots) -> Tensor:
        """Return the places at which attention read tokens [batch, kv_heads, slots], int64."""
        return slots.position + self._shift(slots.position)

    def keys(self, slots: Slots) -> Tensor:
        """Return keys as attention read them [batch, kv_heads, slots, key_dim]."""
        return self.rotate_keys(slots.keys, self._shift(slots.position))

    def unrotated(self, slots: Slots) -> Tensor:
        """Return keys without rotation, as at place 0 [batch, kv_heads, slots, key_dim].

        The factor of a scaled rotary embedding (YaRN's) remains in them. On three axes, a token's
        word or image begins at place 0, and the parts of an image keep their distances from there.
        """
        return self.rotate_keys(slots.keys, -self._begins(slots.position))

    def rotate_to(self, keys: Tensor, position: Tensor) -> Tensor:
        """Rotate keys from `unrotated` to places of held tokens [batch, kv_heads, n], int64."""
        return self.rotate_keys(keys, self._begins(position))

    @cached_property
    def read_queries(self) -> Tensor:
        """The queries at the positions at which attention reads them [batch, kv_heads, group, n,
        key_dim].

        A query whose token is in the front is moved up like the token, so that it sees the same
        tokens at the same distances.
        """
        queries = self._last_queries
        shift = self._query_shift(self.query_positions)
        return queries if shift is None else self._rotate_queries(queries, shift)

    @cached_property
    def unrotated_queries(self) -> Tensor:
        """The queries without rotation, as at place 0 [batch, kv_heads, group, n, key_dim]."""
        queries = self._last_queries
        position = self.query_positions[:, None].expand(-1, queries.shape[1], -1)
        return self._rotate_queries(queries, -self._begins(position))

    def power(self, window: int) -> Tensor:
        """Compute the mean square of the last queries by dimension [batch, kv_heads, key_dim].

        It uses queries without rotation and, of two dimensions that rotate together, the mean of
        both, so that it is valid at every distance.
        """
        power = self.unrotated_queries[:, :, :, -window:].float().square().mean(dim=(2, 3))
        rotary = self.positions.rotary
        half = 0 if rotary is None else rotary.frequencies.shape[0]
        one, two, rest = power.split([half, half, power.shape[2] - 2 * half], dim=2)
        pair = (one + two) / 2
        return torch.cat([pair, pair, rest], dim=2)

    @cached_property
    def query_positions(self) -> Tensor:
        """The places of the queries in the stream [batch, n], int64."""
        back = torch.arange(self._last_queries.shape[3], 0, -1, device=self.next.device)
        return self.next[:, None] - back

    # --- attention

    @cached_property
    def lse(self) -> Tensor:
        """The logarithm of each query's denominator [batch, kv_heads, group, n], float32.

        It covers everything that the query sees, with the weights of slots and with the model's
        sink logits, if any; -inf for a query that sees nothing.
        """
        return attention_weights(self._logits, self.whole.b, self.form)[1]

    def attention(self, slots: Slots, window: int = 0) -> Tensor:
        """Return the share of each query's attention that each slot received.

        It is [batch, kv_heads, group, n, slots], float32; 0 for tokens newer than the query.
        `slots` are tokens of this layer as a pool gets them, in any selection and order. With a
        `window`, only that many of the last queries are included.
        """
        self._check_window(window)
        there = self._find_in_whole(slots)
        if there is not None:
            return self._shares[:, :, :, -window:, there]
        # The logits of these tokens; -inf where there is no token.
        ordered, order = self.whole.position.sort(dim=2)
        at = torch.searchsorted(ordered, slots.position.contiguous())
        at = at.clamp_max(len(self.whole) - 1)
        found = (ordered.gather(2, at) == slots.position) & slots.held
        index = order.gather(2, at)[:, :, None, None]
        logits = self._logits.gather(4, index.expand(*self._logits.shape[:4], -1))
        logits = logits.masked_fill_(~found[:, :, None, None], -torch.inf)
        return attention_shares(logits, slots.b, self.lse)[:, :, :, -window:]

    def received(self, slots: Slots, window: int) -> Tensor:
        """Sum `attention` over the last `window` queries and the heads of the group [batch,
        kv_heads, slots], float32.
        """
        self._check_window(window)
        known = None if self.watched is None else self.watched.of_last(window)
        there = None if known is None else self._find_in_whole(slots)
        if known is not None and there is not None:
            return known[:, :, there]
        return self.attention(slots, window).sum(dim=(2, 3))

    def would_attend(self, slots: Slots) -> Tensor:
        """Return the `attention` that slots with other keys would receive, as shares of the actual
        denominators. The slots must have the places of tokens of this layer.
        """
        tilt = self._alibi_bias(self.places(slots))
        found = compute_logits(self.read_queries, self.keys(slots), self.form, tilt)
        found = found.masked_fill_(self._find_hidden(slots.position), -torch.inf)
        return attention_shares(found, slots.b, self.lse)

    @cached_property
    def answers(self) -> Tensor:
        """The layer's outputs for the queries, before the output projection.

        They are [batch, kv_heads, group, n, value_dim].
        """
        if self.watched is not None:
            return self.watched.answers[:, :, :, -self._last_queries.shape[3] :]
        whole, queries = self.whole, self.read_queries
        hidden = self._find_hidden(whole.position)
        bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
        if (tilt := self._alibi_bias(self._everywhere)) is not None:
            bias = bias + tilt
        return two_weight_attention(
            queries, whole.keys, whole.values, whole.a, whole.b, self.form, bias
        )

    # --- the output

    def lengths(self, values: Tensor) -> Tensor:
        """Compute |W_o v| of values [batch, kv_heads, n, value_dim] for each query head.

        It is [batch, kv_heads, group, n], float32. W_o is the part of the output projection that
        reads the head. If the projection is not known, |v| is returned, for one head per group if
        there are no queries.
        """
        if self.output is None:
            group = 1 if self.queries is None else self.queries.shape[2]
            return values.float().norm(dim=3)[:, :, None].expand(-1, -1, group, -1)
        return torch.einsum("bhnd,hged->bhgne", values.float(), self.output).norm(dim=4)

    def projected_sizes(self, values: Tensor) -> Tensor:
        """Compute ‖W_o v‖₁ of values [batch, kv_heads, n, value_dim], the mean over the group.

        It is [batch, kv_heads, n], float32; ‖v‖₁ if the projection is not known.
        """
        values, project = values.float(), self.projection
        parts = None if project is None else project.parts(values.shape[3], values.device)
        if parts is None:
            return values.abs().sum(dim=3)
        # One query head at a time, because the projected values of all would be as large as a
        # prompt's.
        sizes = [(values @ part.float().mT).abs().sum(dim=3) for part in parts.unbind(1)]
        return torch.stack(sizes).mean(dim=0)

    @cached_property
    def output(self) -> Tensor | None:
        """R with |R x| = |W_o x| for each query head, as `Output` returns it."""
        values = self.whole.values
        return None if self.projection is None else self.projection(values.shape[3], values.device)

    # --- inside

    @property
    def _last_queries(self) -> Tensor:
        if self.queries is None:
            raise UndeclaredError(
                "it reads the last queries, but no pool of the pipe has needs_queries. Set "
                "needs_queries = 16, or another number, in the pool's class."
            )
        return self.queries

    def _check_window(self, window: int) -> None:
        """Refuse a window of more queries than the pools declared, because some would be
        missing.
        """
        if self.asked is not None and window > self.asked:
            raise UndeclaredError(
                f"it reads the attention of the last {window} queries, but no pool of the pipe has "
                f"a needs_queries of more than {self.asked}. Set needs_queries = {window} in the "
                "pool's class, or use a smaller window."
            )

    @cached_property
    def _logits(self) -> Tensor:
        """Logits of every slot [batch, kv_heads, group, n, slots], float32.

        -inf where a query does not see a token.
        """
        whole = self.whole
        tilt = self._alibi_bias(self._everywhere)
        found = compute_logits(self.read_queries, whole.keys, self.form, tilt)
        n = found.shape[3]
        # Each query sees everything before the last n tokens, which are the queries' own tokens.
        # Empty slots have no weight.
        last = -n if self.positions.window is None and n <= self.arrived else 0
        found[..., last:].masked_fill_(self._find_hidden(whole.position[:, :, last:]), -torch.inf)
        return found

    @cached_property
    def _shares(self) -> Tensor:
        """The share of each query's attention that every slot received."""
        if self.watched is not None and self.watched.shares is not None:
            return self.watched.shares[:, :, :, -self._last_queries.shape[3] :]
        return attention_softmax(self._logits, self.whole.b, self.form)

    def _find_in_whole(self, slots: Slots) -> slice | None:
        """Find where these slots are in `whole`, if they are consecutive there and have the same
        weights, as the slots of most pools do. None otherwise.
        """
        position, count = slots.position, len(slots)
        if not count:
            return None
        first = (self.whole.position[0, 0] == position[0, 0, :1]).nonzero()
        if not len(first):
            return None
        there = slice(int(first[0, 0]), int(first[0, 0]) + count)
        same = torch.equal(self.whole.position[:, :, there], position)
        return there if same and torch.equal(slots.b, self.whole.b[:, :, there]) else None

    @cached_property
    def _moved(self) -> Tensor:
        """The places at which the front is read [batch, kv_heads, front]."""
        return self.frame()

    @cached_property
    def _everywhere(self) -> Tensor:
        """The place at which each slot of `whole` is read [batch, kv_heads, slots]."""
        moved = self._moved
        return torch.cat([moved, self.whole.position[:, :, moved.shape[2] :]], dim=2)

    @cached_property
    def _front(self) -> tuple[Tensor, Tensor]:
        """The places of the front in the stream, ascending, and how far each is moved."""
        moved = self._moved
        position = self.whole.position[:, :, : moved.shape[2]]
        ordered, order = position.sort(dim=2)
        return ordered, (moved - position).gather(2, order)

    def _shift(self, position: Tensor) -> Tensor:
        """Return how far attention moves the tokens at these places [batch, kv_heads, n], int64."""
        if not self._moved.shape[2]:
            return torch.zeros_like(position)
        ordered, shift = self._front
        at = torch.searchsorted(ordered.contiguous(), position.contiguous())
        at = at.clamp_max(ordered.shape[2] - 1)
        return shift.gather(2, at).where(ordered.gather(2, at) == position, 0)

    def _begins(self, position: Tensor) -> Tensor:
        """Return the position to which the tokens at these places were rotated [batch, kv_heads,
        n], int64.

        This is the place itself, or on three axes the position where the token's word or image
        begins. For a query whose token has been evicted, it is the position of the next older token
        plus the number of tokens since.
        """
        span = self.whole.span
        if span is None:
            return position
        ordered, order = self.whole.position.sort(dim=2)
        drift = span[..., 0].gather(2, order) - ordered
        at = torch.searchsorted(ordered.contiguous(), position.contiguous(), right=True) - 1
        return position + drift.gather(2, at.clamp_min(0))

    def _query_shift(self, position: Tensor) -> Tensor | None:
        """Return how far queries are moved up [batch, kv_heads, n]. None if no query is moved.

        In the rolling frame, neighbors in the front have no gap between them. So a query whose
        token has been evicted is read directly before the next newer token.
        """
        if not self.positions.rolling:
            return None
        front = self._moved.shape[2]
        if not front or position.shape[1] <= len(self.whole) - front:
            return None
        ordered, shift = self._front
        wide = position[:, None].expand(-1, ordered.shape[1], -1).contiguous()
        at = torch.searchsorted(ordered.contiguous(), wide, right=True)
        # The unbroken run of newest tokens begins after the front.
        run = (self.next - (len(self.whole) - front))[:, None, None].expand_as(ordered[:, :, :1])
        newer = torch.cat([ordered + shift, run], dim=2)
        return (newer.gather(2, at) - 1 - wide).clamp_min(0)

    def _rotate_queries(self, queries: Tensor, by: Tensor) -> Tensor:
        group = queries.shape[2]
        by = by[:, :, None].expand(-1, -1, group, -1)
        return self.rotate_keys(queries.flatten(1, 2), by.flatten(1, 2)).unflatten(1, (-1, group))

    def _find_hidden(self, position: Tensor) -> Tensor:
        """Find the slots that queries do not see [batch, kv_heads, 1, n, slots], bool."""
        place = self.query_positions[:, None, None, :, None]
        position = position[:, :, None, None]
        hidden = (position > place) | (position < 0)
        if self.positions.window is not None:
            hidden |= place - position >= self.positions.window
        return hidden

    def _alibi_bias(self, frame: Tensor) -> Tensor | None:
        """Compute ALiBi of slots that are read at the places `frame`, as attention does."""
        alibi = self.positions.alibi
        if alibi is None:
            return None
        first: Tensor | int = 0
        if self.positions.rolling and alibi.rounding is not None:
            far = torch.iinfo(frame.dtype).max
            held = self.whole.position >= 0
            first = self._everywhere.masked_fill(~held, far).amin(dim=2, keepdim=True)
        return alibi.bias(frame, frame.shape[1], first, self.next[:, None, None] - 1)
