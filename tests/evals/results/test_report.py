"""Reports: one page with everything inside, Markdown beside it, and what stands on both."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from weir.errors import WeirError
from weir.evals.results.file import ResultsFile
from weir.evals.results.report import family, pareto_front, write_report


def record(number: int, policy: str, value: float, nbytes: int, **more: Any) -> dict[str, Any]:
    return {
        "cell": number, "status": "done", "model": "m", "protocol": None, "task": "ppl",
        "setting": "ppl(tokens=2000)", "policy": policy, "budget": None, "seed": 0,
        "weir": "0.1.0", "metric": "ppl", "value": value, "better": "lower", "kv_bytes": nbytes,
        "result": {"ppl_by_block": [value, value + 1], "block": 1000, "tokens": 2000}, **more,
    }  # fmt: skip


CELLS = [
    {"length": length, "depth": depth, "accuracy": depth, "asked": 4}
    for length in (100, 200)
    for depth in (0.0, 0.5, 1.0)
]
RECORDS = [
    record(0, "dense", 100.0, 90_000_000),
    record(1, "h2o(budget=64)", 42.0, 1_000_000),
    record(2, "h2o(budget=128)", 40.0, 2_000_000),
    record(3, "sink(4) | recent(60)", 41.0, 900_000),
    record(
        4, "h2o(budget=64)", 0.5, 1_000_000, setting="needle(longest=200)", metric="accuracy",
        better="higher", result={"cells": CELLS[:-1]},  # and one that was never asked
    ),
    {
        "cell": 5, "status": "failed", "model": "m", "setting": "ppl(tokens=2000)", "seed": 0,
        "policy": "buzz(<9>)", "reason": "out of <memory>", "weir": "0.1.0",
    },
]  # fmt: skip


@pytest.fixture
def results(tmp_path) -> Path:
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, {"grid": "abc", "cells": [{}] * 7}) as file:
        for one in RECORDS:
            file.append(one)
    return path


class Tags(HTMLParser):
    """What is open, and what was fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "br", "img"):
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(results, tmp_path):
    pages = write_report(results, tmp_path / "out")
    assert [page.name for page in pages] == ["report.html", "report.md"]
    text = pages[0].read_text("utf-8")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert all(link.startswith(("#", "data:")) for link in tags.links)
    assert text.count("<svg") == 3  # quality against bytes, along the text, a heat map
    for words in (
        "Of 7 cells, 5 are done and 1 failed", "<b>40.0</b>", "<u>41.0</u>",
        "buzz(&lt;9&gt;), seed 0: out of &lt;memory&gt;", "sink(4) | recent(60)",
    ):  # fmt: skip
        assert words in text
    assert "<b>100.0" not in text


def test_the_markdown_has_the_same_tables_and_its_pictures_beside_it(results, tmp_path):
    _, page = write_report(results, tmp_path / "out")
    text = page.read_text("utf-8")
    assert "| `h2o(budget=128)` | **40.0** | – | 2.00 |" in text
    assert "| <code>sink(4) &#124; recent(60)</code> | <u>41.0</u> | – | 0.90 |" in text
    assert "- ppl(tokens=2000) of m under buzz(<9>), seed 0: out of <memory>" in text
    for name in re.findall(r"\]\((.*\.svg)\)", text):
        assert (tmp_path / "out" / name).read_text("utf-8").startswith("<svg")
    assert len(re.findall(r"\.svg\)", text)) == 3


def test_every_heading_is_another(results, tmp_path):
    _, page = write_report(results, tmp_path / "out")
    titles = re.findall(r"^## (.*)", page.read_text("utf-8"), re.MULTILINE)
    assert len(titles) == len(set(titles)) == 5
    assert titles[:3] == ["m", "m: ppl, ppl against bytes", "m: ppl, perplexity along the text"]


def test_the_page_says_what_its_column_of_bytes_is_and_counts_in_english(results, tmp_path):
    _, page = write_report(results, tmp_path / "out")
    assert "cache, MB is a policy's largest cache over all tasks." in page.read_text("utf-8")
    path = tmp_path / "one.jsonl"
    with ResultsFile(path, {"grid": "abc", "cells": [{}]}) as file:
        file.append(RECORDS[0])
    _, page = write_report(path, tmp_path / "one")
    assert "Of 1 cell, 1 is done and 0 failed." in page.read_text("utf-8")


@pytest.mark.slow
def test_the_same_results_give_the_same_page(results, tmp_path):
    once, again = (write_report(results, tmp_path / n)[0].read_text() for n in ("a", "b"))
    assert once == again


def test_the_front_is_what_nothing_beats_in_both():
    points = [(1.0, 9.0), (2.0, 5.0), (2.0, 4.0), (3.0, 6.0), (4.0, 4.0), (5.0, 1.0)]
    assert pareto_front(points, higher=False) == [0, 2, 5]
    assert pareto_front(points, higher=True) == [0]
    assert pareto_front([(x, -y) for x, y in points], higher=True) == [0, 2, 5]


def test_budgets_of_one_policy_are_a_family_and_a_pipe_is_its_own():
    assert family("h2o(budget=64)") == family("h2o(budget=128)") == "h2o"
    assert family("sink(4) | recent(60)") == "sink(4) | recent(60)"
    assert family("weir(slots=exact, budget=64)") == "weir(slots=exact)"
    assert family("quantized(h2o(budget=64), newest=4)") == "quantized(h2o, newest=4)"
    assert family("h2o(64)") == family("h2o(128)") == "h2o"


def test_results_of_nothing_are_refused(results, tmp_path):
    path = tmp_path / "none.jsonl"
    with ResultsFile(path, {"grid": "abc", "cells": [{}]}) as file:
        file.append(RECORDS[5] | {"cell": 0})
    with pytest.raises(WeirError, match="no finished cell yet"):
        write_report(path, tmp_path / "out")
    with pytest.raises(WeirError, match=r"the results file .* does not exist"):
        write_report(tmp_path / "missing.jsonl", tmp_path / "out")
    with pytest.raises(WeirError, match="cannot write to"):
        write_report(results, results / "below")
    with pytest.raises(WeirError, match=r"r\.jsonl is a file, and --out is the folder of a report"):
        write_report(results, results)


def test_a_figure_that_is_absurd_is_drawn_like_any_other(tmp_path):
    path = tmp_path / "r.jsonl"
    cells = [{**CELLS[0], "accuracy": 10**30}, *CELLS[1:]]
    with ResultsFile(path, {"grid": "abc", "cells": [{}]}) as file:
        file.append({**RECORDS[4], "cell": 0, "result": {"cells": cells}})
    assert "<svg" in write_report(path, tmp_path / "out")[0].read_text("utf-8")
