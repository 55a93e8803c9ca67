"""Figures: their names, whether a target is met, which are left out, and that all of them run."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch

from weir.errors import WeirError
from weir.policies import NAMED
from weir_bench.figure import FIGURES, QUICK, Row, Setting, Skipped, chosen, register
from weir_bench.figures import flat, prompts
from weir_bench.figures import kvpress as presses
from weir_bench.figures.decode import PLAIN
from weir_bench.figures.policies import comparable
from weir_bench.report import markdown
from weir_bench.run import measure
from weir_bench.timing import settled

SETTING = Setting(QUICK, policies=("snapkv", "weir"))
"""Policies of two kinds: one needs attention by token, and the other reads with log-weights."""


SLOW = ("slots", "policies", "recompute", "rows", "deterministic")


def row(ratio: float, target: float | None, least: bool = False) -> Row:
    return Row("this ÷ that", 1.0, 2.0, "ms", ratio, target, least)


def test_a_target_is_a_bound_from_the_side_it_says():
    assert row(0.9, 0.95).met
    assert not row(0.96, 0.95).met
    assert row(33, 32, least=True).met
    assert not row(31, 32, least=True).met
    assert row(1.0, None).met is None


def test_without_names_all_are_meant_that_need_not_be_asked_for():
    assert "flat" in FIGURES
    assert {name for name in FIGURES if FIGURES[name].asked} >= {"flat"}
    assert set(chosen([])) == {name for name in FIGURES if not FIGURES[name].asked}
    assert chosen([])[:2] == ["decode", "around"]
    assert chosen(["flat", "decode"]) == ["flat", "decode"]
    with pytest.raises(WeirError, match=r"unknown figure 'speed'\. Use one of decode, "):
        chosen(["speed"])


@pytest.fixture
def made(monkeypatch):
    """Three registered figures that yield fixed rows instead of measuring."""
    monkeypatch.setattr("weir_bench.run.FIGURES", figures := {})
    monkeypatch.setattr("weir_bench.figure.FIGURES", figures)

    @register(figures, "both")
    def both(setting):
        yield row(0.5, 1.0)
        yield row(2.0 if setting.dtype == torch.bfloat16 else 0.7, 1.0)

    @register(figures, "one", by_dtype=False)
    def one(setting):
        yield row(9.0, 8.0, least=True)

    @register(figures, "none")
    def none(setting):
        raise Skipped("there is no peer")
        yield

    return figures


def test_rows_are_kept_as_they_come_and_what_is_left_out_is_told(made):
    lengths = []
    dtypes = [torch.float32, torch.bfloat16]
    bench = measure(SETTING, [], dtypes, on_row=lambda so_far: lengths.append(len(so_far.rows)))
    assert lengths == [1, 2, 3, 4, 5, 5, 5]
    assert [(name, dtype, row.met) for name, dtype, row in bench.rows] == [
        ("both", "float32", True),
        ("both", "float32", True),
        ("both", "bfloat16", True),
        ("both", "bfloat16", False),
        ("one", "", True),
    ]
    assert bench.skipped == [
        ("none", "float32", "there is no peer"),
        ("none", "bfloat16", "there is no peer"),
    ]
    facts = json.loads(json.dumps(bench.as_json()))
    assert [each["met"] for each in facts["rows"]] == [True, True, True, False, True]
    assert facts["machine"]["threads"] == torch.get_num_threads()


@pytest.mark.slow
def test_the_table_shows_what_missed(made):
    bench = measure(SETTING, [], [torch.float32, torch.bfloat16])
    lines = markdown(bench).splitlines()
    assert len([line for line in lines if line.startswith("| this ÷ that")]) == 5
    assert [line for line in lines if "**2**" in line and "≤ 1" in line]
    assert [line for line in lines if line.startswith("- Not measured: none float32: there is no")]


def test_every_policy_of_a_budget_is_compared_but_the_oracle_and_what_it_stands_beside():
    assert {PLAIN, "recompute", "kvzip"}.isdisjoint(comparable())
    without = {"dense", "pyramid", "pinned", "quantized", "recompute", "kvzip", PLAIN}
    assert {name for name, it in NAMED.items() if it.make.__module__.startswith("weir.")} == {
        *comparable(),
        *without,
    }


@pytest.mark.parametrize(
    "name",
    [
        "decode",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
@pytest.mark.slow
def test_every_figure_runs(name):
    with settled():  # as in a run: each turn begins with a collection of garbage
        rows = list(FIGURES[name].measure(SETTING))
    assert rows
    for each in rows:
        assert each.ours > 0
        assert each.peer > 0
        assert each.ratio == pytest.approx(
            each.peer / each.ours if each.least else each.ours / each.peer
        )


def test_without_torchao_weights_of_few_bits_are_left_out_and_with_it_measured():
    measured = FIGURES["weights"].measure(SETTING)
    if find_spec("torchao") is None:
        with pytest.raises(Skipped, match="torchao"):
            list(measured)
    else:
        rows = list(measured)
        assert len(rows) == 4 and {row.unit for row in rows} == {"ms"}
        assert [row.target for row in rows] == [None, None, 0.35, None]


@pytest.mark.skipif(not prompts.STATUS.exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.slow
def test_the_peak_of_a_prompt_fed_whole_is_higher():
    (each,) = FIGURES["prefill"].measure(SETTING)
    assert each.ours < each.peer
    # Only the memory for reading the prompt counts. The weights would be many times as much.
    assert each.ours * 1e6 < 40e6


@pytest.mark.slow
def test_without_its_environment_kvpress_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr("weir_bench.peers.process.HOME", tmp_path)
    with pytest.raises(Skipped, match="kvpress is not installed; `make peers`"):
        list(FIGURES["kvpress"].measure(SETTING))


def test_compression_is_shared_out_among_the_tokens_between():
    steps = [1.0, 1.0, 5.0, 1.0, 2.0, 7.0]
    assert presses._per_token(steps, 3) == pytest.approx(1.0 + (6.0 - 1.0) / 3)


def test_a_long_stream_is_looked_at_by_the_decade():
    assert flat._marks(1_000_000) == [
        *(10_000, 20_000, 50_000, 100_000, 200_000, 500_000),
        1_000_000,
    ]
    assert flat._marks(30_000) == [10_000, 20_000, 30_000]
