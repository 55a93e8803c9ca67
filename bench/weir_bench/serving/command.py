"""The command `weir bench serve`: measures a server under load from the clients' side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from weir.cli.app import Command
from weir.cli.common import make_folder, output, print_json, print_line, print_table, say, writing
from weir.cli.options import AsJson
from weir.cli.runtime import collect_as_usual
from weir_bench.command import benches, figures, say_measuring

if TYPE_CHECKING:
    from weir_bench.serving.load import Heard
    from weir_bench.serving.run import Served


@benches.command("serve", cls=Command)
def bench_serve(
    model_name: Annotated[
        str,
        Argument(
            metavar="[MODEL]",
            help="nano, 135m (SmolLM2-135M's shape with random weights), a folder or a Hub id.",
        ),
    ] = "nano",
    only: Annotated[
        list[str] | None, Option(help="Measure only this part. Can be repeated.")
    ] = None,
    sessions: Annotated[
        int, Option(min=1, help="Number of clients that talk to a server at the same time.")
    ] = 16,
    budget: Annotated[int, Option(min=8, help="Slots of the policy streaming_llm.")] = 256,
    seconds: Annotated[float, Option(min=0.1, help="Seconds of each run.")] = 10.0,
    rounds: Annotated[
        int,
        Option(
            min=1,
            help="Number of rounds. If a part compares servers, each round runs them all.",
        ),
    ] = 3,
    tokens: Annotated[int, Option(min=1, help="Tokens of each answer.")] = 128,
    far: Annotated[
        int, Option(min=100, help="Tokens of the long session in the part far.")
    ] = 100_000,
    minutes: Annotated[
        float,
        Option(
            min=0.01,
            help="Minutes of the parts soak, attack and refused. The part refused takes at most 1.",
        ),
    ] = 30.0,
    quick: Annotated[
        bool, Option("--quick", help="Use a tiny model, only to check that everything runs.")
    ] = False,
    out: Annotated[
        Path | None, Option(help="JSON file for all results, written after each one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send requests to `weir serve` from many clients over HTTP, and print what they measure.

    Parts: pace, far, disk, compaction, transformers. With --only, also soak, attack and refused.
    docs/speed.md explains them.
    """
    from weir_bench.serving.load import Manner
    from weir_bench.serving.part import QUICK, Plan
    from weir_bench.serving.run import measure

    collect_as_usual()
    if out is not None:
        make_folder(out.parent)
    given: dict[str, Any] = {
        "model": model_name,
        "sessions": sessions,
        "budget": budget,
        "seconds": seconds,
        "rounds": rounds,
        "far": far,
        "minutes": minutes,
        "manner": Manner(tokens=tokens),
    }
    if quick:
        given |= {"model": "tiny", **QUICK}
    plan = Plan(**given, say=say_measuring)
    served = measure(plan, only or [], lambda so_far: None if out is None else _write(so_far, out))
    if as_json:
        print_json({"quick": quick, **served.as_json()})
        return
    _print(served, quick)


def _write(served: Served, out: Path) -> None:
    from weir.evals.results import for_json

    with writing(out):
        out.write_text(json.dumps(for_json(served.as_json())) + "\n", "utf-8")


def _print(served: Served, quick: bool) -> None:
    from rich.table import Table

    from weir_bench.report import machine_line

    if served.runs:
        table = Table(title="a tiny model: these figures say nothing" if quick else None)
        table.add_column("run")
        for head in ("tokens/s", "turns", "errors", "first token, ms", "between tokens, ms", "MB"):
            table.add_column(head, justify="right")
        for _, heard in served.runs:
            table.add_row(*_cells(heard))
        print_table(table)
        output().print("times: p50 / p95 / p99", highlight=False)
    if served.rows:
        print_table(figures(served.rows, dtypes=False, targets=not quick))
    for name, model, why in served.skipped:
        say(f"not measured: {name} {model}: {why}")
    for line in (machine_line(served), served.command):
        print_line(line)


def _cells(heard: Heard) -> list[str]:
    from weir_bench.report import number
    from weir_bench.serving.load import percentiles

    def times(seconds: list[float]) -> str:
        return " / ".join(number(value) for value in percentiles(seconds).values())

    memory = heard.memory[-1][1] if heard.memory else 0
    return [
        heard.what,
        number(heard.pace),
        str(len(heard.first)),
        str(len(heard.errors)),
        times(heard.first),
        times(heard.between),
        number(memory / 1e6),
    ]
