"""Train models with and without an attention sink and stream books: StreamingLLM's section 3.3.

    python examples/sinks/sinks.py --text books.txt.xz --out sinks

The script trains models with no sink, a Zero Sink, and one and two learnable sinks. It streams
held-out books through them with 0, 1, 2 and 4 initial tokens kept, and writes tables, plots and a
page into the folder. An interrupted run continues from the last checkpoint or figure.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
from findings import CONFIGS, VARIANTS, judge_claims
from page import claims_table, perplexity_table, write_results

import weir
from weir.errors import WeirError
from weir.stream import BOOK, read_text
from weir.train import PRESETS, WORK, Preset, SinkKind, read_log
from weir.train import run as train


@dataclass(frozen=True)
class Experiment:
    """The setting of the experiment.

    Attributes:
        text: books to train on.
        out: the folder for models and figures.
        preset: shape and recipe of the models; its sink is replaced.
        sinks: the kind of sink of each model, in the order in which the models are trained.
        held_out: texts that no model was trained on; the packaged one by default.
        read: tokens of each held-out text that are streamed.
        slots: slots of every cache (x initial tokens + y recent ones); None takes half of the
            window, as in the paper.
        samples: samples inside the window, and questions of each ability.
        compiled: compile the models for training.

    Raises:
        WeirError: the cache does not fit into the window, `read` is too small, or `sinks` is empty,
            repeats a kind or has the kind `taught`.
    """

    text: Path
    out: Path
    preset: Preset = field(default_factory=lambda: PRESETS["small"])
    sinks: tuple[str, ...] = tuple(VARIANTS)
    held_out: tuple[Path, ...] = (BOOK,)
    read: int = 10_000
    slots: int | None = None
    samples: int = 400
    compiled: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "sinks", tuple(str(SinkKind.of(sink)) for sink in self.sinks))
        object.__setattr__(self, "slots", self.slots or self.preset.recipe.length // 2)
        if len(set(self.sinks)) != len(self.sinks) or not self.sinks:
            raise WeirError(f"name each sink once, not {', '.join(self.sinks) or 'none at all'}")
        if "taught" in self.sinks:
            raise WeirError("this experiment has no model with a taught sink: choose learnable")
        if self.slots <= max(CONFIGS):
            raise WeirError(
                f"a cache of {self.slots} slots has no room for {max(CONFIGS)} initial tokens and "
                "recent ones: choose more"
            )
        if self.slots + self.chunk > self.preset.recipe.length:
            raise WeirError(
                f"{self.slots} slots and {self.chunk} tokens between folds are more than the "
                f"window of {self.preset.recipe.length}: choose fewer"
            )
        if self.read < 4 * measure.BLOCK:
            raise WeirError(
                f"{self.read:,} tokens are too few to stream: choose {4 * measure.BLOCK:,} or more"
            )

    @property
    def chunk(self) -> int:
        """Tokens between two folds: a quarter of the slots, at most 64."""
        return max(1, min(64, self.slots // 4))

    def folder(self, sink: str) -> Path:
        """The folder of a model."""
        return self.out / sink.replace(":", "-")


def run(experiment: Experiment, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Do the training and measuring that is not done yet, and judge the paper's claims.

    Returns:
        "setting"; "models" (for each: "training", "front", "ppl" and "ppl_by_text" by
        configuration, "inside_ppl", "abilities", "attention"); "findings".

    Raises:
        WeirError: a text cannot be read or is too short, or as `weir.train.run`.
    """
    texts = [read_text(path) for path in experiment.held_out]
    models: dict[str, dict[str, Any]] = {}
    for sink in experiment.sinks:

        def show(step: int, steps: int, facts: dict[str, Any], sink: str = sink) -> None:
            if "held_out_loss" in facts:
                say(f"{sink}: step {step} of {steps}, held-out loss {facts['held_out_loss']:.3f}")

        figures = train(
            replace(experiment.preset.recipe, sink=sink),
            experiment.text,
            experiment.folder(sink),
            vocabulary=experiment.preset.vocabulary,
            shared=experiment.out / "common",
            compiled=experiment.compiled,
            on_step=show,
            on_note=say,
        )
        models[sink] = {"training": training_facts(experiment.folder(sink), figures)}
    store = FigureStore(experiment.out / "measured.json", setting_of(experiment, texts))
    streams, inside = {}, {}
    for sink in experiment.sinks:
        say(f"measuring {sink}")
        figures, losses, inside[sink] = measure_model(experiment, sink, texts, store)
        streams[sink] = {name: list(chain(*parts)) for name, parts in losses.items()}
        models[sink] |= figures
    findings = judge_claims(streams, inside)
    return {"setting": store.setting, "models": models, "findings": findings}


def setting_of(experiment: Experiment, texts: list[str]) -> dict[str, Any]:
    """Everything besides the models that the figures depend on."""
    recipe = asdict(experiment.preset.recipe)
    del recipe["sink"]
    return {
        "recipe": recipe,
        "vocabulary": experiment.preset.vocabulary,
        "text": experiment.text.name,
        "held_out": [
            {"name": path.name, "sha256": hashlib.sha256(text.encode()).hexdigest()}
            for path, text in zip(experiment.held_out, texts, strict=True)
        ],
        "read": experiment.read,
        "slots": experiment.slots,
        "chunk": experiment.chunk,
        "samples": experiment.samples,
    }


def training_facts(folder: Path, figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of a finished training run, from its log and from what `train` returned."""
    log = read_log(folder / WORK / "loss.csv")
    last = log[-max(1, len(log) // 20) :]
    return {
        "parameters": figures["parameters"],
        "steps": len(log),
        "tokens": log[-1]["tokens"],
        "last_loss": float(np.mean([row["loss"] for row in last])),
        "held_out_loss": log[-1]["held_out_loss"],
        "tokens_per_s": sorted(row["tokens_per_s"] for row in log)[len(log) // 2],
    }


class FigureStore:
    """Measured figures in a JSON file; figures of another setting are dropped."""

    def __init__(self, path: Path, setting: dict[str, Any]) -> None:
        self.path, self.setting = path, setting
        old = json.loads(path.read_text("utf-8")) if path.exists() else {}
        self.figures: dict[str, Any] = old["figures"] if old.get("setting") == setting else {}

    def get(self, name: str, measured: Callable[[], Any]) -> Any:
        """A figure from the file, or measured now and stored."""
        if name not in self.figures:
            self.figures[name] = measured()
            unfinished = self.path.with_suffix(".tmp")
            text = json.dumps({"setting": self.setting, "figures": self.figures})
            unfinished.write_text(text, "utf-8")
            unfinished.replace(self.path)
        return self.figures[name]


def measure_model(
    experiment: Experiment, sink: str, texts: list[str], store: FigureStore
) -> tuple[dict[str, Any], dict[str, list[list[float]]], list[float]]:
    """One model's figures, its losses by configuration and text, and those inside the window."""
    folder = experiment.folder(sink)
    model, tokenizer = weir.load(str(folder), dtype="float32")
    front: list[int] = list(tokenizer("")["input_ids"])
    ids = [text_ids(tokenizer, text, experiment.read) for text in texts]
    # The digest of the weights distinguishes models that two runs wrote into the same folder.
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    key = f"{sink} {digest[:16]}"
    losses: dict[str, list[list[float]]] = {}
    seconds: dict[str, float] = {}
    for x in CONFIGS:
        policy = measure.policy_of_config(x, experiment.slots)
        losses[str(x)], seconds[str(x)] = [], 0.0
        for number, part in enumerate(ids):

            def stream(policy: str = policy, part: torch.Tensor = part) -> dict[str, Any]:
                began = time.monotonic()
                found = measure.stream_losses(model, front, part, policy, experiment.chunk)
                return {"losses": found, "seconds": time.monotonic() - began}

            found = store.get(f"{key} {policy} text {number}", stream)
            losses[str(x)].append(found["losses"])
            seconds[str(x)] += found["seconds"]
    whole = np.concatenate([part.numpy() for part in ids])
    length, samples = experiment.preset.recipe.length, experiment.samples
    few = (model, front, whole, length)
    inside = store.get(f"{key} inside", lambda: measure.inside_window(*few, samples))
    abilities = {
        name: store.get(f"{key} {name}", lambda ask=ask: ask(*few, samples))
        for name, ask in measure.ABILITIES.items()
    }
    shares = lambda: measure.attention_shares(*few, min(64, samples))  # noqa: E731
    ppl = {name: [float(np.exp(np.mean(part))) for part in parts] for name, parts in losses.items()}
    figures = {
        "front": len(front),
        "ppl": {
            name: float(np.exp(np.mean(list(chain(*parts))))) for name, parts in losses.items()
        },
        "ppl_by_text": ppl,
        "seconds": seconds,
        "inside_ppl": float(np.exp(np.mean(inside))),
        "abilities": abilities,
        "attention": store.get(f"{key} attention", shares),
    }
    return figures, losses, inside


def text_ids(tokenizer: Any, text: str, most: int) -> torch.Tensor:
    """The first ids of a text [most], without tokens in front.

    Raises:
        WeirError: the text has fewer.
    """
    ids = tokenizer(text[: 16 * most], add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < most:
        raise WeirError(
            f"a held-out text has {len(ids):,} tokens, but {most:,} are needed: give a longer "
            "text, or read less"
        )
    return torch.tensor(ids[:most], dtype=torch.int64)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="books to train on")
    parser.add_argument("--out", type=Path, required=True, help="folder; continues a run there")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small")
    parser.add_argument("--sink", default=",".join(VARIANTS), help="sinks, with commas between")
    parser.add_argument("--held-out", type=Path, action="append", help="text to stream; repeatable")
    parser.add_argument("--tokens", type=int, help="tokens of training; default: the preset's")
    parser.add_argument("--read", type=int, default=10_000, help="tokens to stream of each text")
    parser.add_argument("--budget", type=int, help="slots of every cache; default: half the window")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compiled", action="store_true", help="do not compile the models")
    given = parser.parse_args(arguments)
    preset = PRESETS[given.preset]
    recipe = replace(preset.recipe, seed=given.seed, tokens=given.tokens or preset.recipe.tokens)
    experiment = Experiment(
        given.text,
        given.out,
        replace(preset, recipe=recipe),
        tuple(word.strip() for word in given.sink.split(",") if word.strip()),
        tuple(given.held_out or (BOOK,)),
        given.read,
        given.budget,
        compiled=not given.no_compiled,
    )
    result = run(experiment, lambda line: print(line, file=sys.stderr))
    logs = {sink: experiment.folder(sink) / WORK / "loss.csv" for sink in experiment.sinks}
    files = write_results(result, logs, experiment.out)
    for table in (perplexity_table(result), claims_table(result)):
        print(table.markdown(), end="\n\n")
    print(*files, sep="\n")


if __name__ == "__main__":
    try:
        main()
    except WeirError as error:
        sys.exit(f"sinks: {error}")
