"""The models of bench/results/choosing-weir.md are those that `make models` makes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weir.cli import train as command
from weir.cli.app import app
from weir.train import Preset

ROOT = Path(__file__).parents[2]


def rows() -> dict[str, list[str]]:
    """The cells of the page's table, by model."""
    page = (ROOT / "bench" / "results" / "choosing-weir.md").read_text("utf-8")
    page = page.split("\n## The models\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \|(.+)\|$", page, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in found}


def made() -> dict[str, list[str]]:
    """What `make models` would run, by model: the words after `weir train`."""
    words = ["make", "--dry-run", "--always-make", "--no-print-directory", "models", "BOOKS=books"]
    said = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    lines = re.findall(r"weir train (.*--out models/(\w+).*)", said)
    return {name: line.split() for line, name in lines}


def test_every_model_of_the_page_is_made_and_no_other():
    assert list(rows()) == ["nano", *made()]


@pytest.mark.parametrize("name", made())
def test_a_model_is_made_as_its_row_says(monkeypatch, name):
    asked: list[Preset] = []

    def carry_out(preset, *given, **more):
        asked.append(preset)
        return {"recall": None, "parameters": 1, "book_ppl": 1.0}

    monkeypatch.setattr(command, "carry_out", carry_out)
    ended = CliRunner().invoke(app, ["train", *made()[name]])
    assert ended.exit_code == 0, ended.output
    recipe = asked[0].recipe
    figures = [recipe.layers, recipe.width, f"{recipe.heads}, {recipe.kv_heads}", recipe.window]
    figures += [f"{asked[0].vocabulary:,}", recipe.seed, f"{recipe.tokens / 1e6:g} million"]
    figures += ["yes" if recipe.exercise_rows else "no"]
    what, *row = rows()[name]
    assert row == [str(figure) for figure in figures]
    assert {"llama": "", "qwen3": "Qwen3", "alibi": "ALiBi"}[recipe.shape] in what
