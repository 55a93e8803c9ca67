"""Folders of models on this machine, and files next to a model."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedModel

from weir.models.gguf import find_gguf

ASSETS = Path(str(resources.files("weir"))) / "assets"
"""Folder of the models that come with weir."""


def sidecar_path(
    model: PreTrainedModel | str, name: str, revision: str | None = None
) -> str | None:
    """Return the path of a file next to a model, which is given as a model or a name; None if there
    is no such file.
    """
    place: str | None
    if isinstance(model, str):
        place = str(ASSETS / "nano") if model == "nano" else str(find_gguf(model) or model)
    else:
        # The commit that was loaded, not the newest.
        place, revision = model.name_or_path, getattr(model.config, "_commit_hash", None)
    if not place:
        return None
    folder = Path(place).expanduser()
    if folder.is_file():  # GGUF
        folder = folder.parent
    if folder.is_dir():
        path = folder / name
        # The path of a dangling link is returned, too, so that opening it fails.
        return str(path) if os.path.lexists(path) else None
    try:
        found = try_to_load_from_cache(place, name, revision=revision)
    except HFValidationError:  # the path of a folder that no longer exists
        return None
    return found if isinstance(found, str) else None
