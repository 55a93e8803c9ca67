"""The experiment's results as files: JSON, CSV, plots, and a page of text made from the figures.

Every number and every verdict on the page comes from the result; nothing here knows how it was
measured.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weir.errors import WeirError
from weir.evals.results import for_json
from weir.evals.sinks import paper, plots

ABILITY = {
    "continuation": "right continuation of four",
    "last_word": "last token of a window",
    "recall": "a passage's second time",
}


@dataclass(frozen=True)
class Table:
    """A table of words.

    Attributes:
        title: stands above.
        head: names of the columns.
        rows: of cells.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """As Markdown; the first column left, the others right."""
        line = "|".join(["", "---", *["---:"] * (len(self.head) - 1), ""])
        rows = [self.head, *self.rows]
        written = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([written[0], line, *written[1:]])


def name_of(sink: str) -> str:
    """The paper's name of a model; of one that it does not have, ours."""
    return paper.VARIANTS.get(sink, sink)


def tables(result: dict[str, Any]) -> list[Table]:
    """Tables 3 and 10 together, Tables 4 and 9 at our scale, attention, and training."""
    return [_perplexity(result), _abilities(result), _attention(result), _training(result)]


def _perplexity(result: dict[str, Any]) -> Table:
    slots, models = result["setting"]["slots"], result["models"]
    rows = []
    for sink, model in models.items():
        rows.append(
            (f"{name_of(sink)}, here", *(_number(model["ppl"][str(x)]) for x in paper.CONFIGS))
        )
        if sink in paper.PERPLEXITY:
            rows.append((f"{name_of(sink)}, paper", *map(_number, paper.PERPLEXITY[sink])))
    head = tuple(f"{x}+{slots - x}" for x in paper.CONFIGS)
    return Table(
        f"Streaming perplexity by cache configuration (Tables 3 and 10; the paper's x + y is "
        f"{paper.SLOTS})",
        ("model", *head),
        tuple(rows),
    )


def _abilities(result: dict[str, Any]) -> Table:
    rows = []
    for sink, model in result["models"].items():
        cells = [_number(model["inside_ppl"])]
        for name in ABILITY:
            found = model["abilities"][name]
            low, high = found["low"], found["high"]
            cells.append(f"{found['accuracy']:.1%} ({100 * low:.0f} to {100 * high:.0f})")
        rows.append((name_of(sink), *cells))
    return Table(
        "Held out, inside the window (Tables 4 and 9 at this scale; 95 % intervals)",
        ("model", "perplexity", *ABILITY.values()),
        tuple(rows),
    )


def _attention(result: dict[str, Any]) -> Table:
    rows = []
    for sink, model in result["models"].items():
        for layer, found in enumerate(model["attention"]):
            rows.append(
                (
                    f"{name_of(sink)}, layer {layer}",
                    *(f"{found[name]:.1%}" for name in ("first", "first_4", "nowhere", "even")),
                )
            )
    return Table(
        "Where attention rests: means over heads and the queries of a window's later half",
        ("model", "first token", "first four", "nowhere (Zero Sink)", "first token if all alike"),
        tuple(rows),
    )


def _training(result: dict[str, Any]) -> Table:
    rows = []
    for sink, model in result["models"].items():
        its = model["training"]
        rows.append(
            (
                name_of(sink),
                f"{its['parameters']:,}",
                f"{its['steps']:,}",
                f"{its['tokens']:,}",
                f"{its['last_loss']:.3f}",
                f"{its['held_out_loss']:.3f}",
                f"{its['tokens_per_s']:,.0f}",
            )
        )
    head = ("model", "parameters", "steps", "tokens", "loss at the end", "held out", "tokens/s")
    return Table("Training (Figures 6 and 15)", head, tuple(rows))


def _number(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def write_page(result: dict[str, Any], logs: dict[str, Path], out: Path) -> list[Path]:
    """Write sinks.json, sinks.csv, the plots and sinks.md into a folder; their paths.

    Args:
        result: of the experiment.
        logs: the training log of each model.
        out: the folder.

    Raises:
        WeirError: it cannot be written to.
    """
    files = [
        out / name
        for name in ("sinks.md", "sinks.json", "sinks.csv", "sinks-ppl.png", "sinks-loss.png")
    ]
    page, facts, cells, ppl, loss = files
    try:
        facts.write_text(json.dumps(for_json(result), indent=1) + "\n", "utf-8")
        with cells.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("model", "sinks", "recent", "text", "ppl", "paper_ppl"))
            writer.writerows(_cells(result))
        plots.plot_perplexity(result, ppl)
        plots.plot_losses({name_of(sink): path for sink, path in logs.items()}, loss)
        page.write_text(markdown(result, ppl.name, loss.name), "utf-8")
    except OSError as error:
        raise WeirError(f"cannot write to {out}: {error.strerror}") from None
    return files


def _cells(result: dict[str, Any]) -> Iterator[Sequence[Any]]:
    setting = result["setting"]
    names = [text["name"] for text in setting["held_out"]]
    for sink, model in result["models"].items():
        for place, x in enumerate(paper.CONFIGS):
            theirs = paper.PERPLEXITY.get(sink, [""] * len(paper.CONFIGS))[place]
            both = (sink, x, setting["slots"] - x)
            yield (*both, "all", model["ppl"][str(x)], theirs)
            for name, ppl in zip(names, model["ppl_by_text"][str(x)], strict=True):
                yield (*both, name, ppl, "")


def markdown(result: dict[str, Any], ppl: str, loss: str) -> str:
    """The page: what was done, what was found, the tables, and the plots by their names."""
    setting, found = result["setting"], result["findings"]
    recipe = setting["recipe"]
    length, slots = recipe["length"], setting["slots"]
    texts = " and ".join(text["name"] for text in setting["held_out"])
    some = next(iter(result["models"].values()))["training"]
    one, two, three, four = tables(result)
    lines = [
        "# Models with and without an attention sink",
        "",
        f"StreamingLLM's section 3.3 and appendix I, with models of {some['parameters']:,} "
        f"parameters trained on {some['tokens']:,} tokens; the paper's have 160 million and saw "
        "75 billion. All begin from the same weights and see the same passages in the same order.",
        "",
        "## What was reproduced",
        "",
        "A model *needs* something where perplexity without it is more than 1 % higher, and does "
        "without it where it is less than 1 % higher, each with its whole 95 % interval, over "
        "pairs of the same 500 tokens. Otherwise nothing is settled; nor is it where a sink is "
        "enough for a model that does not need it.",
        "",
        Table(
            "",
            ("claim of the paper", "here", "compared", "excess perplexity (95 %)"),
            tuple((its["claim"], its["verdict"], its["compared"], _interval(its)) for its in found),
        ).markdown(),
        "",
        *_words(result),
        "",
        f"## {one.title}",
        "",
        one.markdown(),
        "",
        f"{setting['read']:,} tokens each of {texts}, chunk {setting['chunk']}; samples had "
        f"{length} tokens of text. x counts the first tokens of the stream, a learned sink among "
        "them; the first token of the text is not scored.",
        "",
        f"![Streaming perplexity by cache configuration, a line a model]({ppl})",
        "",
        f"## {four.title}",
        "",
        four.markdown(),
        "",
        f"![Loss curves, and their differences from Vanilla's]({loss})",
        "",
        f"## {two.title}",
        "",
        two.markdown(),
        "",
        "*Right continuation*: three quarters of a window, and which of four last quarters goes on "
        "from it, by likelihood; guessing gives 25 %. *Last token*: the likeliest is right. "
        "*Second time*: a quarter of a window comes again after half a window of other text; the "
        "share of its tokens that are foretold, "
        + ", ".join(
            f"{name_of(sink)} {model['abilities']['recall']['first_time']:.1%} the first time"
            for sink, model in result["models"].items()
        )
        + ". "
        + _benchmarks(result),
        "",
        f"## {three.title}",
        "",
        three.markdown(),
        "",
        f"Slots: {slots}. Recipe: {json.dumps(recipe)}. Vocabulary: {setting['vocabulary']:,}.",
    ]
    return "\n".join(lines) + "\n"


def _benchmarks(result: dict[str, Any]) -> str:
    """The paper's zero-shot accuracies, for the models that are here."""
    means = [
        f"{name_of(sink)} {sum(scores) / len(scores):.1f} %"
        for sink, scores in paper.ACCURACY.items()
        if sink in result["models"]
    ]
    count = len(paper.BENCHMARKS)
    return f"The paper's means over {count} benchmarks: {', '.join(means)}." if means else ""


def _interval(its: dict[str, Any]) -> str:
    return f"{100 * its['excess']:+.2f} % ({100 * its['low']:+.2f} to {100 * its['high']:+.2f})"


def _words(result: dict[str, Any]) -> list[str]:
    """In one paragraph: how many claims held, and whether the models have sinks at all."""
    verdicts = [its["verdict"] for its in result["findings"]]
    counts = ", ".join(
        f"{verdicts.count(verdict)} {verdict}"
        for verdict in ("reproduced", "not reproduced", "not settled")
    )
    told = [f"Of {len(verdicts)} claims {counts}."]
    for sink, model in result["models"].items():
        layers = model["attention"]
        first = sum(layer["first"] for layer in layers) / len(layers)
        even = sum(layer["even"] for layer in layers) / len(layers)
        nowhere = sum(layer["nowhere"] for layer in layers) / len(layers)
        zero = f", and {nowhere:.1%} goes nowhere" if nowhere > 1e-3 else ""
        told.append(
            f"{name_of(sink)} rests {first:.1%} of its attention on the first token, "
            f"{first / even:.1f} times what it would get were all looked at alike{zero}."
        )
    return [" ".join(told)]
