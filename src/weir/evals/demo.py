"""The demonstration: a model reads far past its window under several policies, which are compared.

The packaged model reads a book, then names with numbers in the form of its exercises, "Anna has
482.", reads on, and is asked for the numbers. A model with a chat template has a chat: it is told
facts in the system turn and in the first message, then a long text is pasted, and it is asked for
the facts. The result is one HTML page that needs no network.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.evals.perplexity import STEP, PerplexityMeter
from weir.evals.report import (
    COLORS,
    DASHES,
    GRAY,
    TextTable,
    drawn_figure,
    html_page,
    legend_columns,
    readable_range,
    render,
    style_axes,
    whole_blocks,
    with_peak,
)
from weir.models import window_of
from weir.stream import (
    BOOK,
    Conversation,
    Stream,
    count_beginning,
    encode,
    held_shares,
    read_text,
)
from weir.train import DIGITS, Words

TITLE = "War and Peace"
DEFAULT = "default"
"""Stands for the policy that a stream uses if none is named."""
POLICIES = (
    "dense",
    "window(budget=90)",
    "streaming_llm(budget=88)",
    "kcenter(budget=72)",
    "sink(4) | recent(299):int8",
    "weir(budget=448)",
    DEFAULT,
)
"""Plain attention, and policies whose caches all take 650 kB on nano: exact recent tokens without
and with sinks, tokens that are unlike all others, more recent tokens in 8 and in 4 bits, and the
`weir.toml` that comes with nano.
"""
NAMES = 8
"""How many names with numbers are told."""
AWAY = 1000
"""Number of tokens between the facts and the questions."""
CHAT_POLICIES = (
    "dense",
    "window(budget=1024)",
    "streaming_llm(budget=1024)",
    "snapkv(budget=1024)",
    "weir(budget=1024)",
    "pinned(weir(budget=1024))",
)
"""The policies of the chat: `dense` is what transformers does, and `pinned` what `weir chat`
does.
"""
FACTS = (
    ("Your name is Nora.", "What is your name?", "Nora"),
    ("The door code of Anna is 60494.", "What is the door code of Anna?", "60494"),
    ("The telephone number of Peter is 73158.", "What is the telephone number of Peter?", "73158"),
    ("Maria lives in the city of Lisbon.", "In which city does Maria live?", "Lisbon"),
    ("Paul works as a baker.", "What does Paul work as?", "baker"),
    ("The train leaves at 7:15.", "When does the train leave?", "7:15"),
    ("The favorite color of Clara is green.", "What is the favorite color of Clara?", "green"),
    ("The key lies under the carpet.", "Where does the key lie?", "carpet"),
)
"""For each fact: its statement at the beginning of the chat, the question at the end, and a word of
the right answer.
"""
IN_SYSTEM = 1
"""The number of facts that are told in the system turn, if there is one; the others are told in the
first message.
"""
RULE = " ".join([*(fact for fact, _, _ in FACTS[:IN_SYSTEM]), "You answer in one short sentence."])
"""The system turn."""
SOON = 1100
"""Tokens of the short text after which the chat is also asked: more than a policy's budget."""
ANSWER = 24
"""Largest number of tokens of an answer in the chat."""
CALM = {"temperature": 0.0, "repetition_penalty": 1.1}
"""The sampling options of the chat."""
PARTS = 240
"""Number of parts of the book in the picture of what is still held."""
WIDTH, LETTERS = 5.2, 9
"""Width of a picture in inches, and size of its legend's letters in points."""


class NamedNumber(NamedTuple):
    """A name and its number as text, and the ids of its statement, question and answer."""

    name: str
    number: str
    said: tuple[int, ...]
    asked: tuple[int, ...]
    answer: tuple[int, ...]


def draw_names(tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 0) -> list[NamedNumber]:
    """Draw different names, each with a different number."""
    words, rng = Words.of(tokenizer), np.random.default_rng(seed)
    drawn = []
    for name in rng.choice(words.names, size=count, replace=False):
        number = rng.choice(words.digits, size=DIGITS)
        texts = str(tokenizer.decode([int(name)])).strip(), _digits(tokenizer, number.tolist())
        ids = words.statement(name, number), words.question(name), number
        drawn.append(NamedNumber(*texts, *(tuple(part.tolist()) for part in ids)))
    return drawn


def _digits(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids)).replace(" ", "")


def ask_names(
    stream: Stream, names: Sequence[NamedNumber], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Ask copies of a stream for each number, and return the likeliest digits."""
    answers = []
    for one in names:
        asked = copy.deepcopy(stream)
        asked.feed(one.asked)
        answers.append(_digits(tokenizer, list(asked.generate(len(one.answer), stop=[]))))
    return answers


def held_by_part(stream: Stream, parts: int) -> list[float]:
    """Divide the text into `parts` equal parts, and return the share of each that is still held.

    A token that has a slot in every layer and KV head counts as 1; one that has slots in half of
    them, as 0.5.
    """
    held = held_shares(stream.holding())
    return [round(float(part.mean()), 5) for part in np.array_split(held, parts)]


def _told(stream: Stream, answers: list[str], right: list[bool]) -> dict[str, Any]:
    """Return the figures of a policy: what it holds, its answers, and which and how many are
    right.
    """
    held = held_by_part(stream, PARTS)
    return {"held": held, "answers": answers, "right": right, "knows": sum(right)}


@dataclass(frozen=True)
class BookStory:
    """The names that follow the book, and the ids of the text before their questions [n]."""

    tokenizer: PreTrainedTokenizerBase
    names: Sequence[NamedNumber]
    between: Tensor

    def tell(self, stream: Stream) -> dict[str, Any]:
        """Feed the names to a stream, read on, and ask for the numbers; return `_told`."""
        stream.feed([token for one in self.names for token in one.said])
        stream.feed(self.between)
        answers = ask_names(stream, self.names, self.tokenizer)
        right = [said == one.number for said, one in zip(answers, self.names, strict=True)]
        return _told(stream, answers, right)

    def facts(self, read: int) -> dict[str, Any]:
        """Return the facts and questions, after `read` tokens of the book, as JSON."""
        return {
            "told_at": read,
            "said": sum(len(one.said) for one in self.names),
            "away": len(self.between),
            "names": [[one.name, one.number] for one in self.names],
        }


class ChatStory:
    """A chat: facts in the first two turns, questions after a short and after a long text.

    `said` is the number of tokens before the long text; `before` counts the questions answered
    right under the first policy before it.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.said, self.before = 0, -1
        self.rule: str | None = RULE
        self.in_system = IN_SYSTEM
        try:
            count_beginning(model, tokenizer, RULE)
        except WeirError:  # the templates of Gemma 2 and Mistral, for example, have no system turn
            self.rule, self.in_system = None, 0

    def begin(self, stream: Stream) -> None:
        """Tell the facts, and let the model answer."""
        told = " ".join(fact for fact, _, _ in FACTS[self.in_system :])
        self._say(stream, f"Please remember this. {told}")
        if self.before < 0:
            self.said, self.before = stream.seen, sum(self._ask(stream)[1])

    def paste(self, tokens: int) -> Tensor:
        """Return the turn in which a text of `length` tokens is pasted, as token ids."""
        book = self.tokenizer.decode(load_book(self.tokenizer, tokens), skip_special_tokens=True)
        talk = Conversation(Stream(self.model, "dense"), self.tokenizer, self.rule)
        list(talk.say("Hello.", max_new_tokens=1))
        return torch.tensor(talk.turn(f"Here is the beginning of a novel.\n\n{book}"))

    def tell(self, stream: Stream) -> dict[str, Any]:
        """Ask the questions, and ask them again in a separate chat after a short text.

        Returns `_told`, and "soon", the number of right answers after the short text.
        """
        told = _told(stream, *self._ask(stream))
        short = Stream(self.model, stream.policy)
        self.begin(short)
        short.feed(self.paste(SOON))
        return {**told, "soon": sum(self._ask(short)[1])}

    def _say(self, stream: Stream, text: str) -> str:
        talk = Conversation(stream, self.tokenizer, self.rule)
        return "".join(talk.say(text, max_new_tokens=ANSWER, **CALM)).strip()

    def _ask(self, stream: Stream) -> tuple[list[str], list[bool]]:
        said = [self._say(copy.deepcopy(stream), asked) for _, asked, _ in FACTS]
        return said, [word in text for text, (_, _, word) in zip(said, FACTS, strict=True)]

    def facts(self, read: int) -> dict[str, Any]:
        """Return the facts and questions, with `read` tokens of text between, as JSON."""
        return {
            "told_at": 0,
            "said": self.said,
            "away": read,
            "before": self.before,
            "in_system": self.in_system,
            "soon": SOON,
            "names": [[question, word] for _, question, word in FACTS],
        }


def make_stream(model: PreTrainedModel, policy: str) -> Stream:
    """Make a stream under a policy of the demo."""
    return Stream(model, None if policy == DEFAULT else policy)


def load_book(tokenizer: PreTrainedTokenizerBase, tokens: int) -> Tensor:
    """Load the first tokens of the packaged excerpt; all if it is shorter."""
    return encode(tokenizer, read_text(BOOK), tokens)


def load_book_and_story(
    tokenizer: PreTrainedTokenizerBase, tokens: int
) -> tuple[Tensor, BookStory]:
    """Load the first tokens of the packaged excerpt, and a story that continues them.

    If the excerpt is too short for both, they share it.
    """
    ids = load_book(tokenizer, tokens + AWAY)
    first = max(min(tokens, len(ids) - AWAY), len(ids) // 2)
    return ids[:first], BookStory(tokenizer, draw_names(tokenizer, NAMES), ids[first:])


def read_book(
    model: PreTrainedModel,
    ids: Tensor,
    story: BookStory | ChatStory | None = None,
    *,
    name: str = "nano",
    policies: tuple[str, ...] = POLICIES,
    block: int = 500,
    on_step: Callable[[list[PerplexityMeter]], bool | None] = lambda meters: None,
    on_ask: Callable[[int], bool | None] = lambda asked: None,
) -> dict[str, Any]:
    """Read the tokens `ids` of the book under every policy, and ask for the facts of a story.

    `on_step` is called after every `STEP` tokens. If it returns True, reading ends early and
    nothing is asked. `on_ask` is called with the number of policies asked so far, and can also end
    the demo by returning True.

    Returns:
        {"model", "chat", "told_first" (tokens of a chat before the book), "model_window", "book",
        "tokens", "block" (tokens of each of `ppl_by_block`), "story" (its `facts`, None if not
        every policy was asked), "policies": [of each the figures of `weir stream`, "slots" (None
        for no limit), and what `tell` returns]}.
    """
    meters = [PerplexityMeter(make_stream(model, policy), block) for policy in policies]
    chat = story if isinstance(story, ChatStory) else None
    if chat is not None:
        for meter in meters:
            chat.begin(meter.stream)
    for piece in ids.split(STEP):
        for meter in meters:
            meter.take(piece)
        if on_step(meters):
            story = None
            break
    for meter in meters:
        meter.close()
    found = [
        {**meter.as_json(), "policy": policy, "slots": meter.stream.capacity}
        for policy, meter in zip(policies, meters, strict=True)
    ]
    answers: list[dict[str, Any]] = []
    for number, meter in enumerate(meters):
        if story is None or on_ask(number):
            story = None
            break
        answers.append(story.tell(meter.stream))
    if story is not None:
        found = [{**figures, **more} for figures, more in zip(found, answers, strict=True)]
    return {
        "model": name,
        "chat": chat is not None,
        "told_first": 0 if chat is None else chat.said,
        "model_window": window_of(model.config),
        "book": f"Leo Tolstoy, {TITLE}",
        "tokens": meters[0].tokens,
        "block": block,
        "story": None if story is None else story.facts(len(ids)),
        "policies": found,
    }


def best_of_a_size(result: dict[str, Any]) -> str | None:
    """Say which policies of fixed size read best and know most; None if no policy was asked.

    The sentence is made from the figures: it names the best policy, whether it is the default or
    not.
    """
    limited = [policy for policy in result["policies"] if policy["slots"] is not None]
    if result["story"] is None or not limited:
        return None
    least = min(policy["ppl"] for policy in limited)
    most = max(policy["knows"] for policy in limited)
    reads = [policy["policy"] for policy in limited if policy["ppl"] == least]
    knows = [policy["policy"] for policy in limited if policy["knows"] == most]
    held = [policy["kv_bytes"] / 1e3 for policy in limited]
    few, many = (f"{kilobytes:,.0f}" for kilobytes in (min(held), max(held)))
    size = f"{many} kB" if few == many else f"{few} to {many} kB"
    return (
        f"Of the caches of fixed size ({size}), {' and '.join(reads)} has the lowest perplexity, "
        f"{least:.1f}, and {' and '.join(knows)} "
        f"{'knows' if len(knows) == 1 else 'know'} the most, {most} of "
        f"{len(result['story']['names'])}."
    )


# --- the page


def write_page(result: dict[str, Any], path: Path) -> None:
    """Write the page for a result of `read_book`."""
    from weir import __version__

    policies = result["policies"]
    limited = [policy for policy in policies if policy["slots"] is not None] or policies
    body = render(
        "demo.html",
        **result,
        last_of=lambda policy: whole_blocks(
            policy["ppl_by_block"], result["tokens"], result["block"]
        )[-1],
        rule=RULE,
        best=best_of_a_size(result),
        color_of=lambda policy: _look(COLORS, result, policy),
        stops_of=lambda policy: _stops(_look(COLORS, result, policy), policy["held"]),
        all_perplexity=_plot(result, policies, "ppl_by_block", "perplexity", log=True),
        perplexity=_plot(result, limited, "ppl_by_block", "perplexity"),
        memory=_plot(result, policies, "bytes_by_block", "cache, MB", log=True),
    )
    footer = (
        f"Made by <code>weir demo</code>, weir {__version__}. The figures are in "
        "<code>result.json</code> next to this page."
    )
    style = "\n" + (resources.files("weir.evals") / "demo.css").read_text("utf-8")
    heading = "A book read past the window, and what the cache still holds of it"
    title = "weir: a book read past the window, and what the cache still holds of it"
    path.write_text(html_page(title, body, footer, heading=heading, style=style), "utf-8")


def write_excerpt(result: dict[str, Any], folder: Path) -> None:
    """Write the table of figures as Markdown and the picture of perplexities, for other pages."""
    story = result["story"]
    heads = ["policy", "perplexity", "cache"]
    if story:
        count = len(story["names"])
        heads += [f"right after {story['soon']:,} tokens"] if result["chat"] else []
        heads += [f"right after {story['away']:,} tokens"]
    rows = [
        [
            # A vertical bar would end the cell.
            f"`{policy['policy']}`".replace("|", r"\|"),
            f"{policy['ppl']:,.1f}",
            _format_bytes(policy["kv_bytes"]),
            *(f"{policy[key]} of {count}" for key in ("soon", "knows") if story and key in policy),
        ]
        for policy in result["policies"]
    ]
    table = TextTable(heads, rows, markup=True).markdown()
    plot = _plot(result, result["policies"], "ppl_by_block", "perplexity")
    (folder / "table.md").write_text(table + "\n", "utf-8")
    (folder / "perplexity.svg").write_text(plot + "\n", "utf-8")


def _format_bytes(count: int) -> str:
    """Format bytes so that caches of almost the same size can be told apart."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def _look(choices: tuple[Any, ...], result: dict[str, Any], policy: dict[str, Any]) -> Any:
    """Return the color or dash of a policy, which is the same in all pictures."""
    return choices[result["policies"].index(policy) % len(choices)]


def _stops(color: str, held: list[float]) -> str:
    """Return the color stops of a bar that shows how much a policy holds of each part of the
    stream.
    """
    stops, at, parts = [], 0, len(held)
    # Opacity is the square root of the share, so that one token in fifty is visible. Equal
    # neighbors are merged.
    for shade, group in itertools.groupby(round(math.sqrt(share), 2) for share in held):
        end = at + len(list(group))
        alpha = f"{round(255 * shade):02x}"
        stops.append(f"{color}{alpha} {100 * at / parts:.2f}% {100 * end / parts:.2f}%")
        at = end
    return ",".join(stops)


def _plot(
    result: dict[str, Any], policies: list[dict[str, Any]], key: str, label: str, log: bool = False
) -> str:
    """Draw one line per policy over the position in the book, as an SVG element."""
    from matplotlib.ticker import MaxNLocator

    curves = [policy[key] for policy in policies]
    if key == "ppl_by_block":
        curves = [whole_blocks(curve, result["tokens"], result["block"]) for curve in curves]
    # A logarithmic axis shows a spike and the other curves. On a linear axis, only the spike would
    # be visible.
    shown = None if log else readable_range(curves)
    names = [with_peak(p["policy"], c, shown) for p, c in zip(policies, curves, strict=True)]
    # Narrow enough for readable letters on a phone.
    columns = min(2, legend_columns(names, WIDTH, LETTERS))
    height = 3.1 + 0.2 * -(-len(names) // columns)
    with drawn_figure(f"{key}{log}{len(policies)}", WIDTH, height) as (figure, picture):
        axes = figure.subplots()
        for policy, values, name in zip(policies, curves, names, strict=True):
            line = {"color": _look(COLORS, result, policy), "lw": 2, "label": name}
            line["ls"] = _look(DASHES, result, policy)
            edges = [min(n * result["block"], result["tokens"]) for n in range(len(values) + 1)]
            if key == "bytes_by_block":
                held = [n / 1e6 for n in values]
                axes.plot(edges, [held[0], *held], drawstyle="steps-pre", **line)
            else:
                middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
                axes.plot(middles, values, marker="o", ms=2.5, **line)
        axes.set(xlim=(0, result["tokens"]), xlabel="tokens read", ylabel=label)
        if log:
            axes.set_yscale("log")
            axes.margins(y=0.1)  # so that the lowest line is not on the axis
        else:
            if shown is not None:
                axes.set_ylim(*shown)
            axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        style_axes(axes, vertical=False)
        window = result["model_window"] - result["told_first"]
        if window < result["tokens"]:
            axes.axvline(window, color=GRAY, lw=1, ls=":")
            top = axes.get_xaxis_transform()
            axes.text(window, 1.01, "the model's window", color=GRAY, transform=top)
        legend: dict[str, Any] = {"frameon": False, "fontsize": LETTERS, "ncols": columns}
        figure.legend(loc="outside lower center", **legend)
    return picture.svg
