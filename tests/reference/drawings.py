"""A folder with a tiny captioner of random weights, and drawings with captions in COCO's format."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from reference.examples import import_example
from reference.models import randomized

_example = import_example("captions/drawings.py")


def captioner(folder: Path, drawings: int = 4) -> PreTrainedModel:
    """Write the folder, and return its model."""
    folder.mkdir(parents=True, exist_ok=True)
    model, processor = _example.make_captioner(_example.ImageRecipe(width=16, layers=1))
    randomized(model)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    _example.write_captions(_example.scenes()[:: 612 // drawings][:drawings], folder, seed=0)
    return model
