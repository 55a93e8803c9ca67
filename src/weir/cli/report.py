"""`weir report`: the results of `weir eval` as a page with tables and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weir.cli.app import command
from weir.cli.common import AsJson, output, print_json, waiting


@command()
def report(
    results: Annotated[Path, typer.Argument(help="The file that `weir eval` wrote.")],
    out: Annotated[
        Path, typer.Option(help="Folder for report.html, report.md and pictures.")
    ] = Path("report"),
    as_json: AsJson = False,
) -> None:
    """Write results as one HTML page with its plots inside, and as Markdown."""
    from weir.evals.results.report import write_report

    with waiting("drawing the plots"):
        pages = write_report(results, out)
    if as_json:
        print_json({"pages": [str(page) for page in pages]})
        return
    for page in pages:
        output().print(str(page), markup=False, highlight=False, soft_wrap=True)
