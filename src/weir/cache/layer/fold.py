"""A fold of one layer: the pipe decides who stays, and the slab is packed.

Between the layer, which says when, and the pools, which say who. Knows nothing about attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weir.cache.layer.plan import Piece
from weir.errors import WeirError
from weir.policies import Pipe
from weir.pools import Draws, Fold
from weir.slab import Form, Place, Slab, Slots, longer, rolled


@dataclass(frozen=True)
class Folding:
    """How a layer folds.

    Attributes:
        pipe: who holds slots.
        place: what the layer knows about positions.
        chunk: tokens between two folds.
        draws: its random numbers.
        layer, layers: which layer it is, and of how many.
    """

    pipe: Pipe
    place: Place
    chunk: int
    draws: Draws
    layer: int
    layers: int

    def fold(
        self,
        slab: Slab,
        lengths: list[list[int]],
        piece: Piece,
        form: Form,
        queries: Tensor | None,
        arrivals: Slots | None = None,
    ) -> None:
        """Fold the rows that are due, rows of the same layout together.

        Args:
            slab: the slots of all rows; rewritten.
            lengths: per row and per pool, slots in use; rewritten for the rows that fold.
            piece: what was appended last; says which rows are due.
            form: how the layer attends.
            queries: the last queries, for pools that ask for them.
            arrivals: folded in place of the tail, if given: a whole prompt [batch, ...].
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for row in piece.full:
            arrived = piece.waiting[row] + piece.counts[row]
            groups.setdefault((*lengths[row], arrived), []).append(row)
        for (*used, arrived), rows in groups.items():
            index = torch.tensor(rows, device=slab.keys.device)
            part = slab if len(rows) == len(piece.counts) else slab.rows(index)
            new = part.run(sum(used), sum(used) + arrived)
            if arrivals is not None:
                new = arrivals.of_rows(index).part(0, arrived)
            fold = Fold(
                draws=self.draws,
                seen=piece.after[index] - piece.origin,
                queries=None if queries is None else queries.index_select(0, index),
                prompt=arrivals is not None,
                origin=piece.origin,
                form=form,
                alibi=self.place.alibi,
            )
            kept = self._fold(part, used, new, fold, piece.after[index])
            if part is not slab:
                slab.grow(len(part), 0 if part.masters is None else part.masters.shape[2])
                slab.put_rows(index, part)
            for row in rows:
                lengths[row] = kept

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
            stays = slots is held[pool] or (slots.slab is slab and pool in pipe.run)
            was = slots.place if slots.slab is slab else places[pool]
            if not (stays and was == start) and len(slots):
                moves.append((start, slab.apart(slots), pool in pipe.front))
            start += len(slots)
        in_front = sum(len(kept[pool]) for pool in pipe.front)
        if start + self.chunk > len(slab):
            slab.grow(2 * (start + self.chunk))
        if slab.masters is not None and in_front > slab.masters.shape[2]:
            slab.grow(0, masters=2 * in_front)
        for place, slots, to_front in moves:
            slab.write(place, slots, front=to_front)
        self.roll(slab, in_front, start, ahead)
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

    def roll(self, slab: Slab, front: int, used: int, ahead: Tensor) -> None:
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
