"""How a peer is asked: every text is read once, token after token, and each is predicted.

Knows torch, and neither weir nor any peer; each peer's script runs in an environment of its own and
imports this file, which lies beside it. Nothing is generated: the right tokens are fed, whatever a
peer would have said, so all read the same text and as many tokens of it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

PIECE = 64
"""Tokens handed over at once; how many go through the model together is a peer's affair."""
SLOTS = {"stream": 256, "far": 256, "window": 128, "near": 128}
COUNTED = 256
"""Of a `window` text the last so many tokens count."""
NANO = Path(__file__).parents[2] / "src" / "weir" / "assets" / "nano"


class Peer(Protocol):
    """A cache with new texts in it."""

    def feed(self, ids: Tensor) -> Tensor:
        """Read ids [rows, tokens]; logits [rows, tokens, vocabulary]."""

    def nbytes(self) -> int:
        """Bytes that one row takes now."""


Begin = Callable[[int, int], Peer]
"""Rows and slots to a peer that has read nothing."""


@dataclass
class Found:
    """What a peer answered.

    Attributes:
        nll: of each token but the first [rows, tokens - 1], in nats.
        said: the likeliest token after each [rows, tokens].
        kv_bytes: the most that a row took.
    """

    nll: Tensor
    said: Tensor
    kv_bytes: int


def read(peer: Peer, ids: Tensor) -> Found:
    """Read texts ids [rows, tokens] in pieces."""
    said, nll, kv_bytes = [], [], 0
    wanted = ids.roll(-1, dims=1)[..., None]  # behind the last token nothing is wanted
    for piece, after in zip(ids.split(PIECE, 1), wanted.split(PIECE, 1), strict=True):
        logits = peer.feed(piece).float()
        kv_bytes = max(kv_bytes, peer.nbytes())
        said.append(logits.argmax(dim=-1))
        nll.append(-logits.log_softmax(dim=-1).gather(-1, after)[..., 0])
    return Found(torch.cat(nll, 1)[:, :-1], torch.cat(said, 1), kv_bytes)


def ask(begin: Begin, task: str, facts: Mapping[str, Tensor]) -> dict[str, Any]:
    """One task: perplexity of prose, or the share of numbers that came back."""
    ids, slots = facts[f"{task}.ids"], SLOTS[task]
    found = read(begin(len(ids), slots), ids)
    record: dict[str, Any] = {
        "task": task,
        "slots": slots,
        "tokens": ids.shape[1],
        "rows": len(ids),
    }
    if task in ("stream", "window"):
        counted = found.nll if task == "stream" else found.nll[:, -COUNTED:]
        record["ppl"] = math.exp(min(float(counted.double().mean()), 700.0))
    else:
        numbers = facts[f"{task}.numbers"]  # [rows, questions, digits]
        digits = torch.arange(numbers.shape[-1])
        places = facts[f"{task}.answers"][:, None] + digits - 1
        right = (found.said[:, places] == numbers).all(dim=-1).float()
        record["recall"] = float(right.mean())
        record["by_distance"] = dict(
            zip(facts[f"{task}.distances"].tolist(), right.mean(dim=0).tolist(), strict=True)
        )
    return {**record, "kv_bytes": found.kv_bytes}


def main(peer: str, packages: tuple[str, ...], offers: Callable[[], Mapping[str, Begin]]) -> None:
    """The command of a peer's script: a line of JSON for each name and task."""
    parser = argparse.ArgumentParser(description=f"Let {peer} read the tasks of make_tasks.py.")
    parser.add_argument("tasks", type=Path)
    parser.add_argument("out", type=Path, help="a file of JSON lines, which is added to")
    parser.add_argument("--names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--only", nargs="*", choices=tuple(SLOTS), default=tuple(SLOTS))
    given = parser.parse_args()
    facts = load_file(given.tasks)
    versions = {name: version(name) for name in packages} | {"python": platform.python_version()}
    with torch.no_grad(), given.out.open("a", encoding="utf-8") as out:
        for name, begin in offers().items():
            if given.names and name not in given.names:
                continue
            for task in given.only:
                began = time.perf_counter()
                try:
                    found = ask(begin, task, facts)
                except Exception as error:  # that it cannot be done is an answer too
                    said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                    found = {"task": task, "slots": SLOTS[task], "error": said}
                record = {"peer": peer, "what": name, **found}
                record |= {"versions": versions, "date": date.today().isoformat()}
                record["seconds"] = round(time.perf_counter() - began, 1)
                out.write(json.dumps(record) + "\n")
                out.flush()


def tensors_of(*what: Any) -> Iterator[Tensor]:
    """All tensors in what is given, however deep."""
    for each in what:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, Mapping):
            yield from tensors_of(*each.values())
        elif isinstance(each, list | tuple):
            yield from tensors_of(*each)


def size_of(*what: Any) -> int:
    """Bytes of all tensors in what is given."""
    return sum(tensor.nbytes for tensor in tensors_of(*what))
