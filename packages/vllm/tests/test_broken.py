"""Programs that are wrong on purpose are caught by the comparison with weir."""

import pytest
import torch

from engines import ask, engine
from reference import allowed, weir_says
from small_models import random_tokens
from weir_vllm import rotary, worker

POLICY = "sink(32) | recent(128)"


def turn_one_too_far(patch):
    stock = rotary.Endless.turn

    def turn(self, by):
        return stock(self, by + (by > 0))

    patch.setattr(worker.SinkTurner, "turn", _with_turn(worker.SinkTurner.turn, turn))


def _with_turn(stock, turn):
    """Rotate sinks by a wrong angle, but queries and keys by the right one."""

    def wrapped(self, stack, rotary, rows):
        class Wrong:
            is_neox_style = rotary.is_neox_style

            @staticmethod
            def turn(by):
                return turn(rotary, by)

        return stock(self, stack, Wrong, rows)

    return wrapped


def leave_sinks_alone(patch):
    def turn(self, by):
        return rotary.Endless.turn(self, by * 0)

    patch.setattr(worker.SinkTurner, "turn", _with_turn(worker.SinkTurner.turn, turn))


def take_the_next_block_for_sinks(patch):
    stock = worker.SinkTurner.turn

    def turn(self, stack, rotary, rows):
        stock(self, stack, rotary, worker.SinkRows(rows.masters + 1, rows.scratch, rows.by))

    patch.setattr(worker.SinkTurner, "turn", turn)


def keep_a_block_less(patch):
    stock = worker.cut_rows
    patch.setattr(worker, "cut_rows", lambda *given: stock(*given[:3], given[3] - 1))


def forget_late_sinks(patch):
    patch.setattr(worker, "LATE", "weir_unused")
    patch.setattr(worker.SinkTurner, "turn_before", staticmethod(lambda forward: forward))


WRONG = [
    turn_one_too_far,
    leave_sinks_alone,
    take_the_next_block_for_sinks,
    keep_a_block_less,
    forget_late_sinks,
]


@pytest.mark.parametrize("break_it", WRONG, ids=lambda each: each.__name__)
def test_a_wrong_program_is_caught(models, monkeypatch, break_it):
    folder = models("llama")
    prompt = random_tokens(600)
    break_it(monkeypatch)
    with engine(folder, POLICY, max_num_batched_tokens=1024) as llm:
        ((said, ours, _),) = ask(llm, [prompt], tokens=40, prompt_logprobs=0)
    theirs = weir_says(folder, POLICY, prompt + said)
    assert torch.isfinite(ours).all()
    assert (ours - theirs).abs().max() > 50 * allowed(folder)
