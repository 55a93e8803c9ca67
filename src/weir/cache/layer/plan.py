"""Rows that end in different slots, one token of each: where tokens go and who sees what.

Layers of equal lengths need the same, so it is made once for all of them; a step of a small model
is short enough for it to be seen. Knows nothing about weights or pools.
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
    """The slots that one token of each row goes to.

    Attributes:
        slots: of each row.
        stop: slots of the longest row, with its token.
        in_step: whether all are the same.
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
        """`slot_lines` of the slots in a buffer of `size` slots a row [batch * kv_heads]."""
        lines = self._lines.get((kv_heads, size))
        if lines is None:
            lines = self._lines[kv_heads, size] = slot_lines(self._tensor, kv_heads, size)
        return lines

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Compute the bias on logits over the first `stop` slots [batch, 1, 1, 1, stop].

        -inf behind a row's own token, and `window` or more tokens before it.
        """
        mask = self._masks.get((window, dtype))
        if mask is None:
            # By NumPy: on a CPU its calls take a third of the time of PyTorch's, and to another
            # device goes one copy in place of five kernels.
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
        columns: which column of the forward each token comes from [batch, width], int64.
        counts: how many tokens each row has here; the rest of its columns mean nothing.
        seen: tokens each row had seen before.
        waiting: tokens each row's tail held before.
        due: the rows whose tail is full afterwards and folds.
        origin: the place in the stream of a row's first token.
        device: where tensors are wanted.
        marks: what each row was told of its stream.
        drift: of a model with three axes, each row's next place on them after the segment, less
            that in the stream [batch], int64; None where both are the same.
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
        """Every token there is: its row, its place in the segment, its column; each [tokens]."""
        rows, places = self.real.nonzero(as_tuple=True)
        return rows, places, self.columns[rows, places]

    @cached_property
    def tail_places(self) -> Tensor:
        """For every entry, the slot of its row's tail that it takes [tokens]."""
        rows, places, _ = self.entries
        return torch.tensor(self.waiting, device=self.device)[rows] + places

    def on(self, device: torch.device) -> Segment:
        """The same segment for a layer that lives on another device."""
        drift = None if self.drift is None else self.drift.to(device)
        pictured = None if self.pictured is None else self.pictured.to(device)
        columns = self.columns.to(device)
        return replace(self, columns=columns, device=device, drift=drift, pictured=pictured)

    def without(self, rows: Sequence[int]) -> Segment:
        """The same segment in which some rows have no token; for one token of each row."""
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
class ForwardPlan:
    """A forward of `length` columns, cut into segments.

    Attributes:
        regular: the columns are all real and every segment is in step, so that segments are plain
            slices.
        step: one column: at most one token of each row, whose tails may be unequally full. A row
            without a token writes into the slot that waits for its next one, and stays there.
        positions: each column's place in the stream [batch or 1, length], int64; where a column is
            not real it means nothing. Of a model with three axes the place on them, and with images
            among the columns one on each [batch, length, 3].
        prefill: fold the prompt once, after exact attention (`prefill="full"`): one segment.
    """

    segments: list[Segment]
    length: int
    regular: bool
    step: bool
    positions: Tensor
    prefill: bool = False

    def on(self, device: torch.device) -> ForwardPlan:
        """The same plan for a layer that lives on another device than the token ids."""
        if all(segment.device == device for segment in self.segments):
            return self
        moved = [segment.on(device) for segment in self.segments]
        return replace(self, segments=moved, positions=self.positions.to(device))

    def after(self, seen: list[int], waiting: list[int]) -> tuple[list[int], list[int]]:
        """Tokens seen and tokens in the tail of each row, once the plan has been carried out."""
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
        batch, length: rows and columns of the forward.
        seen, waiting: per row, tokens seen and tokens in the tail [batch].
        chunk: tokens between two folds of a row.
        device: where the plan's tensors are wanted.
        prefill: one segment, all of it folded at once.
        origin: the place in the stream of a row's first token.
        marks: what each row was told of its stream; None where none was told anything.
    """
    marks = [Marks()] * batch if marks is None else marks
    if real is None and length == 1 and not prefill:  # a decode step: no row has a choice
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
    # Rows that stand at one place share their rotations: one row of positions serves all.
    first = begin[:1] if len(set(begin)) == 1 else begin
    starts = torch.tensor(first, device=device)[:, None]
    return starts if length == 1 else starts + torch.arange(length, device=device)


def place_on_axes(
    plan: ForwardPlan, drift: list[int], offsets: Tensor | None, real: Tensor | None
) -> tuple[ForwardPlan, list[int]]:
    """A plan whose tokens stand where they belong on three axes.

    Args:
        plan: how the forward is cut.
        drift: of each row before it.
        offsets: of each column [batch, length, 5], as `models.offsets` has them; None for words.
        real: which columns hold tokens [batch, length], bool; None if all do.

    Returns:
        The plan, and the drift of each row after it.
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
        its = spans.gather(1, segment.columns[:, :, None].expand(-1, -1, 2))
        segments.append(replace(segment, drift=clock - segment.after, pictured=its))
    positions = begins[:, :, None] + offsets[:, :, :3]
    then: list[int] = (clock - segments[-1].after).tolist()
    return replace(plan, segments=segments, positions=positions), then


def _clock_after(segment: Segment, before: Tensor, after: Tensor) -> Tensor:
    """Each row's clock [batch] behind a segment, from that before and that after each column."""
    counts = torch.tensor(segment.counts, device=before.device)
    last = segment.columns.gather(1, (counts - 1).clamp_min(0)[:, None])
    return torch.where(counts > 0, after.gather(1, last)[:, 0], before)
