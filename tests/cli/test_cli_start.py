"""How little a command imports before it has anything to do: help and lists come at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from terminal import SOURCE

HEAVY = ("torch", "transformers", "matplotlib", "numpy", "rich.markdown", "pydantic", "zipfile")
"""What takes long to import, PyTorch seconds."""
TABLES = ("rich.console", "rich.table", "rich.text")
"""A third of the time of help, which needs none of them."""

START = """
import sys
try:
    from weir.cli import main
    main()
finally:
    sys.stderr.write(" ".join(name for name in {} if name in sys.modules))
"""

COMMANDS = (
    "advise attention-error bench chat demo eval policies report serve size stream train".split()
)  # fmt: skip


def test_python_runs_it_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "weir", "--version"],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("weir ")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--help",),
        ("--version",),
        ("policies",),
        ("policies", "--json"),
        *((command, "--help") for command in COMMANDS),
    ],
)
def test_help_and_lists_import_nothing_that_takes_long(words):
    tables = TABLES if words != ("policies",) else ()
    done = subprocess.run(
        [sys.executable, "-c", START.format((*HEAVY, *tables)), *words],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
