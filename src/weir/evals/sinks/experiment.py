"""The whole experiment: train the models in turn, stream held-out books, and say what was found.

A run that is interrupted goes on: training at its last checkpoint, measuring at the last figure.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weir.errors import WeirError
from weir.evals.sinks import measure, paper
from weir.evals.sinks.findings import findings
from weir.models import load
from weir.stream import BOOK, read_text
from weir.train import PRESETS, WORK, Preset, SinkKind, read_log
from weir.train import run as train

Trained = Callable[[int, int, dict[str, Any]], None]


@dataclass(frozen=True)
class Asked:
    """What the experiment is to do.

    Attributes:
        text: books to train on.
        out: the folder for models and figures.
        preset: shape and recipe; its sink is replaced.
        sinks: of the models, in the order they are trained.
        held_out: texts that nothing was trained on; the packaged one by default.
        read: tokens of each that are streamed.
        budget: x + y, slots of every configuration; None takes half of the window, as the paper.
        chunk: tokens between two folds; None takes a quarter of the budget, at most 64.
        samples: samples inside the window, and questions of each ability.
        compiled: compile the models for training.

    Raises:
        WeirError: the cache does not fit into the window, or what is to be read is too short.
    """

    text: Path
    out: Path
    preset: Preset = field(default_factory=lambda: PRESETS["small"])
    sinks: tuple[str, ...] = tuple(paper.VARIANTS)
    held_out: tuple[Path, ...] = (BOOK,)
    read: int = 10_000
    budget: int | None = None
    chunk: int | None = None
    samples: int = 400
    compiled: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "sinks", tuple(str(SinkKind.of(sink)) for sink in self.sinks))
        if len(set(self.sinks)) != len(self.sinks) or not self.sinks:
            raise WeirError(f"name each sink once, not {', '.join(self.sinks) or 'none at all'}")
        if "taught" in self.sinks:
            raise WeirError("a taught sink is no model of this experiment: choose learnable")
        if self.slots <= max(paper.CONFIGS):
            raise WeirError(
                f"a cache of {self.slots} slots has no room for {max(paper.CONFIGS)} initial "
                "tokens and recent ones: choose more"
            )
        if self.slots + self.tail > self.preset.recipe.length:
            raise WeirError(
                f"{self.slots} slots and {self.tail} tokens between folds are more than the "
                f"window of {self.preset.recipe.length}: choose fewer"
            )
        if self.read < 4 * measure.BLOCK:
            raise WeirError(
                f"{self.read:,} tokens are too few to stream: choose {4 * measure.BLOCK:,} or more"
            )
        if not self.held_out:
            raise WeirError("no held-out text is named")

    @property
    def slots(self) -> int:
        """Slots of every cache."""
        return self.budget or self.preset.recipe.length // 2

    @property
    def tail(self) -> int:
        """Tokens between two folds."""
        return self.chunk or max(1, min(64, self.slots // 4))

    def folder(self, sink: str) -> Path:
        """Where the model of a sink lies."""
        return self.out / sink.replace(":", "-")


def run(
    asked: Asked,
    *,
    on_train: Callable[[str], Trained] = lambda sink: lambda step, steps, facts: None,
    on_measure: Callable[[str, float], None] = lambda what, done: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> dict[str, Any]:
    """Train what is not trained, measure what is not measured, and sum up.

    Args:
        asked: what to do.
        on_train: gives what is told after every step of a model's training.
        on_measure: told what is measured, and how much of everything is, from 0 to 1.
        on_note: told what a user would want to know.

    Returns:
        "setting", "models" (of each: "front", "training" with its loss curve's end, "ppl" by
        configuration, "inside", "abilities", "attention"), "findings". It is also in
        `out/sinks.json`.

    Raises:
        WeirError: as `weir.train.run`, or a text cannot be read or is too short.
    """
    texts = [read_text(path) for path in asked.held_out]
    models: dict[str, dict[str, Any]] = {}
    for sink in asked.sinks:
        figures = train(
            replace(asked.preset.recipe, sink=sink),
            asked.text,
            asked.folder(sink),
            vocabulary=asked.preset.vocabulary,
            shared=asked.out / "common",
            compiled=asked.compiled,
            on_step=on_train(sink),
            on_note=on_note,
        )
        models[sink] = {"training": _training(asked.folder(sink), figures)}
    kept = _Kept(asked.out / "measured.json", _setting(asked, texts))
    for number, sink in enumerate(asked.sinks):

        def told(done: float, number: int = number, sink: str = sink) -> None:
            on_measure(sink, (number + done) / len(asked.sinks))

        models[sink] |= _measured(asked, sink, texts, kept, told)
    result = {
        "setting": kept.setting,
        "models": models,
        "findings": [
            found.as_json()
            for found in findings(
                {sink: _joined(model["losses"]) for sink, model in models.items()},
                {sink: model["inside_losses"] for sink, model in models.items()},
            )
        ],
    }
    for model in models.values():
        del model["losses"], model["inside_losses"]
    return result


def _setting(asked: Asked, texts: list[str]) -> dict[str, Any]:
    """What the figures depend on, besides the models."""
    recipe = {name: value for name, value in asdict(asked.preset.recipe).items() if name != "sink"}
    return {
        "recipe": recipe,
        "vocabulary": asked.preset.vocabulary,
        "text": asked.text.name,
        "held_out": [
            {"name": path.name, "sha256": hashlib.sha256(text.encode()).hexdigest()}
            for path, text in zip(asked.held_out, texts, strict=True)
        ],
        "read": asked.read,
        "slots": asked.slots,
        "chunk": asked.tail,
        "samples": asked.samples,
    }


def _training(folder: Path, figures: dict[str, Any]) -> dict[str, Any]:
    """What the log says of a run at its end."""
    log = read_log(folder / WORK / "loss.csv")
    last = max(1, len(log) // 20)
    speeds = sorted(row["tokens_per_s"] for row in log)
    return {
        "parameters": figures["parameters"],
        "steps": len(log),
        "tokens": log[-1]["tokens"],
        "last_loss": float(np.mean([row["loss"] for row in log[-last:]])),
        "held_out_loss": log[-1]["held_out_loss"],
        "tokens_per_s": speeds[len(speeds) // 2],
    }


class _Kept:
    """Figures that were measured, on disk; those of another setting are dropped."""

    def __init__(self, path: Path, setting: dict[str, Any]) -> None:
        self.path, self.setting = path, setting
        self.figures: dict[str, Any] = {}
        try:
            old = json.loads(path.read_text("utf-8"))
            if old["setting"] == setting:
                self.figures = old["figures"]
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def get(self, name: str, measured: Callable[[], Any]) -> Any:
        """A figure that is there, or is measured now."""
        if name not in self.figures:
            self.figures[name] = measured()
            unfinished = self.path.with_suffix(".tmp")
            unfinished.write_text(
                json.dumps({"setting": self.setting, "figures": self.figures}), "utf-8"
            )
            unfinished.replace(self.path)
        return self.figures[name]


def _measured(
    asked: Asked, sink: str, texts: list[str], kept: _Kept, told: Callable[[float], None]
) -> dict[str, Any]:
    """All that is measured of one model."""
    model, tokenizer = load(str(asked.folder(sink)), dtype="float32")
    front: list[int] = list(tokenizer("")["input_ids"])
    ids = [_ids(tokenizer, text, asked.read) for text in texts]
    length = asked.preset.recipe.length
    whole = np.concatenate([part.numpy() for part in ids])
    # What tells the models of two runs into one folder apart.
    digest = hashlib.sha256((asked.folder(sink) / "model.safetensors").read_bytes()).hexdigest()
    key = f"{sink} {digest[:16]}"
    jobs = len(paper.CONFIGS) * len(texts) + len(measure.ABILITIES) + 2
    done = 0

    def figure(name: str, measured: Callable[[], Any]) -> Any:
        nonlocal done
        found = kept.get(f"{key} {name}", measured)
        done += 1
        told(done / jobs)
        return found

    losses: dict[str, list[list[float]]] = {}
    seconds: dict[str, float] = {}
    for sinks in paper.CONFIGS:
        policy = measure.policy_of_config(sinks, asked.slots)
        losses[str(sinks)] = []
        for number, part in enumerate(ids):

            def streamed(policy: str = policy, part: torch.Tensor = part) -> dict[str, Any]:
                began = time.monotonic()
                by_block = measure.stream_losses(model, front, part, policy, asked.tail)
                return {"losses": by_block, "seconds": time.monotonic() - began}

            found = figure(f"{policy} text {number}", streamed)
            losses[str(sinks)].append(found["losses"])
            seconds[str(sinks)] = seconds.get(str(sinks), 0.0) + found["seconds"]
    few = (model, front, whole, length, asked.samples)
    inside = figure("inside", partial(measure.inside_window, *few))
    some = (model, front, whole, length, min(64, asked.samples))
    shares = figure("attention", partial(measure.attention_shares, *some))
    return {
        "front": len(front),
        "ppl": {name: float(np.exp(np.mean(part))) for name, part in _joined(losses).items()},
        "ppl_by_text": {
            name: [float(np.exp(np.mean(part))) for part in parts] for name, parts in losses.items()
        },
        "seconds": seconds,
        "inside_ppl": float(np.exp(np.mean(inside))),
        "abilities": {
            name: figure(name, partial(ask, *few)) for name, ask in measure.ABILITIES.items()
        },
        "attention": shares,
        "losses": losses,
        "inside_losses": inside,
    }


def _joined(losses: dict[str, list[list[float]]]) -> dict[str, list[float]]:
    """Blocks of all texts in one list, by configuration."""
    return {name: [block for part in parts for block in part] for name, parts in losses.items()}


def _ids(tokenizer: Any, text: str, most: int) -> torch.Tensor:
    """The first ids of a text, without what stands in front [most].

    Raises:
        WeirError: it has fewer.
    """
    ids = tokenizer(text[: 16 * most], add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < most:
        raise WeirError(
            f"a held-out text makes {len(ids):,} tokens, and {most:,} are to be streamed: give a "
            "longer one, or read less"
        )
    return torch.tensor(ids[:most], dtype=torch.int64)
