"""Decode steps are compiled for few numbers of rows, and answer the same."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from reference.models import make
from reference.naive import VOCABULARY, make_llama

from weir import compile_steps
from weir.cli.serve import compile_or_say
from weir.errors import WeirError
from weir.models.compiling import Compiled, Compiling
from weir.serve import (
    Engine,
    SampledToken,
    Sampler,
    SamplingParams,
    Sequence,
    SessionStore,
    compile_engine,
    sizes_of,
)

POLICY = "sink(2) | recent(6) | heavy(4)"


@dataclass
class Heard:
    """What a listener was told."""

    tokens: list[int] = field(default_factory=list)
    over: bool = False

    def on_token(self, token: SampledToken) -> None:
        self.tokens.append(token.id)

    def on_finish(self, reason: str) -> None:
        self.over = True

    def on_failure(self, error: Exception) -> None:
        raise error


@pytest.fixture
def model():
    made = make_llama(layers=1)
    yield made
    compile_steps(made, on=False)
    torch.compiler.reset()


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """The rows of every call that went the compiled way, 0 for those that did not."""
    monkeypatch.setattr(Compiling, "wait", True)
    made: list[int] = []
    call = Compiled.__call__

    def noting(self, step, given):
        out = call(self, step, given)
        made.append(0 if out is None else len(step.waiting))
        return out

    monkeypatch.setattr(Compiled, "__call__", noting)
    return made


def engine_of(model, rows: int, **given) -> Engine:
    return Engine(model, POLICY, rows, SessionStore(), chunk=4, prefill_chunk=5, **given)


def answers(engine: Engine, limits: list[int]) -> list[list[int]]:
    """What turns answer that are asked for together, in tokens."""
    turns = []
    for number, limit in enumerate(limits):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, VOCABULARY, (4 + 5 * number,), generator=generator).tolist()
        chooser = Sampler(SamplingParams())
        turns.append(Sequence(f"{number}", None, ids, limit, frozenset(), chooser, Heard()))
        engine.submit(turns[-1])
    while not all(turn.listener.over for turn in turns):
        engine.step()
    return [turn.listener.tokens for turn in turns]


@pytest.mark.parametrize(
    ("rows", "sizes"), [(1, (1,)), (3, (1, 3)), (4, (1, 4)), (16, (1, 4, 16)), (17, (1, 4, 16, 17))]
)
def test_there_are_few_sizes_and_the_last_is_all_rows(model, rows, sizes):
    assert sizes_of(engine_of(model, rows)) == sizes
    assert sizes_of(engine_of(model, rows, deterministic=True)) == (1,)


@pytest.mark.slow
def test_answers_are_the_same_and_every_step_is_compiled(model, steps):
    limits = [22, 3, 9, 30, 5, 12]  # so that rows are free in between, and one is left alone
    usual = answers(engine_of(model, 6), limits)
    engine = engine_of(model, 6)
    compile_engine(engine, backend="eager")
    assert answers(engine, limits) == usual
    assert set(steps) == {1, 4, 6}
    assert len(steps) == engine.load().calls


def test_each_row_by_itself_has_one_program(model, steps):
    usual = answers(engine_of(model, 3), [4, 6, 5])
    engine = engine_of(model, 3, deterministic=True)
    compile_engine(engine, backend="eager")
    assert answers(engine, [4, 6, 5]) == usual
    assert set(steps) == {1}


@pytest.mark.slow
def test_without_a_compiler_the_engine_answers_as_before(model, steps, notices):
    def none(graph, inputs):
        raise RuntimeError("no compiler here")

    engine = engine_of(model, 3)
    compile_engine(engine, backend=none)
    assert answers(engine, [4, 6, 5]) == answers(engine_of(model, 3), [4, 6, 5])
    assert set(steps) == {0}
    assert sum("no compiler here; they go the usual way" in notice for notice in notices) == 1


@pytest.mark.slow
def test_a_server_says_it_where_no_steps_are_compiled(notices):
    engine = engine_of(make("mpt"), 3)
    compile_or_say(engine)
    assert engine.runner.sizes == ()
    assert notices == [
        "the steps of this model cannot be compiled here: the attention of mpt is code of its own; "
        "they go the usual way"
    ]
    with pytest.raises(WeirError, match="the attention of mpt is code of its own"):
        compile_steps(engine.model, strict=True)
