"""Reports: a page that needs no other files, Markdown with pictures, and the content of both."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weir.errors import WeirError
from weir.evals.report import COLORS, legend_columns, line_style, readable_range
from weir.evals.results.citing import Paper, cited, papers_in, papers_of
from weir.evals.results.file import ResultsFile
from weir.evals.results.report import (
    family,
    pareto_front,
    plot_along,
    plot_pareto,
    write_report,
)
from weir.policies import NAMED, Pipe, Policy, named
from weir.pools import Recent


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
    """Tracks the open elements of a page, and collects what it would fetch from elsewhere."""

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
    assert len(titles) == len(set(titles)) == 6
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
    assert family("quantized(h2o(64))") != family("quantized(snapkv(64))")
    assert family("sink(4)|recent(60)") != family("sink(4)|kcenter(60)")


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
    with pytest.raises(WeirError, match=r"r\.jsonl is a file, and --out must be a folder"):
        write_report(results, results)


def test_a_figure_that_is_absurd_is_drawn_like_any_other(tmp_path):
    path = tmp_path / "r.jsonl"
    cells = [{**CELLS[0], "accuracy": 10**30}, *CELLS[1:]]
    with ResultsFile(path, {"grid": "abc", "cells": [{}]}) as file:
        file.append({**RECORDS[4], "cell": 0, "result": {"cells": cells}})
    assert "<svg" in write_report(path, tmp_path / "out")[0].read_text("utf-8")


def test_the_report_says_when_a_figure_has_no_interval(results, tmp_path):
    """A perplexity of two blocks has none, although it was not measured once."""
    _, page = write_report(results, tmp_path / "out")
    words = "A figure without an interval was measured once, or in fewer than five blocks."
    assert words in page.read_text("utf-8")


def test_a_report_is_written_as_pdf_with_every_picture_beside_it(results, tmp_path):
    out = tmp_path / "out"
    (page,) = write_report(results, out, ["pdf"])
    assert page.name == "report.pdf"
    # A page of facts, one of failures, the tables and the three pictures.
    pages = len(re.findall(rb"/Type /Page\b", page.read_bytes()))
    assert pages >= 6
    pictures = sorted(path.name for path in out.glob("*-*.pdf"))
    assert pictures == ["along-0.pdf", "heat-1.pdf", "pareto-0.pdf"]
    for name in pictures:
        written = (out / name).read_bytes()
        assert written.startswith(b"%PDF") and b"/FontType 3" not in written
    again = write_report(results, tmp_path / "again", ["pdf"])[0]
    assert again.read_bytes() == page.read_bytes()


def test_rivals_fill_the_axes_where_the_baseline_is_far_away():
    rivals = [record(n, f"{name}(budget=64)", 40 + n, 10**6) for n, name in enumerate("abc")]
    far = [record(9, "dense", 4000.0, 90_000_000), *rivals]
    near = [record(9, "dense", 41.5, 1_000_000), *rivals]
    for records, left_out in ((far, True), (near, False)):
        picture = plot_pareto(records, "ppl")
        (axes,) = picture.figure.axes
        low, high = axes.get_ylim()
        assert 39 < low < 40 and 42 < high < 43
        assert ("dense, not drawn: 4,000 in 90.0 MB" in picture.svg) == left_out
        assert sum(len(line.get_xdata()) for line in axes.lines[1:]) == (3 if left_out else 4)


def test_a_spike_does_not_flatten_the_other_curves():
    blocks = {"window(budget=64)": [30, 900, 31.0], "h2o(budget=64)": [29.0, 28.0, 30.0]}
    records = [
        record(n, policy, 30.0, 10**6, result={"ppl_by_block": b, "block": 9, "tokens": 27})
        for n, (policy, b) in enumerate(blocks.items())
    ]
    picture = plot_along(records)
    low, high = picture.figure.axes[0].get_ylim()
    assert 27 < low < 28 and 31 < high < 32
    assert "window(budget=64), up to 900" in picture.svg
    assert readable_range([[1.0, 2.0], [1.5, None]]) is None


def test_ten_policies_have_ten_colors_and_more_have_other_markers():
    looks = [line_style(n) for n in range(90)]
    assert len({look["color"] for look in looks[:10]}) == 10
    assert len({(look["color"], look["marker"]) for look in looks}) == 90
    colors = [np.array([int(c[i : i + 2], 16) for i in (1, 3, 5)]) for c in COLORS]
    assert min(np.abs(a - b).max() for a, b in itertools.combinations(colors, 2)) > 50


def test_a_legend_has_as_many_columns_as_its_names_leave_room_for():
    assert legend_columns(["h2o", "dense", "weir", "tova"], 7.6, 8) == 3
    assert legend_columns(["sink(4) | recent(188):int8 | reservoir(64)", "a"], 7.6, 8) == 2
    assert legend_columns(["x" * 200, "b"], 7.6, 8) == 1


def test_the_papers_of_the_policies_that_ran_are_cited(results, tmp_path):
    page, bib = write_report(results, tmp_path / "out", ["md", "bib"])
    text = page.read_text("utf-8")
    wanted = (
        "- Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large "
        "Language Models, arXiv:2306.14048"
    )
    assert wanted in text.split("## Papers to cite")[1]
    assert "SnapKV" not in text
    entries = bib.read_text("utf-8")
    assert entries.count("@misc{") == 2 and entries.count("@software{weir,") == 1
    assert "author = {Zhang and others}" in entries and "eprint = {2306.14048}" in entries
    assert papers_of("dense") == papers_of("no_such_policy(4)") == []
    assert papers_in("Mine (A. Lee and B. Kim 2031, nothing more)") == []
    assert papers_in('Mine (Lee and Kim 2024, "A  Title\n of mine", arXiv:2401.00001), part 2') == [
        Paper("2401.00001", "Lee and Kim", "A Title of mine")
    ]
    numbers = {
        paper.number
        for name in ("subgen", "balancekv", "buzz", "tova")
        for paper in papers_of(f"{name}(budget=64)")
    }
    assert numbers >= {"2402.06082", "2502.07861", "2410.23079", "2401.06104"}
    assert [paper.authors for paper in papers_of("kvzip(25)")] == ["Kim et al."]
    # The pool names only the number of this paper. Its title is in the text of another pool.
    assert any(paper.title.startswith("Identify Critical") for paper in cited(["defensivekv(64)"]))


def test_the_paper_that_a_policy_was_registered_with_is_cited():
    @named('Lee and Kim 2024, "A Title of mine", arXiv:2401.00001')
    def of_lee(budget: int = 8) -> Policy:
        return Pipe((Recent(budget),))

    try:
        assert Paper("2401.00001", "Lee and Kim", "A Title of mine") in papers_of("of_lee(9)")
    finally:
        del NAMED["of_lee"]


def recalled(form: str, way: str, distance: int, right: int) -> dict[str, Any]:
    return {"form": form, "way": way, "distance": distance, "right": right, "asked": 4}


def test_answers_with_recall_are_drawn_over_the_distance(tmp_path):
    forms = [
        recalled(form, way, distance, 3 if way == "recall" else 0)
        for form in ("once", "changed", "never")
        for way in ("recall", "none")
        for distance in (1000, 10000)
    ]
    more = {"metric": "accuracy", "better": "higher"}
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, {"grid": "abc", "cells": [{}] * 2}) as file:
        file.append(record(0, "weir(64)", 0.5, 100, **more, result={"by_form": forms}))
        near = [recalled("once", "none", 200, 4)]
        file.append(record(1, "dense", 1.0, 900, **more, setting="b", result={"by_form": near}))
    page, markdown = write_report(path, tmp_path / "out")
    assert "m: facts from the archive" in page.read_text("utf-8")
    assert "(recalled-0.svg)" in markdown.read_text("utf-8")
    picture = (tmp_path / "out" / "recalled-0.svg").read_text("utf-8")
    for words in ("told once", "changed since", "weir(64), with recall", "dense, without"):
        assert words in picture
    assert "three facts" not in picture and "never" not in picture


@pytest.mark.parametrize("wrong", [{"distance": "far"}, {"way": 3}, {"right": None}, {"form": 1}])
def test_answers_that_are_no_answers_are_refused(tmp_path, wrong):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, {"grid": "abc", "cells": [{}]}) as file:
        row = {**recalled("once", "none", 200, 4), **wrong}
        file.append(record(0, "dense", 1.0, 900, result={"by_form": [row]}))
    with pytest.raises(WeirError, match=rf"the field 'result\.by_form\[0\]\.{next(iter(wrong))}'"):
        write_report(path, tmp_path / "out")
