"""`weir advise`: recommend a policy and a size for a model, a text and a memory limit."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Option

from weir.cli import options
from weir.cli.app import command
from weir.cli.common import print_json, print_line, print_table, show_progress, size
from weir.cli.loading import Loading, load_model, loads_model

if TYPE_CHECKING:
    from weir.evals.advice import Advice


@command()
@loads_model()
def advise(
    text: options.TextPath,
    memory: Annotated[
        str | None,
        Option(
            help="Memory for the cache of one stream, such as 2GB or 500MB. Give either this or "
            "--budget."
        ),
    ] = None,
    budget: Annotated[
        int | None,
        Option(
            min=1,
            help="Instead of --memory: number of slots for policies that are given without a "
            "budget.",
        ),
    ] = None,
    model_name: options.ModelName = "nano",
    policies: Annotated[
        str | None,
        Option(
            help="Comma-separated policies to try, such as 'weir, weir(sinks=8), mine.toml' "
            "[default: 13 policies, among them weir, streaming_llm, h2o and snapkv]"
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        Option(
            min=2,
            help="Number of tokens to try on [default: four times the largest number of slots, at "
            "least 4,096]",
        ),
    ] = None,
    chunk: options.Chunk = 64,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    *,
    loading: Loading,
) -> None:
    """Try policies on the beginning of a text, in a cache of a given size, and recommend one."""
    from weir.cache import read_bytes
    from weir.evals import advice

    allowed = None if memory is None else read_bytes(memory)
    model, tokenizer = load_model(model_name, loading)
    with show_progress("trying", 1) as show:
        found = advice.advise(
            model,
            tokenizer,
            str(text),
            allowed,
            budget=budget,
            policies=policies,
            tokens=tokens,
            chunk=chunk,
            seed=seed,
            on_step=lambda policy, share: show(completed=share, note=policy),
        )
    if as_json:
        facts = {"model": model_name, "memory": allowed, "budget": budget}
        print_json({**facts, "best": found.best.policy, **asdict(found)})
        return
    _print(model_name, found)


def _print(model_name: str, found: Advice) -> None:
    from rich.table import Table
    from rich.text import Text

    best = found.best
    if found.everything:
        print_line(
            f"all {found.available:,} tokens of the text fit in the window of {model_name} and in "
            f"the given size: their cache takes {size(best.kv_bytes)}. Use the policy dense: "
            "nothing has to be evicted."
        )
        return
    table = Table()
    table.add_column("policy", no_wrap=True)
    for head in ("perplexity", "cache", "tokens/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in found.tries:
        row = (f"{one.ppl:.2f}", size(one.kv_bytes), f"{one.tokens_per_s:,.0f}")
        table.add_row(Text(one.policy), *row)
    print_table(table)
    print_line(
        f"recommended: {best.policy}. Perplexity {best.ppl:.2f} on the first {found.tokens:,} of "
        f"{found.available:,} tokens, {size(best.kv_bytes)} of cache for one stream."
    )
    for why in found.left_out.values():
        print_line(f"left out: {why}")
    idle = [one.policy for one in found.tries if not one.evicted]
    if idle:
        print_line(
            f"{found.tokens:,} tokens are too few to compare policies: {', '.join(idle)} evicted "
            "nothing, so the figures do not show what eviction costs. Try a longer text or more "
            "--tokens."
        )
