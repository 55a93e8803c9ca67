"""`weir stream`: streaming perplexity of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from weir.cli import app
from weir.cli.common import (
    AsJson,
    Chunk,
    Model,
    PolicyText,
    Seed,
    interruptible,
    messages,
    output,
    print_json,
    progress,
    size,
)


@app.command()
def stream(
    text: Annotated[Path, typer.Option(help="The text: UTF-8, plain or .xz.")],
    model: Model = "nano",
    policy: PolicyText = "streaming_llm(budget=256)",
    tokens: Annotated[int | None, typer.Option(min=2, help="Read only so many tokens.")] = None,
    chunk: Chunk = 64,
    block: Annotated[int, typer.Option(min=1, help="Tokens in a block of the table.")] = 1000,
    positions: Annotated[str, typer.Option(help="rolling or original.")] = "rolling",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Read a text once, in constant memory, and report its perplexity.

    Ctrl-C ends the reading and reports what was read.
    """
    from weir.evals.reading import Reading, encode, read
    from weir.load import load
    from weir.policy import policy_of
    from weir.stream import Stream
    from weir.text import read_text

    wanted = policy_of(policy)
    words = read_text(text)
    reader, tokenizer = load(model)
    ids = encode(tokenizer, words, tokens)
    it = Stream(reader, wanted, chunk=chunk, seed=seed, positions=positions)  # type: ignore[arg-type]
    with interruptible() as interrupt, progress() as bar:
        task = bar.add_task(str(wanted), total=len(ids), note="")

        def show(reading: Reading) -> bool:
            note = f"ppl {reading.ppl:.2f}  {reading.tokens_per_s:.0f} tokens/s"
            bar.update(task, completed=reading.tokens, note=note)
            return bool(interrupt)

        reading = read(it, ids, block=block, on_step=show)
    facts = {
        "model": model,
        **reading.as_json(),
        "chunk": chunk,
        "positions": positions,
        "seed": seed,
        "interrupted": bool(interrupt),
    }
    if as_json:
        print_json(facts)
        return
    if interrupt:
        messages.print(f"interrupted after {reading.tokens} of {len(ids)} tokens")
    table = Table("tokens", "perplexity", "cache")
    for number, (ppl, held) in enumerate(
        zip(reading.ppl_by_block, reading.bytes_by_block, strict=True)
    ):
        last = min((number + 1) * block, reading.tokens)
        table.add_row(f"{number * block:,} to {last:,}", f"{ppl:.2f}", size(held))
    output.print(table)
    output.print(
        f"{model} under {reading.policy}: perplexity {reading.ppl:.3f} over {reading.tokens:,} "
        f"tokens, {size(reading.kv_bytes)} of cache, {reading.tokens_per_s:,.0f} tokens/s",
        markup=False,
    )
    if reading.slowdown is not None:
        output.print(f"time per token, last thousand over second thousand: {reading.slowdown:.3f}")
    if reading.memory_growth is not None:
        output.print(f"process memory since token 5,000: +{size(reading.memory_growth)}")
