"""How a forward is cut: every row folds where it would fold alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weir.cache.plan import ForwardPlan, plan_forward

CPU = torch.device("cpu")

forwards = st.integers(1, 4).flatmap(
    lambda rows: st.lists(
        st.integers(1, 9).flatmap(
            lambda length: st.lists(
                st.lists(st.booleans(), min_size=length, max_size=length),
                min_size=rows,
                max_size=rows,
            )
        ),
        min_size=1,
        max_size=6,
    )
)
"""Some forwards of a batch: which columns of which rows hold a token."""


class Rows:
    """Follows rows through plans: which tokens each got, in order, and where it folded."""

    def __init__(self, rows: int, chunk: int) -> None:
        self.chunk = chunk
        self.seen, self.waiting = [0] * rows, [0] * rows
        self.got: list[list[int]] = [[] for _ in range(rows)]
        self.folds: list[list[int]] = [[] for _ in range(rows)]

    def forward(
        self, real: list[list[bool]], first_column: int, *, full: bool = False
    ) -> ForwardPlan:
        mask = torch.tensor(real)
        known = None if bool(mask.all()) else mask
        plan = plan_forward(
            known, *mask.shape, self.seen, self.waiting, self.chunk, CPU, prefill=full, origin=7
        )
        for segment in plan.segments:
            assert (segment.seen, segment.waiting) == (self.seen, self.waiting)
            assert max(segment.counts) == segment.width > 0
            taken: list[list[int]] = [[] for _ in self.seen]
            for row, place, column in zip(*(t.tolist() for t in segment.entries), strict=True):
                assert int(segment.positions[row, 0, place]) == 7 + self.seen[row] + len(taken[row])
                taken[row].append(first_column + column)
            slots = dict.fromkeys(range(len(self.seen)), 0)
            takers = segment.entries[0].tolist()
            for row, slot in zip(takers, segment.tail_places.tolist(), strict=True):
                assert slot == self.waiting[row] + slots[row]
                slots[row] += 1
            for row, columns in enumerate(taken):
                assert len(columns) == segment.counts[row]
                self.got[row] += columns
                self.seen[row] += len(columns)
                self.waiting[row] += len(columns)
                assert int(segment.after[row]) == 7 + self.seen[row]
                if row in segment.due:
                    self.folds[row].append(self.seen[row])
                    self.waiting[row] = 0
                assert full or self.waiting[row] < self.chunk
        return plan


@given(forwards, st.integers(1, 7))
def test_every_row_folds_after_each_chunk_of_its_own_tokens(stream, chunk):
    rows = Rows(len(stream[0]), chunk)
    column, wanted = 0, [[] for _ in stream[0]]
    for real in stream:
        rows.forward(real, column)
        for row, flags in enumerate(real):
            wanted[row] += [column + i for i, flag in enumerate(flags) if flag]
        column += len(real[0])
    assert rows.got == wanted
    assert rows.folds == [list(range(chunk, len(w) + 1, chunk)) for w in wanted]


@given(forwards, st.integers(1, 7), st.data())
def test_cutting_a_stream_into_forwards_changes_no_fold(stream, chunk, data):
    whole = [[flag for real in stream for flag in real[row]] for row in range(len(stream[0]))]
    length = len(whole[0])
    cuts = sorted({0, length} | data.draw(st.sets(st.integers(0, length), max_size=5)))
    once, often = Rows(len(whole), chunk), Rows(len(whole), chunk)
    once.forward(whole, 0)
    for start, stop in pairwise(cuts):
        often.forward([flags[start:stop] for flags in whole], start)
    assert (often.got, often.folds) == (once.got, once.folds)
    assert (often.seen, often.waiting) == (once.seen, once.waiting)


@given(forwards, st.integers(1, 7))
def test_pieces_of_a_whole_plan_are_plain_slices(stream, chunk):
    rows = Rows(len(stream[0]), chunk)
    for real in stream:
        plan = rows.forward(real, 0)
        if plan.regular:
            columns = torch.cat([segment.columns for segment in plan.segments], dim=1)
            assert torch.equal(columns, torch.arange(plan.length).expand(len(real), -1))
        elif all(all(flags) for flags in real):
            assert not all(segment.in_step for segment in plan.segments)


def test_a_batch_in_step_is_cut_into_slices():
    plan = plan_forward(None, 3, 10, [2, 2, 2], [2, 2, 2], 4, CPU)
    assert plan.regular
    assert [segment.width for segment in plan.segments] == [2, 4, 4]
    assert [segment.due for segment in plan.segments] == [[0, 1, 2]] * 3


@given(forwards)
def test_a_full_prompt_is_one_piece_that_folds_every_row_that_has_tokens(stream):
    rows = Rows(len(stream[0]), 4)
    plan = rows.forward(stream[0], 0, full=True)
    counts = [sum(flags) for flags in stream[0]]
    assert len(plan.segments) == (1 if any(counts) else 0)
    assert rows.folds == [[n] if n else [] for n in counts]
    assert rows.waiting == [0] * len(counts)


def test_padding_alone_makes_no_piece():
    assert (
        plan_forward(torch.zeros(2, 5, dtype=torch.bool), 2, 5, [3, 0], [3, 0], 4, CPU).segments
        == []
    )


def test_a_layer_on_another_device_gets_the_same_plan_there() -> None:
    real = torch.tensor([[False, True, True, True], [True, True, True, True]])
    here = plan_forward(real, 2, 4, [0, 0], [0, 0], 2, torch.device("cpu"))
    there = here.on(torch.device("meta"))
    assert here.on(torch.device("cpu")) is here
    assert [segment.counts for segment in there.segments] == [
        segment.counts for segment in here.segments
    ]
    assert {segment.columns.device.type for segment in there.segments} == {"meta"}
    assert there.segments[0].positions.device.type == "meta"


@pytest.mark.parametrize("waiting", [[0, 3], [3, 3], [2, 2], [1, 0]])
def test_a_decode_step_is_cut_without_looking_as_it_is_with_a_mask_that_says_nothing(waiting):
    bare = plan_forward(None, 2, 1, [9, 7], waiting, 4, CPU, origin=1)
    masked = plan_forward(
        torch.ones(2, 1, dtype=torch.bool), 2, 1, [9, 7], waiting, 4, CPU, origin=1
    )
    (one,), (other,) = bare.segments, masked.segments
    assert one.columns.tolist() == other.columns.tolist()
    for name in ("counts", "seen", "waiting", "due", "origin", "marks", "in_step"):
        assert getattr(one, name) == getattr(other, name), name
    assert (bare.length, bare.regular, bare.step) == (masked.length, masked.regular, True)
    assert bare.positions.tolist() == masked.positions.tolist() == [[10], [8]]
