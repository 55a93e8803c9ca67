"""`weir sinks`: models with and without an attention sink, trained and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from weir.cli.app import command
from weir.cli.common import AsJson, Seed, messages, output, print_json, print_table, progress, say
from weir.cli.runtime import Terminated, freeze_imports
from weir.cli.train import Books, Compiled, PresetName, preset_of


@command()
def sinks(
    text: Books,
    out: Annotated[Path, typer.Option(help="Folder for models and figures; a run there goes on.")],
    preset: PresetName = "small",
    sink: Annotated[
        str, typer.Option(help="The models, in the order they are trained.")
    ] = "none,zero,learnable,learnable:2",
    held_out: Annotated[
        list[Path] | None,
        typer.Option(help="A text to stream, several times; the packaged one by default."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to train each model on; as the preset says.")
    ] = None,
    read: Annotated[int, typer.Option(min=1, help="Tokens to stream of each held-out text.")] = (
        10_000
    ),
    budget: Annotated[
        int | None, typer.Option(min=5, help="Slots of every cache; half of the window.")
    ] = None,
    seed: Seed = 0,
    compiled: Compiled = True,
    as_json: AsJson = False,
) -> None:
    """Train models with no sink, a Zero Sink, one and two learnable sinks, and stream books with
    0, 1, 2 and 4 initial tokens kept: StreamingLLM's section 3.3.
    """
    from transformers.utils.logging import disable_progress_bar

    from weir.evals.sinks import Asked, run, tables, write_page
    from weir.stream import BOOK
    from weir.train import WORK

    disable_progress_bar()
    freeze_imports()
    chosen = preset_of(preset)
    recipe = replace(chosen.recipe, seed=seed, tokens=tokens or chosen.recipe.tokens)
    asked = Asked(
        text,
        out,
        replace(chosen, recipe=recipe),
        tuple(word.strip() for word in sink.split(",") if word.strip()),
        tuple(held_out) if held_out else (BOOK,),
        read,
        budget,
        compiled=compiled,
    )
    with progress() as bar:
        training = bar.add_task("training", total=None, note="tokenizing the books")
        measuring = bar.add_task("measuring", total=1.0, note="", visible=False)

        def on_train(sink: str) -> Callable[[int, int, dict[str, Any]], None]:
            def show(step: int, steps: int, facts: dict[str, Any]) -> None:
                speed = f"{facts['tokens_per_s']:,.0f} tokens/s"
                if "held_out_loss" in facts:
                    say(
                        f"{sink}: step {step} of {steps}, loss {facts['loss']:.3f}, held-out loss "
                        f"{facts['held_out_loss']:.3f}, {speed}"
                    )
                bar.update(training, completed=step, total=steps, note=f"{sink}, {speed}")

            return show

        def on_measure(sink: str, done: float) -> None:
            bar.update(measuring, completed=done, note=sink, visible=True)

        try:
            result = run(asked, on_train=on_train, on_measure=on_measure, on_note=say)
        except (KeyboardInterrupt, Terminated):
            say("the same command goes on from where it was")
            raise
    logs = {name: asked.folder(name) / WORK / "loss.csv" for name in asked.sinks}
    files = write_page(result, logs, out)
    if as_json:
        print_json(result)
    else:
        _print(result, tables(result)[:2])
    console = messages() if as_json else output()
    for file in files:
        console.print(f"{file}", markup=False, highlight=False, soft_wrap=True)


def _print(result: dict[str, Any], shown: list[Any]) -> None:
    from rich.table import Table

    for its in shown:
        table = Table(title=its.title, title_justify="left")
        for place, head in enumerate(its.head):
            table.add_column(head, justify="right" if place else "left", no_wrap=bool(place))
        for row in its.rows:
            table.add_row(*row)
        print_table(table)
    for found in result["findings"]:
        output().print(
            f"{found['verdict']}: {found['claim']} ({found['compared']}: "
            f"{100 * found['excess']:+.2f} %)",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
