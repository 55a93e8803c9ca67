"""Merge-and-reduce over the tokens of a layer: `halving` carries out the plan of `schedule`.

All blocks of a level are halved at once, those of all heads and rows of a batch together. Which
tokens share a block depends only on the order in which they came, so tokens that come together give
the same result as tokens that come one after the other. There are two exceptions. For a prompt that
is folded whole (`prefill="full"`), there is a different plan, `schedule.at_once`. And if fewer than
half of a block's tokens stay, the places of the missing ones are freed when the next fold begins
(unless the pool is `eager`), so the result depends on where folds begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from weir.pools.balance.halving import Halving, Sets
from weir.pools.balance.schedule import LEVELS
from weir.pools.counter_rng import CounterRNG
from weir.slab import EMPTY, Slots

Blocks = Sequence[Sequence[int]]
"""The sizes of the blocks to halve, by level, as `schedule.schedule` returns them."""


@dataclass
class _Queue:
    """The places of one level and their tokens, the oldest first, in one line for each group of
    each head.

    Attributes:
        token: which token of `Merging.line` each place has [lines, n], int64; -1 for none.
        a, b: the log-weights of these tokens [lines, n].
        used: which places count towards a block [lines, n], bool. With `halves="paper"` a place may
            count although its token is gone.
        full: whether every place is known to be in use and to have a token, so that nothing must be
            sorted.
    """

    token: Tensor
    a: Tensor
    b: Tensor
    used: Tensor
    full: bool = field(default=False, kw_only=True)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.token, self.a, self.b, self.used

    def pick(self, index: Tensor) -> _Queue:
        return _Queue(*(t.gather(1, index) for t in self.tensors()))

    def packed(self) -> _Queue:
        """Return only the places in use."""
        return self if self.full else self.pick(_in_front(self.used))

    def part(self, start: int, stop: int | None = None) -> _Queue:
        return _Queue(*(t[:, start:stop] for t in self.tensors()), full=self.full)

    def without(self, sizes: Tensor) -> _Queue:
        """Return the queue with only the places after blocks of these `sizes` [lines, blocks] in
        use.
        """
        place = torch.arange(self.used.shape[1], device=sizes.device)
        behind = self.used & (place >= sizes.sum(dim=1, keepdim=True))
        return replace(self, used=behind, full=False)

    @classmethod
    def of(cls, *queues: _Queue) -> _Queue:
        """Join queues one after the other, including gaps."""
        queues = tuple(queue for queue in queues if queue.token.shape[1]) or queues[:1]
        if len(queues) == 1:
            return queues[0]
        full = all(queue.full for queue in queues)
        every = zip(*(queue.tensors() for queue in queues), strict=True)
        return cls(*(torch.cat(parts, dim=1) for parts in every), full=full)


@dataclass(frozen=True)
class Merging:
    """The tokens of a layer, ready to be merged and reduced.

    Attributes:
        line: the tokens [batch, kv_heads, n], those of each level from the oldest on.
        level: the level of each token [batch, kv_heads, n], int64; -1 where there is no place.
        halving: how blocks are halved.
        draws: random numbers. A token of level l gets those of purpose l, and in any group but the
            first those of purpose l + 64. In the highest level, where it may be halved repeatedly,
            they also depend on the other tokens of its block.
        scale: the factor of the logits.
        group: the group of each token [batch, kv_heads, n], int64, if there are several, each with
            separate levels; None for one group.
        groups: number of groups of each head.
    """

    line: Slots
    level: Tensor
    halving: Halving
    draws: CounterRNG
    scale: float
    group: Tensor | None = None
    groups: int = 1

    def reduce(self, blocks: Sequence[Blocks]) -> tuple[Slots, Tensor, Tensor]:
        """Halve the blocks of each group of each head of each row.

        Returns the tokens that stay, their levels (-1 where there is no place), and their groups.
        The highest level comes first, and in it the oldest token.
        """
        batch, heads, _ = self.level.shape
        halved = max(n for of_group in blocks for n in range(LEVELS) if of_group[n] or not n)
        reached = min(halved + 1, LEVELS - 1)
        top = max(reached, int(self.level.max()) if self.level.numel() else 0)
        # Levels that nothing reaches stay in place, as one piece.
        above = self._between(reached + 1, LEVELS) if self._ends is not None else None
        if above is not None:
            top = reached
        group = torch.arange(len(blocks), device=self.level.device)[:, None] % self.groups
        rest, marks, rising = [], [], self._queue(LEVELS)
        for level in range(top + 1):
            queue = _Queue.of(self._queue(level), rising).packed()
            of_lines = [of_group[level] for of_group in blocks]
            whole = _whole(queue, of_lines, level, self.halving)
            if whole is not None:
                rising = self._halve_alike(queue, whole, level)
                queue = queue.part(sum(whole))
                rest.append(queue)
                marks.append(torch.full_like(queue.token, level))
                continue
            sizes = _padded(of_lines, self.level.device)
            if level < LEVELS - 1:
                rising = self._halve(queue, sizes, level)
                queue = queue.without(sizes)
            else:
                for size in sizes.split(1, dim=1):
                    stays = self._halve(queue, size, level)
                    queue = _Queue.of(stays, queue.without(size)).packed()
            by_head = (t.reshape(batch * heads, -1) for t in queue.tensors())
            rest.append(_Queue(*by_head, full=queue.full and self.groups == 1))
            mark = (level * self.groups + group).expand(queue.used.shape)
            marks.append(mark.reshape(batch * heads, -1))
        if above is not None:
            rest.append(above)
            marks.append(self.level[:, :, : above.token.shape[1]].flatten(0, 1))
        every, mark = _Queue.of(*reversed(rest)), torch.cat(marks[::-1], dim=1)
        token, a, b = every.token, every.a, every.b
        if not every.full:
            order = _in_front(every.used)
            every, mark = every.pick(order), mark.gather(1, order)
            mark = mark.where(every.used, -self.groups)
            token = every.token.where(every.used, EMPTY)
            a, b = (t.masked_fill(token < 0, -torch.inf) for t in (every.a, every.b))
        token, a, b, mark = (t.unflatten(0, (batch, heads)) for t in (token, a, b, mark))
        # Without gaps, no token is missing.
        kept = (self.line.picked(token) if every.full else self.line.take(token)).weighed(a, b)
        if self.groups == 1:
            return kept, mark, torch.zeros_like(mark)
        return kept, mark.div(self.groups, rounding_mode="floor"), mark % self.groups

    @cached_property
    def _ends(self) -> list[int] | None:
        """Return the ends of the tokens of each level, level 0 first.

        None unless all lines have the same layout without gaps, with tokens of higher levels first.
        """
        if self.group is not None or not self.level.numel():
            return None
        line = self.level[0, 0]
        alike = (self.level == line).all() & self.line.held.all() & (line.diff() <= 0).all()
        if not bool(alike & (line[-1] >= 0)):
            return None
        ends: list[int] = torch.bincount(line).flip(0).cumsum(0).flip(0).tolist()
        return ends

    def _queue(self, level: int) -> _Queue:
        """Return the places of a level before anything is halved, by line."""
        if self._ends is not None:
            return self._between(level, level + 1)
        used = self.level == level
        if self.group is None:
            used = used[:, :, None]
        else:
            number = torch.arange(self.groups, device=used.device)[:, None]
            used = used[:, :, None] & (self.group[:, :, None] == number)
        held = self.line.held[:, :, None].expand_as(used)
        index = torch.arange(used.shape[3], device=used.device).expand_as(used)
        a, b = (t[:, :, None].expand_as(used) for t in (self.line.a, self.line.b))
        parts = (index.where(held, EMPTY), a, b, used)
        return _Queue(*(t.flatten(0, 2) for t in parts)).packed()

    def _between(self, low: int, high: int) -> _Queue:
        """Return the places of levels from `low` to below `high`, by `_ends`, each with a token."""
        assert self._ends is not None
        start, stop = ((*self._ends[at : at + 1], 0)[0] for at in (high, low))
        token = torch.arange(start, stop, device=self.level.device)
        token = token.expand(self.level.shape[:2].numel(), -1)
        a, b = (t[:, :, start:stop].flatten(0, 1) for t in (self.line.a, self.line.b))
        return _Queue(token, a, b, torch.ones_like(token, dtype=torch.bool), full=True)

    def _halve(self, queue: _Queue, sizes: Tensor, level: int, full: bool = False) -> _Queue:
        """Return the survivors of a level's blocks of the `sizes` [lines, blocks], from the oldest
        on.

        `full` says that the queue consists of exactly these blocks, and that half of each block
        stays.
        """
        lines, blocks = sizes.shape
        if not blocks:
            return self._queue(LEVELS)
        width = int(sizes.max())
        place = torch.arange(width, device=sizes.device)
        inside = (place < sizes[..., None]).flatten(1)
        if not full:
            index = (sizes.cumsum(dim=1) - sizes)[..., None] + place
            queue = queue.pick(index.flatten(1).where(inside, 0))
        cut, nobody = queue, ~inside | (queue.token < 0)
        a, b = cut.a.masked_fill(nobody, -torch.inf), cut.b.masked_fill(nobody, -torch.inf)
        token = cut.token.clamp_min(0)
        head = torch.arange(lines, device=sizes.device)[:, None] // self.groups
        keys, values, position = (
            t.flatten(0, 1)[head, token]
            for t in (self.line.keys, self.line.values, self.line.position)
        )
        u = self._draw(level, position, nobody)
        shape = (lines * blocks, 1, width)
        sets = Sets(*(t.reshape(*shape, *t.shape[2:]) for t in (keys, values, a, b, u)))
        chosen, a, b = self.halving.halve(sets, self.scale)
        came = cut.token.reshape(lines * blocks, width)
        token = came.gather(1, chosen.clamp_min(0)).masked_fill(chosen < 0, EMPTY)
        half = torch.arange(token.shape[1], device=sizes.device)
        used = half < (sizes.view(-1, 1) + 1) // 2
        return _Queue(*(t.reshape(lines, -1) for t in (token, a, b, used)), full=full).packed()

    def _halve_alike(self, queue: _Queue, sizes: Sequence[int], level: int) -> _Queue:
        """Halve full lines that have blocks of the same `sizes`; half of each stays."""
        parts, done = [queue.part(0, 0)], 0
        for size, run in groupby(sizes):
            blocks = len(list(run))
            cut, done = queue.part(done, done + size * blocks), done + size * blocks
            alike = torch.full((len(queue.token), blocks), size, device=queue.token.device)
            # A single token rises unchanged.
            parts.append(cut if size == 1 else self._halve(cut, alike, level, full=True))
        return _Queue.of(*parts)

    def _draw(self, level: int, position: Tensor, nobody: Tensor) -> Tensor:
        """Draw a uniform number for each place of blocks that has a token [lines, n].

        No two blocks that are halved in the highest level hold the same tokens. The sum of their
        tokens' places in the stream distinguishes them.
        """
        shape = (*self.level.shape[:2], self.groups, position.shape[1])
        index: Tensor | int = 0
        if level == LEVELS - 1:
            index = position.masked_fill(nobody, 0).sum(dim=1, keepdim=True)
            index = index.expand_as(position).reshape(shape).flatten(2)
        place = position.view(shape).flatten(2)
        u = self.draws.uniform(level, place, index).view(shape)
        if self.groups > 1:
            others = self.draws.uniform(level + LEVELS, place, index).view(shape)
            u = torch.cat([u[:, :, :1], others[:, :, 1:]], dim=2)
        return u.view(position.shape)


def _in_front(used: Tensor) -> Tensor:
    """Return the order [lines, n] that puts used places first, as many as the fullest line has."""
    width = int(used.sum(dim=1).max()) if used.numel() else 0
    return (~used).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]


def _whole(
    queue: _Queue, of_lines: Sequence[Sequence[int]], level: int, halving: Halving
) -> Sequence[int] | None:
    """Return the sizes of the blocks, if they are the same in all lines and exactly half of each
    stays.
    """
    sizes = of_lines[0]
    if not queue.full or any(other != sizes for other in of_lines):
        return None
    even = all(size == 1 or size % 2 == 0 for size in sizes)
    exactly = halving.halves == "pairs" and level < LEVELS - 1 and even
    return sizes if exactly or not sizes else None


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Join rows of different lengths in one tensor, padded with zeros."""
    width = max(map(len, rows))
    return torch.tensor(
        [[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int64, device=device
    ).view(len(rows), width)
