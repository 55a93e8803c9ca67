"""`weir train --images`: a captioner of drawings, and the drawings to measure it on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from weir.cli.common import output, print_json, progress


def train_on_images(out: Path, given: dict[str, Any], as_json: bool) -> None:
    """Train with progress and say what came out.

    Args:
        out: the folder.
        given: of the recipe (`weir.train.images.ImageRecipe`); None for what it has by itself.
        as_json: print one JSON object.
    """
    from weir.train.images import ImageRecipe, train_captioner

    recipe = ImageRecipe(**{name: value for name, value in given.items() if value is not None})
    with progress() as bar:
        task = bar.add_task("training", total=recipe.steps, note="")

        def show(step: int, steps: int, loss: float) -> None:
            bar.update(task, completed=step, note=f"loss {loss:.3f}")

        figures = train_captioner(recipe, out, show)
    if as_json:
        print_json({"out": str(out), "recipe": asdict(recipe), **figures})
        return
    output().print(
        f"{out}: {figures['parameters']:,} parameters; {figures['right']:.0%} of "
        f"{figures['held_out']} drawings described to the word",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
