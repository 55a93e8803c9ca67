"""Streaming perplexity: a model reads a text once, from its first token to its last.

The test of StreamingLLM (Xiao et al. 2024, section 4.1). Every token is predicted from what the
policy still holds, so nothing is truncated and nothing is read twice.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.stream import Stream

STEP = 200
"""Tokens fed and timed at once."""
MOST_NATS = 700.0
"""Above so many nats a perplexity is infinite: few more, and no float holds it."""
NOT_FINITE = (
    "what the model predicts is infinite or no number; its weights are damaged, or too large for "
    "its dtype: try --dtype float32"
)
"""The reason why a figure is not finite."""


@dataclass
class PerplexityResult:
    """Perplexity, bytes and speed of reading a text.

    Attributes:
        policy, block: the policy as it was written, and tokens in a block.
        tokens, scored: tokens read, and those that had something before them.
        nll: sum of negative log-likelihoods, in nats.
        ppl_by_block: perplexity of each block of the text; the last one may be short. The first
            token of a stream has no prediction and is not scored.
        kv_bytes: bytes of the cache at the end.
        bytes_by_block: bytes of the cache after each block.
        memory_growth: growth of the process's memory above the maximum up to token 5,000, in bytes;
            None before that, and where the system does not report memory.
        seconds: spent reading.
        pace: seconds per token, for each `STEP` tokens.
    """

    policy: str
    block: int
    tokens: int = 0
    nll: float = 0.0
    scored: int = 0
    ppl_by_block: list[float] = field(default_factory=list)
    kv_bytes: int = 0
    bytes_by_block: list[int] = field(default_factory=list)
    memory_growth: int | None = None
    seconds: float = 0.0
    pace: list[float] = field(default_factory=list)

    @property
    def ppl(self) -> float:
        """Perplexity of everything read so far; NaN before the second token."""
        return perplexity_of(self.nll / self.scored) if self.scored else math.nan

    def check(self) -> None:
        """Refuse a perplexity that is infinite or no number (WeirError)."""
        if self.scored and not math.isfinite(self.ppl):
            raise WeirError(f"there is no perplexity: {NOT_FINITE}")

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the whole run."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def slowdown(self) -> float | None:
        """Time per token in the last thousand tokens over the second thousand (medians).

        None for fewer than 3,000 tokens.
        """
        span = 1000 // STEP
        if len(self.pace) < 3 * span:
            return None
        return median(self.pace[-span:]) / median(self.pace[span : 2 * span])

    def as_json(self) -> dict[str, Any]:
        """All figures by name, for JSON."""
        facts = asdict(self)
        del facts["pace"], facts["nll"], facts["scored"]
        return {
            **facts,
            "seconds": round(self.seconds, 3),
            "ppl": self.ppl,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "last_over_second_thousand": self.slowdown,
        }


class PerplexityMeter:
    """Incremental perplexity measurement of a stream.

    Args:
        stream: a new stream.
        block: tokens in a block of `ppl_by_block`.
        in_steps: call the model once per token, as in decoding; otherwise once for many tokens.

    Attributes:
        reading: the result so far.
    """

    def __init__(self, stream: Stream, block: int = 1000, *, in_steps: bool = False) -> None:
        self.stream = stream
        self.in_steps = in_steps
        self.reading = PerplexityResult(str(stream.policy), block)
        # Sums of the block under way.
        self._nll = 0.0
        self._scored = 0
        self._early_memory = 0

    def take(self, piece: Tensor) -> None:
        """Read the next tokens [n]: `STEP` of them, or fewer at the end of a text."""
        reading = self.reading
        began = time.perf_counter()
        is_first = self.stream.seen == 0
        parts = piece.split(1 if self.in_steps else len(piece))
        nll = torch.cat([self.stream.score(part[None])[0] for part in parts])
        took = time.perf_counter() - began
        reading.seconds += took
        reading.pace.append(took / len(piece))
        first = min(len(nll), reading.block - reading.tokens % reading.block)
        for part in (nll[:first], *nll[first:].split(reading.block)):
            known = part[1:] if is_first and reading.tokens == 0 else part
            total = float(known.double().sum())
            self._nll += total
            self._scored += len(known)
            reading.nll += total
            reading.scored += len(known)
            reading.tokens += len(part)
            if reading.tokens % reading.block == 0:
                self.close()
        reading.kv_bytes = self.stream.nbytes
        if (memory := _memory()) is None:
            return
        if reading.tokens <= 5000:
            # Buffers come and go, so a single sample would be luck: take the maximum so far.
            self._early_memory = max(self._early_memory, memory)
        if reading.tokens >= 5000:
            grown = memory - self._early_memory
            reading.memory_growth = max(grown, reading.memory_growth or 0)

    def close(self) -> None:
        """End the block under way, if any; the last block of a text may be short."""
        reading = self.reading
        if reading.tokens <= len(reading.ppl_by_block) * reading.block:
            return
        mean = self._nll / self._scored if self._scored else math.nan
        reading.ppl_by_block.append(perplexity_of(mean))
        reading.bytes_by_block.append(self.stream.nbytes)
        self._nll, self._scored = 0.0, 0


def read(
    stream: Stream,
    ids: Tensor,
    *,
    block: int = 1000,
    in_steps: bool = False,
    on_step: Callable[[PerplexityResult], bool | None] = lambda reading: None,
) -> PerplexityResult:
    """Read `ids` [tokens] with a new stream and measure, as a `PerplexityMeter` does.

    `on_step` is called after every `STEP` tokens; reading ends early when it returns True.
    """
    meter = PerplexityMeter(stream, block, in_steps=in_steps)
    for piece in ids.split(STEP):
        meter.take(piece)
        if on_step(meter.reading):
            break
    meter.close()
    return meter.reading


def perplexity_of(nats: float) -> float:
    """The perplexity of a mean negative log-likelihood in nats."""
    return math.inf if nats > MOST_NATS else math.exp(nats)


def _memory() -> int | None:
    """The memory of the process in bytes; None where the system is not Linux."""
    # Not the peak: loading a model raises it so far that later growth would be hidden.
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * resource.getpagesize()
