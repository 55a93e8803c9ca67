"""Entry point of the command `weir`: imports, error messages and exit codes.

Exit codes: 0 for success, 1 for an error, 2 for wrong usage. Both kinds of error print one line on
standard error. 130 after Ctrl-C and 143 after SIGTERM, also during imports; this file imports
little so that this works from the start.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
import warnings
from typing import Any

from weir.cli.runtime import (
    INTERRUPTED,
    TERMINATED,
    Terminated,
    collect_seldom,
    terminable,
    wait_briefly,
)
from weir.errors import EXTRAS, WeirError, describe_missing

_USUAL_FORMAT = warnings.formatwarning


def main() -> None:
    """Run the command line with the arguments of the process, and exit with its exit code."""
    for written in (sys.stdout, sys.stderr):
        if isinstance(written, io.TextIOWrapper):
            written.reconfigure(errors="replace")  # for terminals that are not UTF-8
    wait_briefly()
    # transformers imports torchao if it is installed, which warns about kernels for other machines.
    for chatty in ("torchao", "torch.utils._pytree"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    # Warnings that a policy can hold more tokens than the model is made for. Commands with one
    # policy report this. A comparison of policies would repeat it often.
    warnings.filterwarnings("ignore", message="weir: .* (hold up to|has no limit)")
    warnings.formatwarning = _format_warning
    try:
        with terminable(), collect_seldom():
            from weir.cli.app import run

            code = run(sys.argv[1:] or ["--help"])
            sys.stdout.flush()
    except WeirError as error:
        code = _fail(str(error), 1)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        code = _fail(describe_missing("this", package), 1)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Terminated:
        code = _fail("terminated", TERMINATED)
    except OSError as error:
        # If the reader of our output has closed it, as `head` does, there is nothing to report.
        code = 1 if isinstance(error, BrokenPipeError) else _fail(str(error), 1)
        _drop_output()
    if code == INTERRUPTED:  # typer also returns this code on Ctrl-C
        _fail("interrupted", code)
    sys.exit(code)


def run_program() -> None:
    """Run `main` as a program, and end the process without a last search for garbage.

    Python would search a million objects of PyTorch and of the model, which takes longer than
    everything else at the exit.
    """
    ended: list[Any] = [1]  # the exit code after an exception that nothing catches
    atexit.register(_leave, ended)  # registered first, so it runs after what libraries register
    try:
        main()
    except SystemExit as left:
        ended[0] = left.code
        raise


def _leave(ended: list[Any]) -> None:
    """End the process at once, with the exit code in `ended`."""
    for written in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            written.flush()
    os._exit(ended[0] if isinstance(ended[0], int) else int(ended[0] is not None))


def _format_warning(message: Warning | str, *where: Any, **more: Any) -> str:
    """Format a warning. A warning of weir's is printed as one line."""
    text = str(message)
    return f"{text}\n" if text.startswith("weir") else _USUAL_FORMAT(message, *where, **more)


def _drop_output() -> None:
    """Discard unwritten output, so that Python does not try to write it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(problem: str, code: int) -> int:
    sys.stderr.write(f"weir: {' '.join(problem.split())}\n")
    return code
