"""The command line: `weir COMMAND`. Each command is a file; what they do lies elsewhere.

Exit codes: 0 done, 1 an error in one line, 2 usage.
"""

from __future__ import annotations

import os
import sys

import typer

from weir import __version__
from weir.errors import WeirError

# Progress and warnings of libraries would mix with ours; errors still come through.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

app = typer.Typer(
    name="weir",
    help="Any Hugging Face decoder on token streams without end, in a KV cache of fixed size.",
    no_args_is_help=True,
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
    from transformers.utils.logging import disable_progress_bar

    from weir.cli import chat, demo, policies, stream, train  # noqa: F401  (they register)

    disable_progress_bar()
    try:
        app()
    except WeirError as error:
        typer.echo(f"weir: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("weir: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone, as `head` does; nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
