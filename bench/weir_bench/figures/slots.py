"""Figures of quantized slots: a decode step beside exact slots, as many of them."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from weir.slab import FORMATS
from weir_bench.caches import Weir
from weir_bench.figure import Row, Setting, figure
from weir_bench.model import model_of
from weir_bench.timing import in_turns, middle

NEWEST = 64


@figure("slots", "a decode step with quantized slots beside one with exact ones", bound="bytes")
def slots(setting: Setting) -> Iterator[Row]:
    """`streaming_llm`, all but its newest tokens quantized, against itself; and what is read."""
    sizes, model = setting.sizes, model_of(setting)
    plain = f"streaming_llm(budget={sizes.slots})"
    newest = min(NEWEST, sizes.slots // 2)
    caches = {"exact": Weir(model, plain, sizes.chunk)}
    for name in FORMATS:
        policy = f"quantized({plain}, slots={name}, newest={newest})"
        caches[name] = Weir(model, policy, sizes.chunk)
    for cache in caches.values():
        cache.fill(sizes.slots + sizes.chunk)
        cache.start_afresh()
    times = middle(in_turns(caches, sizes.steps, warm=3))
    own = {
        name: times[name] + mean(cache.folds or [0.0]) / sizes.chunk
        for name, cache in caches.items()
    }
    for name in FORMATS:
        part = caches[name].cache.nbytes / caches["exact"].cache.nbytes
        yield Row(
            f"decode step, {name} slots ÷ exact ones, {sizes.slots:,} of them, folds included",
            own[name] * 1e3,
            own["exact"] * 1e3,
            "ms",
            own[name] / own["exact"],
            1.0,
            note=f"the cache has {part:.2f} of the bytes",
        )
