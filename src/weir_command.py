"""The command `weir`, from before its imports on.

To import anything of `weir` imports PyTorch and transformers, which takes seconds. Ctrl-C in these
is to end like any other Ctrl-C, in one line, so what is run first stands outside of the package.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Import the command line and run it; exit code 130 after Ctrl-C."""
    try:
        from weir.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("weir: interrupted\n")
        sys.exit(130)
    run()
