"""`weir` itself: which commands there are, and carrying one out; wrong usage is one line.

A command's file is imported when that command is asked for, so that help, `--version` and misspelt
words are answered at once. Knows none from the inside.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from weir import __version__
from weir.cli.app import MADE, PLAIN, Commands
from weir.cli.importing import import_modules, without_import
from weir.errors import WeirError

# typer brings click with it in some versions and not in others: what a wrong option raises.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

COMMANDS = {
    "demo": "Read a book far past the model's window under several policies, and ask who "
    "remembers.",
    "chat": "Talk to a model for as long as you like; the cache stays as large as it is.",
    "stream": "Read a text once, in constant memory, and report its perplexity.",
    "serve": "Serve a model whose conversations have no end, in memory that is fixed at the start.",
    "policies": "List the named policies and the pools a pipe can be made of, or tell all of those "
    "named.",
    "size": "Say how many bytes a stream and the weights take, and how many streams fit.",
    "advise": "Try policies on the beginning of a text, within so much memory, and name one.",
    "calibrate": "Measure which layers need how many slots, and write a policy that says so.",
    "eval": "Measure policies on tasks, cell by cell, into a file that survives a crash.",
    "report": "Write results as one HTML page with its plots inside, and as Markdown, CSV or "
    "LaTeX.",
    "inspect": "Look into a model: attention maps, sinks, keys, norms, and what a policy keeps, as "
    "one page.",
    "attention-error": "Compare attention under a policy with exact attention, layer by layer.",
    "train": "Train a small model on books, of the shape and with the attention sink of your "
    "choice.",
    "sinks": "Train models with no sink, a Zero Sink, one and two learnable sinks, and stream "
    "books with 0, 1, 2 and 4 initial tokens kept: StreamingLLM's section 3.3.",
    "bench": "Time weir and its peers in turns, and print ratios beside their targets.",
}
"""Every command, and the first sentence of what it says of itself."""
FILES = {"attention-error": "attention_error", "eval": "evaluate"}
"""The file of a command that has another name."""
BENCH = Path(__file__).parents[3] / "bench"
"""In a clone, the folder that has `weir_bench`, which is not part of what is installed."""


def import_bench() -> None:
    """Import the commands `weir bench` and `weir bench serve` from the clone.

    Raises:
        WeirError: weir does not run from a clone.
    """
    if not (BENCH / "weir_bench").is_dir():
        raise WeirError(
            "weir bench is not among what is installed: run it in a clone of weir, after "
            "pip install -e . there"
        )
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))
    import_module("weir_bench.command")
    import_module("weir_bench.serving.command")


class _Imported(Mapping[str, Any]):
    """The commands by name: one is imported and made when somebody looks it up."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        if name == "bench":
            import_bench()
        else:
            import_module(f"weir.cli.{FILES.get(name, name)}")
        return get_command(MADE[name])

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Weir(Commands):
    """`weir`, whose commands are listed without being imported."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": _Imported()})

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all."""
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of a help page: each name and its sentence."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    name="weir",
    cls=_Weir,
    help="Any Hugging Face decoder on token streams without end, in a KV cache of fixed size. "
    "Pools of your own: weir --import my_pools,more/pools.py COMMAND.",
    **PLAIN,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"weir {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and leave."
    ),
) -> None:
    pass


def run(arguments: list[str]) -> int:
    """Carry out the command that some arguments ask for; its exit code.

    Raises:
        WeirError: the command cannot be carried out; the message says why.
    """
    try:
        arguments, modules = without_import(arguments)
    except ValueError as error:
        sys.stderr.write(f"weir: {error}\n")
        return 2
    if modules:
        import_modules(modules)
    try:
        code = app(arguments or ["--help"], prog_name="weir", standalone_mode=False)
    except UsageError as error:
        sys.stderr.write(f"weir: {' '.join(_usage(error).split())}\n")
        return 2
    return code if isinstance(code, int) else 0


def _usage(error: object) -> str:
    """What is wrong with the arguments, and where to read how it is right."""
    problem = getattr(error, "format_message", lambda: str(error))().rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{problem}; see {context.command_path if context else 'weir'} --help"
