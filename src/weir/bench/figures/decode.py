"""Figures of one decode step: beside transformers' caches, beside dense attention."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from weir.bench.caches import Dynamic, Static, as_it_is_and_compiled, full
from weir.bench.figure import Row, Setting, figure
from weir.bench.model import bandwidth, model_of, weight_bytes
from weir.bench.timing import Contender, in_turns, middle

PLAIN = "streaming_llm"


@figure("decode", "a decode step beside transformers' caches and the bandwidth of memory")
def decode(setting: Setting) -> Iterator[Row]:
    """`streaming_llm`, also compiled, against DynamicCache and StaticCache; the roofline."""
    sizes, model = setting.sizes, model_of(setting)
    ours = as_it_is_and_compiled(setting, PLAIN, sizes.slots)
    peers: dict[str, Contender] = {
        "DynamicCache": Dynamic(model, sizes.slots),
        "StaticCache": Static(model, sizes.slots),
    }
    times = middle(in_turns({**ours, **peers}, sizes.steps, warm=3))
    slots = f"{sizes.slots:,}"
    moved = weight_bytes(model) + ours[""].read_bytes
    speed = bandwidth(sizes.copied)
    least = moved / speed
    for kind, contender in ours.items():
        # Folds are among the steps that were timed, but a median does not see them.
        own = times[kind] + mean(contender.folds or [0.0]) / sizes.chunk
        for name, target in {"DynamicCache": 0.95, "StaticCache": 1.00}.items():
            yield Row(
                f"decode step, `{PLAIN}` at {slots} slots{kind}, folds included ÷ {name} of "
                f"{slots} tokens",
                own * 1e3,
                times[name] * 1e3,
                "ms",
                own / times[name],
                target,
            )
        yield Row(
            f"share of the roofline, decode at batch 1, {slots} slots{kind}",
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
    ours = full(setting, model, PLAIN, sizes.slots)
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
