"""The command `weir bench peers`: compares weir with other engines that a user could choose."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from weir.cli.app import Command
from weir.cli.common import print_json, print_line, say, waiting, writing
from weir.cli.options import AsJson
from weir.cli.runtime import collect_as_usual
from weir.errors import WeirError
from weir_bench.command import benches, say_measuring

if TYPE_CHECKING:
    from weir_bench.peers.engines import EngineSetup
    from weir_bench.peers.results import Results


@benches.command("peers", cls=Command)
def bench_peers(
    only: Annotated[
        list[str] | None, Option(help="Measure only this part. Can be repeated.")
    ] = None,
    peers: Annotated[
        list[str] | None,
        Option("--peer", help="Only peers whose names begin with this. Can be repeated."),
    ] = None,
    model: Annotated[
        str,
        Option(help="smollm2, or tinyllama (1.1 billion random parameters)."),
    ] = "smollm2",
    threads: Annotated[
        int | None, Option(min=1, help="Threads of each peer [default: one, then all cores].")
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="Measure few peers on short texts, in a few minutes.")
    ] = False,
    out: Annotated[
        Path | None,
        Option(
            help=(
                "File for all results as JSON, with tables next to it. An existing "
                "file is continued."
            )
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time weir, llama.cpp, OpenVINO GenAI and transformers alternately on one model.

    Parts: steps, chat, prompts, rows, start, and quality, which compares weir with
    kvpress and keys_values. Chat and quality are for SmolLM2 only: other models have
    random weights.
    `make peers` installs the other libraries.
    """
    from weir_bench.peers.engines import chosen
    from weir_bench.peers.report import markdown
    from weir_bench.peers.results import Results

    collect_as_usual()
    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise WeirError(f"--threads {threads} is more than the {cores} cores of this machine")
    results = Results.at(out, _facts(quick))
    counts = [threads] if threads else sorted({1, cores})
    _measure(results, only or [], chosen(peers or [], model), counts, quick, bool(peers))
    if out is not None:
        with writing(tables := out.with_suffix(".md")):
            tables.write_text(markdown(results), "utf-8")
    for who, why in results.missing.items():
        say(f"not measured: {who}: {why}")
    if as_json:
        print_json(results.as_json())
        return
    print_line(markdown(results))


def _measure(
    results: Results,
    only: list[str],
    engines: list[EngineSetup],
    threads: list[int],
    quick: bool,
    named: bool,
) -> None:
    from dataclasses import replace

    from transformers.utils.logging import disable_progress_bar

    from weir.models.gguf import read_tokenizer
    from weir.stream import read_stream
    from weir_bench.peers.engines import MODELS, model_file
    from weir_bench.peers.measure import PARTS, QUICK, PeerPlan, measured

    model = engines[0].model
    if model != "smollm2":
        only = only or [part for part in PARTS if part not in ("chat", "quality")]
    if quick:
        kept = (each for each in engines if each.main or named)
        engines = [replace(each, compiles=False) for each in kept]
    disable_progress_bar()
    plan = PeerPlan(
        engines,
        threads[-1:] if quick else threads,
        say=say_measuring,
        **(QUICK if quick else {} if model == "smollm2" else {"behind": (1024,), "long": 1920}),
    )
    with waiting("reading the text"):
        tokenizer = read_tokenizer(model_file(MODELS[model], model))
    plan.ids.extend(read_stream(tokenizer, None, plan.long, None).ids.tolist())
    for _ in measured(plan, results, only):
        results.write()


def _facts(quick: bool) -> dict[str, object]:
    from weir_bench.run import machine

    return {
        "date": date.today().isoformat(),
        "machine": {**machine(), "cores": os.cpu_count() or 1},
        "command": shlex.join(["weir", *sys.argv[1:]]),
        **({"quick": True} if quick else {}),
    }
