"""Rows keep the beginnings and headers that they are marked with, each row as if it were alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain

import pytest
import torch
from engines import compiled
from reference.naive import VOCABULARY, make_llama
from roundings import close_runs

import weir
from weir import StreamingCache, WeirError
from weir.pools import Marks

CHUNK, N, SINKS, RECENT, HEADER = 4, 8, 2, 10, 3
POLICY = f"beginning({N}) | sink({SINKS}) | recent({RECENT}) | header({HEADER})"
MODEL = make_llama()
BEGINNINGS = (0, 3, 8, 12, None)


@dataclass
class Naive:
    """One row as lists of places: beginning, sinks, newest tokens, and header of the turn."""

    marks: Marks
    seen: int = 0
    pools: list[list[int]] = field(default_factory=lambda: [[], [], [], []])
    tail: list[int] = field(default_factory=list)

    def read(self, count: int) -> None:
        for place in range(self.seen, self.seen + count):
            self.tail.append(place)
            if len(self.tail) == CHUNK:
                self.fold()
        self.seen += count

    def fold(self) -> None:
        first, sinks, recent, header = self.pools
        told = self.marks.beginning
        own = range(self.marks.turn, self.marks.turn + min(HEADER, self.marks.header))
        header[:] = [place for place in header if place in own]
        for place in self.tail:
            if len(first) < (N if told is None else min(N, told)):
                first.append(place)
            elif len(sinks) < SINKS:
                sinks.append(place)
            else:
                recent.append(place)
                if len(recent) > RECENT and (old := recent.pop(0)) in own:
                    header.append(old)
        self.tail = []

    @property
    def held(self) -> list[int]:
        return sorted(chain(*self.pools)) + self.tail


def ids(row: int, start: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(row)
    return torch.randint(VOCABULARY, (400,), generator=generator).tolist()[start : start + count]


def feed(cache: StreamingCache, rows: list[Naive], counts: list[int]) -> torch.Tensor:
    """Feed each row its next tokens, padded on the left; the last logits [rows, vocabulary]."""
    width = max(counts)
    fed, real = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for row, (naive, count) in enumerate(zip(rows, counts, strict=True)):
        if count:
            fed[row, width - count :] = torch.tensor(ids(row, naive.seen, count))
            real[row, width - count :] = 1
            naive.read(count)
    with torch.no_grad():
        return MODEL(fed, attention_mask=real, past_key_values=cache).logits[:, -1]


def check(cache: StreamingCache, rows: list[Naive]) -> None:
    for layer in range(len(cache.stack)):
        held = cache.slots(layer).position
        for row, naive in enumerate(rows):
            for head in held[row]:
                assert sorted(head[head >= 0].tolist()) == naive.held


def talk(cache: StreamingCache) -> list[Naive]:
    """Two turns of each row, of different lengths, the second answer longer than the window."""
    rows = [Naive(Marks(beginning)) for beginning in BEGINNINGS]
    for row, naive in enumerate(rows):
        cache.mark(row, naive.marks)
    for prompt, answer in ([13, 14, 15, 20, 21], 9), ([6, 7, 8, 6, 9], 30):
        for row, naive in enumerate(rows):
            turn = naive.seen + prompt[row] - (2 + row)
            naive.marks = replace(naive.marks, turn=turn, header=2 + row)
            cache.mark(row, naive.marks)
        feed(cache, rows, prompt)
        check(cache, rows)
        for _ in range(answer):
            feed(cache, rows, [1] * len(rows))
            check(cache, rows)
    return rows


def test_rows_keep_what_a_loop_over_lists_keeps():
    cache = StreamingCache(MODEL, POLICY, chunk=CHUNK, batch=len(BEGINNINGS))
    rows = talk(cache)
    assert [len(row.pools[0]) for row in rows] == [0, 3, 8, 8, 8]
    assert [len(row.pools[3]) for row in rows] == [2, 3, 3, 3, 3]
    assert cache.report(1)["layers"][0]["slots"]["beginning"] == 3
    # Rows with different marks fold separately. So no slot is empty, and attention need not read
    # log-weights.
    assert all(layer.state.plain for layer in cache.stack)


@pytest.mark.slow
def test_a_compiled_step_sees_the_same():
    usual = StreamingCache(MODEL, POLICY, chunk=CHUNK, batch=len(BEGINNINGS))
    rows = talk(usual)
    with compiled(MODEL) as taken:
        cache = StreamingCache(MODEL, POLICY, chunk=CHUNK, batch=len(BEGINNINGS))
        again = talk(cache)
        last = feed(cache, again, [1] * len(again))
    assert taken
    close_runs(last, feed(usual, rows, [1] * len(rows)), MODEL)


def test_marks_go_where_the_row_goes(tmp_path):
    cache = StreamingCache(MODEL, POLICY, chunk=CHUNK, batch=len(BEGINNINGS))
    rows = talk(cache)
    other = StreamingCache(MODEL, POLICY, chunk=CHUNK)
    other.put_rows(reversed(cache.take_rows()))
    assert other.marks == cache.marks[::-1]
    for row in rows:
        row.marks = replace(row.marks, turn=row.seen + 1, header=2)
    for row, naive in enumerate(rows):
        cache.mark(row, naive.marks)
        other.mark(len(rows) - 1 - row, naive.marks)
    last = feed(cache, rows, [17] * len(rows))
    check(cache, rows)
    with torch.no_grad():
        fed = torch.tensor([ids(row, rows[row].seen - 17, 17) for row in range(len(rows))])
        out = MODEL(fed.flip(0), past_key_values=other).logits[:, -1].flip(0)
    close_runs(out, last, MODEL)
    check(other, rows[::-1])
    cache.reset_row(1)
    assert cache.marks[1] == Marks()
    assert cache.marks[2] == rows[2].marks


def test_a_session_on_disk_has_them(tmp_path):
    stream = weir.Stream(MODEL, POLICY, chunk=CHUNK)
    stream.feed(ids(0, 0, 3))
    stream.cache.mark(0, Marks(5, 20, 2))
    stream.save(tmp_path / "a.weir")
    again = weir.Stream.restore(MODEL, tmp_path / "a.weir")
    assert again.cache.marks == [Marks(5, 20, 2)]


def test_what_is_no_mark_is_refused():
    cache = StreamingCache(MODEL, POLICY, chunk=CHUNK, batch=2)
    with pytest.raises(WeirError, match="row 2 does not exist"):
        cache.mark(2, Marks())
    with pytest.raises(WeirError, match=r"must be weir\.pools\.Marks, got 3"):
        cache.mark(0, 3)
    for wrong in (-1, 1.5, True, 2**60):
        with pytest.raises(WeirError, match="beginning must be a number of tokens"):
            Marks(wrong)
    with pytest.raises(WeirError, match="header must be a number of tokens"):
        Marks(0, 0, None)
    rows = [Naive(Marks()), Naive(Marks())]
    feed(cache, rows, [3, 4])
    cache.mark(0, Marks(5))
    with pytest.raises(WeirError, match="row 1 is none and can no longer become 5"):
        cache.mark(1, Marks(5))
    cache.mark(1, Marks(None, 7, 2))
    state = cache.take_row(1)
    for marks in ({"beginning": -1, "turn": 0, "header": 0}, {"beginning": 1}, None):
        wrong = replace(state, facts={**state.facts, "marks": marks})
        with pytest.raises(WeirError, match="can have this state: marks"):
            cache.put_row(0, wrong)
    assert cache.marks[0] == Marks(5)
