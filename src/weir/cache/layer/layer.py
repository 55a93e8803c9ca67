"""One layer's stream: append, attend, and what is to be settled when a forward has succeeded.

Between folds a token is written into the tail and attention reads the slab; when the tail is full
the layer folds (`fold`). Knows nothing about models beyond a `Form` per call and the layer's
positions.

A forward that fails in a later layer, or makes keys that are not finite, must leave no trace. What
it writes into the tail are slots that wait for a token anyway; all else (attention received, the
fold) waits in `Layer._open` until the forward has succeeded. Of a forward that is longer than the
tail has room, all but the last piece must be settled on the way; then the slots as they were are
kept until its end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from weir.cache.layer.decode import Spot
from weir.cache.layer.fold import Folding
from weir.cache.layer.mask import sight
from weir.cache.layer.plan import Piece, Plan
from weir.cache.layer.prefill import exactly
from weir.cache.layer.queries import last_queries, received, remember, remember_last, tail_of
from weir.errors import NotFiniteError, WeirError
from weir.policies import Pipe
from weir.pools import Draws
from weir.slab import (
    Form,
    Place,
    Rotary,
    Slab,
    Slots,
    fused_attention,
    fuses,
    lined,
    split_attention,
    two_weight_attention,
    two_weight_kernel,
)


@dataclass(frozen=True)
class Open:
    """A piece that was answered and is not settled yet.

    Attributes:
        piece, form: the piece, and how the layer attends.
        arrivals: a whole prompt that is to be folded in place of the tail.
    """

    piece: Piece
    form: Form
    arrivals: Slots | None = None


@dataclass(frozen=True)
class Before:
    """A layer as it was before the forward under way; a slab of None for one without tokens."""

    slab: Slab | None
    lengths: list[list[int]]


class Layer:
    """The stream of one layer: a slab, a pipe, and how far each row of the batch has come.

    Attributes:
        pipe: who holds slots.
        slab: the slots; None before the first token.
        lengths: per row and per pool of the pipe, slots in use.
        unseen: numbers of the last forward that nobody has looked at yet, and that are to be
            finite [numbers]: looking means waiting for an accelerator, and costs a step on a CPU
            more than all layers together at its end.
    """

    def __init__(
        self, pipe: Pipe, place: Place, chunk: int, draws: Draws, index: int, layers: int
    ) -> None:
        self.pipe = pipe
        self.place = place
        self.chunk = chunk
        self.folding = Folding(pipe, place, chunk, draws, index, layers)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.slab: Slab | None = None
        self.lengths: list[list[int]] = []
        self.unseen: list[Tensor] = []
        # Nothing but exact tokens, no empty slot: then attention needs no mask.
        self._plain = True
        self._open: Open | None = None
        self._before: Before | None = None
        self._form: Form | None = None

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, form: Form, plan: Plan
    ) -> Tensor:
        """Take in new tokens and answer their queries; `settle` or `take_back` comes next.

        Args:
            queries: [batch, heads, length, key_dim], unrotated unless `form.placed`.
            keys: [batch, kv_heads, length, key_dim], the same.
            values: [batch, kv_heads, length, value_dim].
            form: how the layer attends.
            plan: how the forward is cut.

        Returns:
            [batch, heads, length, value_dim].

        Raises:
            NotFiniteError: a key or value is infinite or not a number.
        """
        self._form = form
        self._check_finite(keys, values)
        batch, heads, length, _ = queries.shape
        kv_heads = keys.shape[1]
        queries = queries.view(batch, kv_heads, heads // kv_heads, length, -1)
        if not plan.pieces:
            return values.new_zeros((batch, heads, length, values.shape[3]))
        if self.slab is None:
            self._before = Before(None, [])
            self.slab = self._make_slab(keys, values, queries.shape[2])
            self.slab.open_tail(0, plan.pieces[0].start, self.chunk)
        take = self._attend_exactly if plan.full else self._attend_piece
        if plan.whole and len(plan.pieces) == 1:
            return take(queries, keys, values, form, plan.pieces[0]).flatten(1, 2)
        if plan.whole:
            parts, done = [], 0
            for piece in plan.pieces:
                columns = slice(done, done + piece.width)
                done += piece.width
                q, k, v = queries[..., columns, :], keys[..., columns, :], values[..., columns, :]
                parts.append(take(q, k, v, form, piece))
            return torch.cat(parts, dim=3).flatten(1, 2)
        out = values.new_zeros((*queries.shape[:4], values.shape[3]))
        for piece in plan.pieces:
            q, k, v = (_columns(t, piece.columns) for t in (queries, keys, values))
            part = take(q, k, v, form, piece)
            rows, places, columns_of = piece.entries
            out[rows, :, :, columns_of] = part[rows, :, :, places]
        return out.flatten(1, 2)

    def _check_finite(self, keys: Tensor, values: Tensor) -> None:
        if keys.shape[2] == 1:
            self.unseen = [keys.flatten(), values.flatten()]
            return
        self.unseen = []
        if not keys.numel():
            return
        # The least and the greatest tell: NaN makes NaN of both.
        ends = [*keys.aminmax(), *values.aminmax()]
        if keys.device.type != "cpu":
            self.unseen = [torch.stack(ends)]
        elif not all(map(math.isfinite, ends)):
            raise NotFiniteError(self.folding.layer)

    def spot(self) -> Spot | None:
        """Where the next token of all rows goes, for a compiled step; None for the usual way."""
        if self.slab is None or self._form is None:
            return None
        return Spot.of(self.slab, self.pipe, self.place, self._form)

    def stepped(self, piece: Piece, largest: Tensor) -> None:
        """A compiled step has written the token of a piece and answered it; as after `attend`.

        Args:
            piece: one token of each row.
            largest: the largest absolute number among its keys and values [1].
        """
        assert self._form is not None
        self.unseen = [largest]
        self._open = Open(piece, self._form)

    def settle(self) -> None:
        """The forward has succeeded: count its attention, keep its queries, fold what is full."""
        self._settle()
        self._before = None

    def _settle(self) -> None:
        left, self._open = self._open, None
        if left is None or self.slab is None:
            return
        if left.piece.full:
            self._fold(self.slab, left)
            self._plain = self._is_plain(self.slab)

    def _fold(self, slab: Slab, left: Open) -> None:
        piece, wanted = left.piece, self.pipe.needs_queries
        if left.arrivals is None and slab.mass is not None:
            tail = tail_of(piece, self.chunk)
            ends = self.ends(tail.counts)
            mass = received(slab, self.place, left.form, tail, ends, wanted)
            slab.mass[:, :, : mass.shape[2]] += mass
        # What was asked last lies at the end of the tail; after a whole prompt, in front of it.
        start = self.chunk if left.arrivals is None else 0
        queries = last_queries(slab, start, wanted)
        self.folding.fold(slab, self.lengths, piece, left.form, queries, left.arrivals)
        if queries is not None and slab.queries is not None and left.arrivals is None:
            rows = torch.tensor(piece.full, device=queries.device)
            slab.queries[rows, :, :wanted] = lined(queries)[rows]

    def _settle_early(self) -> None:
        """Settle a piece while the forward is still under way."""
        if self._before is None and self.slab is not None:
            lengths = [list(row) for row in self.lengths]
            self._before = Before(self.slab.copy(), lengths)
        self._settle()

    def take_back(self) -> None:
        """The forward has failed: be as it was before."""
        self._open = None
        before, self._before = self._before, None
        if before is not None:
            self.slab, self.lengths = before.slab, before.lengths
            self._plain = self.slab is None or self._is_plain(self.slab)

    def ends(self, waiting: list[int]) -> list[int]:
        """Per row, the number of slots in use."""
        return [sum(row) + w for row, w in zip(self.lengths, waiting, strict=True)]

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder the rows of the batch as `index` [n] says."""
        if self.slab is None:
            return
        self.slab = self.slab.rows(index)
        self.lengths = [list(self.lengths[row]) for row in index.tolist()]

    def load_slab(self, slab: Slab) -> None:
        """Take over a slab that was saved; `lengths` must be set."""
        self.slab = slab
        self._plain = self._is_plain(slab)

    def _make_slab(self, keys: Tensor, values: Tensor, group: int) -> Slab:
        pipe, place = self.pipe, self.place
        asked = pipe.needs_mass or pipe.needs_queries > 0
        moves = place.rolling and bool(pipe.front)
        slots = (4 * self.chunk if pipe.slots is None else pipe.slots) + self.chunk
        masters = pipe.front_slots or self.chunk  # a front without a limit grows as it fills
        try:
            slab = Slab(
                keys,
                values,
                slots,
                masters=masters if moves and place.rotary is not None else 0,
                mass=pipe.needs_mass,
                two_weights=pipe.two_weights,
                frames=place.alibi is not None,
                queries=pipe.needs_queries + self.chunk if asked else 0,
                group=group,
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise WeirError(f"no memory for {slots} slots in every layer: {reason}") from None
        with torch.inference_mode(False):
            for index, pool in enumerate(pipe.pools):
                for name, t in pool.state(slab.run(0, 0)).items():
                    slab.state[f"{index}.{name}"] = t
        self.lengths = [[0] * len(pipe.pools) for _ in range(keys.shape[0])]
        self._plain = True
        return slab

    def _attend_piece(
        self, queries: Tensor, keys: Tensor, values: Tensor, form: Form, piece: Piece
    ) -> Tensor:
        """One piece: into the tail, and attend."""
        if self._open is not None:
            self._settle_early()
        slab = self.slab
        assert slab is not None
        queries, keys = self._placed(queries, keys, form, piece)
        ends = self.ends(piece.waiting)
        even = piece.even and len(set(ends)) == 1
        if even:
            slab.append(keys, values, ends[0])
        else:
            rows, places, _ = piece.entries
            prefix = torch.tensor([sum(row) for row in self.lengths], device=keys.device)
            slab.append_at(keys, values, rows, prefix[rows] + piece.tail_places, places)
        stop = max(end + n for end, n in zip(ends, piece.counts, strict=True))
        bias = sight(self.place, slab, piece, stop, queries.dtype, even=even)
        remember(slab, queries, piece, self.pipe.needs_queries, even=even)
        self._open = Open(piece, form)
        return self._read(slab, queries, form, bias, stop, even)

    def _placed(
        self, queries: Tensor, keys: Tensor, form: Form, piece: Piece
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys at their places in the stream, as attention is to see them."""
        if self.place.rotary is not None and not form.placed:
            queries, keys = _rotated(self.place.rotary, queries, keys, piece.positions)
        if self.pipe.log_n:
            assert self.slab is not None
            queries = self._sharpened(self.slab, queries, piece)
        return queries, keys

    @staticmethod
    def _sharpened(slab: Slab, queries: Tensor, piece: Piece) -> Tensor:
        """Queries times log_512(n), n being the tokens that each sees (BUZZ, section 3.5)."""
        position, start = slab.position, piece.start[:, None, None]
        before = ((position >= 0) & (position < start)).sum(dim=2, keepdim=True)
        n = before + torch.arange(1, piece.width + 1, device=position.device)
        factor = n.log() / math.log(512)
        return (queries * factor[:, :, None, :, None]).to(queries.dtype)

    def _read(
        self, slab: Slab, queries: Tensor, form: Form, bias: Tensor | None, stop: int, even: bool
    ) -> Tensor:
        """Attention over the first `stop` slots."""
        keys = slab.keys.narrow(2, 0, stop)
        kernel = two_weight_kernel(queries)
        if kernel or not fuses(form):
            return (kernel or two_weight_attention)(
                queries,
                keys,
                slab.values[:, :, :stop],
                slab.a[:, :, :stop],
                slab.b[:, :, :stop],
                form,
                bias,
            )
        values = slab.values.narrow(2, 0, stop)
        if not (self._plain and even):
            if slab.split is not None:
                mask, above, below = (t.narrow(2, 0, stop) for t in slab.split)
                return split_attention(queries, keys, values, mask, above, below, form, bias)
            below = slab.b[:, :, None, None, :stop]
            bias = below if bias is None else bias + below
        return fused_attention(queries, keys, values, form, bias)

    def _is_plain(self, slab: Slab) -> bool:
        used = min(sum(row) for row in self.lengths)
        return bool((slab.a[:, :, :used] == 0).all() and (slab.b[:, :, :used] == 0).all())

    def _attend_exactly(
        self, queries: Tensor, keys: Tensor, values: Tensor, form: Form, piece: Piece
    ) -> Tensor:
        """A whole prompt: plain causal attention over it, then one fold.

        At once, so that no more than one layer holds the prompt.
        """
        assert self.slab is not None
        queries, keys = self._placed(queries, keys, form, piece)
        mass = self.pipe.needs_mass
        out, arrivals = exactly(queries, keys, values, form, piece, self.place, mass=mass)
        remember_last(self.slab, queries, piece, self.pipe.needs_queries)
        self._open = Open(piece, form, arrivals)
        self._settle_early()
        return out


def _rotated(
    rotary: Rotary, queries: Tensor, keys: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys of a piece at its positions, in one go."""
    kv_heads, group = queries.shape[1:3]
    both = rotary.rotate(torch.cat([queries.flatten(1, 2), keys], dim=1), positions)
    queries, keys = both.split([kv_heads * group, kv_heads], dim=1)
    return queries.unflatten(1, (kv_heads, group)), keys


def _columns(t: Tensor, index: Tensor) -> Tensor:
    """The columns `index` [batch, n] of `t` [batch, ..., length, dim]."""
    pick = index.view(index.shape[0], *(1,) * (t.ndim - 3), -1, 1)
    return t.gather(t.ndim - 2, pick.expand(*t.shape[:-2], -1, t.shape[-1]))
