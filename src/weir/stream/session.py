"""Sessions on disk: a stream's tensors and facts in one safetensors file.

An interrupted save leaves the old file whole (`replacing`). A checksum over everything in a file
notices a single bit that has changed. Knows the form of the file; `stream` knows what goes in.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from weir.errors import WeirError, shown
from weir.models import transformers_model
from weir.stream.fingerprint import fingerprint
from weir.stream.replacing import replacing

FORMAT = 2
KEY = "weir_session"
CHECKSUM = "sha256"


def write(path: str | Path, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a session, whole or not at all.

    Raises:
        WeirError: the file cannot be written.
    """
    path = _path(path)
    written = json.dumps({"format": FORMAT, **facts})
    kept = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    metadata = {KEY: written, CHECKSUM: _checksum(written, kept)}
    try:
        # A folder is refused by the system; a device would be replaced by a file of its name.
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise WeirError(f"cannot write the session {path}: that is not a file to be replaced")
        with replacing(path) as new:
            save_file(kept, str(new), metadata=metadata)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeirError(f"cannot write the session {path}: {reason}") from None


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The facts and tensors of a session file.

    Raises:
        WeirError: it is missing, damaged, not a session of weir, or of a newer weir.
    """
    path = _path(path)
    if path.is_dir():
        raise WeirError(f"{path} is a folder; a session is a file")
    if not path.is_file():
        raise WeirError(f"there is no session file {path}")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if KEY not in metadata:
                raise WeirError(f"{path} is a safetensors file, but not a session of weir")
            facts = json.loads(metadata[KEY])
            # Copies: what safetensors hands out is the file itself, which others may write to.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise WeirError(f"{path} is damaged or not a session of weir ({error})") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        found = facts.get("format") if isinstance(facts, dict) else facts
        raise WeirError(f"{path} has session format {found}; this weir reads format {FORMAT}")
    if metadata.get(CHECKSUM) != _checksum(metadata[KEY], tensors):
        raise WeirError(f"{path} is damaged: its checksum is not that of what it holds")
    return facts, tensors


def check_model(path: str | Path, facts: dict[str, Any], model: PreTrainedModel) -> None:
    """Refuse a session of another model.

    Raises:
        WeirError: naming what differs; or it is no model at all.
    """
    transformers_model(model)
    mine, theirs = fingerprint(model), facts["model"]
    differ = [name for name, value in mine.items() if theirs.get(name) != value]
    if differ:
        what = ", ".join(f"{name} {theirs.get(name)}, here {mine[name]}" for name in differ)
        raise WeirError(f"{path} is a session of another model ({what})")


def _path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise WeirError(f"a session is a file, and its name is text, not {shown(path)}")
    return Path(path)


def _checksum(facts: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(facts.encode())
    for name, t in sorted(tensors.items()):
        digest.update(f"{name} {t.dtype} {list(t.shape)}".encode())
        digest.update(t.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
