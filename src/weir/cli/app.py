"""The application `weir`: declare commands, find them, and run a command line.

A command's file is imported only when the command line names that command. Importing it does not
import PyTorch, so help, `--version` and misspelled commands are answered at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from weir import __version__
from weir.errors import WeirError

# Progress bars and warnings of libraries would mix with weir's. Their errors are still shown.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

COMMANDS = {
    "demo": "Read a book past the model's window under several policies, and compare what "
    "they remember.",
    "chat": "Talk to a model for as long as you like, in a cache of fixed size.",
    "stream": "Read a text once, in constant memory, and report its perplexity.",
    "serve": "Serve endless conversations with a model, in an amount of memory that is fixed "
    "at the start.",
    "policies": "List the named policies and the pools that policies are made of, or describe "
    "the ones you name.",
    "check": "Check that a policy's pools follow the rules for pools.",
    "size": "Show how many bytes a stream and the weights take, and how many streams fit.",
    "advise": "Try policies on the beginning of a text, in a cache of a given size, and recommend "
    "one.",
    "calibrate": "Measure how many slots each layer needs, and write them to a policy file.",
    "eval": "Measure policies on tasks, and save the results to a file.",
    "report": "Write results as an HTML page with its plots inside, and in other formats (see "
    "--format).",
    "inspect": "Show a model's attention maps, sinks, keys and norms, and what a policy keeps, on "
    "one page.",
    "attention-error": "Compare attention under a policy with exact attention, layer by layer.",
    "train": "Train a small model on books, with a shape and attention sink of your choice.",
    "bench": "Time weir and other libraries alternately, and print each ratio next to the one that "
    "weir aims for.",
}
"""Every command, with the first sentence of its help."""
FILES = {"attention-error": "attention_error", "eval": "evaluate"}
"""Files of commands whose file has another name than the command."""
BENCH = Path(__file__).parents[3] / "bench"
"""Folder of `weir_bench` in a clone; the wheel does not contain it."""
IMPORT = "--import"
"""The option that imports modules. If typer knew it, typer would import pydantic."""
PLAIN: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # rich's help would import a parser of Markdown
}
"""Settings of every typer application here."""

# The exception for wrong usage, from click or from the copy of click inside newer versions of
# typer.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_made: dict[str, typer.Typer] = {}
"""The commands whose files have been imported, by name."""


# --- declaring a command


class _QuickHelp:
    """Help that imports less than typer's own, and so takes half the time."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option `--help` with the default false. If the default were None, typer would
        import pydantic.
        """
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.default = False
        return option

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the whole first sentence of the help, for the list of commands."""
        sentence: str = super().get_short_help_str(1000)  # type: ignore[misc]
        return sentence


class Command(_QuickHelp, TyperCommand):
    """A command."""


class CommandGroup(_QuickHelp, TyperGroup):
    """A command that has subcommands."""


def command(name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function as a command, with typer's options."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        key = name or function.__name__
        made = _made[key] = typer.Typer(**PLAIN)
        return made.command(key, cls=Command)(function)

    return declare


def group(name: str) -> typer.Typer:
    """Declare a command that has subcommands and can also run without one."""
    made = _made[name] = typer.Typer(name=name, cls=CommandGroup, **PLAIN)
    return made


# --- finding a command


def _import_bench() -> None:
    """Import the command `weir bench` and its subcommands from a clone of weir."""
    if not (BENCH / "weir_bench").is_dir():
        raise WeirError(
            "weir bench is not part of the installed package. Clone weir, run pip install -e . in "
            "the clone, and run weir bench there."
        )
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))
    for commands in ("command", "serving.command", "peers.command"):
        import_module(f"weir_bench.{commands}")


class _Weir(CommandGroup):
    """The group `weir`, which lists its commands without importing them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": dict.fromkeys(COMMANDS)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command after importing its file; None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        if cmd_name == "bench":
            _import_bench()
        else:
            import_module(f"weir.cli.{FILES.get(cmd_name, cmd_name)}")
        return get_command(_made[cmd_name])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands for the help, with a sentence for each."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    name="weir",
    cls=_Weir,
    help="Run Hugging Face decoders on endless token streams, in a KV cache of fixed size. To "
    "use pools (rules for which tokens to keep) of your own: weir --import "
    "my_pools,more/pools.py COMMAND.",
    **PLAIN,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weir {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


# --- running a command


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        arguments, modules = split_imports(arguments)
    except ValueError as error:
        sys.stderr.write(f"weir: {error}\n")
        return 2
    if modules:
        _import_modules(modules)
    try:
        code = app(arguments or ["--help"], prog_name="weir", standalone_mode=False)
    except UsageError as error:
        sys.stderr.write(f"weir: {' '.join(_describe_misuse(error).split())}\n")
        return 2
    return code if isinstance(code, int) else 0


def split_imports(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split `--import MODULES` off the front of a command line.

    Returns the remaining arguments, and the names of the modules. Raises ValueError if `--import`
    names no module.
    """
    modules: list[str] = []
    while arguments and arguments[0].partition("=")[0] == IMPORT:
        named, arguments = arguments[0].partition("=")[2], arguments[1:]
        if not named and arguments:
            named, arguments = arguments[0], arguments[1:]
        found = [name.strip() for name in named.split(",") if name.strip()]
        if not found:
            raise ValueError(
                f"{IMPORT} needs the name of a module or a .py file, as in {IMPORT} my_pools"
            )
        modules += found
    return arguments, modules


def _import_modules(modules: list[str]) -> None:
    """Import modules in this process and in processes that it starts."""
    from weir.policies import VARIABLE, load_plugins

    before = [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    # Absolute paths, since other processes may run in other folders.
    named = [os.path.abspath(name) if name.endswith(".py") else name for name in modules]
    os.environ[VARIABLE] = os.pathsep.join([*before, *named])
    load_plugins()


def _describe_misuse(error: object) -> str:
    """Describe what is wrong with the arguments, and name the help to read."""
    problem = getattr(error, "format_message", lambda: str(error))().rstrip(".")
    context = getattr(error, "ctx", None)
    named = context is not None and any(p.name == "model_name" for p in context.command.params)
    if named and "unexpected extra argument" in problem:
        problem += "; use --model to name a model"
    if f"No such option: {IMPORT}" in problem:
        typed = context.command_path.partition(" ")[2] if context else "COMMAND"
        problem += f"; put {IMPORT} before the command, as in weir {IMPORT} my_pools.py {typed}"
    see = " See" if problem.endswith("?") else "; see"
    return f"{problem}{see} {context.command_path if context else 'weir'} --help"
