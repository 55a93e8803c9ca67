"""Compare weir with kvpress: the same method, cache size and interval of compression.

kvpress needs an older transformers than weir, so it runs in a separate environment, which
`make peers` creates. The two take turns: while one does some steps, the other waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import mean, median

import torch

from weir.errors import WeirError
from weir_bench.caches import as_it_is_and_compiled
from weir_bench.figure import Row, Setting, Skipped, compare, figure
from weir_bench.model import config
from weir_bench.peers.process import PeerProcess
from weir_bench.timing import seconds, undisturbed

METHODS = {"StreamingLLM": "streaming_llm", "SnapKV": "snapkv", "Knorm": "streaming_llm"}
"""kvpress's presses, and the policy that each is compared with.

Knorm is compared with `streaming_llm`, which is another method.
"""
TURN = 8
"""Steps of each side in a turn."""
REST = 0.03
"""Seconds between turns, in which the threads of the side that has finished go to sleep."""
CYCLES = 4


@figure("kvpress")
def kvpress(setting: Setting) -> Iterator[Row]:
    """Compare the time per token of kvpress's DecodingPress and weir.

    Compression and folds are included.
    """
    sizes = setting.sizes
    for press, name in METHODS.items():
        setting.say(f"kvpress {press} compared with {name}")
        window = f", window={sizes.chunk // 2}" if press == "SnapKV" else ""
        ours = as_it_is_and_compiled(setting, name, sizes.slots, window)
        own: dict[str, list[float]] = {kind: [] for kind in ours}
        theirs: list[float] = []
        wanted = {
            "config": config(sizes).to_dict(),
            "dtype": str(setting.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "press": press,
            "slots": sizes.slots,
            "chunk": sizes.chunk,
        }
        with ExitStack() as ending:
            try:
                peer = ending.enter_context(PeerProcess("kvpress", "kvpress_side.py", wanted))
            except WeirError as error:
                raise Skipped(str(error)) from None
            ending.enter_context(undisturbed())
            for _ in range(CYCLES * sizes.chunk // TURN):
                theirs += peer.ask("steps", count=TURN)
                time.sleep(REST)
                for kind, cache in ours.items():
                    own[kind] += [seconds(cache.step) for _ in range(TURN)]
                time.sleep(REST)
        kvpress_time = _per_token(theirs, sizes.chunk)
        for kind, taken in own.items():
            yield compare(
                f"decode, kvpress {press} ÷ `{name}`{kind}, {sizes.slots:,} slots, every "
                f"{sizes.chunk} tokens",
                _per_token(taken, sizes.chunk),
                kvpress_time,
                1.5,
                inverse=True,
                least=True,
                note=f"another method than `{name}`" if press == "Knorm" else "",
            )


def _per_token(taken: list[float], chunk: int) -> float:
    """Return the seconds per token of steps of which every `chunk`-th compresses.

    This is the median of the other steps, plus the mean extra time of compression per token.
    """
    compressing = taken[chunk - 1 :: chunk]
    between = median(t for place, t in enumerate(taken, 1) if place % chunk)
    return between + (mean(compressing) - between) / chunk
