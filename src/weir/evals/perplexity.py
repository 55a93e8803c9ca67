"""Streaming perplexity: a model reads a text once, from its first token to its last.

This is the test of StreamingLLM (Xiao et al. 2024, section 4.1). Every token is predicted from the
tokens that the policy still holds, so nothing is truncated and nothing is read twice.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.policies import KVzip
from weir.stream import Stream

STEP = 200
"""Tokens fed and timed at once."""
MOST_NATS = 700.0
"""Above so many nats per token, a perplexity counts as infinite, because a float could not hold
much more.
"""
NOT_FINITE = (
    "the model's predictions are infinite or NaN: its weights are damaged, or too large for its "
    "dtype. Try --dtype float32."
)
"""The reason why a figure is not finite."""


class PerplexityMeter:
    """Perplexity, bytes and speed of a stream that reads a text piece by piece.

    Args:
        stream: a new stream.
        block: tokens in a block.
        in_steps: call the model once per token, as in decoding; otherwise once for many tokens.

    Attributes:
        tokens, scored: number of tokens read, and how many of them had a prediction.
        nll: sum of negative log-likelihoods, in nats.
        ppl_by_block, bytes_by_block: perplexity of each block of the text (the last may be short),
            and bytes of the cache after the call of `take` in which the block ended.
        kv_bytes: bytes of the cache at the end.
        memory_growth: the most that the process's memory has grown above its maximum up to token
            5,000, in bytes; None before that token, and if the system does not report memory.
        seconds: time spent reading.
        pace: seconds per token, for each `STEP` tokens.
    """

    def __init__(self, stream: Stream, block: int = 1000, *, in_steps: bool = False) -> None:
        if isinstance(stream.policy, KVzip):
            raise WeirError(
                "kvzip chooses once, after it has read the whole text, but perplexity is measured "
                "while a text is read. Use another policy."
            )
        self.stream, self.block, self.in_steps = stream, block, in_steps
        self.tokens = self.scored = self.kv_bytes = 0
        self.nll = self.seconds = 0.0
        self.ppl_by_block: list[float] = []
        self.bytes_by_block: list[int] = []
        self.memory_growth: int | None = None
        self.pace: list[float] = []
        self._block_nll, self._block_scored = 0.0, 0
        self._early_memory = 0

    @property
    def ppl(self) -> float:
        """Perplexity of everything read so far; NaN before the second token."""
        return perplexity_of(self.nll, self.scored)

    def check(self) -> None:
        """Refuse a perplexity that is infinite or NaN (WeirError)."""
        if self.scored and not math.isfinite(self.ppl):
            raise WeirError(f"perplexity cannot be computed: {NOT_FINITE}")

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the whole run."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def slowdown(self) -> float | None:
        """Time per token in the last thousand tokens divided by that in the second thousand
        (medians).

        None if fewer than 15 pieces of `STEP` tokens were read. The last piece may be short.
        """
        span = 1000 // STEP
        if len(self.pace) < 3 * span:
            return None
        return median(self.pace[-span:]) / median(self.pace[span : 2 * span])

    @property
    def last_block(self) -> int:
        """Number of tokens in the last block of `ppl_by_block`, which may be fewer than `block`; 0
        if there is none.
        """
        blocks = len(self.ppl_by_block)
        return min(self.block, self.tokens - (blocks - 1) * self.block) if blocks else 0

    def as_json(self) -> dict[str, Any]:
        """All figures by name, for JSON."""
        return {
            "policy": str(self.stream.policy),
            "block": self.block,
            "last_block": self.last_block,
            "tokens": self.tokens,
            "ppl_by_block": self.ppl_by_block,
            "kv_bytes": self.kv_bytes,
            "bytes_by_block": self.bytes_by_block,
            "memory_growth": self.memory_growth,
            "seconds": round(self.seconds, 3),
            "ppl": self.ppl,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "last_over_second_thousand": self.slowdown,
        }

    def take(self, piece: Tensor) -> None:
        """Read the next tokens [n]: `STEP` of them, or fewer at the end of a text."""
        began = time.perf_counter()
        unscored = int(self.stream.seen == 0)  # the first token of a stream has no prediction
        parts = piece.split(1 if self.in_steps else len(piece))
        nll = torch.cat([self.stream.score(part[None])[0] for part in parts])
        took = time.perf_counter() - began
        self.seconds += took
        self.pace.append(took / len(piece))
        first = min(len(nll), self.block - self.tokens % self.block)
        for part in (nll[:first], *nll[first:].split(self.block)):
            total = float(part[unscored:].double().sum())
            self.nll += total
            self._block_nll += total
            self.scored += len(part) - unscored
            self._block_scored += len(part) - unscored
            self.tokens += len(part)
            unscored = 0
            if self.tokens % self.block == 0:
                self.close()
        self.kv_bytes = self.stream.nbytes
        if (memory := _memory()) is None:
            return
        if self.tokens <= 5000:
            # Buffers are allocated and freed all the time, so take the maximum so far instead of a
            # single sample.
            self._early_memory = max(self._early_memory, memory)
        if self.tokens >= 5000:
            self.memory_growth = max(memory - self._early_memory, self.memory_growth or 0)

    def close(self) -> None:
        """End the current block, if there is one; the last block of a text may be short."""
        if self.tokens > len(self.ppl_by_block) * self.block:
            self.ppl_by_block.append(perplexity_of(self._block_nll, self._block_scored))
            self.bytes_by_block.append(self.stream.nbytes)
            self._block_nll, self._block_scored = 0.0, 0


def read(
    stream: Stream,
    ids: Tensor,
    *,
    block: int = 1000,
    in_steps: bool = False,
    on_step: Callable[[PerplexityMeter], bool | None] = lambda meter: None,
) -> PerplexityMeter:
    """Read `ids` [tokens] with a new stream and measure.

    `on_step` is called after every `STEP` tokens; reading ends early when it returns True.
    """
    meter = PerplexityMeter(stream, block, in_steps=in_steps)
    for piece in ids.split(STEP):
        meter.take(piece)
        if on_step(meter):
            break
    meter.close()
    return meter


def perplexity_of(nll: float, scored: int) -> float:
    """Return the perplexity of a sum of losses; NaN if there are no losses."""
    mean = nll / scored if scored else math.nan
    return math.inf if mean > MOST_NATS else math.exp(mean)


def _memory() -> int | None:
    """Return the memory of the process in bytes; None if the system is not Linux."""
    # Do not use the peak, because loading a model raises it so far that later growth would be
    # hidden.
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * resource.getpagesize()
