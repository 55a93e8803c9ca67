"""The command `weir bench`: measures speed and memory of weir and of other libraries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Context, Option

from weir.cli.app import group
from weir.cli.common import make_folder, messages, print_json, print_line, print_table, say, writing
from weir.cli.options import AsJson, say_unused, was_given
from weir.cli.runtime import collect_as_usual
from weir.errors import WeirError, quote, suggest

if TYPE_CHECKING:
    from rich.table import Table

    from weir_bench.figure import Row
    from weir_bench.run import Bench


class Dtype(StrEnum):
    """The values of `--dtype`."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    both = "both"


benches = group("bench")


@benches.callback(invoke_without_command=True)
def bench(
    context: Context,
    only: Annotated[
        list[str] | None,
        Option(
            help="Measure only this figure, such as decode or folds; docs/speed.md explains the "
            "figures. Can be repeated."
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        Option(help="Dtype of models and caches [default: both, and with --quick float32]"),
    ] = None,
    threads: Annotated[
        int | None, Option(min=1, help="Threads of PyTorch. By default all cores.")
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="Use a tiny model, only to check that everything runs.")
    ] = False,
    layers: Annotated[
        int | None, Option(min=1, help="Layers of the model. Fewer take less time [default: 30]")
    ] = None,
    flat: Annotated[
        bool,
        Option(
            "--flat", help="Measure only a long stream through nano, instead of the other figures."
        ),
    ] = False,
    tokens: Annotated[int, Option(min=20_000, help="Tokens of the long stream.")] = 1_000_000,
    policies: Annotated[
        str | None,
        Option(
            help="Comma-separated policies to time, with --only policies, folds or prompts. "
            "By default all."
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for bench.json and bench.md.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time weir and other libraries alternately, and print each ratio next to the one that
    weir aims for.

    With --out, the results so far are written after every measurement. `weir bench serve`
    measures a server.
    """
    if context.invoked_subcommand is not None:
        for name in filter(partial(was_given, context), context.params):
            option = "--json" if name == "as_json" else f"--{name.replace('_', '-')}"
            asked = context.invoked_subcommand
            raise WeirError(
                f"{option} has no effect before {asked}. Write it after {asked} if weir bench "
                f"{asked} --help lists it, or leave it out."
            )
        return
    import torch

    from weir_bench.figure import QUICK, Setting, Sizes
    from weir_bench.run import measure

    collect_as_usual()
    wanted = _policies(policies)
    if flat and only:
        raise WeirError("--flat is a separate figure. Leave out --only.")
    if not flat and "flat" not in (only or []):
        say_unused(context, ("tokens",), "it is for --flat")
    if flat:
        say_unused(context, ("layers", "policies"), "--flat measures nano with its own policies")
    elif only and not {"policies", "folds", "prompts"} & set(only):
        say_unused(context, ("policies",), "no figure of --only compares policies")
    if threads is not None:
        torch.set_num_threads(threads)
    if out is not None:
        make_folder(out)
    dtype = dtype or (Dtype.float32 if quick else Dtype.both)
    names = ["float32", "bfloat16"] if dtype is Dtype.both else [dtype.value]
    sizes = QUICK if quick else Sizes()
    setting = Setting(
        sizes if layers is None else replace(sizes, layers=layers),
        flat=tokens,
        policies=wanted,
        say=say_measuring,
    )
    made = measure(
        setting,
        ["flat"] if flat else only or [],
        [getattr(torch, name) for name in names],
        on_row=lambda so_far: None if out is None else _write(so_far, out),
    )
    if as_json:
        print_json({"quick": quick, **made.as_json()})
        return
    _print(made, quick)


def say_measuring(what: str) -> None:
    """Print what is being measured, if messages go to a terminal."""
    if messages().is_terminal:
        say(f"measuring {what}")


def _policies(text: str | None) -> tuple[str, ...]:
    """Return the names in a comma-separated list of policies, after checking them."""
    if text is None:
        return ()
    from weir_bench.figures.decode import PLAIN
    from weir_bench.figures.policies import comparable

    names = tuple(word for part in text.split(",") if (word := part.strip()))
    known = [PLAIN, *comparable()]
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        asked = wrong[0] if wrong else text
        like = suggest(asked, known) or f". Use one of {', '.join(known)}"
        raise WeirError(f"--policies must be names that figures compare, got {quote(asked)}{like}")
    return names


def _write(made: Bench, out: Path) -> None:
    from weir.evals.results import for_json
    from weir_bench.report import markdown

    facts = json.dumps(for_json(made.as_json()), indent=1, ensure_ascii=False)
    with writing(out):
        (out / "bench.json").write_text(f"{facts}\n", "utf-8")
        (out / "bench.md").write_text(markdown(made), "utf-8")


def _print(made: Bench, quick: bool) -> None:
    from weir_bench.report import machine_line

    title = "a tiny model: these figures say nothing, and the targets are for the full model"
    print_table(figures(made.rows, title if quick else None, targets=not quick))
    for name, dtype, why in made.skipped:
        say(f"not measured: {name} {dtype}: {why}")
    print_line(machine_line(made))


def figures(
    rows: Sequence[tuple[str, str, Row]],
    title: str | None = None,
    *,
    dtypes: bool = True,
    targets: bool = True,
) -> Table:
    """Return a table of figures for the terminal."""
    from rich.table import Table

    from weir_bench.report import number, target

    table = Table(title=title)
    table.add_column("figure", min_width=24)
    aims = ["target", "met"] if targets else []
    for head in (*(["dtype"] if dtypes else []), "weir", "peer", "ratio", *aims):
        table.add_column(head, justify="right", no_wrap=True)
    for _, dtype, row in rows:
        table.add_row(
            row.what,
            *([dtype] if dtypes else []),
            f"{number(row.ours)} {row.unit}",
            f"{number(row.peer)} {row.unit}",
            number(row.ratio),
            *([target(row), {True: "yes", False: "no", None: ""}[row.met]] if targets else []),
        )
    return table
