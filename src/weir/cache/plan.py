"""Plans a forward: finds which tokens each row is fed, checks them, and cuts them into segments
between folds.

`generate` and other callers feed columns, and tell by a mask which of them are tokens. This module
separates each row's tokens from padding, refuses a forward that does not continue every row, and
cuts the tokens into segments, which end where rows fold. If the next token of each row goes to the
same slot in several layers, these layers share what is computed from the slots (`StepEnds`),
because computing it takes a noticeable part of a step of a small model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weir.errors import WeirError, in_words
from weir.models import OFFSETS, out_of_range
from weir.pools import Marks
from weir.slab import slot_lines

GO_ON = (
    "To continue, pass the whole conversation again, or only the new tokens with an attention_mask "
    "that covers everything so far. To begin a new text, call cache.reset() first."
)
KEEP_COLUMNS = (
    "To continue, do not pad a row again: keep the columns of the earlier turns as generate "
    "returned them, append the new tokens to every row, and pass an attention_mask of all columns "
    "that is 0 where a row was padded. It may also be 0 in the padding after an answer that ended "
    "before the others. To begin new texts, call cache.reset() first."
)
"""Advice for batches. If rows were padded again, tokens that the stream has seen would move."""


def _go_on(batch: int) -> str:
    """Return advice on how to continue a stream of `batch` rows."""
    return GO_ON if batch == 1 else KEEP_COLUMNS


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
        """Return `slot_lines` [batch * kv_heads] of these slots, with `size` slots in each row."""
        lines = self._lines.get((kv_heads, size))
        if lines is None:
            lines = self._lines[kv_heads, size] = slot_lines(self._tensor, kv_heads, size)
        return lines

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Compute the bias on logits over the first `stop` slots [batch, 1, 1, 1, stop].

        It is -inf after a row's own token, and for slots `window` or more tokens before it.
        """
        mask = self._masks.get((window, dtype))
        if mask is None:
            # On a CPU, NumPy's calls take a third of the time of PyTorch's, and another device gets
            # one copy instead of five kernels.
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
    """The next tokens of every row, at most as many as fit until the row's tail is full.

    Attributes:
        columns: the forward's column of each token [batch, width], int64.
        counts: number of tokens of each row in this segment. The columns of a row after these are
            undefined.
        seen: tokens each row had seen before.
        waiting: tokens each row's tail held before.
        due: the rows whose tail is full afterwards and folds.
        origin: the place in the stream of a row's first token.
        device: the device of the tensors.
        marks: what is known about each row's stream, such as where its system turn ends
            (`pools.Marks`).
        drift: for a model whose positions have three axes (time, height and width, for images),
            each row's next place on the axes after the segment, minus its place in the stream
            [batch], int64; None if both are the same.
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
        """Where each text token or image begins on three axes, and its length there
        [batch, width, 2], int64.

        A text token has the length 1. All tokens of an image have the numbers of the image.
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
        """For each token of `entries`, its place in the tail of its row [tokens]."""
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
        prefill: fold the prompt once, after exact attention (`prefill="full"`): one segment.

    Args:
        placed: `positions`; or, if all columns hold tokens, the first place of each row.
    """

    segments: list[Segment]
    length: int
    regular: bool
    step: bool
    placed: Tensor | list[int]
    prefill: bool = False

    @cached_property
    def positions(self) -> Tensor:
        """Each column's place in the stream [batch or 1, length], int64; undefined where a column
        holds no token.

        For a model with three axes, it is the place on the axes. If there are images among the
        columns, there is one place for each axis [batch, length, 3].
        """
        if isinstance(self.placed, Tensor):
            return self.placed
        return _positions(None, self.length, self.placed, self.segments[0].device)

    def on(self, device: torch.device) -> ForwardPlan:
        """Copy the plan for a layer on another device than the token ids."""
        if all(segment.device == device for segment in self.segments):
            return self
        moved = [segment.on(device) for segment in self.segments]
        return replace(self, segments=moved, placed=self.positions.to(device))

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
    """Cut a forward so that every row folds each time it has taken `chunk` tokens.

    Args:
        real: which columns hold tokens [batch, length], bool; None if all do.
        seen, waiting: tokens seen and tokens in the tail, by row.
        prefill: one segment, all of it folded at once.
        origin: the place in the stream of a row's first token.
    """
    marks = [Marks()] * batch if marks is None else marks
    if real is None and length == 1 and not prefill:  # a decode step
        columns = _first_columns(batch, device)
        due = [row for row, held in enumerate(waiting) if held + 1 == chunk]
        kept = list(seen), list(waiting)
        segment = Segment(columns, [1] * batch, *kept, due, origin, device, marks)
        return ForwardPlan([segment], 1, segment.in_step, True, [origin + n for n in seen])
    if real is None:
        columns = torch.arange(length, device=device).expand(batch, length)
        left = [length] * batch
    else:
        # A stable sort moves each row's tokens to the left and keeps their order.
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


@lru_cache(maxsize=64)
def _first_columns(batch: int, device: torch.device) -> Tensor:
    """Return the columns of a step [batch, 1]; they are shared and must not be written to."""
    with torch.inference_mode(False):
        return torch.zeros(batch, 1, dtype=torch.int64, device=device)


def _positions(real: Tensor | None, length: int, begin: list[int], device: torch.device) -> Tensor:
    """Return `ForwardPlan.positions` for rows that begin at the places `begin`."""
    if real is not None:
        return torch.tensor(begin, device=device)[:, None] + real.cumsum(dim=1) - 1
    # Rows at the same place share their rotations, so one row of positions is enough.
    first = begin[:1] if len(set(begin)) == 1 else begin
    starts = torch.tensor([[place] for place in first], device=device)
    return starts if length == 1 else starts + torch.arange(length, device=device)


def place_on_axes(
    plan: ForwardPlan, drift: list[int], offsets: Tensor | None, real: Tensor | None
) -> tuple[ForwardPlan, list[int]]:
    """Set the places of a plan's tokens on three axes; returns the plan, and each row's drift after
    it.

    `offsets` are those of each column [batch, length, 5] (`models.offsets`), None if all are text
    tokens. `real` says which columns hold tokens [batch, length], None if all do.
    """
    if not plan.segments or (offsets is None and not any(drift)):
        return plan, drift
    ahead = torch.tensor(drift, device=plan.positions.device)
    if offsets is None:
        segments = [replace(segment, drift=ahead) for segment in plan.segments]
        return replace(plan, segments=segments, placed=plan.positions + ahead[:, None]), drift
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
    return replace(plan, segments=segments, placed=positions), then


def _clock_after(segment: Segment, before: Tensor, after: Tensor) -> Tensor:
    """Return each row's clock [batch], its next place on three axes, after a segment.

    Args:
        segment: the segment.
        before: the clock of each row before the segment [batch].
        after: the clock after each column of the forward [batch, length].
    """
    counts = torch.tensor(segment.counts, device=before.device)
    last = segment.columns.gather(1, (counts - 1).clamp_min(0)[:, None])
    return torch.where(counts > 0, after.gather(1, last)[:, 0], before)


# --- rows of a batch


@dataclass(frozen=True)
class BegunForward:
    """A forward that has been checked and planned.

    Attributes:
        plan: the segments of the forward.
        after: the rows after the forward.
        refused: by row, why its tokens are refused; the other rows go on.
        ids: token ids for the model, those out of range replaced. None if none were fed, or if they
            need no replacement (`Rows.begin_step`).
    """

    plan: ForwardPlan
    after: Rows
    refused: dict[int, WeirError]
    ids: Tensor | None


@dataclass(frozen=True)
class Rows:
    """The rows of a cache's batch between two forwards.

    Attributes:
        columns: columns fed so far, including padding.
        seen: tokens each row has seen.
        waiting: tokens in each row's tail.
        claimed: tokens of each row as the caller counts them; `generate` also counts the padding of
            rows that have ended.
        last: each row's token id in the last column of ids that was fed, even if that column is
            padding; None before any ids.
        ended: whether the row had ended before the newest token that `generate` gave it, so that
            this token is padding.
        marks: the marks of each row.
        drift: each row's next place on three axes minus that in the stream; 0 without images.
    """

    columns: int = 0
    seen: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    claimed: list[int] = field(default_factory=list)
    last: list[int | None] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    marks: list[Marks] = field(default_factory=list)
    drift: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, batch: int) -> Rows:
        """Make rows without tokens."""
        zeros = [0] * batch
        ended, marks = [False] * batch, [Marks()] * batch
        return cls(0, zeros, zeros, zeros, [None] * batch, ended, marks, zeros)

    @property
    def batch(self) -> int | None:
        """Rows of the batch; None if there are none yet."""
        return len(self.seen) or None

    def select(self, index: list[int]) -> Rows:
        """Return the rows `index`, in that order; a row may come more than once."""
        return Rows(self.columns, *([part[row] for row in index] for part in self._parts()))

    def with_row(self, row: int, other: Rows) -> Rows:
        """Replace one row by the only row of `other`."""
        parts = []
        for mine, theirs in zip(self._parts(), other._parts(), strict=True):
            changed = list(mine)
            changed[row] = theirs[0]
            parts.append(changed)
        # `generate` feeds the columns that come after those of the longest row.
        columns = other.columns if len(self.seen) == 1 else max(self.columns, other.columns)
        return Rows(columns, *parts)

    def marked(self, row: int, marks: Marks) -> Rows:
        """Replace the marks of one row."""
        return replace(self, marks=[*self.marks[:row], marks, *self.marks[row + 1 :]])

    def _parts(self) -> tuple[list[Any], ...]:
        rest = self.last, self.ended, self.marks
        return self.seen, self.waiting, self.claimed, *rest, self.drift

    def begin(
        self,
        given: Mapping[str, Any],
        *,
        vocabulary: int,
        chunk: int,
        prefill: bool,
        origin: int,
        without: Collection[int] = (),
        fixed: bool = False,
        is_pad: Callable[[Tensor], Tensor] | None = None,
    ) -> BegunForward:
        """Check and plan a forward, given the decoder's arguments by name.

        Args:
            prefill: whether the first forward is one segment, which folds once (`prefill="full"`).
            without: rows whose tokens are left out.
            fixed: whether the cache was made with a number of rows, which a reset keeps.
            is_pad: tells which of some ids [rows] or embeddings [rows, width] are the padding
                token; None if there is none.

        Raises:
            WeirError: the forward does not continue the stream of every row, or no row is left.
        """
        tokens = _tokens(given)
        batch, length = tokens.shape[:2]
        self._check_shape(batch, length, fixed)
        if given.get("use_cache") is False:
            # The caller may not have passed this, because MPT's configurations set it.
            raise WeirError(
                "use_cache=False would feed the whole text at every step. Pass use_cache=True."
            )
        ids: Tensor | None = given.get("input_ids")
        before = self if self.seen else Rows.empty(batch)
        counted = list(before.claimed)  # where each row is according to the caller
        claimed = before._claim(given.get("attention_mask"), batch, length, counted)
        if given.get("position_ids") is not None:
            _refuse_right_padding(claimed)
        before._check_positions(given.get("position_ids"), claimed, batch, length, counted)
        refused: dict[int, WeirError] = {}
        if ids is not None and (ids.device.type == "cpu" or length > 1):
            refused, ids = _check_ids(ids, claimed, vocabulary)
        out = {*refused, *without}
        real = claimed
        if out:
            silent = [row in out for row in range(batch)]
            going = ~torch.tensor(silent, device=tokens.device)[:, None]
            real = going.expand(batch, length) if claimed is None else claimed & going
        if is_pad is not None and any(before.ended):
            real = before._without_padding(tokens, real, is_pad)
        if prefill and any(before.seen):
            prefill = False
            if any(
                not seen and (real is None or bool(real[row].any()))
                for row, seen in enumerate(before.seen)
            ):
                raise WeirError(
                    'prefill="full" folds the prompts of all rows at once. Feed a row that joins '
                    "later through a separate cache, and put it here with put_row."
                )
        plan = plan_forward(
            real,
            batch,
            length,
            before.seen,
            before.waiting,
            chunk,
            tokens.device,
            prefill=prefill,
            origin=origin,
            marks=before.marks,
        )
        plan, drift = place_on_axes(plan, before.drift, given.get(OFFSETS), real)
        counts = [length] * batch if claimed is None else claimed.sum(dim=1).tolist()
        seen, waiting = plan.after(before.seen, before.waiting)
        after = Rows(
            before.columns + length,
            seen,
            waiting,
            [c + n for c, n in zip(counted, counts, strict=True)],
            before.last if ids is None else ids[:, -1].tolist(),
            [False] * batch,
            before.marks,
            drift,
        )
        return BegunForward(plan, after.keeping(before, out), refused, ids)

    def begin_step(
        self, tokens: list[int], *, vocabulary: int, chunk: int, origin: int, device: torch.device
    ) -> BegunForward | None:
        """Plan a forward of one token of each row, as `begin` does. Returns None in cases that only
        `begin` handles, for example if a row has ended or a token is out of range.

        Args:
            tokens: the token of each row.
            vocabulary, chunk, origin: as for `begin`.
            device: of the model's inputs.
        """
        batch = len(tokens)
        if batch != len(self.seen) or any(self.ended) or any(self.drift):
            return None
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            return None
        held = self.seen, self.waiting, chunk, device
        plan = plan_forward(None, batch, 1, *held, origin=origin, marks=self.marks)
        seen, waiting = plan.after(self.seen, self.waiting)
        after = Rows(
            self.columns + 1,
            seen,
            waiting,
            [count + 1 for count in self.claimed],
            list(tokens),
            [False] * batch,
            self.marks,
            self.drift,
        )
        return BegunForward(plan, after, {}, None)

    def keeping(self, before: Rows, rows: Collection[int]) -> Rows:
        """Return these rows, with `rows` as they were in `before`."""
        if not rows:
            return self
        parts = [
            [was if row in rows else now for row, (now, was) in enumerate(zip(*both, strict=True))]
            for both in zip(self._parts(), before._parts(), strict=True)
        ]
        return Rows(self.columns, *parts)

    def _check_shape(self, batch: int, length: int, fixed: bool) -> None:
        if length == 0 and self.columns:
            raise WeirError(
                f"nothing new was fed after {in_words(self.columns, 'token')}. {_go_on(batch)}"
            )
        if length == 0:
            raise WeirError("a prompt must have at least one token, got none")
        if self.seen and batch != self.batch:
            other = "use one cache per batch, or call cache.reset() first"
            if fixed:
                instead = (
                    "Feed all rows, with attention_mask 0 for those that get no token, or make a "
                    f"cache with batch={batch}"
                )
            elif self.batch is not None and batch % self.batch == 0:
                repeats = batch // self.batch
                instead = (
                    f"For num_return_sequences={repeats} or num_beams={repeats}, make "
                    f"{in_words(repeats, 'row')} of each with "
                    f"cache.batch_repeat_interleave({repeats}). Otherwise, {other}"
                )
            else:
                instead = f"To fix this, {other}"
            held = in_words(self.batch or 0, "row")
            raise WeirError(f"this cache holds {held}, but a batch of {batch} was fed. {instead}.")

    def _claim(
        self, mask: Tensor | None, batch: int, length: int, counted: list[int]
    ) -> Tensor | None:
        """Return which new columns are tokens by the mask [batch, length]; None if all are.

        Writes into `counted` how many tokens precede them in each row according to the mask.
        """
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise WeirError(
                "attention_mask must be [batch, tokens], because weir makes its own 4D masks"
            )
        if mask.shape[0] != batch or mask.shape[1] not in (length, self.columns + length):
            raise WeirError(
                f"attention_mask has the shape {list(mask.shape)}, but {in_words(batch, 'row')} of "
                f"{in_words(length, 'new token')} after {self.columns} need "
                f"[{batch}, {self.columns + length}]"
                + (f". {_go_on(batch)}" if self.columns else "")
            )
        if self.columns and length > 1 and mask.shape[1] > length:
            for row, count in enumerate((mask[:, :-length] != 0).sum(dim=1).tolist()):
                self._check_place(row, count)
                counted[row] = count
        real = mask[:, -length:].bool()
        return None if bool(real.all()) else real

    def _without_padding(
        self, tokens: Tensor, real: Tensor | None, is_pad: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """Return which columns are tokens, without padding in rows that have ended.

        Padding can be only in the first column: a step of `generate` has no other column, and the
        next call begins with the last token that `generate` chose, which was not fed before.
        """
        rows = [row for row, ended in enumerate(self.ended) if ended]
        found = is_pad(tokens[rows, 0]).tolist()
        left = [row for row, pad in zip(rows, found, strict=True) if pad]
        if not left:
            return real
        shape = tokens.shape[:2]
        real = torch.ones(shape, dtype=torch.bool, device=tokens.device) if real is None else real
        real = real.clone()
        real[left, 0] = False
        return real

    def _check_positions(
        self,
        given: Tensor | None,
        real: Tensor | None,
        batch: int,
        length: int,
        counted: list[int],
    ) -> None:
        """Refuse tokens that do not continue the stream.

        Writes into `counted` how many tokens precede them in each row according to the positions.
        """
        if given is None or given.ndim != 2 or given.device.type == "meta":
            return
        if given.shape[1] != length:
            raise WeirError(
                f"position_ids have the shape {list(given.shape)}, but {in_words(length, 'token')} "
                f"of {in_words(batch, 'row')} {'was' if length == batch == 1 else 'were'} fed. "
                f"Pass position_ids [{batch}, {length}], or none."
            )
        places = given.expand(batch, -1)
        first = places[:, 0]
        if places.shape[1] > 1:
            real_columns = torch.ones_like(places, dtype=torch.bool) if real is None else real
            # The difference is equal for all tokens of a row if positions rise by one from token to
            # token.
            start = places - real_columns.cumsum(dim=1) + 1
            first = start.gather(1, real_columns.int().argmax(dim=1, keepdim=True))[:, 0]
            if bool(((start != first[:, None]) & real_columns).any()):
                raise WeirError("position_ids must rise by one from token to token of a row")
        for row, place in enumerate(first.tolist()):
            if real is None or bool(real[row].any()):
                self._check_place(row, place)
                counted[row] = place

    def _check_place(self, row: int, place: int) -> None:
        """Refuse to continue a row at `place` if its stream is elsewhere."""
        if place not in (self.seen[row], self.claimed[row], self.columns):
            raise WeirError(
                f"row {row} should continue after {in_words(place, 'token')}, but its stream has "
                f"seen {self.seen[row]}. {_go_on(len(self.seen))}"
            )


def _tokens(given: Mapping[str, Any]) -> Tensor:
    """Return the ids or embeddings that were fed [batch, length, ...]."""
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    tokens: Tensor | None = ids if ids is not None else embeds
    if tokens is None:
        raise WeirError("the model must be called with input_ids or inputs_embeds, got neither")
    if tokens.ndim < 2:
        raise WeirError(f"input_ids must be [batch, tokens], got {list(tokens.shape)}")
    return tokens


def _refuse_right_padding(real: Tensor | None) -> None:
    """Refuse right padding for `generate`, which continues from the last column."""
    if real is None:
        return
    wrong = (real.any(dim=1) & ~real[:, -1]).nonzero()[:, 0].tolist()
    if wrong:
        raise WeirError(
            f"row {wrong[0]} is padded on the right, so its last column is not a token to "
            "continue from. Pad on the left: tokenizer.padding_side = 'left'."
        )


def _check_ids(
    ids: Tensor, real: Tensor | None, vocabulary: int
) -> tuple[dict[int, WeirError], Tensor]:
    """Return why ids [batch, length] are refused, by row, and ids in which those out of range are
    replaced.

    `real` says which are tokens [batch, length], bool; None if all are.
    """
    if ids.shape[1] == 1:  # a step, where every call of PyTorch takes noticeable time
        found = [token for (token,) in ids.tolist()]
        low, high = min(found), max(found)
    else:
        low, high = map(int, ids.aminmax())
    if low >= 0 and high < vocabulary:
        return {}, ids
    wrong = (ids < 0) | (ids >= vocabulary)
    refused: dict[int, WeirError] = {}
    for row, column in wrong.nonzero().tolist():
        if row not in refused and (real is None or bool(real[row, column])):
            where = f"row {row}, token {column + 1} of this call: " if ids.shape[0] > 1 else ""
            refused[row] = out_of_range(int(ids[row, column]), vocabulary, where)
    if refused and len(refused) == ids.shape[0]:
        raise next(iter(refused.values()))
    return refused, ids.masked_fill(wrong, 0)
