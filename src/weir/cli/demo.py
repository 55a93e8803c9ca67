"""`weir demo`: the packaged model reads the packaged book past its window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.table import Table

from weir.cli import app
from weir.cli.common import AsJson, interruptible, messages, output, plain, print_json, size
from weir.errors import WeirError

if TYPE_CHECKING:
    from weir.evals.reading import Reader


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for result.json and report.html.")] = Path(
        "demo-out"
    ),
    tokens: Annotated[int, typer.Option(min=1000, help="Tokens of the book to read.")] = 10_000,
    as_json: AsJson = False,
) -> None:
    """Read a book far past the model's window, under several policies side by side."""
    from weir import demo as demonstration
    from weir.load import load

    model, tokenizer = load("nano")
    window = model.config.max_position_embeddings
    say = messages if as_json else output
    say.print(
        f"nano was trained on {window} tokens at a time. It now reads {tokens:,} tokens of "
        "War and Peace."
    )
    with interruptible() as interrupt, Live(console=say, refresh_per_second=8) as live:

        def show(readers: list[Reader]) -> bool:
            live.update(_table(readers, window))
            return bool(interrupt)

        result = demonstration.run(model, tokenizer, tokens=tokens, on_step=show)
    result["interrupted"] = bool(interrupt)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(plain(result), indent=1) + "\n", "utf-8")
        demonstration.write_report(result, out / "report.html")
    except OSError as error:
        raise WeirError(f"cannot write to {out}: {error.strerror}") from None
    if as_json:
        print_json(result)
    say.print(f"figures: {out / 'result.json'}   plots: {out / 'report.html'}")


def _table(readers: list[Reader], window: int) -> Table:
    done = readers[0].reading.tokens
    title = f"{done:,} tokens read: {done / window:.1f} times the window"
    table = Table("policy", title=title)
    for head in ("perplexity", "last block", "cache", "tokens/s"):
        table.add_column(head, justify="right", min_width=10)
    for reader in readers:
        reading = reader.reading
        last = f"{reading.ppl_by_block[-1]:.1f}" if reading.ppl_by_block else ""
        whole = f"{reading.ppl:.1f}" if reading.ppl_by_block else ""
        table.add_row(
            reading.policy, whole, last, size(reading.kv_bytes), f"{reading.tokens_per_s:,.0f}"
        )
    return table
