"""Every task can be written as text and parsed again, and so can the documentation's commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import MISSING, fields
from itertools import count
from pathlib import Path

import pytest

from weir.evals.grid.grid import make_grid
from weir.evals.notation import read_tasks
from weir.evals.tasks import TASKS

DOCS = Path(__file__).parents[3] / "docs"
COMMAND = re.compile(r"^weir eval (?:.*\\\n)*.*$", re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """The `weir eval` commands of all pages, with the page they are on."""
    return [
        (page.name, found)
        for page in sorted(DOCS.rglob("*.md"))
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
        for found in COMMAND.findall(block)
    ]


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_is_written_as_it_is_read(name: str) -> None:
    kind = TASKS[name]
    needed = {f.name: "some file.jsonl" for f in fields(kind) if f.default is MISSING}
    made = kind(**needed)
    assert read_tasks(str(made), TASKS) == [made]
    assert kind.metrics and set(kind.metrics.values()) <= {"higher", "lower"}


def test_the_commands_of_the_documentation_can_be_read() -> None:
    assert ("measuring.md" in {page for page, _ in commands()}) and len(commands()) >= 6
    for page, command in commands():
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        given = dict(zip(words, [*words[1:], ""], strict=True))
        # Policy files are written by earlier commands of the page, so policies take their place.
        sizes = count(2)
        listed = given.get("--policies", "all")
        policies = re.sub(r"[\w-]+\.toml", lambda _, n=sizes: f"h2o({next(n)})", listed)
        grid = make_grid(
            ["nano"],
            given.get("--tasks", "ppl"),
            policies,
            budgets=[int(budget) for budget in given.get("--budgets", "").split(",") if budget],
            seeds=[0],
            paper=given.get("--protocol"),
        )
        assert grid.cells, page
