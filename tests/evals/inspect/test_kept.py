"""What a policy keeps at each moment: counted by hand, and compared with all slots."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch

import weir
from weir.cache import Holding
from weir.errors import PolicyError, WeirError
from weir.evals.inspect.kept import (
    COLUMNS,
    STYLE,
    chosen,
    color_of,
    follow,
    fragment_of,
    label_of,
    narrow_image,
    only,
    runs_of,
    section,
    strip,
)
from weir.evals.inspect.section import Inspection
from weir.stream import describe_tokens

TEXT = "All happy families are alike; each unhappy family is unhappy in its own way. " * 40


@pytest.fixture(scope="module")
def nano():
    return weir.load("nano")


@pytest.fixture
def tokenizer(nano):
    return nano[1]


def asked_of(model, **more):
    return Inspection(model, None, "a model", "", **more)


def test_streaming_llm_by_hand(llama, ids):
    steps = []
    asked = asked_of(llama, on_step=lambda done, of: steps.append((done, of)))
    # Folds come after 64 and 128 tokens.
    found = follow(asked, "sink(2) | recent(30)", ids(1, 150)[0], [50, 64, 140])
    assert steps == [(1, 3), (2, 3), (3, 3)]
    sinks, recent, new = range(3)
    first, second, third = (strip(holding, 150, (0, 1), (0, 1)) for holding in found)
    wanted = torch.full((4, 150), -2)
    wanted[:, :50] = new
    assert torch.equal(first, wanted)
    wanted[:, :64] = -1
    wanted[:, :2], wanted[:, 34:64] = sinks, recent
    assert torch.equal(second, wanted)
    wanted[:, :140] = -1
    wanted[:, :2], wanted[:, 98:128], wanted[:, 128:140] = sinks, recent, new
    assert torch.equal(third, wanted)


def test_heads_that_keep_their_own_are_shown_head_by_head(llama, ids):
    text = ids(1, 200)
    (holding,) = follow(asked_of(llama), "recent(20) | heavy(20)", text[0], [200])
    got = strip(holding, 200, (0, 1), (0, 1))
    stream = weir.Stream(llama, "recent(20) | heavy(20)")
    stream.feed(text)
    for layer in range(2):
        has = stream.slots(layer)
        for head in range(2):
            line = got[2 * layer + head]
            for pool, name in enumerate(has.pools):
                mine = has.position[0, head, has.pool[0, head] == pool]
                assert torch.equal(
                    (line == holding.pools.index(name)).nonzero()[:, 0], mine.sort()[0]
                )
    assert len({tuple((line == 1).tolist()) for line in got}) == 4  # each head keeps other tokens


def test_chosen_layers_and_heads_are_counted_alone(llama, ids):
    asked = asked_of(llama, layers=(1,), heads=(3,))  # query head 3 reads KV head 1
    assert chosen(asked) == ((1,), (1,))
    text = ids(1, 200)[0]
    (all_of,) = follow(asked_of(llama), "recent(20) | heavy(20)", text, [200])
    (holding,) = follow(asked, "recent(20) | heavy(20)", text, [200])
    assert holding.pairs == 1 and {held.pairs for held in holding.tokens()} == {1}
    lines = strip(all_of, 200, (0, 1), (0, 1))  # a line for each head, layer by layer
    assert torch.equal(strip(holding, 200, (1,), (1,)), lines[3:])
    second_heads = only(all_of, (0, 1), (1,))
    assert second_heads.pairs == 2
    assert torch.equal(strip(second_heads, 200, (0, 1), (1,)), lines[1::2])


def test_a_picture_of_many_tokens_mixes_neighbors():
    image = torch.zeros(2, 3 * COLUMNS - 1, 3)
    image[0, 3] = 1.0
    small = narrow_image(image)
    assert small.shape == (2, COLUMNS, 3)
    assert small[0, 1].tolist() == pytest.approx([1 / 3] * 3)
    assert float(small.sum()) == pytest.approx(1.0)
    assert torch.equal(narrow_image(image[:, :COLUMNS]), image[:, :COLUMNS])


def test_the_section_shows_every_quarter(nano):
    told = section(Inspection(*nano, "nano", TEXT, policy="sink(4) | recent(28)", tokens=256))
    assert told.table is not None
    assert told.table.heads == (
        "tokens read",
        "held by some",
        "held by all",
        "sink, slots",
        "recent, slots",
        "new, slots",
    )
    assert told.table.rows == (
        ("64", "32", "32", "4.0", "28.0", "0.0"),
        ("128", "32", "32", "4.0", "28.0", "0.0"),
        ("192", "32", "32", "4.0", "28.0", "0.0"),
        ("256", "32", "32", "4.0", "28.0", "0.0"),
    )
    assert [moment["seen"] for moment in told.facts["moments"]] == [64, 128, 192, 256]
    assert told.facts["policy"] == "sink(4) | recent(28)"
    (picture,) = told.pictures
    assert len(picture.figure.axes) == 4
    assert "tokens" in picture.figure.axes[-1].get_xlabel() and picture.figure.get_supylabel()
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert labels == ["sink", "recent", "new", "gone"]
    assert "also represent other tokens" not in told.text and told.fragment and told.style


def test_a_policy_that_weighs_is_said_to(nano):
    policy = "sink(4) | recent(28) | balance(32, block=16)"
    told = section(Inspection(*nano, "nano", TEXT, policy=policy, tokens=400))
    assert "Slots of this policy also represent other tokens" in told.text
    assert "in the numerator" in told.fragment


def test_what_holds_nothing_and_what_cannot_be_read_is_refused(nano):
    with pytest.raises(WeirError, match=r"recompute caches nothing, .* Use another policy"):
        section(Inspection(*nano, "nano", TEXT, policy="recompute(budget=64)"))
    with pytest.raises(PolicyError):
        section(Inspection(*nano, "nano", TEXT, policy="sink(4) | recnt(28)"))
    with pytest.raises(WeirError, match=r"3 tokens are too few. Use a text of at least 8"):
        section(Inspection(*nano, "nano", "so it"))
    with pytest.raises(WeirError, match="5,000 tokens are too many for one picture"):
        section(Inspection(*nano, "nano", TEXT, tokens=5000))


def test_the_model_is_as_it_was_afterwards(fresh_llama, ids):
    model = fresh_llama()
    with torch.no_grad():
        before = model(ids(1, 20)).logits
        follow(asked_of(model), "sink(1) | recent(4)", ids(1, 20)[0], [20])
        assert torch.equal(model(ids(1, 20)).logits, before)
    assert not model.model._forward_hooks and not model.model._forward_pre_hooks


def test_moments_are_those_that_are_named(nano):
    told = section(Inspection(*nano, "nano", TEXT, tokens=100, moments=(90, 7, 90)))
    assert [moment["seen"] for moment in told.facts["moments"]] == [7, 90]
    assert "shown after 7, 90 tokens" in told.text
    for moments, why in (
        ((101,), "no moment after 101 tokens, because only 100 tokens of the text are read"),
        ((0, 5), "no moment after 0 tokens"),
        (tuple(range(1, 30)), "29 moments are too many. Use at most 12"),
    ):
        with pytest.raises(WeirError, match=why):
            section(Inspection(*nano, "nano", TEXT, tokens=100, moments=moments))


# --- the text as HTML: none of it becomes markup, and every token says which pools hold it


class Page(HTMLParser):
    """A fragment as a browser parses it: tags, attributes, and the text of each moment."""

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
    # By step: all tokens are in one run, each is in a separate run, or all but the first are gone.
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
    # If four of four heads hold a token, it has a strong shade and a thick line. With one of four,
    # it has a weak shade, and a thin line of another style.
    assert "/ 0.45)" in whole and "border-bottom:4px solid" in whole
    assert "/ 0.11)" in part and "border-bottom:2px dotted" in part
    gone = [span for span in spans if "style" not in span]
    assert gone and all(span["class"] == "gone" for span in gone)
    # Details can be reached by keyboard and by a tap, and are shown without scripts.
    assert all(span["tabindex"] == "0" for span in spans)
    assert "[data-held]:focus::after" in STYLE and "[data-held]:hover::after" in STYLE


def test_every_pool_has_a_color_of_its_own_and_what_waits_is_gray():
    pools = ("sink", "recent", "heavy", "balance", "new")
    colors = [color_of(pools, pool) for pool in pools]
    assert len(set(colors)) == 5 and colors[-1] == "#77828c"
