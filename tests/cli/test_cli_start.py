"""Commands import little before they have work to do, so that help and lists come at once."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
from terminal import SOURCE, run
from typer.main import get_command

from weir.cli import app as commands
from weir.cli import main
from weir.cli.runtime import SELDOM, collect_seldom, freeze_imports
from weir.errors import WeirError

HEAVY = ("torch", "transformers", "matplotlib", "numpy", "rich.markdown", "pydantic", "zipfile")
"""Modules that take long to import; PyTorch takes seconds."""
TABLES = ("rich.console", "rich.table", "rich.text")
"""Modules whose import would add to the time of help, which needs none of them."""

START = """
import sys
try:
    from weir.cli import main
    main()
finally:
    sys.stderr.write(" ".join(name for name in {} if name in sys.modules))
"""

HELP = """
import sys
from weir.cli import main

for words in {words}:
    sys.argv = ["weir", *words]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 0, words
    found = [name for name in {heavy} if name in sys.modules]
    assert not found, (words, found)
"""


def test_python_runs_it_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "weir", "--version"],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("weir ")


def test_help_imports_nothing_that_takes_long():
    words = [(), ("--help",), ("--version",), *((name, "--help") for name in commands.COMMANDS)]
    done = subprocess.run(
        [sys.executable, "-c", HELP.format(words=words, heavy=(*HEAVY, *TABLES))],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("Usage: weir") == len(words) - 1


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("chta",), 2, "No such command 'chta'. Did you mean 'chat'?"),
        (("chat", "--polcy", "h2o"), 2, "--policy"),
    ],
)
def test_what_is_misspelt_is_refused_before_anything_that_takes_long(words, code, says):
    heavy = ("torch", "transformers", "numpy", *TABLES, "weir.cli.serve")  # another command
    done = subprocess.run(
        [sys.executable, "-c", START.format(heavy), *words],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    line, imported = done.stderr.split("\n")
    assert says in line and imported == ""


def test_the_list_of_commands_says_of_each_what_it_says_itself():
    weir = get_command(commands.app)
    said = {name: weir.get_command(None, name).get_short_help_str() for name in weir.commands}
    assert said == commands.COMMANDS


def test_garbage_is_collected_as_usual_once_the_model_is_loaded_and_when_a_command_has_ended():
    before, frozen = gc.get_threshold(), bool(gc.get_freeze_count())
    with collect_seldom():
        assert gc.get_threshold()[0] == SELDOM > before[0]
        freeze_imports()
        assert (gc.get_threshold(), gc.get_freeze_count() > 0) == (before, True)
    assert (gc.get_threshold(), gc.get_freeze_count() > 0) == (before, frozen)
    with pytest.raises(KeyboardInterrupt), collect_seldom():
        raise KeyboardInterrupt
    assert gc.get_threshold() == before


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("bench", "weir_bench.run.measure"),
        ("bench serve", "weir_bench.serving.run.measure"),
        ("eval --out x", "weir.evals.grid.make_grid"),
        ("train --text x --out x", "weir.cli.train.preset_of"),
    ],
)
def test_commands_that_work_for_long_collect_garbage_as_usual(words, first, monkeypatch, capsys):
    seen, before = [], gc.get_threshold()

    def work(*given, **named):
        seen.append(gc.get_threshold())
        raise WeirError("enough")

    monkeypatch.setattr(first, work)
    assert run(capsys, *words.split()).err.endswith("weir: enough\n")
    assert seen == [before]


_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_wait_briefly_unless_the_user_has_chosen(chosen, spins, monkeypatch):
    others = {name: v for name, v in os.environ.items() if name not in _WAITING}
    monkeypatch.setattr(os, "environ", others | chosen)
    monkeypatch.setattr(sys, "argv", ["weir", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


ENDING = """
import atexit, gc, os, sys
from weir.cli import cli
sys.argv = ["weir", "--version"]
cli.main = {main}
def end():
    # Python's last search comes after all functions of atexit.
    gc.callbacks.append(lambda phase, info: os._exit(99))
    sys.stdout.write("written late\\n")
own = cli.main
def main():
    atexit.register(end)
    own()
cli.main = main
cli.run_program()
"""


@pytest.mark.parametrize(
    ("main", "code"),
    [
        ("cli.main", 0),
        ("lambda: sys.exit(130)", 130),
        ("lambda: sys.exit()", 0),
        ("lambda: sys.exit('why')", 1),
        ("lambda: 1 / 0", 1),
    ],
)
def test_a_program_ends_with_its_code_and_without_a_last_search_for_garbage(main, code):
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(main=main)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert done.stdout.endswith("written late\n")
    assert ("ZeroDivisionError" in done.stderr) == ("1 / 0" in main)
    assert ("why" in done.stderr) == ("why" in main)
