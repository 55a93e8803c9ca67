"""`weir demo`: a model reads a book past its window, and is asked for what it was told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from weir.cli.app import command
from weir.cli.common import (
    ProgressLines,
    make_folder,
    messages,
    output,
    print_json,
    print_line,
    progress,
    say,
    size,
    waiting,
    writing,
)
from weir.cli.loading import Loading, load_model, loads_model
from weir.cli.options import AsJson, ModelName
from weir.cli.runtime import interruptible
from weir.errors import WeirError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table
    from torch import Tensor

    from weir.evals.perplexity import PerplexityMeter


@command()
@loads_model()
def demo(
    model_name: ModelName = "nano",
    out: Annotated[Path, Option(help="Folder for result.json and report.html.")] = Path("demo-out"),
    tokens: Annotated[
        int | None,
        Option(
            min=1000,
            help="Tokens of the book to read [default: more than fit in the model's window]",
        ),
    ] = None,
    as_json: AsJson = False,
    *,
    loading: Loading,
) -> int:
    """Read a book past the model's window under several policies, and compare what they remember.

    The report shows what each policy holds of the book, and under which policies the model still
    knows what it was told.
    """
    from rich.console import Group
    from rich.live import Live

    from weir.evals import demo as demonstration
    from weir.evals.results import for_json
    from weir.models import window_of

    make_folder(out)
    model, tokenizer = load_model(model_name, loading)
    window = window_of(model.config)
    if window is None:
        raise WeirError(
            f"the demo reads past a model's window, and {model_name} does not say how long its "
            "window is. Choose another model, or nano."
        )
    ids: Tensor
    story: demonstration.BookStory | demonstration.FactStory
    if model_name == "nano":
        tokens = tokens or 10_000
        policies: tuple[str, ...] = demonstration.POLICIES
        ids, story = demonstration.load_book_and_story(tokenizer, tokens)
        about = (
            f"nano was trained on {window:,} tokens at a time. It now reads {len(ids):,} tokens "
            f"of {demonstration.TITLE}, once under each policy. Then it is told "
            f"{demonstration.NAMES} names with numbers, reads {len(story.between):,} more tokens, "
            "and is asked for the numbers. The cache of dense, which is plain attention, grows, "
            'and every other cache has about 650 kB. "default" is the policy that weir uses for '
            "nano if you name none."
        )
    else:
        tokens = tokens or demonstration.past_window(window)
        policies = demonstration.equal_policies(model)
        ids = demonstration.load_book(tokenizer, tokens)
        story = demonstration.FactStory(model_name, model, tokenizer)
        what = story.facts(len(ids))
        *others, farthest = (f"{distance:,}" for distance in what["distances"])
        about = (
            f"{model_name} was trained on {window:,} tokens at a time. It now reads {len(ids):,} "
            f"tokens of {demonstration.TITLE}, once under each policy. Then it is told "
            f"{what['count']} facts in other passages of the book, and asked for each of them "
            f"{', '.join(others)} and {farthest} tokens later. The cache of dense, which is plain "
            "attention, grows, and every other cache has as many bytes as that of "
            f"{policies[-1]}, the default."
        )
    if len(ids) < tokens:
        say(
            f"the packaged excerpt is shorter than {tokens:,} tokens, so only {len(ids):,} tokens "
            "are read"
        )
    console = messages() if as_json else output()
    console.print(about, highlight=False)
    bar = progress()
    task = bar.add_task("reading", total=len(ids), note="tokens")
    asking = bar.add_task("asking", total=len(policies), note="policies", visible=False)
    last: list[PerplexityMeter] = []
    lines = ProgressLines(), ProgressLines()
    with interruptible() as interrupt, Live(console=console, refresh_per_second=8) as live:

        def show(meters: list[PerplexityMeter]) -> bool:
            done = meters[0].tokens
            bar.update(task, completed=done)
            lines[0].at(done / len(ids), f"read {done:,} of {len(ids):,} tokens")
            live.update(Group(_table(policies, meters, window), bar))
            last[:] = meters
            return bool(interrupt)

        def ask(done: float) -> bool:
            bar.update(asking, completed=done, visible=True)
            now = policies[min(int(done), len(policies) - 1)]
            lines[1].at(done / len(policies), f"asking under {now}")
            return bool(interrupt)

        result = demonstration.read_book(
            model, ids, story, name=model_name, policies=policies, on_step=show, on_ask=ask
        )
        live.update(_table(policies, last, window), refresh=True)  # without the bar
    if not console.is_terminal:
        console.line()
    _tell(result, console)
    result["interrupted"] = bool(interrupt)
    with waiting("drawing the plots"), writing(out):
        (out / "result.json").write_text(json.dumps(for_json(result), indent=1) + "\n", "utf-8")
        demonstration.write_page(result, out / "report.html")
        demonstration.write_excerpt(result, out)
    if as_json:
        print_json(result)
    for name in ("result.json", "report.html"):
        print_line(f"{out / name}", console)
    return interrupt.code


def _tell(result: dict[str, Any], console: Console) -> None:
    """Print the right answers of each policy, by distance if there are several."""
    from weir.evals.demo import best_of_a_size

    story = result["story"]
    if story is None:
        return
    widest = max(len(policy["policy"]) for policy in result["policies"])
    if story["kind"] == "facts":
        console.print(f"Right answers of {story['count']}, by tokens since the fact:")
        print_line(f"  {'':<{widest}}" + "".join(f"{n:>7,}" for n in story["distances"]), console)
        for policy in result["policies"]:
            right = "".join(f"{at['right']:>7}" for at in policy["by_distance"])
            print_line(f"  {policy['policy']:<{widest}}{right}", console)
    else:
        console.print(f"Right answers {story['away']:,} tokens later:", highlight=False)
        for policy in result["policies"]:
            right = f"{policy['knows']} of {story['asked']}"
            print_line(f"  {policy['policy']:<{widest}}  {right}", console)
    if best := best_of_a_size(result):
        console.print(best, highlight=False)


def _table(policies: Sequence[str], meters: list[PerplexityMeter], window: int) -> Table:
    from rich.table import Table

    from weir.evals.report import whole_blocks

    done = meters[0].tokens
    table = Table(title=f"{done:,} tokens read: {done / window:.1f} times the window")
    table.add_column("policy", no_wrap=True)
    for head in ("perplexity", "last block", "cache", "tokens/s"):
        table.add_column(head, justify="right", min_width=8, no_wrap=True)
    for policy, now in zip(policies, meters, strict=True):
        blocks = whole_blocks(now.ppl_by_block, now.tokens, now.block)
        last = f"{blocks[-1]:.1f}" if blocks else ""
        figures = f"{now.ppl:.1f}", last, size(now.kv_bytes), f"{now.tokens_per_s:,.0f}"
        table.add_row(policy, *figures)
    return table
