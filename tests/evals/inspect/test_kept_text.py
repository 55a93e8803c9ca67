"""The text a policy keeps, as HTML: nothing of it is markup, and every token says who holds it."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch

import weir
from weir.cache import Holding
from weir.evals.inspect.kept import STYLE, color_of, fragment_of, label_of, runs_of
from weir.stream import describe_tokens


@pytest.fixture(scope="module")
def tokenizer():
    return weir.load("nano")[1]


class Page(HTMLParser):
    """What a browser makes of a fragment: tags, attributes, and the text of each moment."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.moments: list[str] = []
        self.feed(fragment)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)
        if tag == "p":
            self.moments.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "p" in self.open and "i" not in self.open:
            self.moments[-1] += data


def holding_of(seen, slots, pools=("sink", "heavy", "new"), pairs=4):
    """A holding from (layer, head, token, pool, a, b), one for each slot."""
    *where, a, b = (torch.tensor(column) for column in zip(*slots, strict=True))
    return Holding(seen, pairs, pools, *where, a=a.float(), b=b.float())


EVIL = """<script>alert('x')</script> & "quotes" </p></details><img src=x onerror=y> &lt;b&gt;"""


@pytest.mark.parametrize("step", [1, 2, 1000])
def test_no_text_becomes_markup(tokenizer, step):
    ids = torch.tensor(tokenizer(EVIL)["input_ids"])
    # All tokens in one run, each in one of its own, and all but the first gone.
    held = [(0, 0, n, 1, 0.0, 0.0) for n in range(0, len(ids), step)]
    page = Page(fragment_of(tokenizer, ids, [holding_of(len(ids), held)]))
    assert {tag for tag, _ in page.tags} <= set("div ul li span details summary p i".split())
    allowed = {"class", "style", "tabindex", "data-held", "dir", "open"}
    assert {name for _, attributes in page.tags for name in attributes} <= allowed
    assert page.moments == [EVIL]


def test_a_pool_of_any_name_is_escaped(tokenizer):
    ids = torch.tensor(tokenizer("so it goes")["input_ids"])
    pools = ('<b>"pool"', "new")
    held = [(0, 0, n, 0, 0.0, 0.0) for n in range(len(ids))]
    page = Page(fragment_of(tokenizer, ids, [holding_of(len(ids), held, pools)]))
    assert "b" not in {tag for tag, _ in page.tags}
    labels = [attributes["data-held"] for _, attributes in page.tags if "data-held" in attributes]
    assert labels and all('<b>"pool" 1' in label for label in labels)


def test_all_characters_of_the_text_are_there_however_many_tokens_they_take(tokenizer):
    text = "Schérer said: 日本語 😀 – so it goes.\n\nAnd then\tthe end"
    ids = torch.tensor(tokenizer(text)["input_ids"])
    said = describe_tokens(tokenizer, ids.tolist())
    assert "".join(piece for piece, special in said if not special) == text
    assert said[0] == ("<|start|>", True)
    page = Page(fragment_of(tokenizer, ids, [holding_of(len(ids), [(0, 0, 0, 0, 0.0, 0.0)])]))
    assert page.moments == [text]


def test_only_what_was_read_is_shown_at_each_moment(tokenizer):
    ids = torch.tensor(tokenizer("All happy families are alike")["input_ids"])
    slots = [(0, 0, 0, 0, 0.0, 0.0)]
    moments = [holding_of(3, slots), holding_of(len(ids), slots)]
    page = Page(fragment_of(tokenizer, ids, moments))
    assert page.moments == [tokenizer.decode(ids[1:3]), "All happy families are alike"]
    assert [attributes for tag, attributes in page.tags if tag == "details"] == [{}, {"open": None}]


def test_neighbors_of_which_the_same_is_to_be_said_are_one_run():
    said = [(letter, False) for letter in "abcdef"]
    two = 0.6931471805599453
    slots = [
        *((layer, head, n, 0, 0.0, 0.0) for n in (0, 1) for layer in range(2) for head in range(2)),
        (0, 1, 4, 1, two, 2 * two),
        (1, 0, 4, 1, two, 2 * two),
        (1, 1, 4, 2, two, 2 * two),
    ]
    holding = holding_of(6, slots)
    runs = list(runs_of(said, holding))
    assert [(run.first, run.last, run.text) for run in runs] == [
        (0, 1, "ab"),
        (2, 3, "cd"),
        (4, 4, "e"),
        (5, 5, "f"),
    ]
    assert [label_of(run, holding) for run in runs] == [
        "tokens 0 to 1: each held by 4 of 4 (layer, head)\nsink 4",
        "tokens 2 to 3: gone",
        "token 4: held by 3 of 4 (layer, head)\nheavy 2, new 1\n"
        "a slot stands for 2 tokens in the numerator, 4 in the denominator",
        "token 5: gone",
    ]


def test_a_shade_is_never_the_only_sign(tokenizer):
    ids = torch.tensor(tokenizer("All happy families are alike")["input_ids"])
    slots = [
        *((layer, head, 1, 0, 0.0, 0.0) for layer in range(2) for head in range(2)),
        (0, 0, 2, 1, 0.0, 0.0),
    ]
    page = Page(fragment_of(tokenizer, ids, [holding_of(len(ids), slots)]))
    spans = [attributes for tag, attributes in page.tags if "data-held" in attributes]
    whole, part = (span["style"] for span in spans if "style" in span)
    # Four of four: a strong shade and a thick line; one of four: weak and thin, of another style.
    assert "/ 0.45)" in whole and "border-bottom:4px solid" in whole
    assert "/ 0.11)" in part and "border-bottom:2px dotted" in part
    gone = [span for span in spans if "style" not in span]
    assert gone and all(span["class"] == "gone" for span in gone)
    # Reached by the keyboard and by a tap, and said without scripts.
    assert all(span["tabindex"] == "0" for span in spans)
    assert "[data-held]:focus::after" in STYLE and "[data-held]:hover::after" in STYLE


def test_every_pool_has_a_color_of_its_own_and_what_waits_is_gray():
    pools = ("sink", "recent", "heavy", "balance", "new")
    colors = [color_of(pools, pool) for pool in pools]
    assert len(set(colors)) == 5 and colors[-1] == "#77828c"
