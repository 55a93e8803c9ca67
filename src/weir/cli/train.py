"""`weir train`: train a small model on text, with a chosen sink. The default is nano's recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from weir.cli.app import command
from weir.cli.common import print_json, print_line, progress, say
from weir.cli.options import AsJson, Seed
from weir.cli.runtime import Terminated, freeze_imports
from weir.errors import WeirError

if TYPE_CHECKING:
    from weir.train import Preset, TrainingRecipe


@command()
def train(
    out: Annotated[Path, Option(help="Folder for the model; an interrupted run there continues.")],
    text: Annotated[
        Path,
        Option(help="The books: UTF-8, plain or .xz. Separate books by a line with a NUL byte."),
    ],
    preset: Annotated[
        str,
        Option(
            help="nano, small (for two CPU cores), medium (30 million parameters, for one GPU), or "
            "large (164 million, for GPUs). The preset sets every option about the model and its "
            "training that you leave out."
        ),
    ] = "nano",
    sink: Annotated[
        str | None,
        Option(
            help="Attention sink: none; zero (softmax-off-by-one); learnable or learnable:N (one "
            "or N tokens before every sample); or taught (as in nano: one learnable token, and a "
            "loss that makes it the sink)."
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        Option(
            min=1,
            help="Number of tokens to train on [default: set by the preset; fewer if the text is "
            "short]",
        ),
    ] = None,
    vocabulary: Annotated[
        int | None, Option(min=300, max=65_000, help="Size of the tokenizer's vocabulary.")
    ] = None,
    exercises: Annotated[
        str,
        Option(
            help="Train on recall exercises too: on, off, or auto (on with the preset nano, if "
            "samples are long enough, a step has at least 2 of them, and the tokenizer made from "
            "the text has the tokens that exercises need)."
        ),
    ] = "auto",
    shape: Annotated[str | None, Option(help="llama, qwen3 (QK norm), or alibi (MPT).")] = None,
    width: Annotated[int | None, Option(min=8, help="Size of the hidden states.")] = None,
    layers: Annotated[int | None, Option(min=1, help="Number of layers.")] = None,
    heads: Annotated[int | None, Option(min=1, help="Attention heads per layer.")] = None,
    kv_heads: Annotated[
        int | None,
        Option(
            min=1,
            help="KV heads per layer [default: as many as heads, with --heads or --shape alibi; "
            "otherwise set by the preset]",
        ),
    ] = None,
    length: Annotated[
        int | None,
        Option(
            min=16,
            help="Tokens of text in a sample. The model's window has this length, plus tokens of "
            "its sink.",
        ),
    ] = None,
    rows: Annotated[int | None, Option(min=1, help="Samples per step.")] = None,
    optimizer: Annotated[str | None, Option(help="muon or adamw.")] = None,
    rate: Annotated[float | None, Option(min=0.0, help="Highest learning rate.")] = None,
    seed: Seed = 0,
    compiled: Annotated[bool, Option(help="Compile the model first, to train faster.")] = True,
    as_json: AsJson = False,
) -> None:
    """Train a small model on books, with a shape and attention sink of your choice.

    An interrupted run continues from its last checkpoint. On several GPUs: `accelerate launch
    --no_python weir train ...`.
    """
    from transformers.utils.logging import disable_progress_bar

    from weir.train import Processes

    disable_progress_bar()
    freeze_imports()
    chosen = preset_of(preset)
    if vocabulary is not None:
        chosen = replace(chosen, vocabulary=vocabulary)
    sizes = {"width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads}
    given = {"tokens": tokens, "length": length, "rows": rows, "seed": seed, **sizes}
    how = {"sink": sink, "shape": shape, "optimizer": optimizer, "rate": rate}
    chosen = replace(chosen, recipe=_recipe(chosen, exercises, {**given, **how}))
    options: dict[str, Any] = {"exercises": exercises, "compiled": compiled}
    figures = carry_out(chosen, text, out, fit_tokens=tokens is None, **options)
    if not Processes.speaks_here():
        return
    if as_json:
        print_json({"out": str(out), **figures})
        return
    recall = "" if figures["recall"] is None else f"; recall {figures['recall']:.1%}"
    print_line(
        f"{out}: {figures['parameters']:,} parameters; held-out book perplexity "
        f"{figures['book_ppl']:.2f}{recall}"
    )


def preset_of(name: str) -> Preset:
    """Return the preset of a name."""
    from weir.train import PRESETS

    if name not in PRESETS:
        raise WeirError(f"unknown preset {name!r}. Use one of {', '.join(PRESETS)}.")
    return PRESETS[name]


def _recipe(chosen: Preset, exercises: str, given: dict[str, Any]) -> TrainingRecipe:
    """Return the preset's recipe with the given values and the values that follow from them."""
    from weir.train import ROOM

    recipe = chosen.recipe
    changes = {name: value for name, value in given.items() if value is not None}
    alibi = changes.get("shape", recipe.shape) == "alibi"
    if "heads" in changes or alibi:
        changes.setdefault("kv_heads", changes.get("heads", recipe.heads))
    if alibi and recipe.kind.taught and "sink" not in changes:
        say("using a learnable sink: a sink cannot be taught to an ALiBi model")
        changes["sink"] = "learnable"
    if "width" in changes:
        changes["inner"] = max(8, recipe.inner * changes["width"] // recipe.width)
    rows, length = (changes.get(name, getattr(recipe, name)) for name in ("rows", "length"))
    practiced = exercises == "on" or (recipe.exercise_rows > 0 and exercises == "auto")
    if practiced and exercises == "auto" and (length < ROOM or rows < 2):
        say(
            f"training on the text alone: exercises need samples of at least {ROOM} tokens, and 2 "
            "rows"
        )
        practiced = False
    return replace(recipe, **changes, exercise_rows=max(1, rows * 5 // 16) if practiced else 0)


def carry_out(preset: Preset, text: Path, out: Path, **options: Any) -> dict[str, Any]:
    """Run a recipe with progress on standard error; return the result of `weir.train.run`."""
    from weir.train import Processes, run

    speaks = Processes.speaks_here()

    def tell(note: str) -> None:
        if speaks:
            say(note)

    with progress() as bar:
        task = bar.add_task("training", total=None, note="tokenizing the books", visible=speaks)

        def show(step: int, steps: int, facts: dict[str, Any]) -> None:
            note = f"loss {facts['loss']:.3f}, {facts['tokens_per_s']:,.0f} tokens/s"
            if "held_out_loss" in facts:
                recall = f", recall {facts['recall']:.2f}" if "recall" in facts else ""
                tell(
                    f"step {step} of {steps}: {facts['tokens']:,} tokens, loss "
                    f"{facts['loss']:.3f}, held-out loss {facts['held_out_loss']:.3f}{recall}, "
                    f"{facts['tokens_per_s']:,.0f} tokens/s"
                )
            bar.update(task, completed=step, total=steps, note=note)

        try:
            options |= {"vocabulary": preset.vocabulary, "on_step": show, "on_note": tell}
            return run(preset.recipe, text, out, **options)
        except (KeyboardInterrupt, Terminated):
            tell("run the same command again to continue from the last checkpoint, if there is one")
            raise
