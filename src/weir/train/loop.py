"""A resumable training loop for small models on books and exercises, on CPU or GPU.

This module knows nothing about caches, policies or text files, because training uses plain
transformers and the model's own attention.

The recipe of nano and its reasons: the losses of text and exercises are averaged separately and
then added, because few tokens of exercises count, so they would otherwise have little weight. The
matrices inside the layers are trained with Muon, and the rest with AdamW. The learning rate is
constant and falls to zero over the last part, so that a run can be made longer or shorter while it
is running.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.models import window_of
from weir.stream import replace_atomically
from weir.train import exercises
from weir.train.exercises import Words
from weir.train.log import open_log
from weir.train.processes import Processes
from weir.train.recipe import TrainingRecipe
from weir.train.shapes import decoder_layers, new_model

MOST_LOGITS = 2**28
"""Largest number of logits in memory at one time (1 GiB), unless a single sample has more. Larger
steps are computed in parts.
"""


@dataclass(frozen=True)
class Lesson:
    """A text that is prepared for a recipe.

    Attributes:
        front: ids in front of every sample [front].
        words: the tokens of the exercises; None without exercises.
        book: ids of the training text [tokens].
        held_out: ids of the held-out text [tokens].
    """

    front: np.ndarray
    words: Words | None
    book: np.ndarray
    held_out: np.ndarray

    @classmethod
    def of(
        cls, recipe: TrainingRecipe, tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray
    ) -> Lesson:
        """Prepare a text's ids [tokens] for a recipe; WeirError if the text is too short or words
        are missing.
        """
        if len(tokens) < recipe.least:
            raise WeirError(
                f"the text has {len(tokens):,} tokens, but samples of {recipe.length} need at "
                f"least {recipe.least:,}. Use more text, or a shorter length."
            )
        words = Words.of(tokenizer) if recipe.exercise_rows else None
        front = words.front if words else exercises.front_of(tokenizer)
        return cls(front, words, *split(tokens, recipe.length))


def split(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Split a text into (training, held out): the last 1 % is held out.

    For a short text, up to 10 % is held out, to fill a few samples of `length`.
    """
    held = max(len(tokens) // 100, min(len(tokens) // 10, 8 * length))
    return tokens[: len(tokens) - held], tokens[len(tokens) - held :]


class TrainingBatch(NamedTuple):
    """One step's samples, and weights of the loss of each id.

    Attributes:
        ids: the samples [rows, length].
        weight: weights for the objective [rows, length].
        text: weights for the loss of the text alone [rows, length]. Ids of book text that follow
            book text have equal weights, which sum to 1, and all others have 0. These ids are the
            same for every sink.
    """

    ids: Tensor
    weight: Tensor
    text: Tensor


def batch(recipe: TrainingRecipe, lesson: Lesson, step: int) -> TrainingBatch:
    """Make the samples of one step.

    They depend only on the arguments, so that a resumed run sees the same samples; the choice of
    passages does not depend on the tokens in front of them.
    """
    rng = np.random.default_rng([recipe.seed, step])
    done = step / recipe.steps
    samples = []
    for row in range(recipe.rows):
        if row >= recipe.exercise_rows:
            ids, weight = exercises.book_sample(lesson.front, lesson.book, recipe.window, rng)
            share = 1.0 / (recipe.rows - recipe.exercise_rows)
        else:
            ids, weight = _exercise(recipe, lesson, done, rng)
            share = recipe.exercise_weight / recipe.exercise_rows
        samples.append((ids, weight * (share / max(weight.sum(), 1.0))))
    ids, weights = (np.stack(parts) for parts in zip(*samples, strict=True))
    text = np.zeros(ids.shape)
    text[recipe.exercise_rows :, len(lesson.front) + 1 :] = 1.0
    text /= text.sum()
    return TrainingBatch(
        torch.from_numpy(ids.astype(np.int64)),
        *(torch.from_numpy(part.astype(np.float32)) for part in (weights, text)),
    )


def _exercise(
    recipe: TrainingRecipe, lesson: Lesson, done: float, rng: np.random.Generator
) -> exercises.Sample:
    words, length = lesson.words, recipe.window
    assert words is not None  # a recipe with exercises has a lesson with their words
    if done < recipe.only_segments:
        return exercises.segment_sample(words, length, 8, 16, rng)
    if rng.random() < 0.25:
        return exercises.segment_sample(words, length, 2, 12, rng)
    return exercises.recall_sample(words, lesson.book, length, 0.6, rng)


def rate_at(recipe: TrainingRecipe, step: int) -> float:
    """Return a step's learning rate: linear warmup, constant, then linear decay to zero.

    The warmup takes 100 steps, or a tenth of the run if that is less.
    """
    warmup = min(100, max(1, recipe.steps // 10))
    left = (recipe.steps - step) / (recipe.falling * recipe.steps)
    return recipe.rate * min(1.0, (step + 1) / warmup, max(left, 0.0))


def optimizers(model: PreTrainedModel, recipe: TrainingRecipe) -> list[torch.optim.Optimizer]:
    """Return the optimizer of the matrices inside the layers, and AdamW for everything else."""
    inside = [p for p in decoder_layers(model).parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not q for q in inside)]
    adamw = partial(torch.optim.AdamW, betas=(0.9, 0.95), fused=True)
    muon = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    first = muon if recipe.optimizer == "muon" else adamw
    return [first(inside, weight_decay=recipe.decay), adamw(others, weight_decay=0.0)]


def losses(
    model: PreTrainedModel, ids: Tensor, weight: Tensor, text: Tensor
) -> tuple[Tensor, Tensor]:
    """Return two weighted sums of the losses of a `TrainingBatch`, in nats: with `weight`, the
    objective; with `text`, a loss to log.
    """
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    target = ids[:, 1:]
    nll = torch.logsumexp(logits, -1) - logits.gather(-1, target[..., None])[..., 0]
    return (nll * weight[:, 1:]).sum(), (nll.detach() * text[:, 1:]).sum()


def sink_loss(model: PreTrainedModel, ids: torch.Tensor, share: float) -> torch.Tensor:
    """Compute how far attention on the start token is below `share`: the mean of log(share /
    (attention + 0.01)), in nats, where negative logarithms count as 0.

    Large models learn on their own to put unused attention on their first tokens; a model of four
    million parameters needs this loss. The mean is taken over all layers and heads, and over the
    queries from position 64 on, so a head that attends to something useful adds little to it.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the only one that returns attention weights
    try:
        with torch.autocast(ids.device.type, torch.bfloat16):
            attention = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    rested = torch.stack([layer[:, :, 64:, 0].float() for layer in attention])
    # One per cent is added, so that the loss has little effect on queries that attend elsewhere.
    return (math.log(share) - (rested + 0.01).log()).relu().mean()


def _window(model: PreTrainedModel) -> int:
    """Return the length of a model's training samples, including sinks."""
    window = window_of(model.config)
    assert window is not None
    return window


def _rows_at_once(model: PreTrainedModel) -> int:
    """Return how many samples of the window's length give at most `MOST_LOGITS` logits; at least
    1.
    """
    return max(1, MOST_LOGITS // (_window(model) * model.config.vocab_size))


@torch.no_grad()
def book_loss(model: PreTrainedModel, lesson: Lesson, rows: int = 32) -> float:
    """Return the mean negative log-likelihood of held-out text inside the window, nats per token.

    Only tokens that follow a token of text count; they are the same for every sink.
    """
    length = _window(model)
    rng, front, total = np.random.default_rng(1), lesson.front, 0.0
    for _ in range(0, rows, 32):
        samples = [exercises.book_sample(front, lesson.held_out, length, rng) for _ in range(32)]
        ids = np.stack([sample for sample, _ in samples])
        weight = torch.zeros(ids.shape)
        weight[:, len(front) + 1 :] = 1.0 / (32 * (length - len(front) - 1))
        given = [part.to(model.device) for part in (torch.from_numpy(ids), weight)]
        for some, share in zip(*(part.split(_rows_at_once(model)) for part in given), strict=True):
            total += float(losses(model, some, share, share)[0])
    return total / len(range(0, rows, 32))


@torch.no_grad()
def recall_accuracy(
    model: PreTrainedModel, words: Words, book: np.ndarray, questions: int = 64
) -> float:
    """Return the share of recall exercises with all digits right, at distances spread over the
    window.
    """
    rng = np.random.default_rng(2)
    prompt_length = _window(model) - exercises.DIGITS
    rows, answers = [], []
    for distance in np.linspace(8, prompt_length - 16, questions).astype(int):
        prompt, answer = exercises.recall_exercise(words, book, int(distance), prompt_length, rng)
        rows.append(np.concatenate([prompt, answer]))
        answers.append(answer)
    guessed = []
    for some in torch.from_numpy(np.stack(rows)).split(min(32, _rows_at_once(model))):
        # The right digits are fed. All predictions are right if, and only if, greedy decoding gives
        # them.
        logits = model(input_ids=some.to(model.device), use_cache=False).logits
        guessed.append(logits[:, prompt_length - 1 : -1].argmax(-1).cpu().numpy())
    return float((np.concatenate(guessed) == np.stack(answers)).all(axis=1).mean())


def save_checkpoint(
    path: Path,
    recipe: TrainingRecipe,
    model: nn.Module,
    steppers: list[torch.optim.Optimizer],
    step: int,
    seconds: float,
) -> None:
    """Write weights, optimizers, step, seconds and recipe. If the run is killed during that, the
    old file stays.
    """
    # Batches and rates follow from recipe and step, so no generator state has to be saved.
    state = {
        "model": model.state_dict(),
        "optimizers": [stepper.state_dict() for stepper in steppers],
        "step": step,
        "seconds": seconds,
        "recipe": asdict(recipe),
    }
    with replace_atomically(path) as new:
        torch.save(state, new)


def restore_checkpoint(
    path: Path, recipe: TrainingRecipe, model: nn.Module, steppers: list[torch.optim.Optimizer]
) -> tuple[int, float]:
    """Load a checkpoint, if there is one, and return its step and the seconds so far."""
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True, map_location="cpu")
    recipe.check_same(state["recipe"], path)
    model.load_state_dict(state["model"])
    for stepper, held in zip(steppers, state["optimizers"], strict=True):
        stepper.load_state_dict(held)
    return int(state["step"]), float(state["seconds"])


OnStep = Callable[[int, int, dict[str, Any]], None]
"""Callback after every step, with its number, the number of steps, and the figures of this step."""


def figures(model: PreTrainedModel, lesson: Lesson, questions: int = 512) -> dict[str, Any]:
    """Compute a model card's figures: size, and perplexity and recall inside the window.

    Recall is None without exercises.
    """
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "book_ppl": float(np.exp(book_loss(model, lesson, rows=64))),
        "recall": lesson.words and recall_accuracy(model, lesson.words, lesson.held_out, questions),
    }


def train(
    recipe: TrainingRecipe,
    tokenizer: PreTrainedTokenizerBase,
    lesson: Lesson,
    out: Path,
    *,
    processes: Processes | None = None,
    look_every: int | None = None,
    compiled: bool = True,
    on_step: OnStep = lambda step, steps, facts: None,
) -> PreTrainedModel:
    """Train a model, or continue the run in `out`.

    Writes `out/loss.csv`, with a line per step, and `out/checkpoint.pt`, from which the run
    continues bit-identically on the same machine with the same number of threads.

    Args:
        processes: by default, those of the launcher.
        look_every: number of steps between checkpoints, where held-out text is also measured. By
            default, a twentieth of the run, but at most 200.
    """
    processes = processes or Processes.here()
    if recipe.rows % processes.count:
        raise WeirError(
            f"{recipe.rows} rows cannot be shared evenly among {processes.count} processes. Use a "
            f"number of rows that is a multiple of {processes.count}."
        )
    look_every = look_every or min(200, max(1, recipe.steps // 20))
    model = new_model(recipe, tokenizer).to(processes.device)  # type: ignore[arg-type]
    steppers = optimizers(model, recipe)
    saved = out / "checkpoint.pt"
    first, seconds = restore_checkpoint(saved, recipe, model, steppers)
    losses_of = torch.compile(losses) if compiled else losses
    began, per_step = time.monotonic() - seconds, recipe.rows * recipe.length
    with open_log(out / "loss.csv", first, writing=processes.is_first) as log:
        for step in range(first, recipe.steps):
            started = time.monotonic()
            step_losses = _step(recipe, lesson, step, model, steppers, losses_of, processes)
            facts: dict[str, Any] = {
                "step": step + 1,
                "tokens": (step + 1) * per_step,
                "rate": rate_at(recipe, step),
                **step_losses,
                "tokens_per_s": round(per_step / (time.monotonic() - started), 1),
            }
            if not math.isfinite(facts["objective"]):
                raise WeirError(
                    f"at step {step + 1} the loss is no longer a finite number. Train in another "
                    "folder with a lower rate."
                )
            if looks := (step + 1) % look_every == 0 or step + 1 == recipe.steps:
                seconds = time.monotonic() - began
                facts |= {"held_out_loss": book_loss(model, lesson), "seconds": round(seconds, 1)}
                if lesson.words is not None:
                    facts["recall"] = recall_accuracy(model, lesson.words, lesson.held_out)
            log(facts)
            if looks and processes.is_first:
                save_checkpoint(saved, recipe, model, steppers, step + 1, seconds)
            on_step(step + 1, recipe.steps, facts)
    return model


def _step(
    recipe: TrainingRecipe,
    lesson: Lesson,
    step: int,
    model: PreTrainedModel,
    steppers: list[torch.optim.Optimizer],
    losses_of: Callable[..., tuple[Tensor, Tensor]],
    processes: Processes,
) -> dict[str, float]:
    """Take one optimizer step; return the losses before it."""
    given = batch(recipe, lesson, step)
    mine = [processes.share(part) for part in given]
    objective, text, pull = torch.zeros(3, device=processes.device)
    at_once = _rows_at_once(model)
    for some in zip(*(part.split(at_once) for part in mine), strict=True):
        # Losses are weighted sums, so those of some rows at a time add up to the whole.
        part, of_text = losses_of(model, *some)
        part.backward()
        objective, text = objective + part.detach(), text + of_text
    if recipe.taught_at(step) and processes.is_first:
        pull = sink_loss(model, given.ids[-2:].to(processes.device), recipe.sink_share)
        (recipe.sink_weight * pull).backward()
    processes.sum_gradients(model.parameters())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for stepper in steppers:
        for group in stepper.param_groups:
            group["lr"] = rate_at(recipe, step)
        stepper.step()
        stepper.zero_grad(set_to_none=True)
    sums = processes.sum(torch.stack([text, objective, pull.detach()])).tolist()
    return dict(zip(("loss", "objective", "sink_loss"), sums, strict=True))
