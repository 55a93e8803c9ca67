"""`efficiency`: compares a policy's seconds of prefill and decoding, and its bytes, with those of
exact attention and of `recompute`.

StreamingLLM (Xiao et al. 2024), Figure 10: latency per token by cache size against a sliding window
with re-computation; BalanceKV (Kochetkova et al. 2025), Table 2: a prompt and an answer against
exact attention. All candidates take turns, step by step, so that other load on the machine affects
them equally. Compare the ratios of the medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from weir.evals.task import Better, Progress, Subject, Task, task
from weir.models import window_of
from weir.policies import parse_policy
from weir.pools import Count
from weir.stream import Stream

EXACT, RECOMPUTE = "exact", "recompute"


@task("efficiency")
@dataclass(frozen=True)
class Efficiency(Task):
    """Measures the seconds for a prompt and for each token after it, and the bytes of the cache.

    Times differ from run to run, here and in the tasks `found` and `recalled`.

    Attributes:
        prompt: number of tokens of the prompt, which are random, because only their number matters.
        tokens: number of tokens that are decoded after it, one at a time.
        repeats: how often the prompt is read.
    """

    prompt: Count = 1024
    tokens: Count = 64
    repeats: Count = 3

    metrics: ClassVar[dict[str, Better]] = {
        "decode_over_exact": "lower",
        "decode_over_recompute": "lower",
        "prefill_over_exact": "lower",
    }

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Read the prompt and decode; all candidates take turns.

        Returns:
            The three ratios ("decode_over_recompute" is None if the policy keeps every token, or
            holds more tokens than the model can recompute); "rivals", with the medians "prefill_s"
            and "decode_s" (per token) and the "kv_bytes" of each; "prompt", "tokens", "threads",
            "device"; "kv_bytes".
        """
        rivals = self._rivals(subject)
        vocabulary = subject.model.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(subject.seed)
        ids = torch.randint(0, vocabulary, (1, self.prompt + self.tokens), generator=generator)
        ids = ids.to(subject.model.device)
        prefill: dict[str, list[float]] = {name: [] for name in rivals}
        decode: dict[str, list[float]] = {name: [] for name in rivals}
        streams: dict[str, Stream] = {}
        for turn in range(self.repeats):
            for name, make in rivals.items():
                streams[name] = make()
                prefill[name].append(_seconds(streams[name], ids[:, : self.prompt]))
            progress((turn + 1) / (2 * self.repeats))
        for step in range(self.prompt, self.prompt + self.tokens):
            for name, stream in streams.items():
                decode[name].append(_seconds(stream, ids[:, step : step + 1]))
            progress(0.5 + (step + 1 - self.prompt) / (2 * self.tokens))
        rows = {}
        for name, stream in streams.items():
            times = {"prefill_s": median(prefill[name]), "decode_s": median(decode[name])}
            rows[name] = {"rival": name, **times, "kv_bytes": stream.nbytes}
        mine = rows[str(subject.policy)]
        return {
            "decode_over_exact": _ratio(mine, rows[EXACT], "decode_s"),
            "decode_over_recompute": _ratio(mine, rows.get(RECOMPUTE), "decode_s"),
            "prefill_over_exact": _ratio(mine, rows[EXACT], "prefill_s"),
            "rivals": list(rows.values()),
            "prompt": self.prompt,
            "tokens": self.tokens,
            "threads": torch.get_num_threads(),
            "device": str(subject.model.device),
            "kv_bytes": mine["kv_bytes"],
        }

    def _rivals(self, subject: Subject) -> dict[str, Callable[[], Stream]]:
        """Stream factories for the policy, exact attention and recompute, by name."""
        stream = subject.stream(self.prompt, self.tokens)
        exact = replace(subject, policy=parse_policy("dense"), rate=None)
        rivals: dict[str, Callable[[], Stream]] = {
            str(subject.policy): lambda: subject.stream(self.prompt, self.tokens),
            EXACT: lambda: exact.stream(self.prompt, self.tokens),
        }
        slots = stream.capacity
        limit = window_of(subject.model.config)
        if slots is not None and (limit is None or slots <= limit):
            again = replace(subject, policy=parse_policy(f"recompute(budget={slots})"), rate=None)
            rivals[RECOMPUTE] = again.stream
        return rivals


def _seconds(stream: Stream, ids: Tensor) -> float:
    """Measure the seconds that a stream takes for some tokens, until the accelerator is done."""
    wait = partial(torch.cuda.synchronize, ids.device) if ids.is_cuda else lambda: None
    wait()
    begun = time.perf_counter()
    stream.feed(ids)
    wait()
    return time.perf_counter() - begun


def _ratio(mine: dict[str, Any], other: dict[str, Any] | None, field: str) -> float | None:
    return None if other is None else mine[field] / other[field]
