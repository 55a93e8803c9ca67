"""`weir attention-error`: how much a policy changes the attention outputs of each layer."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Context, Option

from weir.cli import options
from weir.cli.app import command
from weir.cli.common import (
    in_words,
    print_json,
    print_line,
    print_table,
    say,
    show_progress,
    waiting,
)
from weir.cli.loading import Loading, load_model, loads_model
from weir.cli.runtime import interruptible
from weir.errors import WeirError

if TYPE_CHECKING:
    from weir.evals.attention_error import LayerError

RATES = "1/2,1/4,1/8,1/16"
MOST_SHOWN = 6
"""Number of layers up to which the table shows a column for each."""


@command("attention-error")
@loads_model()
def attention_error(
    context: Context,
    text: options.TextPath,
    model_name: options.ModelName = "nano",
    policy: Annotated[
        str, Option(help="Comma-separated policies: 'uniform, balancekv'.")
    ] = "uniform, balancekv",
    rates: Annotated[
        str | None,
        Option(
            help="If the policies are given without a budget: the shares to keep of the tokens "
            "between the first --exact and the last --queries tokens. Give all policies a budget, "
            f"or none [default: {RATES}]"
        ),
    ] = None,
    blocks: Annotated[
        str,
        Option(help="Comma-separated block sizes to try balancekv with, too, such as 64,128,256."),
    ] = "",
    layers: Annotated[str, Option(help="Comma-separated layers, such as 0,1 [default: all]")] = "",
    tokens: Annotated[
        int | None,
        Option(
            min=2,
            help="Number of tokens of the text to use [default: the model's window, at most 4096]",
        ),
    ] = None,
    queries: Annotated[
        int | None,
        Option(
            min=1,
            help="Number of last queries to compare [default: 256, at most a quarter of the text]",
        ),
    ] = None,
    exact: Annotated[
        int | None,
        Option(
            min=0,
            help="If the policies are given without a budget: the number of first tokens that stay "
            "exact under uniform, balancekv and subgen [default: 256, at most an eighth of the "
            "text]",
        ),
    ] = None,
    seeds: Annotated[int, Option(min=1, help="Number of seeds.")] = 10,
    stream: Annotated[
        bool,
        Option(
            "--stream",
            help="Let the policy choose after each chunk (see --chunk), instead of once for the "
            "whole text.",
        ),
    ] = False,
    chunk: options.Chunk = 64,
    plot: Annotated[Path | None, Option(help="Write a plot: .svg, .png or .pdf.")] = None,
    as_json: options.AsJson = False,
    *,
    loading: Loading,
) -> int:
    """Compare attention under a policy with exact attention, layer by layer.

    The method is that of BalanceKV's section 4.1. Each layer gets the queries, keys and values of
    the exact model. The policy keeps some of the tokens before the last queries, and the outputs
    for these queries are compared.
    """
    from weir.evals.attention_error import (
        check_plot,
        mean_over_layers,
        measure_error,
        set_up,
        size_policies,
        write_plot,
    )
    from weir.evals.notation import read_policies, takes_budget
    from weir.pools.balance import check_block
    from weir.stream import encode, read_text

    if plot is not None:
        check_plot(plot)
    if not stream:
        options.say_unused(
            context, ("chunk",), "it needs --stream; without it the text is folded at once"
        )
    names = read_policies(policy)
    for size in options.numbers("--blocks", blocks):
        check_block(size)
        names.append(f"balancekv(block={size})")
    shared = [name for name in names if takes_budget(name)]
    if rates is None and 0 < len(shared) < len(names):
        own = next(name for name in names if name not in shared)
        raise WeirError(
            f"{shared[0]} has no budget, but {own} has one. Give every policy a budget, or none "
            "of them, so that --rates sets all budgets."
        )
    wanted = _rates(rates if rates is not None else RATES if shared else "")
    words = read_text(text)
    model, tokenizer = load_model(model_name, loading)
    with waiting(f"tokenizing {text}"):
        ids = encode(tokenizer, words, None if tokens is None else tokens)
    setup = set_up(model, len(ids), tokens, queries, exact, whole=not stream, chunk=chunk)
    sized, missing = size_policies(names, setup, wanted)
    for reason in missing:
        say(f"weir: {reason}")
    chosen = options.numbers("--layers", layers) or None
    with interruptible() as interrupt, show_progress("attention error") as show:

        def step(done: int, total: int) -> bool:
            show(completed=done, total=total)
            return bool(interrupt)

        rows = measure_error(
            model, ids, sized, setup, layers=chosen, seeds=range(seeds), on_step=step
        )
    if interrupt:
        say(f"{interrupt.word}; {len(rows)} measurements were made")
    facts: dict[str, Any] = {
        "model": model_name,
        "text": str(text),
        "tokens": setup.tokens,
        "queries": setup.queries,
        "exact": setup.exact,
        "stream": stream,
        "chunk": chunk if stream else None,
        "seeds": seeds,
        "rows": [row.as_json() for row in rows],
        "means": mean_over_layers(rows),
        "left_out": missing,
        "interrupted": bool(interrupt),
    }
    if plot is not None and rows:
        write_plot(rows, plot)
    if as_json:
        print_json(facts)
    else:
        _print(rows, facts)
    return interrupt.code


def _print(rows: list[LayerError], facts: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    layers = sorted({row.layer for row in rows})
    # A deep model's table shows the mean only; --json has every layer.
    shown = layers if len(layers) <= MOST_SHOWN else []
    by_place = {(row.name, row.rate, row.layer): row for row in rows}
    for name in dict.fromkeys(row.name for row in rows):
        table = Table(title=Text(name), title_justify="left", title_style="bold")
        heads = ("rate", *(f"layer {layer}" for layer in shown), "mean", "±", "kept", "pool time")
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
        for mean in (mean for mean in facts["means"] if mean["name"] == name):
            rate = mean["rate"]
            found = [by_place.get((name, rate, layer)) for layer in shown]
            table.add_row(
                "" if rate is None else str(Fraction(rate).limit_denominator(1000)),
                *("" if row is None else f"{row.error:.3f}" for row in found),
                f"{mean['error']:.3f}",
                f"{mean['deviation']:.3f}" if facts["seeds"] > 1 else "",
                f"{mean['kept']:.0%}",
                f"{1000 * mean['seconds']:.0f} ms",
            )
        print_table(table)
    how = f"a stream in chunks of {facts['chunk']}" if facts["stream"] else "one prompt"
    exact = ""
    if any(mean["rate"] is not None for mean in facts["means"]):
        exact = (
            f" Under uniform, balancekv and subgen, the first {facts['exact']} tokens stay exact."
        )
    print_line(
        f"{facts['model']}: relative error of the attention outputs for the last "
        f"{facts['queries']} of {facts['tokens']} tokens. The text was read as {how}.{exact} "
        f"{in_words(facts['seeds'], 'seed')}."
    )


def _rates(text: str) -> list[float]:
    found = []
    for word in (word.strip() for word in text.split(",") if word.strip()):
        try:
            rate = float(Fraction(word))
        except (ValueError, ZeroDivisionError):
            rate = 0.0
        if not 0 < rate < 1:
            raise BadParameter(
                f"--rates must be shares between 0 and 1, separated by commas, got {word!r}. Use, "
                "for example, --rates 1/2,0.1."
            )
        found.append(rate)
    return found
