"""Compare the quality of nano with caches of the same number of slots: weir, kvpress and others.

weir makes the tasks and writes their token ids to a file, which peers can read without weir. There
are four tasks for the packaged model nano, whose context window is 512 tokens:

- `window`: 16 separate texts of 512 tokens, so that all positions are in the range that the model
  was trained on. The perplexity of the last 256 tokens of each text counts. 128 slots.
- `near`: 16 texts from a book with inserted facts, each a name with a number. Each number is asked
  for after 16 to 256 tokens, as in `weir eval --tasks recall`. The texts fit into the window.
  128 slots.
- `stream`: the first 6,000 tokens of the packaged book as one text, for perplexity. 256 slots.
- `far`: like `near`, but numbers are asked for after up to 1,024 tokens. 256 slots.
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
"""The environment of each peer ("" for weir's own). Its script is `sides/NAME_reading.py`."""
HALVES = (("window", "near", 128), ("stream", "far", 256))
"""Pairs of tasks with the same number of slots: one for perplexity, and one for recall."""
TASKS = tuple(task for half in HALVES for task in half[:2])


def make_tasks() -> dict[str, Tensor]:
    """Make the tensors of all tasks.

    Each task has `ids` [rows, tokens]. Tasks of recall also have the places, distances and digits
    of the numbers that are asked for.
    """
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
    """Let every peer's caches read the tasks, except those that are already in the results."""
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
    """Yield a table for each number of slots, sorted by perplexity (lowest first)."""
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
    """Return the name of a cache, with the numbers that `weir_reading` inserts into a policy."""
    few = slots // 4
    for name, number in (("slots", slots), ("few", few), ("most", slots - few - 4)):
        who = who.replace(f"{{{name}}}", str(number))
    peer, _, what = who.replace("|", "&#124;").partition(": ")
    return f"{peer}: <code>{what}</code>"


def _cell(figure: float | None, digits: int) -> str:
    return "–" if figure is None else f"{figure:,.{digits}f}"
