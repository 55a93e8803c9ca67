"""Packages that weir can do without, until a command wants one. Imports nothing."""

from __future__ import annotations

EXTRAS = {
    "accelerate": "train",
    "fastapi": "serve",
    "llguidance": "serve",
    "lm_eval": "eval",
    "matplotlib": "plots",
    "numba": "fast",
    "PIL": "images",
    "prometheus_client": "serve",
    "pydantic": "serve",
    "ray": "ray",
    "rich": "cli",
    "rouge_score": "eval",
    "sacrebleu": "eval",
    "sklearn": "inspect",
    "starlette": "serve",
    "torchao": "quant",
    "typer": "cli",
    "uvicorn": "serve",
}
"""Which of weir's extras brings a package."""


def told(error: ModuleNotFoundError) -> str | None:
    """What to install for a package that is not there; None where no extra brings it."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return f"this needs {package}, which is not installed: pip install 'weir[{EXTRAS[package]}]'"
