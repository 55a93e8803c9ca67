"""The command line: `weir COMMAND`. Each command is a file; what they do lies elsewhere.

Exit codes: 0 done, 1 an error in one line, 2 usage, in one line too; 130 after Ctrl-C.
"""

from __future__ import annotations

import io
import os
import sys

import typer

from weir import __version__
from weir.errors import WeirError

# Progress and warnings of libraries would mix with ours; errors still come through.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

# typer brings click with it in some versions and not in others: what a wrong option raises.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="weir",
    help="Any Hugging Face decoder on token streams without end, in a KV cache of fixed size.",
    add_completion=False,
    pretty_exceptions_enable=False,
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


def main() -> None:
    """Run the command line."""
    for written in (sys.stdout, sys.stderr):
        if isinstance(written, io.TextIOWrapper):
            written.reconfigure(errors="replace")  # a terminal that is not UTF-8 gets what it can
    try:
        code = _run(sys.argv[1:] or ["--help"])
        sys.stdout.flush()
    except WeirError as error:
        code = _fail(str(error), 1)
    except UsageError as error:
        code = _fail(_usage(error), 2)
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        # If the reader of our output has gone, as `head` does, nothing is left to say.
        code = 1 if isinstance(error, BrokenPipeError) else _fail(str(error), 1)
        _drop_output()
    if code == 130:
        _fail("interrupted", code)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Carry out a command; its exit code."""
    from weir.cli import (  # noqa: F401  (they register)
        advise,
        attention_error,
        bench,
        chat,
        demo,
        evaluate,
        policies,
        report,
        stream,
        train,
    )

    code = app(arguments, prog_name="weir", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _drop_output() -> None:
    """What is still to be written goes nowhere, so that Python does not try again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(problem: str, code: int) -> int:
    typer.echo(f"weir: {' '.join(problem.split())}", err=True)
    return code


def _usage(error: object) -> str:
    """What is wrong with the arguments, and where to read how it is right."""
    problem = getattr(error, "format_message", lambda: str(error))().rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{problem}; see {context.command_path if context else 'weir'} --help"
