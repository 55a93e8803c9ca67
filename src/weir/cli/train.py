"""`weir train`: a small model from text, the recipe of the packaged `nano`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from weir.cli.app import command
from weir.cli.common import AsJson, Seed, output, print_json, progress, say


@command()
def train(
    text: Annotated[
        Path, typer.Option(help="Books: UTF-8, plain or .xz, parted by lines with a NUL byte.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the model; a run found there goes on.")],
    tokens: Annotated[int, typer.Option(min=10_000, help="Tokens to train on.")] = 32_000_000,
    vocabulary: Annotated[
        int, typer.Option(min=300, max=65_535, help="Tokens the tokenizer has.")
    ] = 4096,
    width: Annotated[int, typer.Option(min=32, help="Of the hidden states.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Of the model.")] = 4,
    length: Annotated[int, typer.Option(min=192, help="Tokens in a sample: the window.")] = 512,
    rows: Annotated[int, typer.Option(min=2, help="Samples in a step.")] = 16,
    rate: Annotated[float, typer.Option(min=0.0, help="Highest learning rate.")] = 4e-3,
    seed: Seed = 0,
    compiled: Annotated[
        bool, typer.Option(help="Compile the model; faster after a minute.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Train a Llama-shaped model on books and recall exercises.

    A run that was interrupted goes on where its last checkpoint was.
    """
    from transformers.utils.logging import disable_progress_bar

    from weir.train import Recipe, run

    disable_progress_bar()

    recipe = Recipe(
        tokens=tokens,
        rows=rows,
        length=length,
        width=width,
        layers=layers,
        inner=3 * width,
        rate=rate,
        exercise_rows=max(1, rows * 5 // 16),
        seed=seed,
    )
    with progress() as bar:
        task = bar.add_task("training", total=recipe.steps, note="tokenising the books")

        def show(step: int, steps: int, facts: dict[str, Any]) -> None:
            note = f"loss {facts['loss']:.3f}"
            if "recall" in facts:
                say(
                    f"step {step}: {facts['tokens']:,} tokens, book loss {facts['book_loss']:.3f}, "
                    f"recall {facts['recall']:.2f}"
                )
            bar.update(task, completed=step, note=note)

        try:
            figures = run(recipe, text, out, vocabulary=vocabulary, compiled=compiled, on_step=show)
        except KeyboardInterrupt:
            say("the same command goes on from the last checkpoint, if there is one yet")
            raise
    facts = {"out": str(out), "recipe": asdict(recipe), **figures}
    if as_json:
        print_json(facts)
        return
    output.print(
        f"{out}: {figures['parameters']:,} parameters; held-out book perplexity "
        f"{figures['book_ppl']:.2f}; recall {figures['recall']:.1%}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
