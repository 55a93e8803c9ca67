"""How little a command imports before it has anything to do: help and lists come at once."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
from terminal import SOURCE, run
from typer.main import get_command

from weir.cli import commands
from weir.cli.collecting import SELDOM, seldom_collected, started
from weir.errors import WeirError

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


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("chta",), 2, "No such command 'chta'. Did you mean 'chat'?"),
        (("chat", "--polcy", "h2o"), 2, "--policy"),
        (("policies", "h2oo"), 2, "did you mean 'h2o'?"),
        (("chat", "--policy", "h2oo(64)"), 1, "did you mean 'h2o'?"),
        (("size", "./nowhere"), 1, "there is no model folder './nowhere'"),
    ],
)
def test_what_is_misspelt_is_refused_before_anything_that_takes_long(words, code, says):
    heavy = ("torch", "transformers", "numpy", *TABLES, "weir.cli.serve")  # which is another's
    done = subprocess.run(
        [sys.executable, "-c", START.format(heavy), *words],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    line, imported = done.stderr.split("\n")
    assert says in line and imported == ""


@pytest.mark.parametrize(
    "text", ["h2oo(64)", "sinks | recent(4)", "nothing_like(1): int8", "H2O(9)"]
)
def test_a_policy_is_refused_early_in_the_words_it_would_be_refused_in_later(capsys, text):
    from weir import policy

    with pytest.raises(WeirError) as late:
        policy(text)
    assert run(capsys, "stream", "--text", "x", "--policy", text).err == f"weir: {late.value}\n"


def test_a_missing_folder_is_refused_early_in_the_words_it_would_be_refused_in_later(capsys):
    from weir import load

    for name in ("", "./nowhere"):
        with pytest.raises(WeirError) as late:
            load(name)
        assert run(capsys, "size", name).err == f"weir: {late.value}\n"


def test_the_list_of_commands_says_of_each_what_it_says_itself():
    made = get_command(commands.app).commands
    said = {name: made[name].get_short_help_str() for name in made}
    assert said == commands.COMMANDS


def test_garbage_is_collected_as_usual_once_the_model_is_loaded_and_when_a_command_has_ended():
    before, frozen = gc.get_threshold(), bool(gc.get_freeze_count())
    with seldom_collected():
        assert gc.get_threshold()[0] == SELDOM > before[0]
        started()
        assert (gc.get_threshold(), gc.get_freeze_count() > 0) == (before, True)
    assert (gc.get_threshold(), gc.get_freeze_count() > 0) == (before, frozen)
    with pytest.raises(KeyboardInterrupt), seldom_collected():
        raise KeyboardInterrupt
    assert gc.get_threshold() == before


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("bench", "weir_bench.run.measure"),
        ("bench serve", "weir_bench.serving.run.measure"),
        ("eval --out x", "weir.evals.grid.make_grid"),
        ("train --text x --out x", "weir.cli.train.preset_of"),
        ("train --images --out x", "weir.train.images.train_captioner"),
        ("sinks --text x --out x", "weir.cli.sinks.preset_of"),
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
