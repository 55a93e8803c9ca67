"""The figure of endless streams: time and memory while nano reads a million tokens."""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from weir.loading import load
from weir.stream import PIECE, Stream
from weir_bench.figure import Row, Setting, compare, figure
from weir_bench.timing import in_turns, seconds, undisturbed

POLICY = "streaming_llm(budget=256)"
EARLY = 10_000
CHUNK = 64
STEPS = 256
"""Decode steps that are timed at each mark (a position at which the stream is measured)."""


@figure("flat", by_dtype=False, asked=True)
def flat(setting: Setting) -> Iterator[Row]:
    """Compare time and memory at the end of the stream with those at 10,000 tokens."""
    model, _ = load("nano")
    early, late, marks = run(Stream(model, POLICY, chunk=CHUNK), setting)
    token = torch.tensor([[5]])
    both = {
        "late": lambda: _cycle(late, token),
        "early": lambda: _cycle(early, token),
    }
    times = {name: median(taken) / CHUNK for name, taken in in_turns(both, 40, warm=2).items()}
    first, last = marks[0], marks[-1]
    what = f"time per token at position {late.seen:,} ÷ at {EARLY:,}, `nano`, `{POLICY}`"
    yield compare(what, times["late"], times["early"], 1.03)
    far, near = last["tokens"], first["tokens"]
    what = f"memory of the process after {far:,} tokens ÷ after {near:,}, `nano`, `{POLICY}`"
    yield compare(what, last["process_bytes"], first["process_bytes"], unit="MB")


def run(stream: Stream, setting: Setting) -> tuple[Stream, Stream, list[dict[str, Any]]]:
    """Feed the long stream and measure it at each mark.

    Returns the stream as it was after 10,000 tokens, the stream at its end, and the measurements.
    """
    early = stream
    marks: list[dict[str, Any]] = []
    for mark in _marks(setting.flat):
        _read(stream, mark - STEPS)
        marks.append(_look(stream))
        setting.on_mark(marks)
        pace, memory = marks[-1]["ms_per_token"], marks[-1]["process_bytes"]
        setting.say(f"{mark:,} tokens: {pace:.2f} ms a token, {memory / 1e6:.0f} MB")
        if mark == EARLY:
            with tempfile.TemporaryDirectory() as folder:
                stream.save(Path(folder) / "early")
                early = Stream.restore(stream.model, Path(folder) / "early")
    return early, stream, marks


def _marks(tokens: int) -> list[int]:
    """Return the marks: 1, 2 and 5 times each power of ten from 10,000 on, and `tokens`."""
    powers = [10**n for n in range(4, len(str(tokens)) + 1)]
    every = [m * power for power in powers for m in (1, 2, 5)]
    return sorted({EARLY, *(mark for mark in every if mark < tokens), tokens})


def _read(stream: Stream, tokens: int) -> None:
    """Feed random tokens until the stream has seen `tokens` tokens."""
    vocabulary = stream.model.config.vocab_size
    generator = torch.Generator().manual_seed(stream.seen)
    while (left := tokens - stream.seen) > 0:
        stream.feed(torch.randint(vocabulary, (1, min(PIECE, left)), generator=generator))


def _look(stream: Stream) -> dict[str, Any]:
    """Time `STEPS` decode steps, and return their median, the cache's bytes and peak memory."""
    token = torch.tensor([[5]])
    with undisturbed():
        taken = [seconds(lambda: stream.feed(token)) for _ in range(STEPS)]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "tokens": stream.seen,
        "ms_per_token": median(taken) * 1e3,
        "cache_bytes": stream.nbytes,
        "process_bytes": most * unit,
    }


def _cycle(stream: Stream, token: Tensor) -> None:
    """Feed `CHUNK` tokens. Exactly one of them leads to a fold."""
    for _ in range(CHUNK):
        stream.feed(token)
