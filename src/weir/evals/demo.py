"""The demonstration: a model reads far past its window under several policies, which are compared.

The packaged model reads a book, then names with numbers in the form of its exercises, "Anna has
482.", reads on, and is asked for the numbers. Any other model reads the book, and is then told
facts in sentences and asked for them at several distances. The result is one HTML page that needs
no network.
"""

from __future__ import annotations

import copy
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.evals.fitting import bytes_of, fit_to_memory, largest_budget
from weir.evals.perplexity import STEP, PerplexityMeter
from weir.evals.report import (
    COLORS,
    DASHES,
    GRAY,
    TextTable,
    code_cell,
    drawn_figure,
    html_page,
    legend_columns,
    readable_range,
    render,
    style_axes,
    whole_blocks,
    with_peak,
)
from weir.evals.task import Progress, Subject
from weir.evals.tasks import Facts
from weir.models import window_of
from weir.stream import BOOK, Stream, encode, held_shares, read_text
from weir.train import DIGITS, Words

TITLE = "War and Peace"
DEFAULT = "default"
"""The name for the policy that a stream uses by default."""
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
and with sinks, tokens that are unlike all others, a larger number of recent tokens in 8 and in 4
bits, and the `weir.toml` that comes with nano.
"""
NAMES = 8
"""How many names with numbers are told."""
AWAY = 1000
"""Tokens between what is told and the question."""
RIVALS = ("window", "streaming_llm", "snapkv")
"""Policies that are compared with the default on models other than nano, with equally large caches.

Plain attention comes before them, and `EIGHT_BITS` and the default after them.
"""
EIGHT_BITS = "sink(4) | recent({}):int8"
"""The newest tokens in 8 bits, as many as fit."""
BUDGET = 1024
"""Budget of the default policy. All other caches of fixed size get as many bytes as this one."""
FACTS = Facts(distances="200 800 1600 3200 4000", samples=4)
"""Facts in sentences of a book: 32, each asked for at every distance."""
PAST = 500
"""Tokens, at least, that a model other than nano reads past its window."""
CHUNK = 64
"""Tokens between two folds, the default of every stream."""
BLOCK = 500
"""Tokens of a block. The perplexity of each block is a point of a curve."""
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


@dataclass(frozen=True)
class BookStory:
    """The names that follow the book, and the ids [n] of the text between the names and the
    questions.
    """

    tokenizer: PreTrainedTokenizerBase
    names: Sequence[NamedNumber]
    between: Tensor

    def tell(self, stream: Stream, progress: Progress = lambda share: None) -> dict[str, Any]:
        """Feed the names to a stream, read on, and ask for the numbers.

        Returns:
            {"held" (share of each part of the text that is still held), "answers", "right" (whether
            each answer is right), "knows" (number of right answers)}.
        """
        stream.feed([token for one in self.names for token in one.said])
        stream.feed(self.between)
        answers = ask_names(stream, self.names, self.tokenizer)
        right = [said == one.number for said, one in zip(answers, self.names, strict=True)]
        held = held_by_part(stream, PARTS)
        return {"held": held, "answers": answers, "right": right, "knows": sum(right)}

    def facts(self, read: int) -> dict[str, Any]:
        """Return the facts and questions, after `read` tokens of the book, as JSON."""
        return {
            "kind": "names",
            "asked": len(self.names),
            "told_at": read,
            "said": sum(len(one.said) for one in self.names),
            "away": len(self.between),
            "names": [[one.name, one.number] for one in self.names],
        }


@dataclass(frozen=True)
class FactStory:
    """Facts that are told in other passages of the book, to new streams under each policy, and
    asked for at several distances.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def tell(self, stream: Stream, progress: Progress) -> dict[str, Any]:
        """Measure the policy of a stream that has read the book.

        Returns:
            {"held" (share of each part of the book that is still held), "knows" (number of right
            answers at all distances together), "by_distance": [{"distance", "right", "asked", and
            the 95 % interval of the share of right answers, from "low" to "high"}]}.
        """
        held = held_by_part(stream, PARTS)
        subject = Subject(self.name, self.model, self.tokenizer, stream.policy)
        found = FACTS.run(subject, progress)
        return {"held": held, "knows": found["right"], "by_distance": found["by_distance"]}

    def facts(self, read: int) -> dict[str, Any]:
        """Return what is asked, after `read` tokens of the book, as JSON."""
        count = FACTS.samples * FACTS.facts
        distances = list(FACTS.tokens_back)
        return {
            "kind": "facts",
            "read": read,
            "count": count,
            "asked": count * len(distances),
            "distances": distances,
            "task": str(FACTS),
        }


def equal_policies(model: PreTrainedModel) -> tuple[str, ...]:
    """Return plain attention, and policies whose caches have the bytes of the default policy."""
    ours = f"weir(budget={min(BUDGET, largest_budget(model, CHUNK))})"
    memory = bytes_of(model, ours)
    fitted = (fit_to_memory(model, rival, memory)[0] for rival in RIVALS)
    most = bisect_right(
        range(1, largest_budget(model, CHUNK)),
        memory,
        key=lambda slots: bytes_of(model, EIGHT_BITS.format(slots)),
    )
    return ("dense", *fitted, EIGHT_BITS.format(max(1, most)), ours)


def make_stream(model: PreTrainedModel, policy: str) -> Stream:
    """Make a stream under a policy of the demo."""
    return Stream(model, None if policy == DEFAULT else policy)


def load_book(tokenizer: PreTrainedTokenizerBase, tokens: int) -> Tensor:
    """Load the first tokens of the packaged excerpt; all if it is shorter."""
    return encode(tokenizer, read_text(BOOK), tokens)


def past_window(window: int, block: int = BLOCK) -> int:
    """Return how many tokens a model other than nano reads: whole blocks, past its window."""
    return -(-(window + PAST) // block) * block


def load_book_and_story(
    tokenizer: PreTrainedTokenizerBase, tokens: int
) -> tuple[Tensor, BookStory]:
    """Load the first tokens of the packaged excerpt, and a story that continues them.

    The next `AWAY` tokens are those between the names and the questions of the story. If the
    excerpt is too short for both, fewer than `tokens` tokens come before the story. If the excerpt
    has fewer than twice `AWAY` tokens, each part gets half of it.
    """
    ids = load_book(tokenizer, tokens + AWAY)
    first = max(min(tokens, len(ids) - AWAY), len(ids) // 2)
    return ids[:first], BookStory(tokenizer, draw_names(tokenizer, NAMES), ids[first:])


def read_book(
    model: PreTrainedModel,
    ids: Tensor,
    story: BookStory | FactStory | None = None,
    *,
    name: str = "nano",
    policies: tuple[str, ...] = POLICIES,
    block: int = BLOCK,
    on_step: Callable[[list[PerplexityMeter]], bool | None] = lambda meters: None,
    on_ask: Callable[[float], bool | None] = lambda asked: None,
) -> dict[str, Any]:
    """Read the tokens `ids` of the book under every policy, and ask for the facts of a story.

    `on_step` is called after every `STEP` tokens. When it returns True, reading ends early, and
    nothing is asked. `on_ask` is called with the number of policies asked so far (1.5 halfway
    through the second). When it returns True, the asking ends.

    Returns:
        {"model", "model_window", "book", "tokens", "block" (tokens of each of `ppl_by_block`),
        "story" (its `facts`, None if not every policy was asked), "policies": [for each policy, the
        figures of `weir stream`, "slots" (None for no limit), and the result of `tell`]}.
    """
    meters = [PerplexityMeter(make_stream(model, policy), block) for policy in policies]
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
    if story is not None:
        try:
            answers = [
                story.tell(meter.stream, _told_of(on_ask, number))
                for number, meter in enumerate(meters)
            ]
        except _Stopped:
            story = None
        else:
            found = [{**figures, **more} for figures, more in zip(found, answers, strict=True)]
    return {
        "model": name,
        "model_window": window_of(model.config),
        "book": f"Leo Tolstoy, {TITLE}",
        "tokens": meters[0].tokens,
        "block": block,
        "story": None if story is None else story.facts(len(ids)),
        "policies": found,
    }


class _Stopped(Exception):
    """Raised to end a story in the middle."""


def _told_of(on_ask: Callable[[float], bool | None], number: int) -> Progress:
    """Return a function that reports the progress of a policy's questions to `on_ask`, and raises
    `_Stopped` if `on_ask` returns True. This call itself already reports that the questions begin.
    """

    def progress(share: float) -> None:
        if on_ask(number + share):
            raise _Stopped

    progress(0.0)
    return progress


def best_of_a_size(result: dict[str, Any]) -> str | None:
    """Say which policies of fixed size read best and know most; None if there are none, or if not
    every policy was asked.

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
    held = [policy["kv_bytes"] for policy in limited]
    few, many = min(held), max(held)
    # Both sizes are rounded in the unit of the larger one, so that 650.1 and 649.8 kB both become
    # 650 kB and are shown as one size.
    power, unit, digits = (6, "MB", 1) if many >= 1e6 else (3, "kB", 0)
    sizes = dict.fromkeys(f"{count / 10**power:,.{digits}f}" for count in (few, many))
    over = " at all distances together" if result["story"]["kind"] == "facts" else ""
    return (
        f"Of the caches of fixed size ({' to '.join(sizes)} {unit}), {' and '.join(reads)} "
        f"{'has' if len(reads) == 1 else 'have'} the lowest perplexity, {least:.1f}, and "
        f"{' and '.join(knows)} {'has' if len(knows) == 1 else 'have'} the most right answers, "
        f"{most} of {result['story']['asked']}{over}."
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
        best=best_of_a_size(result),
        color_of=lambda policy: _look(COLORS, result, policy),
        stops_of=lambda policy: _stops(_look(COLORS, result, policy), policy["held"]),
        facts=_plot_facts(result) if _has_facts(result) else "",
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
    """Write the table of figures as Markdown, and the pictures, for other pages."""
    story = result["story"]
    heads = ["policy", "perplexity", "cache"]
    if _has_facts(result):
        first, *others = story["distances"]
        heads += [f"facts after {first:,} tokens", *(f"{distance:,}" for distance in others)]
    elif story:
        heads += [f"correct after {story['away']:,} tokens"]
    rows = [
        [
            code_cell(policy["policy"]),
            f"{policy['ppl']:,.1f}",
            _format_bytes(policy["kv_bytes"]),
            *(str(at["right"]) for at in policy.get("by_distance", ()) if story),
            *([f"{policy['knows']} of {story['asked']}"] if story and "names" in story else []),
        ]
        for policy in result["policies"]
    ]
    table = TextTable(heads, rows, markup=True).markdown()
    plot = _plot(result, result["policies"], "ppl_by_block", "perplexity")
    (folder / "table.md").write_text(table + "\n", "utf-8")
    (folder / "perplexity.svg").write_text(plot + "\n", "utf-8")
    if _has_facts(result):
        (folder / "facts.svg").write_text(_plot_facts(result) + "\n", "utf-8")


def _has_facts(result: dict[str, Any]) -> bool:
    """Whether facts were asked for at several distances."""
    return bool(result["story"]) and result["story"]["kind"] == "facts"


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
        window = result["model_window"]
        if window < result["tokens"]:
            axes.axvline(window, color=GRAY, lw=1, ls=":")
            top = axes.get_xaxis_transform()
            axes.text(window, 1.01, "the model's window", color=GRAY, transform=top)
        legend: dict[str, Any] = {"frameon": False, "fontsize": LETTERS, "ncols": columns}
        figure.legend(loc="outside lower center", **legend)
    return picture.svg


def _plot_facts(result: dict[str, Any]) -> str:
    """Right answers of each policy over the distance, with 95 % intervals, as an SVG element."""
    story, policies = result["story"], result["policies"]
    distances, count = story["distances"], story["count"]
    names = [policy["policy"] for policy in policies]
    columns = min(2, legend_columns(names, WIDTH, LETTERS))
    height = 3.1 + 0.2 * -(-len(names) // columns)
    with drawn_figure("facts", WIDTH, height) as (figure, picture):
        axes = figure.subplots()
        axes.set_xscale("log")
        for number, policy in enumerate(policies):
            found = policy["by_distance"]
            # Side by side, so that whiskers at the same distance can be told apart.
            beside = 1.025 ** (number - (len(policies) - 1) / 2)
            at = [distance * beside for distance in distances]
            right = [one["right"] for one in found]
            low = [one["right"] - count * one["low"] for one in found]
            high = [count * one["high"] - one["right"] for one in found]
            look = {"color": _look(COLORS, result, policy), "ls": _look(DASHES, result, policy)}
            reach = [[max(0.0, n) for n in ends] for ends in (low, high)]
            axes.errorbar(
                at, right, reach, label=names[number], marker="o", ms=4, lw=2, elinewidth=1, **look
            )
        axes.set(xlabel="tokens since the fact", ylabel=f"right answers of {count}")
        axes.set_ylim(-0.04 * count, 1.04 * count)
        style_axes(axes, vertical=False)
        # A label that the next one would touch is left out.
        nexts = [*distances[1:], math.inf]
        labels = [
            f"{at:,}" if after > 1.4 * at else ""
            for at, after in zip(distances, nexts, strict=True)
        ]
        axes.set_xticks(distances, labels)
        axes.minorticks_off()
        legend: dict[str, Any] = {"frameon": False, "fontsize": LETTERS, "ncols": columns}
        figure.legend(loc="outside lower center", **legend)
    return picture.svg
