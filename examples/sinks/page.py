"""The experiment's results as files: sinks.json, sinks.csv, two plots, and sinks.md."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from findings import ACCURACY, CONFIGS, PERPLEXITY, VARIANTS
from matplotlib.figure import Figure

from weir.evals.report import TextTable, line_style
from weir.evals.results import for_json
from weir.train import read_log, smoothed

ABILITY = {
    "continuation": "right continuation of four",
    "last_word": "last token of a window",
    "recall": "a passage's second time",
}
WIDTH = 5.2
"""Inches; readable on a phone."""


def write_results(result: dict[str, Any], logs: dict[str, Path], out: Path) -> list[Path]:
    """Write everything into a folder, and return the paths.

    Args:
        result: the result of the experiment.
        logs: the training log of each model.
        out: the folder.
    """
    names = ("sinks.md", "sinks.json", "sinks.csv", "sinks-ppl.png", "sinks-loss.png")
    files = [out / name for name in names]
    page, facts, cells, ppl, loss = files
    facts.write_text(json.dumps(for_json(result), indent=1) + "\n", "utf-8")
    with cells.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("model", "sinks", "recent", "text", "ppl", "paper_ppl"))
        for sink, model in result["models"].items():
            for place, x in enumerate(CONFIGS):
                paper = PERPLEXITY.get(sink, [""] * len(CONFIGS))[place]
                first = (sink, x, result["setting"]["slots"] - x)
                writer.writerow((*first, "all", model["ppl"][str(x)], paper))
                for text, value in zip(
                    result["setting"]["held_out"], model["ppl_by_text"][str(x)], strict=True
                ):
                    writer.writerow((*first, text["name"], value, ""))
    plot_perplexity(result, ppl)
    plot_losses({name_of(sink): path for sink, path in logs.items()}, loss)
    page.write_text(markdown(result, ppl.name, loss.name), "utf-8")
    return files


def name_of(sink: str) -> str:
    """The paper's name of a model, or weir's name if the paper does not have this model."""
    return VARIANTS.get(sink, sink)


def perplexity_table(result: dict[str, Any]) -> TextTable:
    """Streaming perplexity by cache configuration, the paper's figures below each model's."""
    slots, rows = result["setting"]["slots"], []
    for sink, model in result["models"].items():
        here = (number(model["ppl"][str(x)]) for x in CONFIGS)
        rows.append((f"{name_of(sink)}, here", *here))
        if sink in PERPLEXITY:
            rows.append((f"{name_of(sink)}, paper", *map(number, PERPLEXITY[sink])))
    return TextTable(("model", *(f"{x}+{slots - x}" for x in CONFIGS)), tuple(rows))


def ability_table(result: dict[str, Any]) -> TextTable:
    """Held-out perplexity inside the window, and the accuracy of each ability."""
    rows = []
    for sink, model in result["models"].items():
        cells = [number(model["inside_ppl"])]
        for name in ABILITY:
            found = model["abilities"][name]
            interval = f"({100 * found['low']:.0f} to {100 * found['high']:.0f})"
            cells.append(f"{found['accuracy']:.1%} {interval}")
        rows.append((name_of(sink), *cells))
    return TextTable(("model", "perplexity", *ABILITY.values()), tuple(rows))


def attention_table(result: dict[str, Any]) -> TextTable:
    """Where the attention of each layer goes."""
    heads = (
        "model",
        "first token",
        "first four",
        "nowhere (Zero Sink)",
        "an even share",
    )
    shares = ("first", "first_4", "nowhere", "even")
    rows = [
        (f"{name_of(sink)}, layer {layer}", *(f"{found[name]:.1%}" for name in shares))
        for sink, model in result["models"].items()
        for layer, found in enumerate(model["attention"])
    ]
    return TextTable(heads, tuple(rows))


def training_table(result: dict[str, Any]) -> TextTable:
    """How each model was trained."""
    heads = ("model", "parameters", "steps", "tokens", "loss at the end", "held out", "tokens/s")
    rows = []
    for sink, model in result["models"].items():
        facts = model["training"]
        counts = (f"{facts[name]:,}" for name in ("parameters", "steps", "tokens"))
        losses = (f"{facts[name]:.3f}" for name in ("last_loss", "held_out_loss"))
        rows.append((name_of(sink), *counts, *losses, f"{facts['tokens_per_s']:,.0f}"))
    return TextTable(heads, tuple(rows))


def claims_table(result: dict[str, Any]) -> TextTable:
    """The paper's claims and their verdicts."""
    heads = ("claim of the paper", "here", "compared", "excess perplexity (95 %)")
    rows = []
    for found in result["findings"]:
        low, high = (f"{100 * found[end]:+.2f}" for end in ("low", "high"))
        excess = f"{100 * found['excess']:+.2f} % ({low} to {high})"
        rows.append((found["claim"], found["verdict"], found["compared"], excess))
    return TextTable(heads, tuple(rows))


def number(value: float) -> str:
    """A perplexity as it is printed."""
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def summary(result: dict[str, Any]) -> str:
    """How many claims held, and whether the models have sinks at all."""
    verdicts = [found["verdict"] for found in result["findings"]]
    kinds = ("reproduced", "not reproduced", "not settled")
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds)
    sentences = [f"Of {len(verdicts)} claims: {counts}."]
    for sink, model in result["models"].items():
        layers = model["attention"]
        first, even, nowhere = (
            sum(layer[name] for layer in layers) / len(layers)
            for name in ("first", "even", "nowhere")
        )
        zero = f", and {nowhere:.1%} goes nowhere" if nowhere > 1e-3 else ""
        sentences.append(
            f"{name_of(sink)} puts {first:.1%} of its attention on the first token, "
            f"{first / even:.1f} times an even share{zero}."
        )
    return " ".join(sentences)


def markdown(result: dict[str, Any], ppl: str, loss: str) -> str:
    """The page: setting, findings, tables and plots."""
    setting = result["setting"]
    training = next(iter(result["models"].values()))["training"]
    texts = " and ".join(text["name"] for text in setting["held_out"])
    first_time = ", ".join(
        f"{name_of(sink)} {model['abilities']['recall']['first_time']:.1%}"
        for sink, model in result["models"].items()
    )
    means = ", ".join(
        f"{name_of(sink)} {sum(scores) / len(scores):.1f} %"
        for sink, scores in ACCURACY.items()
        if sink in result["models"]
    )
    return f"""# Models with and without an attention sink

StreamingLLM's section 3.3 and appendix I, with models of {training["parameters"]:,} parameters
trained on {training["tokens"]:,} tokens; the paper's have 160 million and saw 75 billion. All begin
from the same weights and see the same passages in the same order.

## What was reproduced

A model *needs* something if perplexity without it is more than 1 % higher, and *does without* it if
perplexity without it is less than 1 % higher. In both cases the whole 95 % interval must be on the
same side of 1 %. Otherwise the claim is not settled. The interval is computed over pairs of losses
of two models or caches on the same tokens: blocks of 500 tokens of a stream, or whole samples
inside the window. The claim that a sink is enough is also not settled for a model that does not
need initial tokens.

{claims_table(result).markdown()}

{summary(result)}

## Streaming perplexity by cache configuration (Tables 3 and 10; the paper's x + y is 1024)

{perplexity_table(result).markdown()}

Each model read the first {setting["read"]:,} tokens of each held-out text ({texts}) with chunk
{setting["chunk"]}. Training samples had {setting["recipe"]["length"]} tokens of text. x counts the
first tokens of the stream, including learned sinks. The first token of the text is not scored.

![Streaming perplexity by cache configuration, with a line for each model]({ppl})

## Training (Figures 6 and 15)

{training_table(result).markdown()}

![Loss curves, and their differences from Vanilla's]({loss})

## Held-out text inside the window (Tables 4 and 9 at this scale; 95 % intervals)

{ability_table(result).markdown()}

*Right continuation*: the model reads three quarters of a window. How often is the true last quarter
the likeliest of four? Guessing gives 25 %. *Last token*: how often is the likeliest token the right
one? *Second time*: a quarter of a window comes again after half a window of other text. How many of
its tokens are predicted? When they come for the first time: {first_time}.

The paper's means over 7 benchmarks: {means or "none of these models"}.

## Where attention goes (means over heads and over the queries in a window's later half)

{attention_table(result).markdown()}

Slots: {setting["slots"]}. Recipe: {json.dumps(setting["recipe"])}. Vocabulary:
{setting["vocabulary"]:,}.
"""


def plot_perplexity(result: dict[str, Any], out: Path) -> None:
    """Perplexity by the number of initial tokens that are kept, here and in the paper."""
    models = result["models"]
    here = {sink: [model["ppl"][str(x)] for x in CONFIGS] for sink, model in models.items()}
    paper = {sink: PERPLEXITY[sink] for sink in models if sink in PERPLEXITY}
    panels = [("here", here)] + ([("paper, 160 million parameters", paper)] if paper else [])
    figure = Figure(figsize=(WIDTH, 1.0 + 2.4 * len(panels)), layout="constrained")
    places = range(len(CONFIGS))
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, lines) in zip(rows, panels, strict=True):
        for index, (sink, values) in enumerate(lines.items()):
            axes.plot(places, values, label=name_of(sink), lw=1.4, ms=5, **line_style(index))
        low, high = (f(v for line in lines.values() for v in line) for f in (min, max))
        if high < 3 * low:  # differences of a few per cent should look small
            axes.set_ylim(low / 1.1, high * 1.1)
        else:
            axes.set_yscale("log")
        axes.set_title(title, fontsize=10)
        axes.set_ylabel("streaming perplexity")
        axes.grid(alpha=0.3)
    axes.set_xticks(places, [str(x) for x in CONFIGS])
    axes.set_xlabel("initial tokens in the cache, all others recent")
    labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(out, dpi=130)


def plot_losses(logs: dict[str, Path], out: Path) -> None:
    """Loss curves, and below the difference of each from the first, step by step.

    All models have the same samples in each step, so the difference shows what the curves hide.
    """
    figure = Figure(figsize=(WIDTH, 5.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    base: np.ndarray | None = None
    top = reach = 0.0
    for index, (name, path) in enumerate(logs.items()):
        rows = read_log(path)
        tokens = np.array([row["tokens"] for row in rows]) / 1e6
        losses = np.array([row["loss"] for row in rows])
        color = line_style(index)["color"]
        above.plot(tokens, smoothed(losses), label=name, lw=1.3, color=color)
        top = max(top, smoothed(losses)[len(losses) // 20])
        base = losses if base is None else base
        both = min(len(base), len(losses))
        apart = smoothed(losses[:both] - base[:both], 0.05)
        below.plot(tokens[:both], apart, color=color, lw=1.3)
        reach = max(reach, float(np.abs(apart[both // 10 :]).max(initial=0.0)))
    above.set_ylim(top=top)
    above.set_ylabel("loss (nats per token)")
    above.legend()
    below.set_ylabel(f"loss minus {next(iter(logs))}'s")
    below.set_xlabel("tokens of text trained on (millions)")
    if reach > 0:
        below.set_ylim(-1.1 * reach, 1.1 * reach)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(out, dpi=130)
