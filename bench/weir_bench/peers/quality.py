"""Quality of nano's answers from caches of as many slots: weir beside kvpress and others.

Peers read token ids that weir's own tasks make, in a file that needs no weir. Four tasks on the
packaged model, whose window is 512 tokens:

- `window`: 16 stretches of 512 tokens, each a text of its own, so that no position is one that the
  model was not trained on; the last 256 tokens of each count. 128 slots.
- `near`: 16 texts of book in which names with numbers are said and asked for again after 16 to 256
  tokens, as `weir eval --tasks recall` has them, and never past the window. 128 slots.
- `stream`: the first 6,000 tokens of the packaged book, one long text. 256 slots.
- `far`: as `near`, up to 1,024 tokens. 256 slots.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

import weir
from weir.errors import WeirError
from weir.evals.report import TextTable
from weir.evals.tasks.exercises import Material, distances_to, draw_facts, draw_layout, fill_in
from weir.stream import read_stream
from weir.train import DIGITS, Words
from weir_bench.peers.process import PeerProcess
from weir_bench.peers.results import Results

TOKENS, WINDOW, STRETCHES, SAMPLES = 6_000, 512, 16, 16
READERS = {
    "weir": "",
    "transformers": "",
    "kvpress": "kvpress",
    "keys_values": "keys_values",
}
"""The environment of each peer; its script is `sides/NAME_reading.py`."""
HALVES = (("window", "near", 128), ("stream", "far", 256))
"""Tasks of perplexity and of recall that share a number of slots."""
TASKS = tuple(task for half in HALVES for task in half[:2])


def make_tasks() -> dict[str, Tensor]:
    """Make the tasks: of each `ids` [rows, tokens], and where a peer is judged."""
    _, tokenizer = weir.load("nano")
    words = Words.of(tokenizer)
    prose = read_stream(tokenizer, None, TOKENS, None).ids
    book = read_stream(tokenizer, None, 200_000, None).ids
    front = prose[:1].expand(STRETCHES, 1)
    stretches = prose[1:].unfold(0, WINDOW - 1, (TOKENS - WINDOW) // STRETCHES)[:STRETCHES]
    found = {"stream.ids": prose[None], "window.ids": torch.cat([front, stretches], dim=1)}
    for name, farthest, before in (("far", 1024, 256), ("near", 256, 24)):
        rng = np.random.default_rng(0)
        distances = distances_to(farthest)
        layout = draw_layout(distances, before, rng)
        assert name == "far" or layout.length <= WINDOW, layout.length
        material = Material(words, book.numpy(), rng)
        rows, numbers = [], []
        for _ in range(SAMPLES):
            facts = draw_facts(material, len(distances), distinct=False)
            rows.append(fill_in(material, facts, layout))
            numbers.append([fact.answer for (fact,) in facts])
        found[f"{name}.ids"] = torch.from_numpy(np.stack(rows))
        found[f"{name}.answers"] = torch.tensor(layout.answers)
        found[f"{name}.distances"] = torch.tensor(distances)
        found[f"{name}.numbers"] = torch.from_numpy(np.array(numbers))
        assert found[f"{name}.numbers"].shape[-1] == DIGITS
    return {name: ids.long().contiguous() for name, ids in found.items()}


def read_tasks(results: Results, threads: int, tasks: tuple[str, ...] = TASKS) -> None:
    """Let every peer's caches read the tasks; what is in the results already is not read again."""
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as folder:
        save_file(make_tasks(), file := str(Path(folder) / "tasks.safetensors"))
        for peer, home in READERS.items():
            try:
                with PeerProcess(
                    home, f"{peer}_reading.py", {"threads": threads, "tasks": file}
                ) as side:
                    results.facts.setdefault("versions", {})[peer] = side.ask("facts")
                    for name in side.ask("names"):
                        for task in tasks:
                            _ask(results, side, task, name, peer)
            except WeirError as error:
                results.miss(peer, error)


def _ask(results: Results, side: PeerProcess, task: str, name: str, peer: str) -> None:
    named = {"who": f"{peer}: {name}", "task": task}
    if results.find("quality", **named) is None:
        try:
            results.add("quality", named, side.ask("ask", name=name, task=task))
        except WeirError as error:
            results.miss(f"{peer}: {name}, {task}", error)


def quality_tables(results: Results) -> Iterator[TextTable]:
    """Yield a table for each number of slots, the best perplexity first."""
    found: dict[str, dict[str, Any]] = {}
    for each in results.figures:
        if each["part"] == "quality":
            found.setdefault(each["who"], {})[each["task"]] = each
    for prose, facts, slots in HALVES:
        rows = []
        for who, tasks in found.items():
            read, asked = tasks.get(prose, {}), tasks.get(facts, {})
            if read or asked:
                size = (read or asked)["kv_bytes"] / 1e3
                cells = [_cell(read.get("ppl"), 1), _cell(asked.get("recall"), 2), f"{size:,.0f}"]
                rows.append((read.get("ppl", float("inf")), [_shown(who, slots), *cells]))
        heads = [f"nano, {slots} slots", "perplexity", "recall", "kB"]
        yield TextTable(heads, [row for _, row in sorted(rows)], markup=True)


def _shown(who: str, slots: int) -> str:
    """The name of a cache, with the numbers that `weir_reading` puts into a policy."""
    few = slots // 4
    for name, number in (("slots", slots), ("few", few), ("most", slots - few - 4)):
        who = who.replace(f"{{{name}}}", str(number))
    peer, _, what = who.replace("|", "&#124;").partition(": ")
    return f"{peer}: <code>{what}</code>"


def _cell(figure: float | None, digits: int) -> str:
    return "–" if figure is None else f"{figure:,.{digits}f}"
