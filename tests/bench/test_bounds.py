"""What bounds a figure, and how near it comes."""

from __future__ import annotations

import pytest
import torch

from weir_bench import bounds
from weir_bench.bounds import CALLS, Bound, of_prompt, of_step, of_work, weights_of
from weir_bench.caches import Weir
from weir_bench.figure import FIGURES, QUICK, Figure, Row, Setting
from weir_bench.model import model_of
from weir_bench.report import bound
from weir_bench.run import measure

SETTING = Setting(QUICK)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """One that copies a thousand bytes a second, and does ten thousand operations."""
    monkeypatch.setattr(bounds, "bandwidth", lambda copied: 1e3)
    monkeypatch.setattr(bounds, "arithmetic", lambda rows, columns, dtype: 1e4)


def test_the_bound_is_what_takes_longer_and_the_share_its_part_of_the_time():
    assert of_work(SETTING, 4.0, moved=2e3) == Bound("bytes", 0.5)
    assert of_work(SETTING, 4.0, moved=2e3, operations=1e4) == Bound("bytes", 0.5)
    assert of_work(SETTING, 4.0, moved=2e3, operations=3e4) == Bound("operations", 0.75)


def test_a_step_of_many_rows_is_a_matter_of_operations_and_of_one_of_bytes():
    model = model_of(SETTING)
    cache = Weir(model, "streaming_llm(budget=64)", 16)
    cache.fill(96)
    one, many = (of_step(SETTING, 1.0, cache, rows) for rows in (1, 64))
    assert (one.bound, many.bound) == ("bytes", "operations")
    assert one.share == pytest.approx((4 * weights_of(model) + cache.read_bytes) / 1e3)
    # Each key and value is read by the three query heads of its group.
    assert many.share == pytest.approx((128 * weights_of(model) + 6 * cache.read_bytes / 4) / 1e4)


def test_a_prompt_is_multiplied_with_all_weights_and_its_last_token_with_the_head():
    model = model_of(SETTING)
    head = model.get_input_embeddings().weight.numel()
    wanted = 2 * 100 * (weights_of(model) - head) + 2 * head
    assert of_prompt(SETTING, 1.0, model, 100) == Bound("operations", wanted / 1e4)


def test_a_row_says_its_own_bound_or_that_of_its_figure(monkeypatch):
    rows = [Row("a", 1, 1, "ms", 1, share=0.25, bound="bytes"), Row("b", 1, 1, "ms", 1)]
    made = {"it": Figure(lambda setting: iter(rows), "of it", by_dtype=False, bound="calls")}
    for module in ("run", "figure"):
        monkeypatch.setattr(f"weir_bench.{module}.FIGURES", made)
    said = [bound(row) for _, _, row in measure(SETTING, [], [torch.float32]).rows]
    assert said == ["bytes 0.25", "calls"]
    assert CALLS.share is None


def test_every_figure_says_what_bounds_it_or_its_rows_do():
    silent = {name for name, each in FIGURES.items() if not each.bound}
    assert silent == {"answer", "batches", "halvings", "policies", "prompts"}
    assert {each.bound for each in FIGURES.values()} == {"", "bytes", "calls"}
