"""A file that lies beside a model's weights: in its folder, or in the Hub's cache on this machine.

Nothing is fetched. Knows nothing about what is in such files.
"""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedModel

from weir.models.loading import ASSETS


def file_beside(model: PreTrainedModel | str, name: str, revision: str | None = None) -> str | None:
    """Where a file lies beside a model; None where there is none.

    Args:
        model: the model, which says where it was read; or its name, as `load` takes it.
        name: of the file.
        revision: of a Hub id that is given as a name, as for `load`.
    """
    place: str | None
    if isinstance(model, str):
        place = str(ASSETS / "nano") if model == "nano" else model
    else:
        # The commit that was read, not the newest.
        place, revision = model.name_or_path, getattr(model.config, "_commit_hash", None)
    if not place:
        return None
    folder = Path(place).expanduser()
    if folder.is_dir():
        path = folder / name
        return str(path) if os.path.lexists(path) else None  # a link to nothing is an error
    try:
        found = try_to_load_from_cache(place, name, revision=revision)
    except HFValidationError:  # a folder that is gone by now, as an id
        return None
    return found if isinstance(found, str) else None
