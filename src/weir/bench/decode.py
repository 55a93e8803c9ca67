"""Figures of one decode step: beside transformers' caches, beside dense attention."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from weir.bench.caches import Dynamic, Static, Weir
from weir.bench.figure import Row, Setting, figure
from weir.bench.model import bandwidth, model_of, weight_bytes
from weir.bench.timing import Contender, in_turns, middle

PLAIN = "streaming_llm"


@figure("decode", "a decode step beside transformers' caches and the bandwidth of memory")
def decode(setting: Setting) -> Iterator[Row]:
    """`streaming_llm` against DynamicCache and StaticCache of as many tokens; the roofline."""
    sizes, model = setting.sizes, model_of(setting)
    ours = Weir(model, f"{PLAIN}({sizes.slots})", sizes.chunk)
    ours.fill(sizes.slots + sizes.chunk)
    peers: dict[str, Contender] = {
        "DynamicCache": Dynamic(model, sizes.slots),
        "StaticCache": Static(model, sizes.slots),
    }
    taken = in_turns({PLAIN: ours, **peers}, sizes.steps, warm=3)
    times = middle(taken)
    # Folds are among the steps that were timed, but a median does not see them.
    own = times[PLAIN] + mean(ours.folds or [0.0]) / sizes.chunk
    slots = f"{sizes.slots:,}"
    targets = {"DynamicCache": 0.95, "StaticCache": 1.00}
    what = f"decode step, `{PLAIN}` at {slots} slots, folds included ÷"
    for name, target in targets.items():
        row = f"{what} {name} of {slots} tokens"
        yield Row(row, own * 1e3, times[name] * 1e3, "ms", own / times[name], target)
    moved = weight_bytes(model) + ours.read_bytes
    speed = bandwidth(sizes.copied)
    least = moved / speed
    yield Row(
        f"share of the roofline, decode at batch 1, {slots} slots",
        own * 1e3,
        least * 1e3,
        "ms",
        least / own,
        0.7,
        least=True,
        share=least / own,
        note=f"{moved / 1e6:.0f} MB a step; a copy moves {speed / 1e9:.1f} GB/s",
    )


@figure("dense", "a decode step beside dense attention over a long stream")
def dense(setting: Setting) -> Iterator[Row]:
    """`streaming_llm` against DynamicCache that holds all of a stream."""
    sizes, model = setting.sizes, model_of(setting)
    ours = Weir(model, f"{PLAIN}({sizes.slots})", sizes.chunk)
    ours.fill(sizes.slots + sizes.chunk)
    for tokens in sizes.dense:
        peer = Dynamic(model, tokens)
        times = middle(in_turns({PLAIN: ours, "dense": peer}, 2 * sizes.slow, warm=1))
        yield Row(
            f"decode step, DynamicCache of {tokens:,} tokens ÷ `{PLAIN}` at {sizes.slots:,} slots",
            times[PLAIN] * 1e3,
            times["dense"] * 1e3,
            "ms",
            times["dense"] / times[PLAIN],
        )
