"""Figures beside kvpress: the same method, size and interval, in an environment of its own.

kvpress needs an older transformers than weir, so it runs in another Python as a subprocess
(`kvpress_peer`), and takes turns with weir: while one does some steps the other waits.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from weir.errors import WeirError
from weir_bench.caches import as_it_is_and_compiled
from weir_bench.figure import Row, Setting, Skipped, compare, figure
from weir_bench.model import config
from weir_bench.timing import seconds, undisturbed

METHODS = {"StreamingLLM": "streaming_llm", "SnapKV": "snapkv", "Knorm": "streaming_llm"}
"""Its press, and the policy beside it; weir has no pool for the norms of keys."""
TURN = 8
"""Steps in a turn."""
REST = 0.03
"""Seconds between turns, so that the threads of the one that waits have gone to sleep."""
CYCLES = 4


@figure("kvpress", "kvpress beside the same method, size and interval", bound="bytes")
def kvpress(setting: Setting) -> Iterator[Row]:
    """kvpress's DecodingPress against weir, a token, compression and folds included."""
    if setting.kvpress is None:
        raise Skipped("kvpress needs an environment of its own; name its Python with --kvpress")
    sizes = setting.sizes
    for press, name in METHODS.items():
        setting.say(f"kvpress {press} beside {name}")
        window = f", window={sizes.chunk // 2}" if press == "SnapKV" else ""
        ours = as_it_is_and_compiled(setting, name, sizes.slots, window)
        own: dict[str, list[float]] = {kind: [] for kind in ours}
        theirs: list[float] = []
        with _peer(setting, press) as peer, undisturbed():
            for _ in range(CYCLES * sizes.chunk // TURN):
                theirs += peer.steps(TURN)
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
                note="not the same method: weir has no norms" if press == "Knorm" else "",
            )


def _per_token(taken: list[float], chunk: int) -> float:
    """Seconds a token, every `chunk`-th of which compresses: the median of the others, and more."""
    compressing = taken[chunk - 1 :: chunk]
    between = median(t for place, t in enumerate(taken, 1) if place % chunk)
    return between + (mean(compressing) - between) / chunk


class KvpressProcess:
    """kvpress in its process.

    Attributes:
        process: with pipes to its standard input and output.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, what: Any) -> Any:
        """Send one line of JSON, and wait for one.

        Raises:
            WeirError: the process has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self.process.stdout.readline()
        if not answer:
            assert self.process.stderr is not None
            said = self.process.stderr.read().strip().splitlines() or ["it ended without a word"]
            raise WeirError(f"kvpress failed in its environment: {said[-1]}")
        return json.loads(answer)

    def steps(self, count: int) -> list[float]:
        """Seconds of each of so many decode steps."""
        return [float(taken) for taken in self.ask(count)]


@contextmanager
def _peer(setting: Setting, press: str) -> Iterator[KvpressProcess]:
    """kvpress with its cache full, its next step the first after a compression."""
    assert setting.kvpress is not None
    script = Path(__file__).with_name("kvpress_peer.py")
    try:
        process = subprocess.Popen(
            # On its own, or `import kvpress` would find the file of that name beside the script.
            [setting.kvpress, "-I", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise WeirError(f"--kvpress {setting.kvpress} cannot be run: {error.strerror}") from None
    with process:
        try:
            peer = KvpressProcess(process)
            peer.ask(
                {
                    "config": config(setting.sizes).to_dict(),
                    "dtype": str(setting.dtype).removeprefix("torch."),
                    "threads": torch.get_num_threads(),
                    "press": press,
                    "slots": setting.sizes.slots,
                    "chunk": setting.sizes.chunk,
                }
            )
            yield peer
        finally:
            process.kill()
