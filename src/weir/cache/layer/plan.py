"""How one forward is cut: which tokens of which rows go into which chunk.

Rows of a batch may be padded and may have seen different numbers of tokens, yet each row must be
cut exactly where it would be cut alone. A plan is made once per forward and shared by all layers.
Knows nothing about keys, values or pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from weir.cache.layer.ragged import StepEnds
from weir.pools import Marks


@dataclass(frozen=True)
class Piece:
    """The next tokens of every row, at most as many as fit before one of its tails is full.

    Attributes:
        columns: which column of the forward each token comes from [batch, width], int64.
        counts: how many tokens each row has here; the rest of its columns mean nothing.
        seen: tokens each row had seen before.
        waiting: tokens each row's tail held before.
        due: the rows whose tail is full afterwards and folds.
        origin: the place in the stream of a row's first token.
        device: where tensors are wanted.
        marks: what each row was told of its stream.
        drift: of a model with three axes, each row's next place on them after the piece, less that
            in the stream [batch], int64; None where both are the same.
        pictured: the tokens' spans [batch, width, 2], int64, if there are images among them.
    """

    columns: Tensor
    counts: list[int]
    seen: list[int]
    waiting: list[int]
    due: list[int]
    origin: int
    device: torch.device
    marks: list[Marks] = field(default_factory=list)
    drift: Tensor | None = None
    pictured: Tensor | None = None
    # The ends of layers that lie alike: made once for all of them.
    _ends: dict[tuple[int, ...], StepEnds] = field(
        default_factory=dict, compare=False, repr=False, init=False
    )

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return self.columns.shape[1]

    @cached_property
    def in_step(self) -> bool:
        """Whether all rows have the same number of tokens and equally full tails."""
        return len(set(self.counts)) == 1 and len(set(self.waiting)) == 1

    @cached_property
    def start(self) -> Tensor:
        """Each row's place in the stream before the piece [batch], int64."""
        return torch.tensor(self.seen, device=self.device) + self.origin

    @cached_property
    def after(self) -> Tensor:
        """Each row's place in the stream after the piece [batch], int64."""
        return self.start + torch.tensor(self.counts, device=self.device)

    @cached_property
    def positions(self) -> Tensor:
        """Places in the stream [batch, 1, width], int64."""
        steps = torch.arange(self.width, device=self.device)
        return (self.start[:, None] + steps)[:, None]

    @cached_property
    def clock(self) -> Tensor:
        """Each row's place on three axes after the piece [batch], int64."""
        return self.after if self.drift is None else self.after + self.drift

    @cached_property
    def spans(self) -> Tensor:
        """Where each token's word or image begins on three axes, and its reach [batch, width, 2].

        int64; of a model with one axis it means nothing.
        """
        if self.pictured is not None:
            return self.pictured
        begins = self.positions[:, 0]
        if self.drift is not None:
            begins = begins + self.drift[:, None]
        return torch.stack([begins, torch.ones_like(begins)], dim=-1)

    @cached_property
    def real(self) -> Tensor:
        """Which of the tokens there are [batch, width], bool."""
        counts = torch.tensor(self.counts, device=self.device)
        return torch.arange(self.width, device=self.device) < counts[:, None]

    @cached_property
    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Every token there is: its row, its place in the piece, its column; each [tokens]."""
        rows, places = self.real.nonzero(as_tuple=True)
        return rows, places, self.columns[rows, places]

    @cached_property
    def tail_places(self) -> Tensor:
        """For every entry, the slot of its row's tail that it takes [tokens]."""
        rows, places, _ = self.entries
        return torch.tensor(self.waiting, device=self.device)[rows] + places

    def on(self, device: torch.device) -> Piece:
        """The same piece for a layer that lives on another device."""
        drift = None if self.drift is None else self.drift.to(device)
        pictured = None if self.pictured is None else self.pictured.to(device)
        columns = self.columns.to(device)
        return replace(self, columns=columns, device=device, drift=drift, pictured=pictured)

    def without(self, rows: Sequence[int]) -> Piece:
        """The same piece in which some rows have no token; for one token of each row."""
        gone = set(rows)
        counts = [0 if row in gone else count for row, count in enumerate(self.counts)]
        return replace(self, counts=counts, due=[row for row in self.due if row not in gone])

    def ends(self, slots: tuple[int, ...]) -> StepEnds:
        """The slots that one token of each row goes to, as layers use them."""
        ends = self._ends.get(slots)
        if ends is None:
            ends = self._ends[slots] = StepEnds(slots, self.device)
        return ends


@dataclass(frozen=True)
class Plan:
    """A forward of `length` columns, cut into pieces.

    Attributes:
        regular: the columns are all real and every piece is in step, so that pieces are plain
            slices.
        step: one column: at most one token of each row, whose tails may be unequally full. A row
            without a token writes into the slot that waits for its next one, and stays there.
        positions: each column's place in the stream [batch or 1, length], int64; where a column is
            not real it means nothing. Of a model with three axes the place on them, and with images
            among the columns one on each [batch, length, 3].
        prefill: fold the prompt once, after exact attention (`prefill="full"`): one piece.
    """

    pieces: list[Piece]
    length: int
    regular: bool
    step: bool
    positions: Tensor
    prefill: bool = False

    def on(self, device: torch.device) -> Plan:
        """The same plan for a layer that lives on another device than the token ids."""
        if all(piece.device == device for piece in self.pieces):
            return self
        moved = [piece.on(device) for piece in self.pieces]
        return replace(self, pieces=moved, positions=self.positions.to(device))

    def after(self, seen: list[int], waiting: list[int]) -> tuple[list[int], list[int]]:
        """Tokens seen and tokens in the tail of each row, once the plan has been carried out."""
        for piece in self.pieces:
            seen = [n + count for n, count in zip(seen, piece.counts, strict=True)]
            due = set(piece.due)
            waiting = [
                0 if row in due else n + count
                for row, (n, count) in enumerate(zip(waiting, piece.counts, strict=True))
            ]
        return list(seen), list(waiting)


def cut(
    real: Tensor | None,
    batch: int,
    length: int,
    seen: list[int],
    waiting: list[int],
    chunk: int,
    device: torch.device,
    *,
    prefill: bool = False,
    origin: int = 0,
    marks: list[Marks] | None = None,
) -> Plan:
    """Cut a forward so that every row folds after each `chunk` tokens of its own.

    Args:
        real: which columns hold tokens [batch, length], bool; None if all do.
        batch, length: rows and columns of the forward.
        seen, waiting: per row, tokens seen and tokens in the tail [batch].
        chunk: tokens between two folds of a row.
        device: where the plan's tensors are wanted.
        prefill: one piece, all of it folded at once.
        origin: the place in the stream of a row's first token.
        marks: what each row was told of its stream; None where none was told anything.
    """
    marks = [Marks()] * batch if marks is None else marks
    if real is None and length == 1 and not prefill:  # a decode step: no row has a choice
        columns = torch.zeros(1, 1, dtype=torch.int64, device=device).expand(batch, 1)
        due = [row for row, held in enumerate(waiting) if held + 1 == chunk]
        kept = list(seen), list(waiting)
        piece = Piece(columns, [1] * batch, *kept, due, origin, device, marks)
        positions = _positions(None, 1, [origin + n for n in seen], device)
        return Plan([piece], 1, piece.in_step, True, positions)
    if real is None:
        columns = torch.arange(length, device=device).expand(batch, length)
        left = [length] * batch
    else:
        # A stable sort brings each row's tokens to the left and keeps their order.
        columns = (~real).to(torch.uint8).argsort(dim=1, stable=True)
        left = real.sum(dim=1).tolist()
    positions = _positions(real, length, [origin + n for n in seen], device)
    done = [0] * batch
    seen, waiting = list(seen), list(waiting)
    pieces: list[Piece] = []
    while any(left):
        room = left if prefill else [chunk - w for w in waiting]
        counts = [min(r, n) for r, n in zip(room, left, strict=True)]
        width = max(counts)
        if len(set(done)) == 1:
            these = columns[:, done[0] : done[0] + width]
        else:
            index = torch.tensor(done, device=device)[:, None] + torch.arange(width, device=device)
            these = columns.gather(1, index.clamp_max(length - 1))
        after = [w + n for w, n in zip(waiting, counts, strict=True)]
        due = [r for r, w in enumerate(after) if (prefill and w) or w == chunk]
        pieces.append(Piece(these, counts, list(seen), list(waiting), due, origin, device, marks))
        done = [d + n for d, n in zip(done, counts, strict=True)]
        left = [n - c for n, c in zip(left, counts, strict=True)]
        seen = [s + n for s, n in zip(seen, counts, strict=True)]
        folded = set(due)
        waiting = [0 if r in folded else w for r, w in enumerate(after)]
    in_step = all(piece.in_step for piece in pieces)
    regular = in_step and (real is None or bool(real.all()))
    step = length == 1 and len(pieces) == 1 and not prefill
    return Plan(pieces, length, regular, step, positions, prefill)


def _positions(real: Tensor | None, length: int, begin: list[int], device: torch.device) -> Tensor:
    """`Plan.positions`, for rows that begin at the places `begin`."""
    if real is not None:
        return torch.tensor(begin, device=device)[:, None] + real.cumsum(dim=1) - 1
    # Rows that stand at one place share their rotations: one row of positions serves all.
    first = begin[:1] if len(set(begin)) == 1 else begin
    starts = torch.tensor(first, device=device)[:, None]
    return starts if length == 1 else starts + torch.arange(length, device=device)
