"""`weir-lm-eval`: the command line of lm-evaluation-harness, with weir as one of its models.

Releases of the harness that look for plug-ins find weir automatically. For others, this command
registers weir first. Everything else is up to the harness.
"""

from __future__ import annotations

import sys

from weir.cli.common import say
from weir.errors import WeirError
from weir.evals.records import import_optional


def main() -> None:
    """Run the harness with the arguments of the process; a WeirError gives exit code 1."""
    try:
        registry = import_optional("lm_eval.api.registry", "weir-lm-eval")
        command = import_optional("lm_eval.__main__", "weir-lm-eval")
        harness = import_optional("weir.evals.harness", "weir-lm-eval")
        registry.register_model("weir")(harness.WeirLM)
        command.cli_evaluate()
    except WeirError as error:
        say(f"weir: {error}")
        sys.exit(1)
