"""Decode steps are compiled for a few numbers of rows, and do not change the answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from engines import compiled
from reference.models import make
from reference.naive import VOCABULARY, make_llama

from weir import compile_steps
from weir.cli.serve import compile_or_say
from weir.errors import WeirError
from weir.serve import (
    Engine,
    SampledToken,
    Sampler,
    SamplingParams,
    SessionStore,
    TokenSequence,
    compile_engine,
    sizes_of,
)

POLICY = "sink(2) | recent(6) | heavy(4)"


@dataclass
class Heard:
    """A listener that records what it is told."""

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
    return make_llama(layers=1)


def engine_of(model, rows: int, **given) -> Engine:
    return Engine(model, POLICY, rows, SessionStore(), chunk=4, prefill_chunk=5, **given)


def answers(engine: Engine, limits: list[int]) -> list[list[int]]:
    """Return the answers, as token ids, to turns that are submitted together."""
    turns = []
    for number, limit in enumerate(limits):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, VOCABULARY, (4 + 5 * number,), generator=generator).tolist()
        chooser = Sampler(SamplingParams())
        turns.append(TokenSequence(f"{number}", None, ids, limit, frozenset(), chooser, Heard()))
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
def test_answers_are_the_same_and_every_step_is_compiled(model):
    # Rows become free in between, and one row is left alone at the end.
    limits = [22, 3, 9, 30, 5, 12]
    usual = answers(engine_of(model, 6), limits)
    engine = engine_of(model, 6)
    with compiled(model) as taken:
        engine.runner.sizes = sizes_of(engine)
        assert answers(engine, limits) == usual
    assert set(taken) == {1, 4, 6}
    assert len(taken) == engine.load().calls


def test_each_row_by_itself_has_one_program(model):
    usual = answers(engine_of(model, 3), [4, 6, 5])
    engine = engine_of(model, 3, deterministic=True)
    with compiled(model) as taken:
        engine.runner.sizes = sizes_of(engine)
        assert answers(engine, [4, 6, 5]) == usual
    assert set(taken) == {1}


def test_a_server_on_a_cpu_says_that_steps_are_native_there(model, notices, capsys):
    engine = engine_of(model, 3)
    assert compile_engine(engine) is False
    assert engine.runner.sizes == ()
    compile_or_say(engine)
    assert "--compile is for a GPU" in capsys.readouterr().err
    compile_steps(model, on=False)


def test_who_is_strict_hears_which_model_has_no_native_steps():
    with pytest.raises(WeirError, match=r"cannot be compiled here: .*MptModel.*no `?embed_tokens"):
        compile_steps(make("mpt"), strict=True)
