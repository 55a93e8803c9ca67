"""`weir demo`: the packaged model reads the packaged book past its window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir.cli.app import command
from weir.cli.common import (
    AsJson,
    messages,
    output,
    print_json,
    progress,
    say,
    size,
    waiting,
)
from weir.cli.loading import load_model
from weir.cli.signals import interruptible
from weir.errors import WeirError

if TYPE_CHECKING:
    from rich.table import Table

    from weir.evals.measures import PerplexityMeter


@command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for result.json and report.html.")] = Path(
        "demo-out"
    ),
    tokens: Annotated[int, typer.Option(min=1000, help="Tokens of the book to read.")] = 10_000,
    as_json: AsJson = False,
) -> int:
    """Read a book far past the model's window, under several policies side by side."""
    from rich.console import Group
    from rich.live import Live

    from weir.evals import demo as demonstration

    _make_folder(out)
    model, tokenizer = load_model("nano")
    ids = demonstration.book(tokenizer, tokens)
    if len(ids) < tokens:
        say(f"the packaged excerpt has {len(ids):,} tokens, not {tokens:,}; all of them are read")
    window = model.config.max_position_embeddings
    console = messages() if as_json else output()
    console.print(
        f"nano was trained on {window:,} tokens at a time. "
        f"It now reads {len(ids):,} tokens of {demonstration.TITLE}, once under each policy.",
        highlight=False,
    )
    bar = progress()
    task = bar.add_task("reading", total=len(ids), note="tokens")
    with interruptible() as interrupt, Live(console=console, refresh_per_second=8) as live:

        def show(meters: list[PerplexityMeter]) -> bool:
            done = meters[0].reading.tokens
            bar.update(task, completed=done)
            table = _table(meters, window)
            over = done == len(ids) or bool(interrupt)
            live.update(table if over else Group(table, bar), refresh=over)
            return bool(interrupt)

        result = demonstration.read_book(model, ids, on_step=show)
    if not console.is_terminal:
        console.line()
    result["interrupted"] = bool(interrupt)
    with waiting("drawing the plots"):
        _write(result, out)
    if as_json:
        print_json(result)
    for name in ("result.json", "report.html"):
        console.print(f"{out / name}", markup=False, highlight=False, soft_wrap=True)
    return interrupt.code


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeirError(f"cannot make the folder {out}: {error.strerror}") from None


def _write(result: dict[str, Any], out: Path) -> None:
    from weir.evals.demo import write_report
    from weir.evals.results import for_json

    try:
        (out / "result.json").write_text(json.dumps(for_json(result), indent=1) + "\n", "utf-8")
        write_report(result, out / "report.html")
    except OSError as error:
        raise WeirError(f"cannot write to {out}: {error.strerror}") from None


def _table(meters: list[PerplexityMeter], window: int) -> Table:
    from rich.table import Table

    done = meters[0].reading.tokens
    table = Table(title=f"{done:,} tokens read: {done / window:.1f} times the window")
    table.add_column("policy", no_wrap=True)
    for head in ("perplexity", "last block", "cache", "tokens/s"):
        table.add_column(head, justify="right", min_width=8, no_wrap=True)
    for meter in meters:
        reading = meter.reading
        last = f"{reading.ppl_by_block[-1]:.1f}" if reading.ppl_by_block else ""
        table.add_row(
            reading.policy,
            f"{reading.ppl:.1f}",
            last,
            size(reading.kv_bytes),
            f"{reading.tokens_per_s:,.0f}",
        )
    return table
