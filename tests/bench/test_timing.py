"""Contenders take turns, and only their steps are timed."""

from __future__ import annotations

import gc

import pytest
import torch

from weir_bench import timing
from weir_bench.timing import Contender, in_turns, middle, settled, undisturbed


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Runner(Contender):
    """A contender whose steps take the given seconds, and whose `rewind` takes ten."""

    def __init__(self, name: str, takes: list[float], clock: Clock, said: list[str]) -> None:
        self.name, self.takes, self.clock, self.said = name, iter(takes), clock, said

    def step(self) -> None:
        self.said.append(self.name)
        self.clock.now += next(self.takes)

    def rewind(self) -> None:
        self.clock.now += 10


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


@pytest.mark.slow
def test_each_does_one_step_in_turn_and_nobody_is_always_first(clock):
    said: list[str] = []
    runners = {name: Runner(name, [1.0] * 4, clock, said) for name in "abc"}
    in_turns(runners, rounds=3, warm=1)
    assert "".join(said) == "abcbcacababc"


@pytest.mark.slow
def test_steps_are_timed_without_the_first_and_without_getting_ready(clock):
    slow, fast = [9.0, 2.0, 8.0, 3.0], [9.0, 1.0, 1.5, 1.0]
    said: list[str] = []
    both = {"slow": Runner("s", slow, clock, said), "fast": Runner("f", fast, clock, said)}
    times = in_turns(both, rounds=3, warm=1)
    assert times == {"slow": pytest.approx(slow[1:]), "fast": pytest.approx(fast[1:])}
    assert middle(times) == {"slow": pytest.approx(3.0), "fast": pytest.approx(1.0)}


def test_nothing_is_collected_and_nothing_is_differentiated_meanwhile():
    with undisturbed():
        assert not gc.isenabled()
        assert not torch.is_grad_enabled()
    assert gc.isenabled()
    assert torch.is_grad_enabled()


def test_who_hid_things_from_the_collector_before_keeps_them_hidden():
    gc.freeze()
    hidden = gc.get_freeze_count()
    new = [[each] for each in range(1000)]
    with settled():
        assert gc.get_freeze_count() <= hidden
    assert 0 < gc.get_freeze_count() <= hidden
    assert len(new) == 1000
