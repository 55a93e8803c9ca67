"""The figure that compares a batch of several rows with one row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weir_bench.figure import QUICK, Setting
from weir_bench.figures import rows as figure
from weir_bench.figures.rows import QuietRows, batches
from weir_bench.model import model_of

SETTING = Setting(replace(QUICK, layers=1, slots=32))


@pytest.mark.slow
def test_rows_in_step_lie_alike_and_ragged_ones_do_not_and_none_folds():
    model, made = model_of(SETTING), {}
    for ragged in (False, True):
        batch = made[ragged] = QuietRows(model, 32, 16, 4, ragged=ragged)
        assert all(sum(lengths) == 32 for lengths in batch.cache.stack[0].state.lengths)
        batch.step()
    assert made[False].cache.waiting == [1, 1, 1, 1]
    assert made[True].cache.waiting == [1, 6, 3, 8]
    assert not made[True].folds


@pytest.mark.slow
def test_tokens_per_second_are_of_all_rows(monkeypatch):
    monkeypatch.setattr(figure, "BATCHES", (2,))
    rows = list(batches(SETTING))
    assert ["ragged" in row.what for row in rows] == [False, True]
    assert all(row.ratio == pytest.approx(row.peer / row.ours) for row in rows)
