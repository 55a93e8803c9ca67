"""Tasks that state facts and ask for them, with stand-ins that remember a given window."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import weir
from weir.errors import WeirError
from weir.evals.task import Subject
from weir.evals.tasks.exercises import (
    Changed,
    Instruction,
    Material,
    Repeated,
    Verbatim,
    draw_facts,
    draw_layout,
)
from weir.train import Words

pytestmark = pytest.mark.thinned(3, least=2)

FEW: dict[str, Any] = {"samples": 3, "farthest": 256}
NBYTES = 1200


@pytest.fixture(scope="module")
def nano():
    return weir.load("nano")


def silent(share: float) -> None:
    """Ignore progress."""


@dataclass
class Knowing:
    """A stand-in for a stream, which predicts what followed the same last tokens earlier.

    Attributes:
        newest: use the newest of several such earlier places, or else the oldest.
        window: how many tokens it remembers; None for all.
        verb: the token of the verb. Tokens are compared from the name on, which comes before the
            last verb.
        rows: the tokens that were fed, by row.
        back: for each token that it found, how many tokens back this was.
        begins: the first prediction of each feed with `all_logits`, by row.
    """

    newest: bool
    window: int | None
    verb: int
    rows: list[list[int]] = field(default_factory=list)
    back: list[int] = field(default_factory=list)
    begins: list[list[int]] = field(default_factory=list)
    nbytes = NBYTES

    @property
    def seen(self) -> int:
        return len(self.rows[0])

    def feed(self, ids: Tensor, all_logits: bool = False) -> Tensor | None:
        self.rows = self.rows or [[] for _ in ids]
        told = []
        for row, new in zip(self.rows, ids.tolist(), strict=True):
            said = []
            for token in new:
                row.append(token)
                said.append(self._next(row) if all_logits else 0)
            told.append(said)
        if not all_logits:
            return None
        self.begins.append([said[0] for said in told])
        return torch.nn.functional.one_hot(torch.tensor(told), 4096).float()

    def _next(self, row: list[int]) -> int:
        first = 0 if self.window is None else max(0, len(row) - self.window)
        places = range(first, len(row) - 1)
        size = row[::-1].index(self.verb) + 2
        places = [n for n in places if row[n - size + 1 : n + 1] == row[-size:]]
        if not places:
            return 0
        best = places[-1 if self.newest else 0]
        self.back.append(len(row) - 1 - best)
        return row[best + 1]


@dataclass(frozen=True)
class Reads(Subject):
    """A subject whose streams are `Knowing` stand-ins with the given `newest` and `window`."""

    newest: bool = True
    window: int | None = None
    streams: list[Knowing] = field(default_factory=list)

    def stream(self, prompt=None, answer=0):
        verb = Words.of(self.tokenizer).verb
        self.streams.append(Knowing(self.newest, self.window, verb))
        return self.streams[-1]


def reader(nano, **more) -> Reads:
    return Reads("some", *nano, policy=weir.policy("dense"), **more)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("task", [Repeated(**FEW), Changed(**FEW), Instruction(**FEW)])
def test_who_remembers_everything_and_takes_the_newest_is_always_right(nano, task, seed):
    one = reader(nano, seed=seed)
    found = task.run(one, silent)
    assert found["accuracy"] == found["token_accuracy"] == 1.0
    distances = [row["distance"] for row in found["by_distance"]]
    assert found["asked"] == 3 * len(distances)
    assert distances == ([32, 64, 128, 256] if task.name == "instruction" else distances)
    assert found["kv_bytes"] == NBYTES // 3
    if task.name != "instruction":
        # All digits of a number are equally far back, and this is the distance.
        assert distances == [16, 32, 64, 128, 256]
        assert sorted(set(one.streams[0].back)) == distances
        assert one.streams[0].seen <= found["tokens"]


def test_who_holds_on_to_the_oldest_is_right_where_nothing_changes_and_stale_where_it_does(nano):
    same = Repeated(**FEW).run(reader(nano, newest=False), silent)
    assert same["accuracy"] == 1.0
    assert "stale" not in same
    other = Changed(**FEW).run(reader(nano, newest=False), silent)
    assert (other["accuracy"], other["stale"]) == (0.0, 1.0)
    assert Changed(**FEW).run(reader(nano), silent)["stale"] == 0.0


def test_guessing_is_not_stale(nano):
    found = Changed(**FEW).run(reader(nano, window=1), silent)
    assert (found["accuracy"], found["stale"]) == (0.0, 0.0)


def test_a_window_has_what_was_said_within_it_last_and_nothing_else(nano):
    for task in (Repeated(**FEW), Changed(**FEW), Verbatim(length=4, **FEW)):
        found = task.run(reader(nano, window=100), silent)
        right = {row["distance"]: row["accuracy"] for row in found["by_distance"]}
        assert right == {d: float(d < 100) for d in (16, 32, 64, 128, 256)}


def test_an_instruction_stands_at_the_start_and_is_asked_for_its_distance_after_its_end(nano):
    task = Instruction(samples=2, farthest=128)
    one = reader(nano)
    found = task.run(one, silent)
    words = Words.of(nano[1])
    for row in one.streams[0].rows:
        assert row[0] == words.front[0]
        rules = [row[1 + 7 * n : 8 + 7 * n] for n in range(3)]
        assert all(rule[1] == words.verb and rule[-1] == words.stop for rule in rules)
        # The rule is in the row again where it is asked for. Its end is not compared, because the
        # very last digit of a row is not fed.
        for distance in (32, 64, 128):
            place = 1 + 3 * 7 + distance
            assert row[place - 3 : place + 2] in [rule[:5] for rule in rules]
    assert [row["distance"] for row in found["by_distance"]] == [32, 64, 128]
    window = task.run(reader(nano, window=100), silent)
    assert [row["accuracy"] for row in window["by_distance"]][-1] == 0.0


def test_an_answer_of_many_tokens_is_right_only_whole(nano):
    task = Verbatim(length=9, **FEW)
    whole = task.run(reader(nano), silent)
    assert (whole["accuracy"], whole["token_accuracy"]) == (1.0, 1.0)

    class Slips(Knowing):
        def _next(self, row):
            told = super()._next(row)
            return 0 if len(row) % 5 == 0 else told

    @dataclass(frozen=True)
    class Slipping(Reads):
        def stream(self, prompt=None, answer=0):
            return Slips(True, None, Words.of(self.tokenizer).verb)

    slipped = task.run(Slipping("some", *nano, policy=weir.policy("dense")), silent)
    assert slipped["accuracy"] == 0.0  # nine tokens in a row include a place where it slips
    assert 0.7 < slipped["token_accuracy"] < 0.9


def test_numbers_of_one_name_begin_differently_and_answers_are_as_long_as_asked(nano):
    material = Material(Words.of(nano[1]), np.zeros(0), np.random.default_rng(0))
    for facts in draw_facts(material, 20, times=9):
        first = [nano[1].decode(fact.answer.tolist()).strip()[0] for fact in facts]
        assert len(set(first)) == 9
        assert len({tuple(fact.statement[:3].tolist()) for fact in facts}) == 1
    assert all(
        len(fact.answer) == 7 for (fact,) in draw_facts(material, 20, length=7, distinct=False)
    )


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Repeated(times=1), "times of repeated must be a whole number from 2 to 9, got 1"),
        (lambda: Changed(times=10), "times of changed must be a whole number from 2 to 9, got 10"),
        (
            lambda: Changed(samples=0),
            ("samples of changed must be a whole number of at least 1, got 0"),
        ),
        (lambda: Repeated(before=0), "before of repeated must be"),
        (lambda: Repeated(farthest=15), "at least its nearest distance, 16, got 15"),
        (lambda: Instruction(samples=0), "samples of instruction must be"),
        (lambda: Instruction(farthest=31), "at least its nearest distance, 32, got 31"),
        (
            lambda: Verbatim(length=1),
            ("length of verbatim must be a whole number of at least 2, got 1"),
        ),
        (lambda: Verbatim(length=20, farthest=60), "at least its nearest distance, 64, got 60"),
    ],
)
def test_what_makes_no_sense_is_refused(make, sentence):
    with pytest.raises(WeirError, match=sentence):
        make()


def test_where_there_is_no_room_that_is_said(nano, tmp_path):
    with pytest.raises(WeirError, match="Increase the number of tokens `before`"):
        Repeated(times=9, before=8, **FEW).run(reader(nano), silent)
    rng = np.random.default_rng(0)
    with pytest.raises(WeirError, match="at least the 9 tokens of a statement, got 8"):
        draw_layout([8, 16], 10, rng, statement=9)
    crowded = draw_layout([16, 16, 17, 17], 10, rng, statement=16)
    begins = sorted([n for (n,) in crowded.statements] + [n - 3 for n in crowded.answers])
    assert min(np.diff(begins)) >= 16
    assert [a - 3 - n for a, (n,) in zip(crowded.answers, crowded.statements, strict=True)] == [
        16,
        16,
        17,
        17,
    ]
    book = tmp_path / "short.txt"
    book.write_text("It was a dark night. " * 20)
    with pytest.raises(WeirError, match="is needed, but this one gives only"):
        Repeated(text=str(book), **FEW).run(reader(nano), silent)
    said = r"with {} needs a stream of 2\d\d,\d+ tokens, but at most 200,000 .* a smaller {}\."
    given = said.format("farthest=262144 and before=256", "farthest or before")
    with pytest.raises(WeirError, match=f"verbatim {given}"):
        Verbatim(farthest=262_144, samples=1).run(reader(nano), silent)
    given = said.format("farthest=262144", "farthest")
    with pytest.raises(WeirError, match=f"instruction {given}"):
        Instruction(farthest=262_144, samples=1).run(reader(nano), silent)


@pytest.mark.slow
def test_on_nano_a_stream_of_k_centers_remembers_what_was_said_again_and_not_that_it_changed(nano):
    at_kcenter = Subject("nano", *nano, policy=weir.policy("kcenter(96)"))
    settings = {"samples": 6, "farthest": 128, "before": 128, "times": 2}
    assert Repeated(**settings).run(at_kcenter, silent)["accuracy"] > 0.9
    found = Changed(**settings).run(at_kcenter, silent)
    assert found["accuracy"] < 0.8
    assert found["stale"] > 0.2
