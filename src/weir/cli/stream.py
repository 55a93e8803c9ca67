"""`weir stream`: streaming perplexity of a text."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weir.cli.app import command
from weir.cli.common import (
    AsJson,
    Chunk,
    ModelName,
    PolicyText,
    Seed,
    SlotsName,
    interruptible,
    load_model,
    output,
    print_json,
    progress,
    say,
    size,
    waiting,
)

if TYPE_CHECKING:
    from weir.evals.measures import Reading


class Positions(StrEnum):
    """What `--positions` may be."""

    rolling = "rolling"
    original = "original"


@command()
def stream(
    text: Annotated[Path, typer.Option(help="The text: UTF-8, plain or .xz.")],
    model_name: ModelName = "nano",
    policy: PolicyText = "streaming_llm(budget=256)",
    slots: SlotsName = "exact",
    tokens: Annotated[int | None, typer.Option(min=2, help="Read only so many tokens.")] = None,
    chunk: Chunk = 64,
    block: Annotated[int, typer.Option(min=1, help="Tokens in a block of the table.")] = 1000,
    start: Annotated[
        str | None, typer.Option(help="Text in front, in place of the tokenizer's start token.")
    ] = None,
    positions: Annotated[
        Positions, typer.Option(help="Inside the cache, or in the stream.")
    ] = Positions.rolling,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Read a text once, in constant memory, and report its perplexity.

    Ctrl-C ends the reading and reports what was read.
    """
    from weir.evals.measures import read
    from weir.policies import policy_of, with_slots
    from weir.stream import Stream, encode, read_text

    wanted = with_slots(policy_of(policy), slots)
    words = read_text(text)
    model, tokenizer = load_model(model_name)
    with waiting(f"tokenising {text}"):
        ids = encode(tokenizer, words, tokens, start)
    if tokens is not None and len(ids) < tokens:
        say(f"{text} has {len(ids):,} tokens, not {tokens:,}; all of them are read")
    reader = Stream(model, wanted, chunk=chunk, seed=seed, positions=positions.value)
    with interruptible() as interrupt, progress() as bar:
        task = bar.add_task(str(wanted), total=len(ids), note="")

        def show(reading: Reading) -> bool:
            note = f"perplexity {reading.ppl:.2f}, {reading.tokens_per_s:,.0f} tokens/s"
            bar.update(task, completed=reading.tokens, note=note)
            return bool(interrupt)

        reading = read(reader, ids, block=block, on_step=show)
    ended = f"interrupted after {reading.tokens:,} of {len(ids):,} tokens" if interrupt else None
    if as_json:
        if ended:
            say(ended)
        settings = {
            "chunk": chunk,
            "positions": positions.value,
            "seed": seed,
            "start": start,
        }
        print_json(
            {"model": model_name, **reading.as_json(), **settings, "interrupted": bool(interrupt)}
        )
        return
    _print(model_name, reading, ended)


def _print(model_name: str, reading: Reading, ended: str | None) -> None:
    """A table of the blocks, and what there is to say of all; `ended` is why it stops early."""
    from rich.table import Table

    table = Table()
    for head in ("tokens", "perplexity", "cache"):
        table.add_column(head, justify="right")
    for number, (ppl, held) in enumerate(
        zip(reading.ppl_by_block, reading.bytes_by_block, strict=True)
    ):
        first = number * reading.block
        last = min(first + reading.block, reading.tokens)
        mark = ", interrupted" if ended and last == reading.tokens else ""
        table.add_row(f"{first + 1:,} to {last:,}{mark}", f"{ppl:.2f}", size(held))
    output().print(table)
    lines = [
        *([ended] if ended else []),
        f"{model_name} under {reading.policy}: perplexity {reading.ppl:.3f} over "
        f"{reading.tokens:,} tokens, {size(reading.kv_bytes)} of cache, "
        f"{reading.tokens_per_s:,.0f} tokens/s",
    ]
    if reading.slowdown is not None:
        lines.append(f"time per token, last thousand over second thousand: {reading.slowdown:.3f}")
    if reading.memory_growth is not None:
        lines.append(f"process memory since token 5,000: +{size(reading.memory_growth)}")
    for line in lines:
        output().print(line, markup=False, highlight=False, soft_wrap=True)
