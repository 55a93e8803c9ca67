"""Measure the quality of caches: a model reads each text once and predicts each next token.

Nothing is generated. The tokens of the text are fed even if the model predicts others, so all peers
read the same tokens. This file needs only PyTorch and safetensors, because scripts in environments
without weir import it.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

PIECE = 64
"""Tokens that a peer gets at a time. It can pass them through the model in smaller pieces."""
SLOTS = {"stream": 256, "far": 256, "window": 128, "near": 128}
COUNTED = 256
"""How many tokens at the end of a text of the task `window` count."""
NANO = Path(__file__).parents[4] / "src" / "weir" / "assets" / "nano"


class Peer(Protocol):
    """A model with a cache, which reads a batch of texts."""

    def feed(self, ids: Tensor) -> Tensor:
        """Read ids [rows, tokens], and return logits [rows, tokens, vocabulary]."""

    def nbytes(self) -> int:
        """Return the bytes that one row takes now."""


Begin = Callable[[int, int], Peer]
"""A function that makes a peer with an empty cache, given the numbers of rows and slots."""


@dataclass
class Found:
    """A peer's predictions.

    Attributes:
        nll: negative log-likelihood of each token except the first [rows, tokens - 1], in nats.
        said: the likeliest token after each token [rows, tokens].
        kv_bytes: the most bytes that a row took.
    """

    nll: Tensor
    said: Tensor
    kv_bytes: int


def read(peer: Peer, ids: Tensor) -> Found:
    """Let a peer read texts with ids [rows, tokens] in pieces."""
    said, nll, kv_bytes = [], [], 0
    wanted = ids.roll(-1, dims=1)[..., None]  # the last token's target is not used
    for piece, after in zip(ids.split(PIECE, 1), wanted.split(PIECE, 1), strict=True):
        logits = peer.feed(piece).float()
        kv_bytes = max(kv_bytes, peer.nbytes())
        said.append(logits.argmax(dim=-1))
        nll.append(-logits.log_softmax(dim=-1).gather(-1, after)[..., 0])
    return Found(torch.cat(nll, 1)[:, :-1], torch.cat(said, 1), kv_bytes)


def ask(begin: Begin, task: str, facts: Mapping[str, Tensor]) -> dict[str, Any]:
    """Run a task, and return the perplexity, or the share of numbers that were recalled."""
    ids, slots = facts[f"{task}.ids"], SLOTS[task]
    found = read(begin(len(ids), slots), ids)
    record: dict[str, Any] = {"slots": slots, "tokens": ids.shape[1], "rows": len(ids)}
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


class Reader:
    """The caches of a peer, which run tasks by name.

    Args:
        packages: the packages whose versions `facts` returns.
        offers: returns functions that make each cache, by name.
        wanted: the settings "threads", and "tasks", the path of the tasks' file.
    """

    def __init__(
        self, packages: Sequence[str], offers: Callable[[], Mapping[str, Begin]], wanted: Any
    ) -> None:
        torch.set_num_threads(wanted["threads"])
        torch.set_grad_enabled(False)
        self._packages, self._offers = packages, offers()
        self._tasks = load_file(wanted["tasks"])

    def facts(self) -> dict[str, str]:
        """Return the versions of the packages and of Python."""
        versions = ", ".join(f"{name} {version(name)}" for name in self._packages)
        return {"version": versions, "built": f"Python {platform.python_version()}"}

    def names(self) -> list[str]:
        """Return the names of the caches."""
        return list(self._offers)

    def ask(self, name: str, task: str) -> dict[str, Any]:
        """Run a task with a cache, and return its results."""
        return ask(self._offers[name], task, self._tasks)


def tensors_of(*what: Any) -> Iterator[Tensor]:
    """Yield all tensors in the arguments, including those in nested lists, tuples and mappings."""
    for each in what:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, Mapping):
            yield from tensors_of(*each.values())
        elif isinstance(each, list | tuple):
            yield from tensors_of(*each)


def size_of(*what: Any) -> int:
    """Return the bytes of all tensors in the arguments."""
    return sum(tensor.nbytes for tensor in tensors_of(*what))
