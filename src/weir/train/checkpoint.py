"""Checkpoints of a run: weights, optimizers, step and recipe in one file, replaced atomically.

Batches and learning rates follow from recipe and step, and training draws no random numbers, so
there is no generator state to save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weir.errors import WeirError
from weir.train.recipe import TrainingRecipe


def save(
    path: Path,
    recipe: TrainingRecipe,
    model: nn.Module,
    steppers: list[torch.optim.Optimizer],
    step: int,
    seconds: float,
) -> None:
    """Write a checkpoint; a run killed meanwhile keeps the previous one."""
    state = {
        "model": model.state_dict(),
        "optimizers": [stepper.state_dict() for stepper in steppers],
        "step": step,
        "seconds": seconds,
        "recipe": asdict(recipe),
    }
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    unfinished.replace(path)


def restore(
    path: Path, recipe: TrainingRecipe, model: nn.Module, steppers: list[torch.optim.Optimizer]
) -> tuple[int, float]:
    """Load a checkpoint into model and optimizers, and return its step and the seconds so far.

    Without a checkpoint the result is (0, 0.0).

    Raises:
        WeirError: the run was begun with another recipe.
    """
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True, map_location="cpu")
    check_same(recipe, state["recipe"], str(path))
    model.load_state_dict(state["model"])
    for stepper, held in zip(steppers, state["optimizers"], strict=True):
        stepper.load_state_dict(held)
    return int(state["step"]), float(state["seconds"])


def check_same(recipe: TrainingRecipe, begun: Mapping[str, Any], where: str) -> None:
    """Refuse to continue a run that was begun with another recipe; only `tokens` may differ.

    Raises:
        WeirError: the recipes differ; the message names the first field that does.
    """
    name = recipe.differs_from(begun)
    if name is not None:
        raise WeirError(
            f"{where} was begun with {name}={begun.get(name)}, not {getattr(recipe, name)}: give "
            "that, or another folder"
        )
