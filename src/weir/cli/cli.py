"""The command `weir`, from before its imports to its exit code. What commands do lies elsewhere.

Exit codes: 0 done, 1 an error in one line, 2 usage, in one line too; 130 after Ctrl-C and 143
after SIGTERM, also in the imports, which is why this file has next to none.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings

from weir.cli.runtime import INTERRUPTED, TERMINATED, Terminated, collect_seldom, terminable
from weir.errors import EXTRAS, WeirError, describe_missing


def main() -> None:
    """Run the command line with the arguments of the process, and leave with its exit code."""
    for written in (sys.stdout, sys.stderr):
        if isinstance(written, io.TextIOWrapper):
            written.reconfigure(errors="replace")  # a terminal that is not UTF-8 gets what it can
    # Where it is installed transformers imports it, and it warns of kernels for other machines.
    for chatty in ("torchao", "torch.utils._pytree"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    # Commands of one policy say so by themselves; in one that compares many it would come often.
    warnings.filterwarnings("ignore", message="weir: .* hold up to")
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
        # If the reader of our output has gone, as `head` does, nothing is left to say.
        code = 1 if isinstance(error, BrokenPipeError) else _fail(str(error), 1)
        _drop_output()
    if code == INTERRUPTED:  # typer makes this code of Ctrl-C too
        _fail("interrupted", code)
    sys.exit(code)


def _drop_output() -> None:
    """Send unwritten output nowhere, so that Python does not try to write it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(problem: str, code: int) -> int:
    sys.stderr.write(f"weir: {' '.join(problem.split())}\n")
    return code
