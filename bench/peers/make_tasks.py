"""What all peers read: token ids, made once by weir's own tasks, in a file that needs no weir.

    .venv/bin/python bench/peers/make_tasks.py peers/tasks.safetensors

Four tasks on the packaged model, whose window is 512 tokens:

- `stream`: the first 6,000 tokens of the packaged book, one long text. 256 slots.
- `far`: 16 texts of book in which names with numbers are said and asked for again after 16 to 1,024
  tokens, as `weir eval --tasks recall` has them. 256 slots.
- `window`: 16 stretches of 512 tokens, each a text of its own, so that no position is one that the
  model was not trained on; the last 256 tokens of each count. 128 slots.
- `near`: as `far`, up to 256 tokens and never past the window. 128 slots.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import weir
from weir.evals.tasks.exercises import Material, distances_to, draw_facts, fill_in, lay_out
from weir.stream import read_stream
from weir.train import DIGITS, Words

TOKENS, WINDOW, STRETCHES, SAMPLES = 6_000, 512, 16, 16


def main(out: Path) -> None:
    """Write the tasks: of each `ids` [rows, tokens], and where a peer is judged."""
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
        layout = lay_out(distances, before, rng)
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
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: ids.long().contiguous() for name, ids in found.items()}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
