"""The training loop: a small Llama on books and exercises, on CPU or GPU, resumable.

Knows nothing about caches or policies: training is plain transformers and plain attention.

The recipe, and why: the two losses are averaged apart and then added, because exercises are a few
per cent of the tokens and would drown in the text; hidden matrices are trained with Muon, the rest
with AdamW; the rate is held and then falls to zero over the last part, so that a run can be made
longer or shorter while it is under way.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from weir.errors import WeirError
from weir.stream import read_books
from weir.train import corpus, exercises
from weir.train.exercises import Words

SHORTEST = 192
"""Tokens in the shortest sample that has room for the exercises and for `sink_loss`."""


@dataclass(frozen=True)
class Recipe:
    """Everything a run is decided by, besides its text and tokenizer.

    Attributes:
        tokens: tokens in all, books and exercises together.
        rows: samples in a step.
        length: tokens in a sample, and the model's window.
        width, layers, heads, kv_heads, inner: the shape of the model.
        rate: the highest learning rate.
        falling: the share of the run over which the rate falls to zero.
        exercise_rows: samples of a step that are exercises.
        exercise_weight: weight of their loss beside the books' loss.
        only_segments: the share of the run in which all exercises are segments.
        sinks_after: the share of the run after which the model is taught to rest its attention on
            the start token.
        sink_weight: weight of that loss; 0 leaves it out.
        sink_share: the share of attention it asks for.
        seed: of the weights and of every draw.
    """

    tokens: int = 32_000_000
    rows: int = 16
    length: int = 512
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    inner: int = 768
    rate: float = 4e-3
    falling: float = 0.23
    exercise_rows: int = 5
    exercise_weight: float = 0.5
    only_segments: float = 0.3438
    sinks_after: float = 0.6051
    sink_weight: float = 0.08
    sink_share: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise WeirError(
                f"a model {self.width} wide has no {self.heads} heads of an even size: choose a "
                f"multiple of {2 * self.heads}"
            )
        if self.length < SHORTEST:
            raise WeirError(
                f"the exercises do not fit in samples of {self.length} tokens: choose {SHORTEST} "
                "or more"
            )
        if not self.steps:
            raise WeirError(
                f"{self.tokens:,} tokens are less than one step of {self.rows} samples of "
                f"{self.length}: choose {self.rows * self.length:,} or more"
            )

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.tokens // (self.rows * self.length)


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A Llama of the recipe's shape with random weights."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        intermediate_size=recipe.inner,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=recipe.length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def batch(
    recipe: Recipe, words: Words, book: np.ndarray, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids [rows, length] of one step and the weight of predicting each of them.

    Depends on nothing but its arguments, so that a resumed run sees what it would have seen.
    """
    rng = np.random.default_rng([recipe.seed, step])
    done = step / recipe.steps
    samples = []
    for row in range(recipe.rows):
        if row >= recipe.exercise_rows:
            ids, weight = exercises.book_sample(words, book, recipe.length, rng)
            share = 1.0 / (recipe.rows - recipe.exercise_rows)
        else:
            ids, weight = _exercise(recipe, words, book, done, rng)
            share = recipe.exercise_weight / recipe.exercise_rows
        samples.append((ids, weight * (share / max(weight.sum(), 1.0))))
    ids, weights = (np.stack(parts) for parts in zip(*samples, strict=True))
    return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(weights.astype(np.float32))


def _exercise(
    recipe: Recipe, words: Words, book: np.ndarray, done: float, rng: np.random.Generator
) -> exercises.Sample:
    if done < recipe.only_segments:
        return exercises.segment_sample(words, recipe.length, 8, 16, rng)
    if rng.random() < 0.25:
        return exercises.segment_sample(words, recipe.length, 2, 12, rng)
    return exercises.recall_sample(words, book, recipe.length, 0.6, rng)


def rate_at(recipe: Recipe, step: int, warmup: int = 100) -> float:
    """The learning rate: up over `warmup` steps, held, then straight down to zero."""
    left = (recipe.steps - step) / (recipe.falling * recipe.steps)
    return recipe.rate * min(1.0, (step + 1) / warmup, max(left, 0.0))


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    inside = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not q for q in inside)]
    return [
        torch.optim.Muon(inside, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def weighted_loss(model: LlamaForCausalLM, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of every next token, times its weight, summed; nats."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    target = ids[:, 1:]
    nll = torch.logsumexp(logits, -1) - logits.gather(-1, target[..., None])[..., 0]
    return (nll * weight[:, 1:]).sum()


def sink_loss(model: LlamaForCausalLM, ids: torch.Tensor, share: float) -> torch.Tensor:
    """How far attention stays below `share` on the start token: mean of the missing log, nats.

    Large models park attention they have no use for on their first tokens by themselves; one of
    four million parameters does so only when asked. The mean runs over layers, heads and queries
    from position 64 on, so a head that has something to look at loses little by looking.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the one that returns attention
    try:
        with torch.autocast(ids.device.type, torch.bfloat16):
            attention = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    rested = torch.stack([layer[:, :, 64:, 0].float() for layer in attention])
    # One per cent is added so that a query which found what it looked for is hardly pulled away.
    return (math.log(share) - (rested + 0.01).log()).relu().mean()


@torch.no_grad()
def book_loss(model: LlamaForCausalLM, words: Words, book: np.ndarray, rows: int = 32) -> float:
    """Mean negative log-likelihood of held-out text inside the window; nats a token."""
    length = model.config.max_position_embeddings
    rng = np.random.default_rng(1)
    ids = np.stack([exercises.book_sample(words, book, length, rng)[0] for _ in range(rows)])
    weight = torch.full(ids.shape, 1.0 / (rows * (length - 1)), device=model.device)
    return float(weighted_loss(model, torch.from_numpy(ids).to(model.device), weight))


@torch.no_grad()
def recall_accuracy(
    model: LlamaForCausalLM, words: Words, book: np.ndarray, questions: int = 64, seed: int = 2
) -> float:
    """The share of recall exercises answered right, all digits, at distances over the window."""
    rng = np.random.default_rng(seed)
    length = model.config.max_position_embeddings
    prompt_length = length - exercises.DIGITS
    rows, answers = [], []
    for distance in np.linspace(8, prompt_length - 16, questions).astype(int):
        prompt, answer = exercises.recall_exercise(words, book, int(distance), prompt_length, rng)
        rows.append(np.concatenate([prompt, answer]))
        answers.append(answer)
    guessed = []
    for some in torch.from_numpy(np.stack(rows)).split(32):
        # The right digits are fed; all are answered right exactly if greedy decoding gives them.
        logits = model(input_ids=some.to(model.device), use_cache=False).logits
        guessed.append(logits[:, prompt_length - 1 : -1].argmax(-1).cpu().numpy())
    return float((np.concatenate(guessed) == np.stack(answers)).all(axis=1).mean())


OnStep = Callable[[int, int, dict[str, Any]], None]
"""Told after every step: its number, how many there are, and what is known."""


def split(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(what is trained on, what is held out): the last 1 % of the text is held out."""
    edge = int(len(tokens) * 0.99)
    return tokens[:edge], tokens[edge:]


def run(
    recipe: Recipe,
    text: Path,
    out: Path,
    *,
    vocabulary: int = 4096,
    compiled: bool = True,
    on_step: OnStep = lambda step, steps, facts: None,
) -> dict[str, Any]:
    """From books to a model folder: tokenizer, corpus, training, weights in bfloat16.

    What `out` already holds of an earlier run with the same text is taken up again.

    Returns:
        The figures of the weights as they were saved: parameters, perplexity of held-out text
        inside the window, and the share of recall exercises answered right.

    Raises:
        WeirError: the text cannot be read or is too short, its tokenizer lacks the words that
            exercises are made of, or `out` holds a model of another shape.
    """
    books = read_books(text)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeirError(f"cannot write to {out}: {error.strerror}") from None
    if not (out / "tokenizer.json").exists():
        corpus.train_tokenizer(books, vocabulary).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokens = corpus.load_or_encode(out / "tokens.npy", books, tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = train(recipe, tokenizer, tokens, out, device=device, compiled=compiled, on_step=on_step)
    model.to(torch.bfloat16).save_pretrained(out)  # type: ignore[arg-type]
    # Read back, for `to` has rounded the rotary frequencies, which are not saved, as well.
    saved = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).to(device)  # type: ignore[arg-type]
    return figures(saved, tokenizer, split(tokens)[1])


def figures(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    held_out: np.ndarray,
    questions: int = 512,
) -> dict[str, Any]:
    """What a model card says: size, held-out perplexity and recall, both inside the window."""
    words = Words.of(tokenizer)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "book_ppl": float(np.exp(book_loss(model, words, held_out, rows=64))),
        "recall": recall_accuracy(model, words, held_out, questions),
    }


def train(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    tokens: np.ndarray,
    out: Path,
    *,
    device: str = "cpu",
    look_every: int = 200,
    compiled: bool = True,
    on_step: OnStep = lambda step, steps, facts: None,
) -> LlamaForCausalLM:
    """Train, or take up again what `out` holds; the last 1 % of `tokens` is held out.

    Writes `out/log.jsonl`, a line every `look_every` steps, and `out/checkpoint.pt` with it.

    Raises:
        WeirError: as `run`.
    """
    words = Words.of(tokenizer)
    book, held_out = split(tokens)
    if len(held_out) < recipe.length:
        raise WeirError(
            f"the text makes {len(tokens):,} tokens; it takes {100 * recipe.length:,}, so that the "
            f"1 % that is held out fills a sample of {recipe.length}"
        )
    model = new_model(recipe, tokenizer).to(device)  # type: ignore[arg-type]
    steppers = optimizers(model)
    saved = out / "checkpoint.pt"
    first = _restore(saved, recipe, model, steppers) if saved.exists() else 0
    loss_of = torch.compile(weighted_loss) if compiled else weighted_loss
    began = time.monotonic()
    for step in range(first, recipe.steps):
        ids, weight = (t.to(device) for t in batch(recipe, words, book, step))
        loss, pull = loss_of(model, ids, weight), torch.zeros(())
        loss.backward()
        if recipe.sink_weight and step >= recipe.sinks_after * recipe.steps:
            pull = sink_loss(model, ids[-2:], recipe.sink_share)
            (recipe.sink_weight * pull).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = rate_at(recipe, step)
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        facts: dict[str, Any] = {"loss": float(loss.detach()), "sink_loss": float(pull.detach())}
        if (step + 1) % look_every == 0 or step + 1 == recipe.steps:
            facts |= {
                "step": step + 1,
                "tokens": (step + 1) * recipe.rows * recipe.length,
                "book_loss": book_loss(model, words, held_out),
                "recall": recall_accuracy(model, words, held_out),
                "seconds": round(time.monotonic() - began, 1),
            }
            _save(saved, model, steppers, step + 1, recipe)
            with (out / "log.jsonl").open("a") as log:
                log.write(json.dumps(facts) + "\n")
        on_step(step + 1, recipe.steps, facts)
    return model


def _save(
    path: Path,
    model: LlamaForCausalLM,
    steppers: list[torch.optim.Optimizer],
    step: int,
    recipe: Recipe,
) -> None:
    state = {
        "model": model.state_dict(),
        "optimizers": [stepper.state_dict() for stepper in steppers],
        "step": step,
        "recipe": asdict(recipe),
    }
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def _restore(
    path: Path, recipe: Recipe, model: LlamaForCausalLM, steppers: list[torch.optim.Optimizer]
) -> int:
    state = torch.load(path, weights_only=True)
    for name in ("width", "layers", "heads", "kv_heads", "inner"):
        began, wanted = state["recipe"][name], getattr(recipe, name)
        if began != wanted:
            raise WeirError(
                f"{path} was begun with {name}={began}, not {wanted}: give that, or another folder"
            )
    model.load_state_dict(state["model"])
    for stepper, held in zip(steppers, state["optimizers"], strict=True):
        stepper.load_state_dict(held)
    return int(state["step"])
