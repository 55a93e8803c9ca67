"""`weir report`: write the results of `weir eval` as a page with tables and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from weir.cli.app import command
from weir.cli.common import print_json, print_line, waiting
from weir.cli.options import AsJson


@command()
def report(
    results: Annotated[
        list[Path], Argument(help="One or more results files written by `weir eval`.")
    ],
    out: Annotated[Path, Option(help="Folder for report.html, report.md and pictures.")] = Path(
        "report"
    ),
    formats: Annotated[
        str, Option("--format", help="Comma-separated formats: html, md, csv, latex, pdf, bib.")
    ] = "html,md",
    as_json: AsJson = False,
) -> None:
    """Write results as an HTML page with its plots inside, and in other formats (see --format)."""
    from weir.evals.results.report import write_report

    with waiting("drawing the plots"):
        pages = write_report(results, out, [name.strip() for name in formats.split(",")])
    if as_json:
        print_json({"pages": [str(page) for page in pages]})
        return
    for page in pages:
        print_line(page)
