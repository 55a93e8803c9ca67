"""Records as tables: where each figure is, and which are marked as best."""

from __future__ import annotations

from typing import Any

from weir.evals.results.summary import Column, Estimate, by_distance, overviews, short_heads


def record(policy: str, value: float | None, **more: Any) -> dict[str, Any]:
    return {
        "cell": 0, "status": "done", "model": "m", "protocol": None, "task": "ppl",
        "setting": "ppl(tokens=9)",
        "policy": policy, "seed": 0, "value": value, "metric": "ppl", "better": "lower",
        "kv_bytes": 2_000_000, "result": {}, **more,
    }  # fmt: skip


def column(head: str, values: tuple[float | None, ...], *how: Any, **more: Any) -> Column:
    """A column of figures, each of them measured once."""
    figures = tuple(None if value is None else Estimate(value, 1, 1) for value in values)
    return Column(head, figures, *how, **more)


def test_best_and_second_best_are_told_by_what_is_written_and_the_worst_never_is():
    lower = column("ppl", (9.0, 3.141, 7.0, None, 3.1415), "lower", digits=2)
    assert lower.places() == {1: 1, 4: 1, 2: 2}
    assert column("x", (0.5, 0.9, 0.7), "higher").places() == {1: 1, 2: 2}
    assert column("x", (0.0, 1.0, 1.0), "higher").places() == {1: 1, 2: 1}
    assert column("x", (1.0, 1.0), "higher").places() == {}
    assert column("x", (2.0, 1.0), None).places() == {}


def test_figures_are_written_as_wide_as_they_need():
    assert column("x", (1234.567,), None, digits=1).written(0, group=",") == "1,234.6"
    assert column("x", (2_345_678.0,), None, megabytes=True).written(0) == "2.35"
    assert column("x", (None,), None).written(0) == "–"


def test_an_overview_has_a_row_per_policy_and_a_column_per_setting():
    records = [
        record("dense", 10.0, kv_bytes=9_000_000),
        record("h2o(8)", 20.0),
        record("h2o(8)", 40.0, seed=1),
        record(
            "dense",
            0.5,
            setting="efficiency(n=1)",
            better="higher",
            kv_bytes=None,
            metric="decode_over_exact",
        ),
        record(
            "h2o(8)",
            None,
            setting="efficiency(n=1)",
            better="higher",
            kv_bytes=3_000_000,
            metric="decode_over_exact",
        ),
        record("buzz", 1.0, status="failed"),
        record("dense", 11.0, model="other"),
    ]
    table, other = overviews(records)
    assert (table.title, table.rows) == ("m", ("dense", "h2o(8)"))
    assert [column.head for column in table.columns] == [
        "ppl",
        "efficiency: decode over exact",
        "cache, MB",
    ]
    assert [column.values for column in table.columns] == [
        (10.0, 30.0), (0.5, None), (9_000_000, 3_000_000),
    ]  # fmt: skip
    assert [column.better for column in table.columns] == ["lower", "higher", None]
    assert other.title == "other"
    assert overviews([record("a", 1.0, protocol="buzz")])[0].title == "m, protocol buzz"


def test_heads_say_what_tells_settings_of_one_task_apart():
    settings = ["ppl(tokens=9, text=none)", "ppl(tokens=5, text=none)", "recall(n=3)"]
    assert list(short_heads(settings).values()) == ["ppl(tokens=9)", "ppl(tokens=5)", "recall"]


def test_files_stand_in_heads_without_their_folders():
    def short(*settings: str) -> list[str]:
        return list(short_heads(list(settings)).values())

    assert short('ppl(tokens=9, text="/a/b/c.txt")', 'ppl(tokens=9, text="d.txt")') == [
        'ppl(text="c.txt")',
        'ppl(text="d.txt")',
    ]
    assert short('docqa(file="hub:a/b:test")', 'docqa(file="c/d.gz")') == [
        'docqa(file="hub:a/b:test")',
        'docqa(file="d.gz")',
    ]
    # Folders stay in the heads if they tell two files apart.
    both = ['ppl(text="a/c.txt")', 'ppl(text="b/c.txt")']
    assert short(*both) == both
    asked = ['needle(answer="a/b")', 'needle(answer="c/b")']
    assert short(*asked) == asked


def test_answers_by_distance_are_counted_over_the_seeds():
    def rows(near: int, far: int) -> dict[str, Any]:
        hits = {20: near, 1000: far}
        return {"by_distance": [{"distance": d, "right": n, "asked": 4} for d, n in hits.items()]}

    records = [
        record("a", 0.5, setting="recall", result=rows(4, 0)),
        record("a", 0.5, setting="recall", seed=1, result=rows(1, 2)),
        record("b", 0.5, setting="recall", result=rows(2, 1)),
        record("b", 0.5),
    ]
    (table,) = by_distance(records)
    assert table.rows == ("a", "b")
    assert [(c.head, c.values) for c in table.columns] == [
        ("20", (5 / 8, 0.5)),
        ("1,000", (2 / 8, 0.25)),
    ]
