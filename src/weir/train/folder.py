"""A training run from books to a model folder: checks everything, tokenizes and trains.

The folder becomes a model only when the run is done. Checkpoints, log and loss curves are in its
folder `training/`. This module knows nothing about a training step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.stream import read_books, replace_atomically
from weir.train import corpus, loop
from weir.train.exercises import PRACTICED, Words
from weir.train.log import plot_losses
from weir.train.loop import Lesson, OnStep
from weir.train.processes import Processes
from weir.train.recipe import TrainingRecipe

WORK = "training"
"""The folder of a run within that of its model."""
EXERCISES = ("auto", "on", "off")
PASSES = 8
"""Number of passes over a short text; more passes teach nothing more."""
FEWEST = 1_000_000
"""Smallest number of tokens to train on, even for a short text; with fewer, a model learns
nothing.
"""


def run(
    recipe: TrainingRecipe,
    text: Path,
    out: Path,
    *,
    vocabulary: int = 4096,
    exercises: str = "auto",
    fit_tokens: bool = False,
    shared: Path | None = None,
    compiled: bool = True,
    on_step: OnStep = lambda step, steps, facts: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> dict[str, Any]:
    """Train a model from books and save it in a folder, with weights in bfloat16.

    An earlier run in `out` is continued if it has the same text, vocabulary and recipe, of which
    only `tokens` can differ; otherwise, it is refused.

    Args:
        recipe, text, out: the recipe of the run, its books (UTF-8, plain or .xz), and the model's
            folder.
        vocabulary: size of the tokenizer's vocabulary, which becomes smaller for short texts.
        exercises: what to do if the tokenizer of the text lacks the exercises' words: "on" refuses
            the text, and "auto" trains without exercises and reports it. "off" always trains
            without exercises.
        fit_tokens: for a short text, train on fewer tokens than the recipe says: `PASSES` times
            the text's tokens, and at least `FEWEST`.
        shared: a folder for the tokenizer and the text's ids, which runs on the same text and
            vocabulary can share; None for the folder of this run.
        compiled: compile the model.
        on_step, on_note: called after every step, and with messages for the user.

    Returns:
        `loop.figures` of the saved weights, "vocabulary", and the "recipe" that was followed.

    Raises:
        WeirError: the text or the folder cannot be used.
    """
    if exercises not in EXERCISES:
        raise WeirError(f"exercises must be one of {', '.join(EXERCISES)}, got {exercises!r}")
    if not corpus.FEWEST_WORDS <= vocabulary <= corpus.MOST_WORDS:
        raise WeirError(
            f"vocabulary must be {corpus.FEWEST_WORDS} to {corpus.MOST_WORDS:,} tokens, got "
            f"{vocabulary:,}"
        )
    if exercises == "off":
        recipe = replace(recipe, exercise_rows=0)
    books = read_books(text)
    size = sum(len(book.encode()) for book in books)
    if size < recipe.least:  # a text cannot have more tokens than bytes
        raise WeirError(
            f"{text} has {size:,} bytes, but samples of {recipe.length} need at least "
            f"{recipe.least:,} tokens. Use more text, or a shorter length."
        )
    digest = hashlib.sha256("".join(f"{book}\0" for book in books).encode()).hexdigest()
    begun = {"text": digest, "vocabulary": vocabulary}
    processes = Processes.here()
    with _folder(out, begun, recipe, processes) as work:
        common = shared or work
        common.mkdir(parents=True, exist_ok=True)
        with processes.first_before_others():
            backend = corpus.load_or_train(common / "base.json", books, vocabulary)
        tokenizer = corpus.with_sinks(backend, recipe.kind.count)
        try:
            if recipe.exercise_rows:
                Words.of(tokenizer)
        except WeirError as error:
            if exercises == "on":
                raise
            on_note(f"training on the text alone, without exercises: {error}")
            recipe = replace(recipe, exercise_rows=0)
        if (filled := backend.get_vocab_size()) < vocabulary:
            on_note(
                f"the text is enough for a vocabulary of only {filled:,} tokens, fewer than "
                f"{vocabulary:,}"
            )
        with processes.first_before_others():
            tokens = corpus.load_or_encode(common / "tokens.npy", books, tokenizer)
        if fit_tokens:
            recipe = replace(recipe, tokens=fitting(recipe.tokens, len(tokens)))
        lesson = Lesson.of(recipe, tokenizer, tokens)
        if processes.is_first:
            _note_down(work, begun, recipe)
    model = loop.train(
        recipe, tokenizer, lesson, work, processes=processes, compiled=compiled, on_step=on_step
    )
    if processes.is_first:
        if recipe.exercise_rows:
            setattr(model.config, PRACTICED, True)
        _finish(model, tokenizer, work, out)
    processes.wait()
    # Read it back, because saving has rounded the weights.
    saved = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    saved.to(processes.device)  # type: ignore[arg-type]
    return {**loop.figures(saved, lesson), "vocabulary": len(tokenizer), "recipe": asdict(recipe)}


def fitting(most: int, size: int) -> int:
    """Return how many tokens, at most `most`, to train on for a text of `size` tokens."""
    return min(most, max(FEWEST, PASSES * size))


@contextmanager
def _folder(
    out: Path, begun: dict[str, Any], recipe: TrainingRecipe, processes: Processes
) -> Iterator[Path]:
    """Check and make the folder of a run; on a WeirError inside, remove the folders it made."""
    work = out / WORK
    first_new = next((p for p in [*reversed(work.parents), work] if not p.exists()), None)
    _check_old(work, out, begun, recipe)
    try:
        work.mkdir(parents=True, exist_ok=True)
        probe = work / f"probe-{processes.rank}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise WeirError(f"cannot write to {out}: {error.strerror}") from None
    try:
        yield work
    except WeirError:
        if first_new is not None:
            shutil.rmtree(first_new, ignore_errors=True)
        raise


def _check_old(work: Path, out: Path, begun: dict[str, Any], recipe: TrainingRecipe) -> None:
    """Refuse a folder that holds another run, or a model that was not trained there."""
    noted = work / "run.json"
    if not noted.exists():
        if (out / "config.json").exists():
            raise WeirError(f"{out} holds a model that was not trained there. Use another folder.")
        return
    try:
        old = json.loads(noted.read_text("utf-8"))
        text, vocabulary, recorded = (old[name] for name in ("text", "vocabulary", "recipe"))
    except (ValueError, KeyError, TypeError):
        raise WeirError(f"{noted} cannot be read. Use another folder.") from None
    if text != begun["text"]:
        raise WeirError(f"{out} holds a run on another text. Use that text, or another folder.")
    if vocabulary != begun["vocabulary"]:
        raise WeirError(
            f"{out} was begun with vocabulary={vocabulary}, got {begun['vocabulary']}. Use "
            f"{vocabulary}, or another folder."
        )
    # Exercises are compared later, because a tokenizer that lacks their words removes them.
    replace(recipe, exercise_rows=0).check_same({**recorded, "exercise_rows": 0}, out)


def _note_down(work: Path, begun: dict[str, Any], recipe: TrainingRecipe) -> None:
    """Record text, vocabulary and recipe of the run; refuse if the exercises have changed."""
    noted = work / "run.json"
    if noted.exists():
        recipe.check_same(json.loads(noted.read_text("utf-8"))["recipe"], work.parent)
    with replace_atomically(noted) as new:
        new.write_text(json.dumps({**begun, "recipe": asdict(recipe)}, indent=1) + "\n", "utf-8")


def _finish(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, work: Path, out: Path
) -> None:
    """Move the model into its folder; the configuration comes last, because it makes the folder a
    model.
    """
    whole = work / "model"
    model.to(torch.bfloat16).save_pretrained(whole)  # type: ignore[arg-type]
    tokenizer.save_pretrained(whole)
    for path in sorted(whole.iterdir(), key=lambda path: (path.name == "config.json", path)):
        path.replace(out / path.name)
    with contextlib.suppress(OSError):
        whole.rmdir()
    plot_losses(work / "loss.csv", work / "loss.png", f"Training {out.name}")
