"""The demo: several policies read one book, taking turns; its page needs no other files."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from roundings import nll_off
from transformers import AutoTokenizer

import weir
from weir.evals import demo
from weir.evals.demo import POLICIES, TITLE, NamedNumber, ask_names, draw_names, held_by_part
from weir.evals.perplexity import read
from weir.evals.report import COLORS
from weir.loading.loader import ASSETS
from weir.stream.text import BOOK, read_text

SMALL = ("dense", "window(24)", "streaming_llm(24)", "streaming_llm(48)")
VOID = {"meta", "br", "wbr", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects a page's links and text, and checks that its elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.refers: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.count: dict[str, int] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
                self.refers.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


class Letters:
    """A tokenizer with only the method that answers need."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(chr(65 + token) for token in ids)


NAMES = (
    NamedNumber("Anna", "AB", said=(1, 2, 3, 0, 1, 4), asked=(1, 2, 3), answer=(0, 1)),
    NamedNumber("Boris", "<&", said=(5, 2, 3, 6, 7, 4), asked=(5, 2, 3), answer=(6, 7)),
)


@pytest.fixture(scope="module")
def result(llama) -> dict[str, Any]:
    """What the demo finds with a small random model in a window of 512 tokens."""
    text = torch.randint(0, 61, (1300,), generator=torch.Generator().manual_seed(0))
    story = demo.BookStory(Letters(), NAMES, text[:88])  # type: ignore[arg-type]
    return demo.read_book(llama, text, story, policies=SMALL, block=250)


@pytest.fixture
def page(result, tmp_path) -> str:
    demo.write_page(result, tmp_path / "report.html")
    return (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_every_policy_reads_the_same_tokens_as_if_it_were_alone(llama, result):
    text = torch.randint(0, 61, (1300,), generator=torch.Generator().manual_seed(0))
    assert (result["tokens"], result["block"], result["model_window"]) == (1300, 250, 512)
    assert [policy["policy"] for policy in result["policies"]] == list(SMALL)
    for policy, found in zip(SMALL, result["policies"], strict=True):
        alone = read(weir.Stream(llama, policy), text, block=250).as_json()
        for name in ("tokens", "ppl", "ppl_by_block", "kv_bytes", "bytes_by_block"):
            assert found[name] == pytest.approx(alone[name], rel=nll_off(llama, 50))
        assert found["tokens_per_s"] > 0


@pytest.mark.slow
def test_the_story_is_told_behind_the_book_and_asked_without_a_trace(llama, result):
    assert result["story"] == {
        "kind": "names", "asked": 2,
        "told_at": 1300, "said": 12, "away": 88, "names": [["Anna", "AB"], ["Boris", "<&"]]
    }  # fmt: skip
    text = torch.randint(0, 61, (1300,), generator=torch.Generator().manual_seed(0))
    for policy, found in zip(SMALL, result["policies"], strict=True):
        stream = weir.Stream(llama, policy)
        for piece in (text, [*NAMES[0].said, *NAMES[1].said], text[:88]):
            stream.feed(piece)
        assert found["held"] == held_by_part(stream, 240)
        assert found["answers"] == ask_names(stream, NAMES, Letters()) and stream.seen == 1400
        likeliest = int(stream.feed(NAMES[1].asked).argmax())
        assert found["answers"][1][0] == chr(65 + likeliest)
        right = [a == n.number for a, n in zip(found["answers"], NAMES, strict=True)]
        assert found["knows"] == sum(right)


def test_a_strip_says_how_much_of_each_part_is_left(llama):
    stream = weir.Stream(llama, "sink(4) | recent(20)", chunk=8)
    stream.feed(torch.randint(0, 61, (1, 100)))
    held = held_by_part(stream, 10)
    new = 100 - stream.slots().position[0, 0].clamp_min(0).max()  # token 99 is held
    assert new == 1 and held[0] == 0.4 and held[1:7] == [0.0] * 6 and held[8:] == [1.0, 1.0]
    # A token that is held by one KV head of two counts half.
    stream = weir.Stream(llama, "kcenter(24)", chunk=8)
    stream.feed(torch.randint(0, 61, (1, 100)))
    pairs = [it.pairs / stream.holding().pairs for it in stream.holding().tokens()]
    assert sum(held_by_part(stream, 100)) == pytest.approx(sum(pairs), abs=100 * 1e-5)


def test_names_are_what_nano_was_taught_and_nobody_has_two_numbers():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "nano")
    names = draw_names(tokenizer, 8)
    assert len({one.name for one in names}) == 8
    for one in names:
        assert tokenizer.decode(one.said).strip() == f"{one.name} has {one.number}."
        assert one.said == (*one.asked, *one.answer, one.said[-1])
    assert draw_names(tokenizer, 8) == names != draw_names(tokenizer, 8, seed=1)


def test_only_dense_grows(result):
    assert [policy["slots"] for policy in result["policies"]] == [None, 24, 24, 48]
    for policy in result["policies"]:
        held = policy["bytes_by_block"]
        assert (held[-1] > 2 * held[0]) if policy["slots"] is None else (len(set(held)) == 1)


def test_it_ends_early_with_what_all_policies_have_read(llama):
    text = torch.randint(0, 61, (1300,))
    found = demo.read_book(
        llama, text, policies=SMALL, block=250, on_step=lambda rs: rs[0].tokens >= 600
    )
    assert found["tokens"] == 600
    assert {policy["tokens"] for policy in found["policies"]} == {600}
    assert {len(policy["ppl_by_block"]) for policy in found["policies"]} == {3}


def test_the_page_needs_nothing_from_elsewhere(page):
    parsed = Page(page)
    assert parsed.open == []
    assert parsed.refers
    assert all(place.startswith("#") for place in parsed.refers)
    assert {place[1:] for place in parsed.refers} <= set(parsed.ids)
    assert not {"script", "link", "iframe", "img", "object"} & set(parsed.count)
    # Names of XML namespaces are the only addresses there are, and nobody fetches those.
    assert set(re.findall(r"\bhttps?://[^\s\"'<>)]*", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not re.search(r"@import|@font-face|url\((?!#)", page)


def test_no_two_elements_of_the_page_share_a_name(page):
    ids = Page(page).ids
    assert len(ids) == len(set(ids))


def test_the_page_shows_every_policy_with_its_figures(page, result):
    parsed = Page(page)
    words = [" ".join(word.split()) for word in parsed.words]
    assert parsed.count["svg"] == 3
    for policy in result["policies"]:
        # A name is in the legends of the plots, and in the tables, where names with a bracket are
        # split in two.
        assert words.count(policy["policy"]) == (
            3 + 2 * ("(" not in policy["policy"]) + (policy["policy"] == "dense")
        )  # the introduction names dense
        assert policy["policy"] in "".join(words[: words.index("All policies")])
        assert f"{policy['ppl']:,.1f}" in words
        assert f"{policy['ppl_by_block'][-2]:,.1f}" in words  # the last whole block
    for axis in ("perplexity", "cache, MB", "tokens read"):
        assert axis in words
    assert "512" in " ".join(words)


def drawn(page: str, plot: int) -> dict[str, list[tuple[float, float]]]:
    """The points of each line of a plot, by color, in the units of the picture."""
    svg = page.split("<svg")[plot + 1]
    lines = re.findall(
        r'<path d="(M [^"]*)"[^>]*style="fill: none; (?:stroke-dash[^;]*; )*stroke: (#\w+)', svg
    )
    found: dict[str, list[tuple[float, float]]] = {}
    for path, color in lines:
        points = [tuple(map(float, p.split())) for p in re.split(r"[ML]", path)[1:]]
        if len(points) > len(found.get(color, [])):
            found[color] = points  # the longest line; the others are in the legend
    return found


def test_the_lines_of_the_plots_go_where_the_figures_go(page, result):
    for plot, policies in ((0, result["policies"]), (1, result["policies"][1:])):
        for policy in policies:
            color = COLORS[result["policies"].index(policy)]
            points = drawn(page, plot)[color]
            # The last block has fewer tokens than the others, and is not drawn.
            assert len(points) == len(policy["ppl_by_block"]) - 1 == 5
            # A higher perplexity is further up, which is a smaller coordinate in a picture.
            order = sorted(range(5), key=lambda n: policy["ppl_by_block"][n])
            assert order == sorted(range(5), key=lambda n, p=points: -p[n][1])
    memory = drawn(page, 2)
    rises = {color: points[0][1] - points[-1][1] for color, points in memory.items()}
    assert rises[COLORS[0]] > 20
    assert [rises[color] for color in COLORS[1:4]] == [0, 0, 0]


def test_of_lines_on_top_of_each_other_all_are_seen(page):
    memory = page.split("<svg")[3]
    lines = re.findall(r'style="fill: none; ((?:stroke-dash[^;]*; )*)stroke: (#\w+)', memory)
    looks = {color: dashes for dashes, color in lines}
    dashed = [looks[color] for color in COLORS[2:4]]
    assert looks[COLORS[1]] == "" != dashed[0] != dashed[1] != ""


def test_the_page_is_not_wider_than_a_phone(page):
    assert not re.search(r"min-width:\s*\d", page.replace("(max-width", ""))
    for svg in page.split("<svg")[1:]:
        width = re.match(r'[^>]* width="([\d.]+)pt"', svg)
        assert width is not None and float(width.group(1)) <= 380  # in points, if letters have 10
        ticks = re.findall(r">([\d,.]+)</text>", svg)
        assert len(ticks) >= 7  # of both axes


def test_a_right_answer_has_a_tick_and_a_strip_says_in_words_what_it_shows(result, tmp_path):
    told = {
        **result,
        "policies": [
            {**p, "answers": ["AB", "XY and so on, whatever"], "right": [True, False]}
            for p in result["policies"]
        ],
    }
    demo.write_page(told, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count("<td><b>AB&nbsp;✓</b></td>") == len(SMALL)
    assert page.count("<td>XY and so on, whatever</td>") == len(SMALL)  # in full
    assert 'aria-label="holds 100.0% of 1,400 tokens"' in page
    assert page.count('role="img"') == len(SMALL)


def test_a_page_of_which_nobody_was_asked_tells_no_story(result, tmp_path):
    demo.write_page({**result, "story": None}, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "still knows" not in page and "Who still" not in page and "names" not in page


def test_names_are_shown_as_they_are(result, tmp_path):
    odd = {**result, "book": "<b>R&D</b>"}
    odd["policies"] = [{**policy, "policy": "<i>&"} for policy in result["policies"]]
    demo.write_page(odd, tmp_path / "report.html")
    parsed = Page((tmp_path / "report.html").read_text("utf-8"))
    assert "b" not in parsed.count
    assert "<b>R&D</b>" in parsed.words
    assert "<i>&" in "".join(parsed.words)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_demo_that_was_broken_off_has_a_page_too(result, tmp_path, blocks):
    short = {**result, "tokens": 200 * blocks}
    short["policies"] = [
        {**p, "ppl_by_block": p["ppl_by_block"][:blocks], "bytes_by_block": [1000] * blocks}
        for p in result["policies"]
    ]
    demo.write_page(short, tmp_path / "report.html")
    assert Page((tmp_path / "report.html").read_text("utf-8")).count["svg"] == 3


def test_the_result_survives_json(result, tmp_path):
    demo.write_page(json.loads(json.dumps(result)), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 20_000


# --- what is packaged


def test_the_packaged_book_is_the_story_from_its_first_sentence():
    text = read_text(BOOK)
    assert text.startswith(f"{TITLE.upper()}\nBy Leo Tolstoy\nBOOK ONE: 1805\nCHAPTER I\n")
    assert '"Well, Prince, so Genoa and Lucca' in text[:100]
    assert len(demo.load_book(AutoTokenizer.from_pretrained(ASSETS / "nano"), 20_000)) == 20_000
    assert Path(BOOK).stat().st_size < 100_000


def test_the_demo_compares_what_fails_with_what_does_not():
    assert {"dense", "window(budget=90)", "streaming_llm(budget=88)"} <= set(POLICIES)
    for policy in set(POLICIES) - {demo.DEFAULT}:
        weir.policy(policy)
    assert len(POLICIES) <= len(COLORS)  # no two lines of a picture look alike


def test_the_policies_of_fixed_size_have_the_same_bytes():
    model, _ = weir.load("nano", device="cpu")
    sizes = []
    for policy in POLICIES[1:]:
        stream = demo.make_stream(model, policy)
        stream.feed([1, 2])
        sizes.append(stream.report()["bytes"])
    assert max(sizes) < 1.005 * min(sizes)


def test_the_default_of_the_demo_is_what_a_stream_takes_by_itself():
    model, _ = weir.load("nano", device="cpu")
    assert demo.make_stream(model, demo.DEFAULT).policy == weir.Stream(model).policy


def test_the_best_of_a_size_is_read_off_the_figures(result):
    told = {**result, "policies": [{**policy} for policy in result["policies"]]}
    dense, first, second, third = told["policies"]
    dense |= {"ppl": 1.0, "knows": 2}  # it grows, so it is not compared
    first |= {"ppl": 40.04, "knows": 0, "kv_bytes": 650_100}
    second |= {"ppl": 50.0, "knows": 1, "kv_bytes": 649_900}
    third |= {"ppl": 60.0, "knows": 1, "kv_bytes": 649_800}
    assert demo.best_of_a_size(told) == (
        "Of the caches of fixed size (650 kB), window(24) has the lowest perplexity, 40.0, and "
        "streaming_llm(24) and streaming_llm(48) have the most right answers, 1 of 2."
    )
    first["knows"] = 2
    assert "and window(24) has the most right answers, 2 of 2" in (demo.best_of_a_size(told) or "")
    assert demo.best_of_a_size({**told, "story": None}) is None


@pytest.mark.slow
def test_at_equal_bytes_the_default_reads_best_and_knows_every_name():
    """What `weir demo` shows; README and the quick start have these figures."""
    model, tokenizer = weir.load("nano", device="cpu")
    ids, story = demo.load_book_and_story(tokenizer, 10_000)
    found = demo.read_book(model, ids, story, policies=POLICIES[1:])["policies"]
    *others, default = found
    assert default["knows"] == 8 and default["ppl"] < min(other["ppl"] for other in others)
    assert max(other["knows"] for other in others) < 8
