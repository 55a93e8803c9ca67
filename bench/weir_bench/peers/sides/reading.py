"""Quality of caches: every text is read once, token after token, and each token is predicted.

Knows torch, and neither weir nor any peer; scripts that run in environments of their own import it.
Nothing is generated: the right tokens are fed, whatever a peer would have said, so all read the
same text and as many tokens of it.
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
"""Tokens handed over at once; how many go through the model together is a peer's affair."""
SLOTS = {"stream": 256, "far": 256, "window": 128, "near": 128}
COUNTED = 256
"""Of a `window` text the last so many tokens count."""
NANO = Path(__file__).parents[4] / "src" / "weir" / "assets" / "nano"


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
    """The caches of one peer, each asked for its tasks by name.

    Args:
        packages: whose versions are told.
        offers: makes the caches by name.
        wanted: "threads", and the file of "tasks".
    """

    def __init__(
        self, packages: Sequence[str], offers: Callable[[], Mapping[str, Begin]], wanted: Any
    ) -> None:
        torch.set_num_threads(wanted["threads"])
        torch.set_grad_enabled(False)
        self._packages, self._offers = packages, offers()
        self._tasks = load_file(wanted["tasks"])

    def facts(self) -> dict[str, str]:
        """Versions of the packages, and of Python."""
        versions = ", ".join(f"{name} {version(name)}" for name in self._packages)
        return {"version": versions, "built": f"Python {platform.python_version()}"}

    def names(self) -> list[str]:
        """The names of the caches."""
        return list(self._offers)

    def ask(self, name: str, task: str) -> dict[str, Any]:
        """Figures of one cache on one task."""
        return ask(self._offers[name], task, self._tasks)


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
