"""The log of a run, with one CSV line per step, and loss curves drawn from logs.

A run that continues from a checkpoint drops the lines after it, so that no step is logged twice.
This module knows nothing about models.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from weir.stream import replace_atomically

COLUMNS = (
    "step",
    "tokens",
    "loss",
    "objective",
    "sink_loss",
    "rate",
    "tokens_per_s",
    "held_out_loss",
    "recall",
)
"""`loss` is the loss of the text alone, without predictions from sink tokens, so that models with
different sinks can be compared. `objective` is the loss of text and exercises. Training minimizes
the objective plus the weighted sink loss. The last two columns are filled at checkpoints,
`recall` only if there are exercises.
"""


@contextmanager
def open_log(
    path: Path, done: int, *, writing: bool = True
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Open a run's log, drop its lines of steps after `done`, and provide a function that appends a
    line.

    `writing` is false in processes that do not write the log.
    """
    if not writing:
        yield lambda facts: None
        return
    kept = [row for row in read_log(path) if row["step"] <= done] if path.exists() else []
    with replace_atomically(path) as new, new.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
    with path.open("a", newline="", encoding="utf-8") as file:
        appender = csv.DictWriter(file, COLUMNS, "", "ignore", lineterminator="\n")

        def write(facts: Mapping[str, Any]) -> None:
            appender.writerow(facts)
            file.flush()

        yield write


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a log, except an incomplete last line; unknown figures are ""."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    return [
        {
            name: "" if value == "" else int(value) if name in ("step", "tokens") else float(value)
            for name, value in row.items()
        }
        for row in rows
    ]


def smoothed(values: np.ndarray, share: float = 0.02) -> np.ndarray:
    """Return a running mean over the last `share` of all values, or over all so far if there are
    fewer.
    """
    span = max(1, round(len(values) * share))
    total = np.concatenate([[0.0], np.cumsum(values)])
    upto = np.arange(1, len(values) + 1)
    since = np.maximum(upto - span, 0)
    return (total[upto] - total[since]) / (upto - since)


def plot_losses(log: Path, out: Path, title: str) -> None:
    """Draw the losses of a run's log as a .png: training text (line) and held-out text (dots)."""
    from matplotlib.figure import Figure

    rows = read_log(log)
    tokens = np.array([row["tokens"] for row in rows]) / 1e6
    losses = smoothed(np.array([row["loss"] for row in rows]))
    looks = [(row["tokens"] / 1e6, row["held_out_loss"]) for row in rows if row["held_out_loss"]]
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    [line] = axes.plot(tokens, losses, linewidth=1.4)
    if looks:
        axes.plot(*zip(*looks, strict=True), "o", color=line.get_color(), markersize=3)
    # Cut off the steep beginning, which would flatten the rest of the curve.
    axes.set_ylim(top=max(0.0, losses[len(losses) // 20]))
    axes.set_title(title)
    axes.set_xlabel("tokens of text trained on (millions)")
    axes.set_ylabel("loss (nats per token); dots: held out")
    axes.grid(alpha=0.3)
    figure.savefig(out, dpi=130)
