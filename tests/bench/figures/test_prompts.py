"""The time to read prompts under each policy, and the estimate for a prompt that is far longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weir_bench.figure import QUICK, Setting
from weir_bench.figures import prompts as figure
from weir_bench.figures.prompts import _beyond, _beyond_squared, prompts


@pytest.mark.slow
def test_every_policy_stands_beside_exact_attention_at_each_length(monkeypatch):
    monkeypatch.setattr(figure, "budgeted", lambda: ["window", "h2o"])
    sizes = replace(QUICK, layers=1, slots=32, prompts=(32, 64), far=256)
    rows = list(prompts(Setting(sizes)))
    lengths = ["32"] * 2 + ["64"] * 2 + ["256"] * 2
    assert [row.what.split()[2] for row in rows] == lengths
    assert ["window" in row.what for row in rows] == [True, False] * 3
    assert ["extrapolated" in row.note for row in rows] == [False] * 4 + [True] * 2
    assert all(row.ratio == pytest.approx(row.ours / row.peer) for row in rows)


def test_what_is_worked_out_is_a_line_for_policies_and_a_parabola_for_exact_attention():
    tokens = (1024, 8192)
    line = [3 + 0.002 * n for n in tokens]
    assert _beyond(tokens, line, 32768) == pytest.approx(3 + 0.002 * 32768)
    parabola = [0.002 * n + 1e-6 * n**2 for n in tokens]
    assert _beyond_squared(tokens, parabola, 32768) == pytest.approx(
        0.002 * 32768 + 1e-6 * 32768**2
    )
    # If the longer prompt took less time per token, that is noise: its quadratic part is taken as
    # 0, and the estimate grows in proportion to the length.
    assert _beyond_squared((10, 20), [10.0, 18.0], 100) == pytest.approx(90.0)
