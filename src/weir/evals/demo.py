"""The demonstration: a model reads far past its window under several policies side by side.

The packaged model reads a book, then names with numbers in the form of its exercises, "Anna has
482.", reads on, and is asked for the numbers. A model with a chat template holds a chat: it is
told facts in the system turn and in the first message, then a long text is pasted, and it is asked
for the facts. The result is one
HTML page that needs no network.
"""

from __future__ import annotations

import copy
import html
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.evals.perplexity import STEP, PerplexityMeter
from weir.evals.report import COLORS, DASHES, GRAY, TextTable, html_page, style_axes, svg_figure
from weir.stream import BOOK, Conversation, Stream, encode, held_shares, read_text
from weir.train import DIGITS, Words

TITLE = "War and Peace"
POLICIES = (
    "dense",
    "window(budget=256)",
    "streaming_llm(budget=256)",
    "streaming_llm(budget=448)",
    "h2o(budget=256)",
    "kcenter(budget=256)",
    "centers(budget=256)",
    "weir(budget=448)",
)
"""Plain attention, a window, the paper's policy at two sizes, and policies that choose tokens."""
NAMES = 8
"""How many names with numbers are told."""
AWAY = 1000
"""Tokens between what is told and the question."""
CHAT_POLICIES = (
    "dense",
    "window(budget=1024)",
    "streaming_llm(budget=1024)",
    "snapkv(budget=1024)",
    "weir(budget=1024)",
    "pinned(weir(budget=1024))",
)
"""Those of the chat: `dense` is what transformers does, and `pinned` what `weir chat` does."""
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
"""Each fact that the chat states first, the question at the end, and a word of the right answer."""
IN_SYSTEM = 1
"""So many of them are told in the system turn, the others in the first message."""
RULE = " ".join([*(fact for fact, _, _ in FACTS[:IN_SYSTEM]), "You answer in one short sentence."])
"""The system turn."""
SOON = 1100
"""Tokens of the short text after which the chat is asked as well: more than a policy's budget."""
ANSWER = 24
"""Most tokens of an answer in the chat."""
CALM = {"temperature": 0.0, "repetition_penalty": 1.1}
"""How the chat draws its tokens."""
PARTS = 240
"""Parts of the book in the picture of what is still held."""
MOST_SHOWN = 5
"""Characters of a wrong answer; a model that has forgotten the number may say anything."""


@dataclass(frozen=True)
class NamedNumber:
    """A name and its number as text, and the ids of its statement, question and answer."""

    name: str
    number: str
    said: tuple[int, ...]
    asked: tuple[int, ...]
    answer: tuple[int, ...]


def draw_names(tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 0) -> list[NamedNumber]:
    """Draw different names, each with a number of its own.

    Raises:
        WeirError: the tokenizer lacks names or digits that are one token.
    """
    words, rng = Words.of(tokenizer), np.random.default_rng(seed)
    drawn = []
    for name in rng.choice(words.names, size=count, replace=False):
        number = rng.choice(words.digits, size=DIGITS)
        drawn.append(
            NamedNumber(
                str(tokenizer.decode([int(name)])).strip(),
                str(tokenizer.decode(number.tolist())).replace(" ", ""),
                tuple(words.statement(name, number).tolist()),
                tuple(words.question(name).tolist()),
                tuple(number.tolist()),
            )
        )
    return drawn


def ask_names(
    stream: Stream, names: Sequence[NamedNumber], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Ask a stream for each number, and return the likeliest digits.

    Every question goes to a copy, so that the stream does not change.
    """
    answers = []
    for one in names:
        asked = copy.deepcopy(stream)
        asked.feed(one.asked)
        digits = list(asked.generate(len(one.answer), stop=[]))
        answers.append(str(tokenizer.decode(digits)).replace(" ", ""))
    return answers


def held_by_part(stream: Stream, parts: int) -> list[float]:
    """Divide the text into `parts` equal parts, and return the share of each that is still held.

    A token that holds a slot in every layer and KV head counts as 1, in half of them as 0.5, so
    shares lie between 0 and 1.
    """
    held = held_shares(stream.holding())
    return [round(float(part.mean()), 5) for part in np.array_split(held, parts)]


@dataclass(frozen=True)
class BookStory:
    """The names that follow the book, and the ids of the text before their questions [n]."""

    tokenizer: PreTrainedTokenizerBase
    names: Sequence[NamedNumber]
    between: Tensor

    def begin(self, stream: Stream) -> None:
        """Do nothing: the names are told behind the book."""

    def tell(self, stream: Stream) -> dict[str, Any]:
        """Feed the names to a stream, read on, and ask for the numbers.

        Returns:
            "held" (the share of each part of the stream that is still held, 0 to 1), "answers",
            "right" (which of them are), and "knows", the number of right answers.
        """
        stream.feed([token for one in self.names for token in one.said])
        stream.feed(self.between)
        held = held_by_part(stream, PARTS)
        answers = ask_names(stream, self.names, self.tokenizer)
        right = [said == one.number for said, one in zip(answers, self.names, strict=True)]
        return {"held": held, "answers": answers, "right": right, "knows": sum(right)}

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

    Args:
        model, tokenizer: the model and its tokenizer, which has a chat template.

    Attributes:
        said: tokens before the long text.
        before: questions answered right under the first policy before the long text.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.said, self.before = 0, -1

    def begin(self, stream: Stream) -> None:
        """Tell the facts, and let the model answer."""
        talk = Conversation(stream, self.tokenizer, RULE)
        told = " ".join(fact for fact, _, _ in FACTS[IN_SYSTEM:])
        for _ in talk.say(f"Please remember this. {told}", max_new_tokens=ANSWER, **CALM):
            pass
        if self.before < 0:
            self.said, self.before = stream.seen, sum(self._ask(stream)[1])

    def paste(self, tokens: int) -> Tensor:
        """Return the turn in which a text of so many tokens is pasted, as token ids."""
        book = self.tokenizer.decode(load_book(self.tokenizer, tokens), skip_special_tokens=True)
        stream = Stream(self.model, "dense")
        talk = Conversation(stream, self.tokenizer, RULE)
        for _ in talk.say("Hello.", max_new_tokens=1):
            pass
        return torch.tensor(talk.turn(f"Here is the beginning of a novel.\n\n{book}"))

    def tell(self, stream: Stream) -> dict[str, Any]:
        """Ask the questions, and once more in a chat of its own, after a short text.

        Returns:
            What `BookStory.tell` returns, and "soon", the number of right answers after the short
            text.
        """
        answers, right = self._ask(stream)
        held = held_by_part(stream, PARTS)
        told = {"held": held, "answers": answers, "right": right, "knows": sum(right)}
        short = Stream(self.model, stream.policy)
        self.begin(short)
        short.feed(self.paste(SOON))
        return {**told, "soon": sum(self._ask(short)[1])}

    def _ask(self, stream: Stream) -> tuple[list[str], list[bool]]:
        answers = []
        for _, question, _ in FACTS:
            talk = Conversation(copy.deepcopy(stream), self.tokenizer, RULE)
            answers.append("".join(talk.say(question, max_new_tokens=ANSWER, **CALM)).strip())
        return answers, [word in said for said, (_, _, word) in zip(answers, FACTS, strict=True)]

    def facts(self, read: int) -> dict[str, Any]:
        """Return the facts and questions, with `read` tokens of text between, as JSON."""
        return {
            "told_at": 0,
            "said": self.said,
            "away": read,
            "before": self.before,
            "in_system": IN_SYSTEM,
            "soon": SOON,
            "names": [[question, word] for _, question, word in FACTS],
        }


def load_book(tokenizer: PreTrainedTokenizerBase, tokens: int) -> Tensor:
    """Load the first tokens of the packaged excerpt; all if it is shorter."""
    return encode(tokenizer, read_text(BOOK), tokens)


def load_book_and_story(
    tokenizer: PreTrainedTokenizerBase, tokens: int
) -> tuple[Tensor, BookStory]:
    """Load the first tokens of the packaged excerpt, and a story that continues them.

    The two share the excerpt where it is too short for both.
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
    """Read the tokens `ids` of the book under every policy, and ask for the numbers of a story.

    Args:
        model: the model.
        ids: from `load_book`.
        story: what is told and asked; None asks nothing.
        name: the model's name.
        policies: the policies.
        block: tokens in a block of `ppl_by_block`.
        on_step: called after every `STEP` tokens; reading ends early when it returns True, and
            then nothing is asked.
        on_ask: called with the number of policies asked so far, from 0; returning True stops early.

    Returns:
        {"model", "chat", "told_first" (tokens of a chat before the book), "model_window", "book",
        "tokens", "block", "story", "policies": [figures of each]}. The figures are those of `weir
        stream`, "slots" (None for no limit), and what `BookStory.tell` returns. "story" has
        "told_at" (a position in the stream), "said" and "away" (tokens of the statements, and of
        the text read after them), "names" (what was asked, and the answer) and in a chat "before"
        (right answers without the text between, under the first policy). If not every policy was
        asked, "story" is None and the figures have no answers.
    """
    chat = story if isinstance(story, ChatStory) else None
    meters = [PerplexityMeter(Stream(model, policy), block) for policy in policies]
    if story is not None:
        for meter in meters:
            story.begin(meter.stream)
    for piece in ids.split(STEP):
        for meter in meters:
            meter.take(piece)
        if on_step(meters):
            story = None
            break
    for meter in meters:
        meter.close()
    found = [
        {**meter.reading.as_json(), "policy": policy, "slots": meter.stream.capacity}
        for policy, meter in zip(policies, meters, strict=True)
    ]
    if story is not None:
        answers: list[dict[str, Any]] = []
        for number, meter in enumerate(meters):
            if on_ask(number):
                story = None
                break
            answers.append(story.tell(meter.stream))
        else:
            found = [{**figures, **more} for figures, more in zip(found, answers, strict=True)]
    return {
        "model": name,
        "chat": chat is not None,
        "told_first": 0 if chat is None else chat.said,
        "model_window": model.config.max_position_embeddings,
        "book": f"Leo Tolstoy, {TITLE}",
        "tokens": meters[0].reading.tokens,
        "block": block,
        "story": None if story is None else story.facts(len(ids)),
        "policies": found,
    }


# --- the page

ABOUT = Template("""<p>The packaged model <code>nano</code> was trained on $window tokens at a time.
Here it reads the first $tokens tokens of <em>$book</em> once, $times times its window, and predicts
each token from what the policy still holds.</p>""")
CHAT_ABOUT = Template("""<p><code>$model</code> was trained on $window tokens at a time. In a chat
it has the system turn &ldquo;$rule&rdquo; and is told more facts; then $tokens tokens of
<em>$book</em> are pasted, and it predicts each from what the policy still holds. <code>dense</code>
is what transformers does by itself.</p>""")
"""The first paragraph of the page, for a book and for a chat."""
CHAT_STORY = Template("""<h2>Who still knows?</h2>
<p>Before the long text every policy was told $count facts, the first $system of them in the system
turn, which only <code>pinned</code> holds on to; $away tokens later it was asked for each. Without
the text between, $before of $count answers are right: a model that cannot answer then says nothing
about a policy. In a second chat the text between was $soon tokens short: right after it were
$answered. A right answer has a tick.</p>
""")
STORY = Template("""<h2>Who still knows?</h2>
<p>Behind the book every policy was told $count names with numbers ($some, &hellip;), read $away
tokens more, and was asked for each number. A right answer has a tick.</p>
""")
HELD = Template("""$answers

<h2>What each policy still holds</h2>
<p>$all, from its first token at the left to its ${seen}th at the right, just before the
questions. The stronger the color, the more tokens of a place have a slot, over all layers and
heads. The mark shows where the $what were told.</p>
<div class="strips">
<div class="told"><span style="left:$place%">$what</span></div>
$strips
</div>""")
"""The part of the page about what is known and held, where every policy was asked."""


def write_report(result: dict[str, Any], path: Path) -> None:
    """Write the page for a result of `read_book`."""
    from weir import __version__

    policies = result["policies"]
    limited = [policy for policy in policies if policy["slots"] is not None] or policies
    folder = resources.files("weir.evals")
    body = Template((folder / "demo.html").read_text("utf-8")).substitute(
        about=(CHAT_ABOUT if result["chat"] else ABOUT).substitute(
            model=html.escape(result["model"]),
            rule=html.escape(RULE),
            book=html.escape(result["book"]),
            tokens=f"{result['tokens']:,}",
            times=f"{result['tokens'] / result['model_window']:.1f}",
            window=f"{result['model_window']:,}",
        ),
        block=f"{result['block']:,}",
        figures=_figures(result),
        story=_story(result) if result["story"] else "",
        all_perplexity=_plot(result, policies, "ppl_by_block", "perplexity", log=True),
        perplexity=_plot(result, limited, "ppl_by_block", "perplexity"),
        memory=_plot(result, policies, "bytes_by_block", "cache, MB", log=True),
    )
    footer = (
        f"Made by <code>weir demo</code>, weir {__version__}. The figures are in "
        "<code>result.json</code> beside this page."
    )
    style = "\n" + (folder / "demo.css").read_text("utf-8")
    heading = "A book read past the window, and what is left of it"
    title = "weir: a book read past the window, and what is left of it"
    path.write_text(html_page(title, body, footer, heading=heading, style=style), "utf-8")


def write_excerpt(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write the table of figures as Markdown and the picture of perplexities, for other pages."""
    table, picture = folder / "table.md", folder / "perplexity.svg"
    story = result["story"]
    heads = ["policy", "perplexity", "cache"]
    if story:
        count = len(story["names"])
        heads += [f"right after {story['soon']:,} tokens"] if result["chat"] else []
        heads += [f"right after {story['away']:,} tokens"]
    rows = [
        [
            f"`{policy['policy']}`",
            f"{policy['ppl']:,.1f}",
            f"{policy['kv_bytes'] / 1e6:,.1f} MB",
            *(f"{policy[key]} of {count}" for key in ("soon", "knows") if story and key in policy),
        ]
        for policy in result["policies"]
    ]
    table.write_text(TextTable(heads, rows, markup=True).markdown() + "\n", "utf-8")
    plot = _plot(result, result["policies"], "ppl_by_block", "perplexity", log=True)
    picture.write_text(plot + "\n", "utf-8")
    return [table, picture]


def _look(choices: tuple[Any, ...], result: dict[str, Any], policy: dict[str, Any]) -> Any:
    """The color or dash of a policy, the same in all pictures."""
    return choices[result["policies"].index(policy) % len(choices)]


def _name(result: dict[str, Any], policy: dict[str, Any]) -> str:
    """A policy name after its color swatch; lines may break before the bracket on phones."""
    written = html.escape(policy["policy"]).replace("(", "<wbr>(")
    return f'<i style="background:{_look(COLORS, result, policy)}"></i><code>{written}</code>'


def _figures(result: dict[str, Any]) -> str:
    """The table of figures."""
    story = result["story"]
    heads = ["policy", "perplexity", "last block", "cache", "still knows", "tokens/s"]
    rows = []
    for policy in result["policies"]:
        knows = f"{policy['knows']} of {len(story['names'])}" if story else ""
        first = [policy["ppl"], policy["ppl_by_block"][-1], policy["kv_bytes"] / 1e6]
        ppl, last, cache = (f"{figure:,.1f}" for figure in first)
        speed = f"{policy['tokens_per_s']:,.0f}"
        rows.append([_name(result, policy), ppl, last, f"{cache} MB", knows, speed])
    if not story:
        for cells in (heads, *rows):
            del cells[4]
    return TextTable(heads, rows, markup=True).html("figures")


def _story(result: dict[str, Any]) -> str:
    """The section about the names: the policies' answers, and what each policy holds."""
    story = result["story"]
    seen = story["told_at"] + story["away"] + story["said"]
    some = ", ".join(f"{html.escape(name)} has {number}" for name, number in story["names"][:2])
    names = [f"{html.escape(name)}<br>{html.escape(number)}" for name, number in story["names"]]
    answers = [
        [_name(result, policy), *_answers(policy, story, 24 if result["chat"] else MOST_SHOWN)]
        for policy in result["policies"]
    ]
    every, what = ("The whole chat", "facts") if result["chat"] else ("All that was read", "names")
    asked = (CHAT_STORY if result["chat"] else STORY).substitute(
        count=len(story["names"]),
        some=some,
        before=story.get("before"),
        system=story.get("in_system"),
        soon=f"{story.get('soon', 0):,}",
        answered=", ".join(
            f"{policy.get('soon')} under <code>{html.escape(policy['policy'])}</code>"
            for policy in result["policies"]
        ),
        away=f"{story['away']:,}",
    )
    return asked + HELD.substitute(
        all=every,
        what=what,
        seen=f"{seen:,}",
        place=f"{100 * story['told_at'] / seen:.2f}",
        answers=TextTable(["policy", *names], answers, markup=True).html("answers"),
        strips="\n".join(_strip(result, policy, seen) for policy in result["policies"]),
    )


def _answers(policy: dict[str, Any], story: dict[str, Any], most: int) -> list[str]:
    """Table cells with a policy's answers, cut to `most` characters; right ones have a tick."""
    cells = zip(policy["answers"], policy["right"], story["names"], strict=True)
    return [
        f"<b>{html.escape(answer)}&nbsp;✓</b>"
        if right
        else html.escape(said if len(said) <= most else said[:most] + "…")
        for said, right, (_, answer) in cells
    ]


def _strip(result: dict[str, Any], policy: dict[str, Any], seen: int) -> str:
    """A bar that shows how much a policy holds of each part of the stream."""
    held = policy["held"]
    color, parts = _look(COLORS, result, policy), len(held)
    stops = []
    at = 0
    # Opacity is the square root of the share, so that one token in fifty is visible. Equal
    # neighbors are merged.
    for shade, group in itertools.groupby(round(math.sqrt(share), 2) for share in held):
        end = at + len(list(group))
        alpha = f"{round(255 * shade):02x}"
        stops.append(f"{color}{alpha} {100 * at / parts:.2f}% {100 * end / parts:.2f}%")
        at = end
    words = f"holds {sum(held) / parts:.1%} of {seen:,} tokens"
    return (
        f"<div><p>{_name(result, policy)} {words}</p>"
        f'<div class="strip" role="img" aria-label="{words}" '
        f'style="background:linear-gradient(90deg,{",".join(stops)})"></div></div>'
    )


def _plot(
    result: dict[str, Any],
    policies: list[dict[str, Any]],
    key: str,
    label: str,
    *,
    log: bool = False,
) -> str:
    """One line per policy over the position in the book, as an SVG element."""
    from matplotlib.ticker import MaxNLocator

    # Narrow enough for readable letters on a phone.
    with svg_figure(f"{key}{log}{len(policies)}", 5.2, 3.6) as (figure, out):
        axes = figure.subplots()
        for policy in policies:
            line = {"color": _look(COLORS, result, policy), "lw": 2, "label": policy["policy"]}
            line["ls"] = _look(DASHES, result, policy)
            values = policy[key]
            edges = [min(n * result["block"], result["tokens"]) for n in range(len(values) + 1)]
            if key == "bytes_by_block":
                held = [n / 1e6 for n in values]
                axes.plot(edges, [held[0], *held], drawstyle="steps-pre", **line)
            else:
                middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
                axes.plot(middles, values, marker="o", ms=2.5, **line)
        axes.set_xlim(0, result["tokens"])
        axes.set_xlabel("tokens read")
        axes.set_ylabel(label)
        if log:
            axes.set_yscale("log")
            axes.margins(y=0.1)  # so that the lowest line does not lie on the axis
        else:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        style_axes(axes, vertical=False)
        window = result["model_window"] - result["told_first"]
        if window < result["tokens"]:
            axes.axvline(window, color=GRAY, lw=1, ls=":")
            top = axes.get_xaxis_transform()
            axes.text(window, 1.01, "the model's window", color=GRAY, transform=top)
        figure.legend(loc="outside lower center", frameon=False, fontsize=9, ncols=2)
    return out[0]
