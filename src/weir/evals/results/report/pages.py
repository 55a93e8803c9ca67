"""The pages of a report: what stands on them, in order, as HTML and as Markdown."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from weir.errors import WeirError
from weir.evals.look import page_colors
from weir.evals.results.across_models import across_models
from weir.evals.results.file import CellRecord, failures, unique
from weir.evals.results.report.plots import along, heat, pareto
from weir.evals.results.report.tables import as_csv, as_html, as_latex, as_markdown
from weir.evals.results.several import read_together
from weir.evals.results.summary import CACHE, Table, by_distance, grouped, heads, overviews

FORMATS = {
    "html": "report.html",
    "md": "report.md",
    "csv": "tables.csv",
    "latex": "tables.tex",
}
"""What a report is written as, and into which file."""
USUAL = ("html", "md")
MARKS = "Bold is best, underlined second best."
SURE = (
    "Behind a figure stand its 95 % interval (Wilson's of answers that were counted, Student's "
    "over seeds), the standard deviation over seeds, and n, answers or seeds; a figure without "
    "was measured once."
)

ACROSS = (
    "Behind a figure stand Student's 95 % interval, the standard deviation and n of the models."
)


@dataclass(frozen=True)
class Part:
    """A part of a report.

    Attributes:
        title: its heading.
        words: a sentence or two under it.
        table: a table.
        picture: an SVG element.
        name: the picture's file beside the Markdown, without ending.
    """

    title: str
    words: str = ""
    table: Table | None = None
    picture: str | None = None
    name: str = ""


def write_report(
    results: Path | Sequence[Path], out: Path, formats: Sequence[str] = USUAL
) -> list[Path]:
    """Write `report.html`, which holds its pictures, and `report.md` with them beside it.

    Args:
        results: a file that `weir eval` wrote, or several; they may still be growing.
        out: a folder, made if need be.
        formats: what is written, of `FORMATS`: `csv` and `latex` are the tables alone.

    Returns:
        What was written.

    Raises:
        WeirError: the results cannot be read or contradict each other, none is done yet, a format
            is none of these, or a file cannot be written.
    """
    for name in formats:
        if name not in FORMATS:
            raise WeirError(f"a report is written as {', '.join(FORMATS)}, not {name!r}")
    paths = [results] if isinstance(results, Path) else list(results)
    cells, records = read_together(paths)
    source = ", ".join(path.name for path in paths)
    done = [record for record in records if record["status"] == "done"]
    if not done:
        raise WeirError(f"{source} has no finished cell yet, so there is nothing to report")
    parts = list(_parts(done))
    facts = _facts(cells, records)
    tables = [part.table for part in parts if part.table is not None]
    pages = [out / FORMATS[name] for name in FORMATS if name in formats]
    if out.exists() and not out.is_dir():
        raise WeirError(f"{out} is a file, and --out is the folder of a report; name another")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for page in pages:
            page.write_text(_written(page.suffix, parts, tables, facts, records, source), "utf-8")
        for part in parts:
            if part.picture is not None and "md" in formats:
                (out / f"{part.name}.svg").write_text(part.picture, "utf-8")
    except OSError as error:
        raise WeirError(f"cannot write to {out}: {error.strerror}") from None
    return pages


def _written(
    suffix: str,
    parts: Sequence[Part],
    tables: Sequence[Table],
    facts: str,
    records: Sequence[CellRecord],
    source: str,
) -> str:
    """What stands in the file of a format."""
    if suffix == ".csv":
        return as_csv(tables)
    if suffix == ".tex":
        return as_latex(tables)
    page = _html if suffix == ".html" else _markdown
    return page(parts, facts, failures(records), source)


def _parts(done: Sequence[CellRecord]) -> Iterator[Part]:
    for table in overviews(done):
        words = (
            f"{MARKS} Figures of several seeds are their means. {SURE} {CACHE} is a policy's "
            "largest cache over all tasks."
        )
        yield Part(table.title, words, table=table)
    for table in across_models(done):
        words = (
            "What each policy makes of a model's figures at the same bytes or slots: the ratio, or "
            "of shares of right answers the difference. Mean over the sizes of a model, and then "
            f"over models. {MARKS} {ACROSS}"
        )
        yield Part(table.title, words, table=table)
    for table in by_distance(done):
        words = f"Share of right answers by distance. {MARKS} {SURE}"
        yield Part(table.title, words, table=table)
    short = heads(list(unique(record["setting"] for record in done)))
    settings = grouped(done, "model", "protocol", "setting")
    for number, ((model, _, setting), mine) in enumerate(settings.items()):
        better = mine[0]["better"]
        label = mine[0]["metric"]
        for kind, heading, picture, words in (
            (
                "pareto",
                f"{label} against bytes",
                pareto(mine, label),
                f"{label} against the bytes of the cache; {better} is better. Points of one policy "
                "with different budgets are joined; those on the gray line no other beats in both.",
            ),
            (
                "along",
                "perplexity along the text",
                along(mine),
                "Perplexity of each block of the text; lower is better.",
            ),
            (
                "heat",
                "needles by length and depth",
                heat(mine),
                "Share of needles found, by length and depth of the haystack.",
            ),
        ):
            if picture is not None:
                title = f"{model}: {short[setting]}, {heading}"
                yield Part(title, words, picture=picture, name=f"{kind}-{number}")


def _facts(cells: int, records: Sequence[CellRecord]) -> str:
    """What was run, in a sentence."""

    def several(word: str, values: Sequence[object]) -> str:
        return f"{len(values)} {word}{'' if len(values) == 1 else 's'}"

    kinds = [
        several(word, unique(record[field] for record in records))
        for word, field in (("model", "model"), ("task setting", "setting"), ("seed", "seed"))
    ]
    policies = len(unique(record["policy"] for record in records))
    failed = len(failures(records))
    done = len(records) - failed
    versions = ", ".join(unique(record["weir"] for record in records))
    return (
        f"{', '.join(kinds)}, policies and budgets: {policies}. Of "
        f"{several('cell', range(cells))}, {done} {'is' if done == 1 else 'are'} done and {failed} "
        f"failed. weir {versions}."
    )


def _html(parts: Sequence[Part], facts: str, failed: Sequence[CellRecord], source: str) -> str:
    body = []
    for part in parts:
        body.append(f"<h2>{html.escape(part.title)}</h2>\n<p>{html.escape(part.words)}</p>")
        if part.table is not None:
            body.append(as_html(part.table))
        if part.picture is not None:
            body.append(f"<figure>{part.picture}</figure>")
    if failed:
        rows = "".join(f"<li>{html.escape(_failure(record))}</li>" for record in failed)
        body.append(f"<h2>Failed</h2>\n<ul>{rows}</ul>")
    page = Template((resources.files("weir.evals.results.report") / "page.html").read_text("utf-8"))
    return page.substitute(
        colors=page_colors(),
        facts=html.escape(facts),
        source=html.escape(source),
        body="\n".join(body),
    )


def _markdown(parts: Sequence[Part], facts: str, failed: Sequence[CellRecord], source: str) -> str:
    body = ["# Results", facts]
    for part in parts:
        body += [f"## {part.title}", part.words]
        if part.table is not None:
            body.append(as_markdown(part.table))
        if part.picture is not None:
            body.append(f"![{part.title}]({part.name}.svg)")
    if failed:
        body += ["## Failed", "\n".join(f"- {_failure(record)}" for record in failed)]
    body.append(f"Made by `weir report` from `{source}`.")
    return "\n\n".join(body) + "\n"


def _failure(record: CellRecord) -> str:
    where = f"{record['setting']} of {record['model']} under {record['policy']}"
    return f"{where}, seed {record['seed']}: {record['reason']}"
