"""Time how long a row takes to be saved on disk and to be loaded again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from statistics import median

import torch

from weir.cache import StreamingCache
from weir.loading import load
from weir.models import CACHE
from weir.serve import Checkpoint, TurnRecord
from weir.serve.sessions.disk_turns import DiskTurns
from weir.serve.sessions.store import SessionStore
from weir.serve.sessions.store_format import StoreFormat
from weir_bench.figure import Row, compare
from weir_bench.serving.load import Heard
from weir_bench.serving.part import Plan, part
from weir_bench.timing import undisturbed

CHUNK = 64
TIMES = 20
MOST = 20.0
"""The target for loading a row of nano, in milliseconds."""


@part("disk")
def disk(plan: Plan) -> Iterator[Row | Heard]:
    """Time loading a row, which the next turn of an evicted session waits for, and saving one."""
    model, _ = load(str(plan.folder), dtype="float32")
    cache = StreamingCache(model, plan.policy, chunk=CHUNK, batch=2)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(2 * (plan.budget + CHUNK)).view(2, -1) % vocabulary
    store_format = StoreFormat.of(model, plan.policy, CHUNK)
    saved: list[float] = []
    back: list[float] = []
    plan.say("a row to disk and back")
    with (
        undisturbed(),
        SessionStore(DiskTurns(plan.scratch / "disk", store_format)) as store,
    ):
        for piece in ids.split(256, dim=1):
            model(input_ids=piece, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        for number in range(TIMES):
            began = time.perf_counter()
            _save(store, str(number), Checkpoint(cache.take_row(0), (1,)))
            safe = time.perf_counter()
            cache.put_row(1, store.load(str(number)).state, check=False)
            back.append(time.perf_counter() - safe)
            saved.append(safe - began)
    size = cache.nbytes / 2 / 1e6
    note = f"at most {max(back) * 1e3:.3g} ms in {TIMES} loads; the file is in the page cache"
    what = f"a row of {size:.3g} MB back from disk ÷ {MOST:g} ms"
    target = 1.0 if plan.model == "nano" else None
    yield compare(what, median(back), MOST / 1e3, target, note=note)
    note = "written, synced, renamed and committed, in a separate thread, not in the engine's"
    what = f"a row of {size:.3g} MB saved safely on disk ÷ back from disk"
    yield compare(what, median(saved), median(back), note=note)


def _save(store: SessionStore, name: str, checkpoint: Checkpoint) -> None:
    """Save a turn and wait until it is safely on disk."""
    safe = threading.Event()
    wrong: list[Exception] = []

    def done(error: Exception | None) -> None:
        if error is not None:
            wrong.append(error)
        safe.set()

    record = TurnRecord(name, "", name, None, name, (), checkpoint.pending[-1], 1)
    store.save(checkpoint, record, done)
    safe.wait()
    if wrong:
        raise wrong[0]
