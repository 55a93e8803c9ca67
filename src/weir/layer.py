"""One layer's stream: append, attend, fold.

Between folds a token is written into the tail and attention reads the slab; when the tail is full
the pipe decides who stays and the slab is packed. Knows nothing about models beyond a `Form` per
call and the layer's positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from weir.attention import (
    Form,
    attention_mass,
    fused_attention,
    fuses,
    two_weight_attention,
)
from weir.draws import Draws
from weir.errors import WeirError
from weir.plan import Piece, Plan
from weir.policy import Pipe
from weir.pools import Fold
from weir.positions import Alibi, Rotary, rolled
from weir.slab import Slab, Slots, longer

QUERY_BLOCK = 256
"""Queries handled at once where logits have to be written out."""


@dataclass(frozen=True)
class Place:
    """What a layer knows about positions.

    Attributes:
        rotary: its rotary embedding; None for none.
        alibi: its linear biases; None for none.
        window: it sees only this many newest tokens (a sliding layer that keeps its own window);
            None for all.
        rolling: positions inside the cache, not in the stream.
    """

    rotary: Rotary | None = None
    alibi: Alibi | None = None
    window: int | None = None
    rolling: bool = True


class Layer:
    """The stream of one layer: a slab, a pipe, and how far each row of the batch has come.

    Attributes:
        pipe: who holds slots.
        slab: the slots; None before the first token.
        lengths: per row and per pool of the pipe, slots in use.
    """

    def __init__(
        self, pipe: Pipe, place: Place, chunk: int, draws: Draws, index: int, layers: int
    ) -> None:
        self.pipe = pipe
        self.place = place
        self.chunk = chunk
        self.draws = draws
        self.index = index
        self.layers = layers
        self.slab: Slab | None = None
        self.lengths: list[list[int]] = []
        self.queries: Tensor | None = None
        # Nothing but exact tokens, no empty slot: then attention needs no mask.
        self._plain = True

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, form: Form, plan: Plan
    ) -> Tensor:
        """Take in new tokens and answer their queries.

        Args:
            queries: unrotated [batch, heads, length, key_dim].
            keys: unrotated [batch, kv_heads, length, key_dim].
            values: [batch, kv_heads, length, value_dim].
            form: how the layer attends.
            plan: how the forward is cut.

        Returns:
            [batch, heads, length, value_dim].
        """
        kv_heads = keys.shape[1]
        queries = queries.unflatten(1, (kv_heads, -1))
        if not plan.pieces:
            return values.new_zeros((*queries.shape[:4], values.shape[3])).flatten(1, 2)
        if self.slab is None:
            self.slab = self._make_slab(keys, values)
            self.slab.open_tail(0, plan.pieces[0].start, self.chunk)
        take = self._attend_exactly if plan.full else self._attend_piece
        if plan.whole:
            parts, done = [], 0
            for piece in plan.pieces:
                columns = slice(done, done + piece.width)
                done += piece.width
                q, k, v = queries[..., columns, :], keys[..., columns, :], values[..., columns, :]
                parts.append(take(self.slab, q, k, v, form, piece))
            return torch.cat(parts, dim=3).flatten(1, 2)
        out = values.new_zeros((*queries.shape[:4], values.shape[3]))
        for piece in plan.pieces:
            q, k, v = (_columns(t, piece.columns) for t in (queries, keys, values))
            part = take(self.slab, q, k, v, form, piece)
            rows, places, columns_of = piece.entries
            out[rows, :, :, columns_of] = part[rows, :, :, places]
        return out.flatten(1, 2)

    def ends(self, waiting: list[int]) -> list[int]:
        """Per row, the number of slots in use."""
        return [sum(row) + w for row, w in zip(self.lengths, waiting, strict=True)]

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder the rows of the batch as `index` [n] says."""
        if self.slab is None:
            return
        self.slab = self.slab.rows(index)
        self.lengths = [list(self.lengths[row]) for row in index.tolist()]
        if self.queries is not None:
            self.queries = self.queries.index_select(0, index)

    def load_slab(self, slab: Slab) -> None:
        """Take over a slab that was saved; `lengths` must be set."""
        self.slab = slab
        self._plain = self._is_plain(slab)

    def _make_slab(self, keys: Tensor, values: Tensor) -> Slab:
        pipe, place = self.pipe, self.place
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
                # Half precision ends at 65504, too soon for values times e^(a-b).
                folded_weights=pipe.two_weights and values.dtype != torch.float16,
                frames=place.alibi is not None,
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
        self, slab: Slab, queries: Tensor, keys: Tensor, values: Tensor, form: Form, piece: Piece
    ) -> Tensor:
        """One piece: into the tail, attend, fold what is full."""
        if self.place.rotary is not None:
            queries = self._rotate(self.place.rotary, queries, piece.positions)
            keys = self.place.rotary.rotate(keys, piece.positions)
        if self.pipe.log_n:
            queries = self._sharpened(slab, queries, piece)
        ends = self.ends(piece.waiting)
        even = piece.even and len(set(ends)) == 1
        if even:
            slab.append(keys, values, ends[0])
        else:
            rows, places, _ = piece.entries
            prefix = torch.tensor([sum(row) for row in self.lengths], device=keys.device)
            slab.append_at(keys, values, rows, prefix[rows] + piece.tail_places, places)
        stop = max(end + n for end, n in zip(ends, piece.counts, strict=True))
        out = self._read(slab, queries, form, piece, stop, even)
        self._remember(queries, piece)
        self._fold_rows(slab, piece, form)
        return out

    @staticmethod
    def _rotate(rotary: Rotary, queries: Tensor, positions: Tensor) -> Tensor:
        return rotary.rotate(queries.flatten(1, 2), positions).unflatten(1, queries.shape[1:3])

    @staticmethod
    def _sharpened(slab: Slab, queries: Tensor, piece: Piece) -> Tensor:
        """Queries times log_512(n), n being the tokens that each sees (BUZZ, section 3.5)."""
        position, start = slab.position, piece.start[:, None, None]
        before = ((position >= 0) & (position < start)).sum(dim=2, keepdim=True)
        n = before + torch.arange(1, piece.width + 1, device=position.device)
        factor = n.log() / math.log(512)
        return (queries * factor[:, :, None, :, None]).to(queries.dtype)

    def _read(
        self, slab: Slab, queries: Tensor, form: Form, piece: Piece, stop: int, even: bool
    ) -> Tensor:
        """Attention over the first `stop` slots."""
        keys = slab.keys[:, :, :stop]
        bias = self._bias(slab, queries, piece, stop, even)
        if self.pipe.needs_mass and slab.mass is not None:
            slab.mass[:, :, :stop] += attention_mass(queries, keys, slab.b[:, :, :stop], form, bias)
        if not fuses(form) or (self.pipe.two_weights and slab.weighted is None):
            return two_weight_attention(
                queries,
                keys,
                slab.values[:, :, :stop],
                slab.a[:, :, :stop],
                slab.b[:, :, :stop],
                form,
                bias,
            )
        values = slab.values if slab.weighted is None else slab.weighted
        if not (self._plain and even):
            below = slab.b if slab.mask is None else slab.mask
            below = below[:, :, None, None, :stop]
            bias = below if bias is None else bias + below
        return fused_attention(queries, keys, values[:, :, :stop], form, bias)

    def _bias(
        self, slab: Slab, queries: Tensor, piece: Piece, stop: int, even: bool
    ) -> Tensor | None:
        """What is added to the logits: -inf for what a query must not see, and ALiBi."""
        width, window = piece.width, self.place.window
        bias: Tensor | None = None
        if not even:
            # A slot that waits for its token carries a position in the future.
            ahead = piece.positions[:, :, None, :, None] - slab.position[:, :, None, None, :stop]
            seen = (ahead >= 0) & piece.real[:, None, None, :, None]
            if window is not None:
                seen &= ahead < window
            bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
        elif width > 1 or (window is not None and stop > window):
            bias = _kept_band(width, stop, window, queries.dtype, queries.device)
        if self.place.alibi is not None and slab.frame is not None:
            frame, position = slab.frame[:, :, :stop], slab.position[:, :, :stop]
            tilt = self._tilt(self.place.alibi, frame, position, piece)
            bias = tilt if bias is None else bias + tilt
        return bias

    def _tilt(self, alibi: Alibi, frame: Tensor, position: Tensor, piece: Piece) -> Tensor:
        """ALiBi of slots at the places that the frame gives them [batch, kv_heads, slots]."""
        first: Tensor | int = 0
        if self.place.rolling and alibi.rounding is not None:
            far = torch.iinfo(frame.dtype).max
            first = frame.masked_fill(position < 0, far).amin(dim=2, keepdim=True)
        return alibi.bias(frame, frame.shape[1], first, piece.start[:, None, None])

    def _remember(self, queries: Tensor, piece: Piece) -> None:
        """Keep the last queries, rotated, for pools that ask for them."""
        wanted = self.pipe.needs_queries
        if not wanted:
            return
        if self.queries is None:
            self.queries = queries.new_zeros((*queries.shape[:3], wanted, queries.shape[4]))
        both = torch.cat([self.queries, queries], dim=3)
        counts = torch.tensor(piece.counts, device=queries.device)
        index = counts[:, None] + torch.arange(wanted, device=queries.device)
        shape = (*both.shape[:3], -1, both.shape[4])
        self.queries = both.gather(3, index[:, None, None, :, None].expand(shape))

    def _fold_rows(
        self, slab: Slab, piece: Piece, form: Form, arrivals: Slots | None = None
    ) -> None:
        """Fold the rows that are due, rows of the same layout together.

        `arrivals`, if given, are folded in place of the tail: a whole prompt [batch, ...].
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for row in piece.full:
            arrived = piece.waiting[row] + piece.counts[row]
            groups.setdefault((*self.lengths[row], arrived), []).append(row)
        everyone = len(piece.counts)
        for (*lengths, arrived), rows in groups.items():
            index = torch.tensor(rows, device=slab.keys.device)
            part = slab if len(rows) == everyone else slab.rows(index)
            queries = None if self.queries is None else self.queries.index_select(0, index)
            new = part.run(sum(lengths), sum(lengths) + arrived)
            if arrivals is not None:
                new = arrivals.map(lambda t, i=index, n=arrived: t.index_select(0, i)[:, :, :n])
            fold = Fold(
                draws=self.draws,
                layer=self.index,
                layers=self.layers,
                seen=piece.after[index] - piece.origin,
                scale=form.scale,
                queries=queries,
                prompt=arrivals is not None,
                origin=piece.origin,
                form=form,
                alibi=self.place.alibi,
            )
            kept = self._fold(part, lengths, new, fold, piece.after[index])
            if part is not slab:
                slab.grow(len(part), 0 if part.masters is None else part.masters.shape[2])
                slab.put_rows(index, part)
            for row in rows:
                self.lengths[row] = kept
        if groups:
            self._plain = self._is_plain(slab)

    def _fold(
        self, slab: Slab, lengths: list[int], new: Slots, fold: Fold, ahead: Tensor
    ) -> list[int]:
        """Fold a slab whose rows all lie alike; returns the new lengths.

        `ahead` [batch] is each row's next place in the stream.
        """
        pipe = self.pipe
        order = (*pipe.front, *pipe.run)
        held: list[Slots] = [new] * len(order)
        places: dict[int, int] = {}
        start = 0
        for pool in order:
            view = slab.front if pool in pipe.front else slab.run
            held[pool] = view(start, start + lengths[pool])
            places[pool] = start
            start += lengths[pool]
        states = self._states(slab)
        kept = pipe.fold(held, new, fold, states)
        self._remember_states(slab, states)
        start, moves = 0, []
        for pool in order:
            slots = kept[pool]
            most = pipe.pools[pool].slots()
            if most is not None and len(slots) > most:
                name = pipe.pools[pool].name
                raise WeirError(f"the pool {name} kept {len(slots)} slots and may hold {most}")
            stays = slots is held[pool] or (slots.slab is slab and pool in pipe.run)
            was = slots.place if slots.slab is slab else places[pool]
            if not (stays and was == start) and len(slots):
                # A copy first: what is written here may be what the next pool still has to read.
                moves.append((start, slots.map(torch.clone), pool in pipe.front))
            start += len(slots)
        in_front = sum(len(kept[pool]) for pool in pipe.front)
        if start + self.chunk > len(slab):
            slab.grow(2 * (start + self.chunk))
        if slab.masters is not None and in_front > slab.masters.shape[2]:
            slab.grow(0, masters=2 * in_front)
        for place, slots, to_front in moves:
            slab.write(place, slots, front=to_front)
        self._roll(slab, in_front, start, ahead)
        slab.open_tail(start, ahead, self.chunk)
        return [len(slots) for slots in kept]

    def _states(self, slab: Slab) -> list[dict[str, Tensor]]:
        """What each pool remembers, by its own names."""
        states: list[dict[str, Tensor]] = [{} for _ in self.pipe.pools]
        for name, t in slab.state.items():
            index, _, own = name.partition(".")
            states[int(index)][own] = t
        return states

    def _remember_states(self, slab: Slab, states: list[dict[str, Tensor]]) -> None:
        """Write what each pool is to remember into the slab."""
        for name, t in slab.state.items():
            index, _, own = name.partition(".")
            after = states[int(index)][own]
            pool = self.pipe.pools[int(index)]
            if after.shape == t.shape:
                if after is not t:
                    t.copy_(after)
            elif pool.slots() is None and longer(after, t):
                with torch.inference_mode(False):
                    slab.state[name] = after.clone()
            else:
                raise WeirError(
                    f"the pool {pool.name} remembers {own} of shape {list(after.shape)} instead of "
                    f"{list(t.shape)}"
                )

    def _roll(self, slab: Slab, front: int, used: int, ahead: Tensor) -> None:
        """Move the front up to the run, in the frame."""
        position = slab.position[:, :, :front]
        frame = position
        if self.place.rolling and front:
            frame = rolled(position, ahead - (used - front))
            if slab.masters is not None and self.place.rotary is not None:
                masters = slab.masters[:, :, :front]
                slab.keys[:, :, :front] = self.place.rotary.move(masters, frame - position)
        if slab.frame is not None:
            slab.frame[:, :, :front] = frame
            slab.frame[:, :, front:used] = slab.position[:, :, front:used]

    def _is_plain(self, slab: Slab) -> bool:
        used = min(sum(row) for row in self.lengths)
        return bool((slab.a[:, :, :used] == 0).all() and (slab.b[:, :, :used] == 0).all())

    def _attend_exactly(
        self, slab: Slab, queries: Tensor, keys: Tensor, values: Tensor, form: Form, piece: Piece
    ) -> Tensor:
        """A whole prompt: plain causal attention over it, then one fold."""
        kv_heads, width = keys.shape[1], piece.width
        if self.place.rotary is not None:
            queries = self._rotate(self.place.rotary, queries, piece.positions)
            keys = self.place.rotary.rotate(keys, piece.positions)
        if self.pipe.log_n:
            queries = self._sharpened(slab, queries, piece)
        zeros = torch.zeros(keys.shape[:3], device=keys.device)
        position = piece.positions.expand(-1, kv_heads, -1)
        mass = zeros.clone() if self.pipe.needs_mass else None
        steps = torch.arange(width, device=keys.device)[None, None]
        outs = []
        for start in range(0, width, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, width)
            bias = band(stop - start, stop, self.place.window, queries.dtype, keys.device)
            if self.place.alibi is not None:
                bias = bias + self.place.alibi.bias(steps[..., :stop], kv_heads, 0, stop - 1)
            block, k, v = queries[:, :, :, start:stop], keys[:, :, :stop], values[:, :, :stop]
            if mass is not None:
                real = torch.where(piece.real[:, None, None, start:stop, None], 0.0, -torch.inf)
                mass[:, :, :stop] += attention_mass(block, k, zeros[..., :stop], form, bias + real)
            if fuses(form):
                outs.append(fused_attention(block, k, v, form, bias))
            else:
                weights = zeros[..., :stop]
                outs.append(two_weight_attention(block, k, v, weights, weights, form, bias))
        self._remember(queries, piece)
        arrivals = Slots(keys, values, zeros, zeros.clone(), position, mass)
        self._fold_rows(slab, piece, form, arrivals)
        return torch.cat(outs, dim=3)


def _columns(t: Tensor, index: Tensor) -> Tensor:
    """The columns `index` [batch, n] of `t` [batch, ..., length, dim]."""
    pick = index.view(index.shape[0], *(1,) * (t.ndim - 3), -1, 1)
    return t.gather(t.ndim - 2, pick.expand(*t.shape[:-2], -1, t.shape[-1]))


def band(
    width: int, stop: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The mask of the last `width` of `stop` tokens in a row [1, 1, 1, width, stop]."""
    with torch.inference_mode(False):
        query = torch.arange(stop - width, stop, device=device)[:, None]
        ahead = query - torch.arange(stop, device=device)
        seen = ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~seen, -torch.inf)[None, None, None]


_kept_band = lru_cache(maxsize=8)(band)
