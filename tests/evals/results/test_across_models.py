"""The table over several models: which records are compared, and that each model counts once."""

from __future__ import annotations

from typing import Any

import pytest

from weir.evals.results.summary import across_models, strip_budget


def record(
    model: str, policy: str, value: float | None, budget: int | None = 64, **more: Any
) -> Any:
    return {
        "cell": 0, "status": "done", "model": model, "protocol": None, "task": "ppl",
        "setting": "ppl(tokens=9)", "policy": policy, "budget": budget, "seed": 0, "chunk": 64,
        "positions": "rolling", "value": value, "metric": "ppl", "better": "lower",
        "kv_bytes": 2_000_000, "result": {}, **more,
    }  # fmt: skip


RECALL = {"setting": "recall(n=3)", "better": "higher"}
RECORDS = [
    record("a", "streaming_llm(budget=64)", 40.0),
    record("a", "h2o(budget=64)", 44.0),
    record("a", "streaming_llm(budget=96)", 20.0, 96),
    record("a", "h2o(budget=96)", 26.0, 96),
    record("b", "streaming_llm(budget=64)", 100.0),
    record("b", "h2o(budget=64)", 140.0),
    record("a", "streaming_llm(budget=64)", 0.0, **RECALL),
    record("a", "h2o(budget=64)", 0.2, **RECALL),
    record("a", "h2o(budget=64)", 0.4, seed=1, **RECALL),
    record("b", "streaming_llm(budget=64)", 0.5, **RECALL),
    record("b", "h2o(budget=64)", 0.1, **RECALL),
]


def test_a_model_counts_once_with_the_mean_of_its_sizes_and_seeds():
    (table,) = across_models(RECORDS)
    assert table.title == "mean of 2 models compared with streaming_llm"
    assert table.rows == ("streaming_llm", "h2o")
    ppl, recall = table.columns
    assert (ppl.head, ppl.better) == ("ppl, ratio", "lower")
    # The ratios of h2o are (1.1 + 1.3) / 2 for model a, and 1.4 for b.
    assert ppl.values == pytest.approx((1.0, 1.3))
    assert (recall.head, recall.better) == ("recall, difference", "higher")
    # The differences are 0.3 − 0 for model a, and 0.1 − 0.5 for b. A figure of 0 counts, too.
    assert recall.values == pytest.approx((0.0, -0.05))
    figure = ppl.figures[1]
    assert figure is not None and figure.n == 2
    # The two models are 0.2 apart, and Student's t with one degree of freedom is 12.706.
    assert figure.high == pytest.approx(1.3 + 12.7062 * 0.1, rel=1e-5)


def test_bytes_are_one_size_and_slots_another():
    of_bytes = [
        record(m, f"{name}(budget={n})", value, n, memory=900)
        for m in "ab"
        for name, n, value in (("streaming_llm", 70, 10.0), ("quantized(kcenter", 90, 8.0))
    ]
    for it in of_bytes:
        it["policy"] = it["policy"].replace(
            "quantized(kcenter(budget=90)", "quantized(kcenter(budget=90), newest=4)"
        )
    (table,) = across_models([*of_bytes, record("a", "h2o(budget=70)", 1.0, 70)])
    assert table.rows == ("streaming_llm", "quantized(kcenter, newest=4)")
    assert table.columns[0].values == pytest.approx((1.0, 0.8))


def test_what_some_model_lacks_has_no_figure_and_one_model_no_table():
    assert across_models([r for r in RECORDS if r["model"] == "a"]) == []
    lacking = [r for r in RECORDS if (r["model"], r["policy"][:3]) != ("b", "h2o")]
    (table,) = across_models(lacking)
    assert table.columns[0].values == (1.0, None)
    without = [r for r in RECORDS if not r["policy"].startswith("streaming_llm")]
    assert across_models(without) == []
    fixed = record("b", "recent(8)", 3.0, None)
    assert across_models([*RECORDS, fixed, record("b", "buzz(budget=64)", None)])[0].rows == (
        "streaming_llm",
        "h2o",
    )


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("weir(budget=128)", "weir"),
        ("weir(slots=exact, budget=128)", "weir(slots=exact)"),
        ("h2o(64)", "h2o"),
        ("quantized(h2o(64))", "quantized(h2o)"),
        ("pinned(quantized(h2o(64), newest=4))", "pinned(quantized(h2o, newest=4))"),
        ("pinned(sink(4)|recent(60))", "pinned(sink(4)|recent(60))"),
        ("snapkv(8, window=4)", "snapkv(window=4)"),
        ("sink(4) | recent(60)", "sink(4) | recent(60)"),
        ("no_such_policy(64)", "no_such_policy(64)"),
        ("snapkv(budget=8, window=4)", "snapkv(window=4)"),
        ("quantized(h2o(budget=20), slots=int8)", "quantized(h2o, slots=int8)"),
        (
            "quantized(uniform(sinks=2, budget=20), newest=4)",
            "quantized(uniform(sinks=2), newest=4)",
        ),
    ],
)
def test_a_policy_is_named_without_what_was_put_in(text, plain):
    assert strip_budget(text) == plain
