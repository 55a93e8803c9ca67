"""Differences of two policies, from pairs of blocks of a text, of books, answers or seeds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from weir.evals.results import overviews
from weir.evals.results.report import as_markdown
from weir.evals.results.summary import Estimate, estimate_of, paired
from weir.evals.scores import paired_shares

T_OF_9 = 2.2621571628540993
"""Student's t with 9 degrees of freedom that leaves 2.5 % on either side, from a table."""
T_OF_2 = 4.302652729749464


def record(policy: str, budget: int | None, value: float, seed: int = 0, **more: Any):
    return {
        "cell": 0, "status": "done", "model": "m", "protocol": None, "task": "ppl",
        "setting": "ppl(tokens=1050)", "policy": policy, "budget": budget, "seed": seed,
        "chunk": 64, "positions": "rolling", "weir": "0.1.0", "value": value, "metric": "ppl",
        "better": "lower", "kv_bytes": 2_000_000, "result": {}, **more,
    }  # fmt: skip


def read(policy: str, budget: int | None, losses: np.ndarray, seed: int = 0, **more: Any):
    """A record of a text in ten whole blocks of 100 tokens, and a last block of 50."""
    blocks = [*map(math.exp, losses), 1e6]
    result = {"ppl_by_block": blocks, "block": 100, "tokens": 1050}
    return record(policy, budget, math.exp(losses.mean()), seed, result=result, **more)


def asked(policy: str, budget: int, marks: str, seed: int = 0):
    right, n = marks.count("1"), len(marks)
    return record(
        policy, budget, right / n, seed, setting="facts", task="facts", metric="accuracy",
        better="higher", result={"right": right, "asked": n, "marks": marks},
    )  # fmt: skip


@pytest.fixture
def losses():
    """Losses of ten blocks under two policies. Blocks differ far more than the policies do."""
    rng = np.random.default_rng(0)
    text = rng.normal(3.0, 0.5, 10)
    return text, text - 0.05 + rng.normal(0, 0.02, 10)


def test_a_perplexity_of_one_seed_has_the_interval_of_its_whole_blocks(losses):
    text, _ = losses
    found = estimate_of([read("a", 64, text)], "value")
    reach = T_OF_9 * text.std(ddof=1) / math.sqrt(10)
    assert (found.n, found.seeds, found.sd) == (10, 1, None)
    assert found.mean == pytest.approx(math.exp(text.mean()), rel=1e-12)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx(
        (text.mean() - reach, text.mean() + reach), rel=1e-9
    )
    infinite = read("a", 64, text)
    infinite["result"]["ppl_by_block"][3] = None
    assert estimate_of([infinite], "value") == Estimate(infinite["value"], 1, 1)


def test_policies_are_paired_block_by_block(losses):
    text, other = losses
    (table,) = paired(
        [read("streaming_llm(budget=64)", 64, text), read("h2o(budget=64)", 64, other)]
    )
    assert (table.title, table.rows) == ("m: compared with streaming_llm", ("h2o(budget=64)",))
    written = paired([read("streaming_llm(64)", 64, text), read("h2o(budget=64)", 64, other)])
    assert written[0].rows == table.rows and written[0].columns == table.columns
    (column,) = table.columns
    (figure,) = column.figures
    each = other - text
    reach = T_OF_9 * each.std(ddof=1) / math.sqrt(10)
    assert column.head == "ppl, ratio" and column.better is None and figure.n == 10
    assert math.log(figure.mean) == pytest.approx(each.mean(), rel=1e-9)
    assert (math.log(figure.low), math.log(figure.high)) == pytest.approx(
        (each.mean() - reach, each.mean() + reach), rel=1e-9
    )
    # Pairs show that the two policies differ, which their separate intervals do not show.
    assert figure.high < 1
    mine, theirs = (
        overviews([read("streaming_llm(budget=64)", 64, text), read("h2o(budget=64)", 64, other)])[
            0
        ]
        .columns[0]
        .figures
    )
    assert mine.low < theirs.mean < mine.high
    assert "n 10</small>" in as_markdown(table)


def test_draws_of_a_policy_are_averaged_before_blocks_are_paired(losses):
    text, other = losses
    records = [read("streaming_llm(budget=64)", 64, text)]
    records += [
        read("b(budget=64)", 64, other + shift, seed) for seed, shift in ((0, 0.1), (1, -0.1))
    ]
    (figure,) = paired(records)[0].columns[0].figures
    assert figure.n == 10
    assert math.log(figure.mean) == pytest.approx((other - text).mean(), rel=1e-9)


def test_a_policy_is_put_beside_the_reference_of_its_size_or_the_only_one(losses):
    text, other = losses
    records = [
        read("streaming_llm(budget=64)", 64, text),
        read("streaming_llm(budget=128)", 128, text - 1),
        read("h2o(budget=128)", 128, other - 1),
        read("dense", None, other),
        read("h2o(budget=9)", 9, other, chunk=1),
    ]
    (table,) = paired(records)
    assert table.rows == ("h2o(budget=128)",)
    assert math.log(table.columns[0].figures[0].mean) == pytest.approx((other - text).mean())
    (table,) = paired([records[0], *records[2:]])
    assert table.rows == ("h2o(budget=128)", "dense")  # the last record has another chunk
    sizes = [
        read("streaming_llm(budget=64)", 64, text, memory=10**6),
        read("streaming_llm(budget=70)", 70, text - 1, memory=10**6, equal="kv"),
        read("h2o(budget=7)", 7, other, memory=10**6),
    ]
    (table,) = paired(sizes)
    assert math.log(table.columns[0].figures[0].mean) == pytest.approx((other - text).mean())
    assert paired([records[2], records[3]]) == []


def test_books_are_units_where_there_are_several(losses):
    text, other = losses
    books = np.array([0.01, -0.2, -0.02])
    records = []
    for policy, each, by_book in (("streaming_llm", text, 0 * books), ("h2o", other, books)):
        one = read(f"{policy}(budget=64)", 64, each)
        one["result"]["by_book"] = [{"ppl": math.exp(3 + x), "tokens": 350} for x in by_book]
        records.append(one)
    (table,) = paired(records)
    assert [column.head for column in table.columns] == ["ppl, ratio", "ppl by books, ratio"]
    (figure,) = table.columns[1].figures
    reach = T_OF_2 * books.std(ddof=1) / math.sqrt(3)
    assert figure.n == 3 and math.log(figure.mean) == pytest.approx(books.mean())
    assert math.log(figure.high) == pytest.approx(books.mean() + reach)
    # Texts of several tasks count as books too.
    two = [
        {**one, "setting": f"ppl(text={name})", "result": {**one["result"], "by_book": [book]}}
        for one in records
        for name, book in zip("ab", one["result"]["by_book"], strict=False)
    ]
    (figure,) = paired(two)[0].columns[-1].figures
    assert figure.n == 2 and math.log(figure.mean) == pytest.approx(books[:2].mean())


def test_answers_are_paired_question_by_question():
    records = [
        asked("streaming_llm(budget=64)", 64, "1100" * 10),
        asked("h2o(budget=64)", 64, "1110" * 10),
    ]
    (figure,) = paired(records)[0].columns[0].figures
    assert figure.n == 40 and figure.mean == pytest.approx(0.25)
    assert 0 < figure.low < 0.25 < figure.high < 0.5
    swapped = paired_shares([True, False] * 3, [True] * 6)
    middle, low, high = paired_shares([True] * 6, [True, False] * 3)
    assert swapped == pytest.approx((-middle, -high, -low))
    # If all answers agree, the interval is still not empty, and it is wider with fewer answers.
    few, many = (paired_shares([True] * n, [True] * n) for n in (10, 100))
    assert few[0] == many[0] == 0 and few[2] > many[2] > 0 > many[1] > few[1]


def test_the_interval_of_pairs_of_answers_is_that_of_newcombe():
    # Newcombe 1998, paired data, method 10: 36 right for both, 12 for one, 2 for the other.
    pairs = [(True, True)] * 36 + [(True, False)] * 12 + [(False, True)] * 2
    first, second = zip(*pairs, strict=True)
    assert paired_shares(first, second) == pytest.approx((0.2, 0.0569, 0.3404), abs=6e-5)


def test_the_interval_of_pairs_covers_the_true_difference_as_often_as_it_says():
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(1000):
        hard = rng.random(60)  # the same questions for both
        first, second = hard < 0.7, (hard < 0.6) ^ (rng.random(60) < 0.05)
        truth = 0.7 - (0.6 * 0.95 + 0.4 * 0.05)
        _, low, high = paired_shares(first.tolist(), second.tolist())
        inside += low <= truth <= high
    assert 925 <= inside <= 985


def test_other_figures_are_paired_by_seeds():
    records = [
        record(f"{policy}(budget=64)", 64, value, seed, metric="error", setting="attention-error")
        for policy, values in (("streaming_llm", (0.2, 0.4, 0.8)), ("h2o", (0.1, 0.2, 0.4)))
        for seed, value in enumerate(values)
    ]
    (figure,) = paired(records)[0].columns[0].figures
    assert (figure.n, figure.mean) == (3, pytest.approx(0.5))
    assert (figure.low, figure.high) == pytest.approx((0.5, 0.5))
