"""The error of every size of every layer, compared with the formula written out."""

from __future__ import annotations

import pytest
import torch
from roundings import run_off

from weir.evals import calibration
from weir.evals.calibration import measure_sizes
from weir.evals.capture import capture_each
from weir.policies import policy


def answers(it, newest: int) -> torch.Tensor:
    """Answers to queries that see their own token and the `newest` tokens before it.

    Returns [heads, length, value_dim].
    """
    heads = it.queries.shape[1] // it.keys.shape[1]
    keys, values = (t[0].repeat_interleave(heads, dim=0) for t in (it.keys, it.values))
    logits = it.queries[0] @ keys.mT * it.params.scale
    back = torch.arange(len(it))[:, None] - torch.arange(len(it))
    logits = logits.masked_fill((back < 0) | (back > newest), -torch.inf)
    return logits.softmax(dim=-1) @ values


def test_it_is_the_relative_error_of_the_second_halves(llama, ids, monkeypatch):
    monkeypatch.setattr(calibration, "PIECE", 20)  # so that calls end within a half
    sizes = (3, 7, 11)
    passages = list(ids(1, 96)[0].split(48))
    told: list[float] = []
    pipes = [policy(f"window({n})") for n in sizes]
    got = measure_sizes(llama, passages, {0: pipes, 1: pipes[:1]}, chunk=1, on_step=told.append)
    off, whole = torch.zeros(2, len(sizes)), torch.zeros(2)
    for passage in passages:
        for layer, it in capture_each(llama, passage, lambda it: it).items():
            exact = answers(it, 48)[:, 24:]
            whole[layer] += exact.square().sum()
            for place, newest in enumerate(sizes):
                off[layer, place] += (answers(it, newest)[:, 24:] - exact).square().sum()
    wanted = (off / whole[:, None]).sqrt().tolist()
    assert got == {
        0: pytest.approx(wanted[0], abs=2 * run_off(llama, 48)),
        1: pytest.approx(wanted[1][:1], abs=2 * run_off(llama, 48)),
    }
    assert wanted[0][0] > wanted[0][2] > 0.05
    assert told == sorted(told)
    assert told[-1] == 1


def test_a_size_that_loses_nothing_has_no_error_and_pools_see_what_they_ask_for(llama, ids):
    pipes = [policy(text) for text in ("window(48)", "recent(4) | heavy(8)", "snap(12, window=4)")]
    found = measure_sizes(llama, [ids(1, 48)[0]], {1: pipes}, chunk=4)[1]
    assert found[0] <= 2 * run_off(llama, 48)
    assert all(0.01 < error < 2 for error in found[1:])
