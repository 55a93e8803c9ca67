"""Plan of a forward: segments between folds, the slots that tokens go to, and masks.

Layers of equal lengths share slots and masks: in a step of a small model their cost shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from weir.pools import Marks
from weir.slab import slot_lines


class StepEnds:
    """The slots that take one token of each row.

    Attributes:
        slots: the slot of each row.
        stop: slots of the longest row, its token included.
        in_step: whether all rows have the same slot.
    """

    def __init__(self, slots: tuple[int, ...], device: torch.device) -> None:
        self.slots = slots
        self.stop = max(slots) + 1
        self.in_step = slots.count(slots[0]) == len(slots)
        self._device = device
        self._lines: dict[tuple[int, int], Tensor] = {}
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    @cached_property
    def _tensor(self) -> Tensor:
        return torch.from_numpy(np.array(self.slots)).to(self._device)

    def lines(self, kv_heads: int, size: int) -> Tensor:
        """`slot_lines` of these slots in a buffer of `size` slots a row [batch * kv_heads]."""
        lines = self._lines.get((kv_heads, size))
        if lines is None:
            lines = self._lines[kv_heads, size] = slot_lines(self._tensor, kv_heads, size)
        return lines

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Compute the bias on logits over the first `stop` slots [batch, 1, 1, 1, stop].

        -inf behind a row's own token and for slots `window` or more tokens before it.
        """
        mask = self._masks.get((window, dtype))
        if mask is None:
            # NumPy: on a CPU its calls take a third of PyTorch's time, and another device gets one
            # copy in place of five kernels.
            slots, ends = np.arange(self.stop), np.array(self.slots)[:, None]
            unseen = slots > ends
            if window is not None:
                unseen |= slots <= ends - window
            numbers = np.where(unseen, np.float32(-np.inf), np.float32(0.0))
            mask = torch.from_numpy(numbers)[:, None, None, None].to(self._device, dtype)
            self._masks[window, dtype] = mask
        return mask


@dataclass(frozen=True)
class Segment:
    """The next tokens of every row, at most as many as fit before one of its tails is full.

    Attributes:
        columns: the forward's column of each token [batch, width], int64.
        counts: tokens of each row in this segment; its other columns are undefined.
        seen: tokens each row had seen before.
        waiting: tokens each row's tail held before.
        due: the rows whose tail is full afterwards and folds.
        origin: the place in the stream of a row's first token.
        device: the device of the tensors.
        marks: the marks of each row.
        drift: for a model with three axes, each row's next place on them after the segment, minus
            its place in the stream [batch], int64; None if both are the same.
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
    # Layers with the same slots share their ends.
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
        """Each row's place in the stream before the segment [batch], int64."""
        return torch.tensor(self.seen, device=self.device) + self.origin

    @cached_property
    def after(self) -> Tensor:
        """Each row's place in the stream after the segment [batch], int64."""
        return self.start + torch.tensor(self.counts, device=self.device)

    @cached_property
    def positions(self) -> Tensor:
        """Places in the stream [batch, 1, width], int64."""
        steps = torch.arange(self.width, device=self.device)
        return (self.start[:, None] + steps)[:, None]

    @cached_property
    def clock(self) -> Tensor:
        """Each row's place on three axes after the segment [batch], int64."""
        return self.after if self.drift is None else self.after + self.drift

    @cached_property
    def spans(self) -> Tensor:
        """Start of each token's word or image on three axes, and its reach [batch, width, 2],
        int64.
        """
        if self.pictured is not None:
            return self.pictured
        begins = self.positions[:, 0]
        if self.drift is not None:
            begins = begins + self.drift[:, None]
        return torch.stack([begins, torch.ones_like(begins)], dim=-1)

    @cached_property
    def real(self) -> Tensor:
        """Which columns hold a token [batch, width], bool."""
        counts = torch.tensor(self.counts, device=self.device)
        return torch.arange(self.width, device=self.device) < counts[:, None]

    @cached_property
    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, place in the segment and column of every token; [tokens] each."""
        rows, places = self.real.nonzero(as_tuple=True)
        return rows, places, self.columns[rows, places]

    @cached_property
    def tail_places(self) -> Tensor:
        """The place in its row's tail of each of `entries` [tokens]."""
        rows, places, _ = self.entries
        return torch.tensor(self.waiting, device=self.device)[rows] + places

    def on(self, device: torch.device) -> Segment:
        """Copy the segment for a layer on another device."""
        drift = None if self.drift is None else self.drift.to(device)
        pictured = None if self.pictured is None else self.pictured.to(device)
        columns = self.columns.to(device)
        return replace(self, columns=columns, device=device, drift=drift, pictured=pictured)

    def without(self, rows: Sequence[int]) -> Segment:
        """Copy a segment of one token a row, with no token in some rows."""
        gone = set(rows)
        counts = [0 if row in gone else count for row, count in enumerate(self.counts)]
        return replace(self, counts=counts, due=[row for row in self.due if row not in gone])

    def of_row(self, row: int) -> Segment:
        """Copy the segment for a batch of one of its rows."""
        only, parts = slice(row, row + 1), (self.counts, self.seen, self.waiting)
        counts, seen, waiting = (part[only] for part in parts)
        drift = None if self.drift is None else self.drift[only]
        pictured = None if self.pictured is None else self.pictured[only]
        own = replace(self, columns=self.columns[only], counts=counts, seen=seen, waiting=waiting)
        return replace(own, due=[], marks=self.marks[only], drift=drift, pictured=pictured)

    def ends(self, slots: tuple[int, ...]) -> StepEnds:
        """Return the `StepEnds` of these slots, shared between layers."""
        ends = self._ends.get(slots)
        if ends is None:
            ends = self._ends[slots] = StepEnds(slots, self.device)
        return ends


@dataclass(frozen=True)
class ForwardPlan:
    """A forward of `length` columns, cut into segments.

    Attributes:
        regular: all columns hold tokens and every segment is in step, so that segments are plain
            slices.
        step: one column, so at most one token a row; tails may be unequally full. A row without a
            token writes into the slot that waits for its next one, and does not advance.
        positions: each column's place in the stream [batch or 1, length], int64; undefined
            where a column holds no token. For a model with three axes the place on them, with
            images among the columns one on each axis [batch, length, 3].
        prefill: fold the prompt once, after exact attention (`prefill="full"`): one segment.
    """

    segments: list[Segment]
    length: int
    regular: bool
    step: bool
    positions: Tensor
    prefill: bool = False

    def on(self, device: torch.device) -> ForwardPlan:
        """Copy the plan for a layer on another device than the token ids."""
        if all(segment.device == device for segment in self.segments):
            return self
        moved = [segment.on(device) for segment in self.segments]
        return replace(self, segments=moved, positions=self.positions.to(device))

    def after(self, seen: list[int], waiting: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens seen and the tokens in the tail of each row after this plan."""
        for segment in self.segments:
            seen = [n + count for n, count in zip(seen, segment.counts, strict=True)]
            due = set(segment.due)
            waiting = [
                0 if row in due else n + count
                for row, (n, count) in enumerate(zip(waiting, segment.counts, strict=True))
            ]
        return list(seen), list(waiting)


def plan_forward(
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
) -> ForwardPlan:
    """Cut a forward so that every row folds after each `chunk` tokens of its own.

    Args:
        real: which columns hold tokens [batch, length], bool; None if all do.
        seen, waiting: tokens seen and tokens in the tail, by row.
        prefill: one segment, all of it folded at once.
        origin: the place in the stream of a row's first token.
    """
    marks = [Marks()] * batch if marks is None else marks
    if real is None and length == 1 and not prefill:  # a decode step
        columns = torch.zeros(1, 1, dtype=torch.int64, device=device).expand(batch, 1)
        due = [row for row, held in enumerate(waiting) if held + 1 == chunk]
        kept = list(seen), list(waiting)
        segment = Segment(columns, [1] * batch, *kept, due, origin, device, marks)
        positions = _positions(None, 1, [origin + n for n in seen], device)
        return ForwardPlan([segment], 1, segment.in_step, True, positions)
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
    segments: list[Segment] = []
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
        segments.append(
            Segment(these, counts, list(seen), list(waiting), due, origin, device, marks)
        )
        done = [d + n for d, n in zip(done, counts, strict=True)]
        left = [n - c for n, c in zip(left, counts, strict=True)]
        seen = [s + n for s, n in zip(seen, counts, strict=True)]
        folded = set(due)
        waiting = [0 if r in folded else w for r, w in enumerate(after)]
    in_step = all(segment.in_step for segment in segments)
    regular = in_step and (real is None or bool(real.all()))
    step = length == 1 and len(segments) == 1 and not prefill
    return ForwardPlan(segments, length, regular, step, positions, prefill)


def _positions(real: Tensor | None, length: int, begin: list[int], device: torch.device) -> Tensor:
    """`ForwardPlan.positions`, for rows that begin at the places `begin`."""
    if real is not None:
        return torch.tensor(begin, device=device)[:, None] + real.cumsum(dim=1) - 1
    # Rows at the same place share their rotations, so one row of positions is enough.
    first = begin[:1] if len(set(begin)) == 1 else begin
    starts = torch.tensor(first, device=device)[:, None]
    return starts if length == 1 else starts + torch.arange(length, device=device)


def place_on_axes(
    plan: ForwardPlan, drift: list[int], offsets: Tensor | None, real: Tensor | None
) -> tuple[ForwardPlan, list[int]]:
    """Set the places of a plan's tokens on three axes; returns the plan, and each row's drift after
    it.

    `offsets` are of each column [batch, length, 5] (`models.offsets`), None for words; `real` says
    which columns hold tokens [batch, length], None if all do.
    """
    if not plan.segments or (offsets is None and not any(drift)):
        return plan, drift
    ahead = torch.tensor(drift, device=plan.positions.device)
    if offsets is None:
        segments = [replace(segment, drift=ahead) for segment in plan.segments]
        return replace(plan, segments=segments, positions=plan.positions + ahead[:, None]), drift
    offsets = offsets.to(ahead.device)
    steps = offsets[:, :, 4] if real is None else offsets[:, :, 4] * real
    clock = plan.segments[0].start + ahead
    after = clock[:, None] + steps.cumsum(dim=1)
    begins = after - steps
    spans = torch.stack([begins, offsets[:, :, 3]], dim=-1)
    segments = []
    for segment in plan.segments:
        clock = _clock_after(segment, clock, after)
        pictured = spans.gather(1, segment.columns[:, :, None].expand(-1, -1, 2))
        segments.append(replace(segment, drift=clock - segment.after, pictured=pictured))
    positions = begins[:, :, None] + offsets[:, :, :3]
    then: list[int] = (clock - segments[-1].after).tolist()
    return replace(plan, segments=segments, positions=positions), then


def _clock_after(segment: Segment, before: Tensor, after: Tensor) -> Tensor:
    """Return each row's clock [batch] after a segment, given it before and after each column."""
    counts = torch.tensor(segment.counts, device=before.device)
    last = segment.columns.gather(1, (counts - 1).clamp_min(0)[:, None])
    return torch.where(counts > 0, after.gather(1, last)[:, 0], before)
