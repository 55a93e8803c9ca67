"""`weir stream`: measure the streaming perplexity of a text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from typer import Context, Option

from weir.cli import options
from weir.cli.app import command
from weir.cli.common import (
    in_lines,
    in_words,
    prepare_model,
    print_json,
    print_line,
    print_table,
    say,
    say_window,
    show_progress,
    size,
    waiting,
)
from weir.cli.loading import Loading, load_model, loads_model
from weir.cli.runtime import interruptible

if TYPE_CHECKING:
    from weir.evals.perplexity import PerplexityMeter


@command()
@loads_model()
def stream(
    context: Context,
    text: options.TextPath,
    model_name: options.ModelName = "nano",
    policy: options.PolicyText = options.DEFAULT,
    budget: options.Budget = None,
    slots: options.SlotsName = None,
    tokens: Annotated[int | None, Option(min=2, help="The most tokens to read.")] = None,
    chunk: options.PolicyChunk = None,
    block: Annotated[
        int, Option(min=1, help="The report has the perplexity of each block of this many tokens.")
    ] = 1000,
    start: Annotated[
        str | None, Option(help="Text to put first, instead of the tokenizer's start token.")
    ] = None,
    positions: options.PositionsName = options.Positions.rolling,
    seed: options.Seed = 0,
    compiled: options.Compile = False,
    as_json: options.AsJson = False,
    *,
    loading: Loading,
) -> int:
    """Read a text once, in constant memory, and report its perplexity.

    Each forward pass reads many tokens. With --compile, each token is read in a separate decode
    step, as in generation.

    After Ctrl-C, the command stops and reports the perplexity of the tokens read so far. After
    SIGTERM, it does the same, with exit code 143. It also stops if the perplexity is not a finite
    number, with exit code 1.
    """
    from weir.evals.perplexity import read
    from weir.policies import Recompute, parse_policy, resolve_chunk, with_slots
    from weir.stream import STANDARD_INPUT, Stream, encode, read_text

    wanted = with_slots(parse_policy(options.with_given_budget(policy, budget)), slots)
    chunk = resolve_chunk(wanted, chunk)
    if isinstance(wanted, Recompute):
        unused = ("chunk", "positions", "seed")
        options.say_unused(
            context, unused, "recompute recomputes its window and draws no random numbers"
        )
    words = read_text(text)
    model, tokenizer = load_model(model_name, loading)
    if compiled:
        prepare_model(model, compiled=True)
    source = "standard input" if str(text) == STANDARD_INPUT else str(text)
    with waiting(f"tokenizing {source}"):
        ids = encode(tokenizer, words, tokens, start)
    if tokens is not None and len(ids) < tokens:
        say(f"{source} has only {len(ids):,} tokens, fewer than {tokens:,}. All of them are read.")
    if positions.value == "rolling":
        say_window(model, wanted, chunk)
    reader = Stream(model, wanted, chunk=chunk, seed=seed, positions=positions.value)
    with interruptible() as interrupt, show_progress(wanted.brief, len(ids)) as show:

        def step(reading: PerplexityMeter) -> bool:
            note = f"perplexity {reading.ppl:.2f}, {reading.tokens_per_s:,.0f} tokens/s"
            show(completed=reading.tokens, note=note)
            while in_lines() and len(printed) < len(reading.ppl_by_block):
                printed.append(_block_line(reading, len(printed)))
                say(printed[-1])
            return bool(interrupt) or not math.isfinite(reading.ppl)

        printed: list[str] = []
        reading = read(reader, ids, block=block, in_steps=compiled, on_step=step)
    ended = (
        f"{interrupt.word} after {reading.tokens:,} of {len(ids):,} tokens" if interrupt else None
    )
    if as_json:
        if ended:
            say(ended)
        settings = {"chunk": chunk, "positions": positions.value, "seed": seed, "start": start}
        print_json(
            {"model": model_name, **reading.as_json(), **settings, "interrupted": bool(interrupt)}
        )
        reading.check()
        return interrupt.code
    _print(model_name, reader.policy.brief, reading, ended)
    reading.check()
    return interrupt.code


def _block_line(reading: PerplexityMeter, number: int) -> str:
    """Return a line about a complete block, for output without a progress bar."""
    first, end = number * reading.block, (number + 1) * reading.block
    return (
        f"tokens {first + 1:,} to {min(end, reading.tokens):,}: perplexity "
        f"{reading.ppl_by_block[number]:.2f}, {size(reading.bytes_by_block[number])} of cache, "
        f"{reading.tokens_per_s:,.0f} tokens/s"
    )


def _print(model_name: str, policy: str, reading: PerplexityMeter, ended: str | None) -> None:
    """Print a table of the blocks and a summary. `ended` says why the reading stopped early."""
    from rich.table import Table

    table = Table()
    for head in ("tokens", "perplexity", "cache"):
        table.add_column(head, justify="right", no_wrap=True)
    for number, (ppl, held) in enumerate(
        zip(reading.ppl_by_block, reading.bytes_by_block, strict=True)
    ):
        first = number * reading.block
        last = min(first + reading.block, reading.tokens)
        mark = f", {ended.split()[0]}" if ended and last == reading.tokens else ""
        table.add_row(f"{first + 1:,} to {last:,}{mark}", f"{ppl:.2f}", size(held))
    print_table(table)
    short = reading.last_block < reading.block
    lines = [
        *([f"the last block has {in_words(reading.last_block, 'token')}"] if short else []),
        *([ended] if ended else []),
        f"{model_name} under {policy}: perplexity {reading.ppl:.3f} over "
        f"{reading.tokens:,} tokens, {size(reading.kv_bytes)} of cache, "
        f"{reading.tokens_per_s:,.0f} tokens/s",
    ]
    if reading.slowdown is not None:
        lines.append(f"time per token, last thousand / second thousand: {reading.slowdown:.3f}")
    if reading.memory_growth is not None:
        lines.append(f"growth of process memory since token 5,000: {size(reading.memory_growth)}")
    for line in lines:
        print_line(line)
