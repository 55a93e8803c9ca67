"""Figures of one decode step: beside transformers' caches, beside dense attention."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from statistics import mean

import torch

from weir.errors import WeirError
from weir_bench.caches import CompiledStatic, Dynamic, Static, as_it_is_and_compiled, full
from weir_bench.figure import Row, Setting, figure
from weir_bench.model import bandwidth, model_of, twin_of, weight_bytes
from weir_bench.timing import Contender, in_turns, middle

PLAIN = "streaming_llm"
COMPILED = ", compiled"
COMPILED_STATIC = "compiled StaticCache"


@figure(
    "decode", "a decode step beside transformers' caches and the bandwidth of memory", bound="bytes"
)
def decode(setting: Setting) -> Iterator[Row]:
    """`streaming_llm`, also compiled, against DynamicCache and StaticCache; the roofline."""
    sizes, model = setting.sizes, model_of(setting)
    ours = as_it_is_and_compiled(setting, PLAIN, sizes.slots)
    peers: dict[str, Contender] = {
        "DynamicCache": Dynamic(model, sizes.slots),
        "StaticCache": Static(model, sizes.slots),
    }
    if COMPILED in ours:
        setting.say("compiling a step of StaticCache")
        with suppress(WeirError):
            twin = twin_of(setting)
            peers[COMPILED_STATIC] = CompiledStatic(twin, sizes.slots, sizes.backend)
    times = middle(in_turns({**ours, **peers}, sizes.steps, warm=3))
    slots = f"{sizes.slots:,}"
    moved = weight_bytes(model) + ours[""].read_bytes
    speed = bandwidth(sizes.copied)
    least = moved / speed
    for kind, contender in ours.items():
        # Folds are among the steps that were timed, but a median does not see them.
        own = times[kind] + mean(contender.folds or [0.0]) / sizes.chunk
        for name, target in _targets(kind, peers, least / times["DynamicCache"]).items():
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
            0.6 if kind and setting.dtype != torch.float32 else 0.7,
            least=True,
            share=least / own,
            note=f"{moved / 1e6:.0f} MB a step; a copy moves {speed / 1e9:.1f} GB/s",
        )


def _targets(kind: str, peers: Collection[str], share: float) -> dict[str, float]:
    """What a step is to take of each peer's.

    Args:
        kind: of our step.
        peers: by name.
        share: of the roofline, of a step with PyTorch's products.
    """
    if kind != COMPILED:
        return {"DynamicCache": 0.95, "StaticCache": 1.00}
    targets = {"DynamicCache": 0.35 if share < 0.5 else 0.75, "StaticCache": 1.00}
    return {**targets, **{name: 1.00 for name in peers if name == COMPILED_STATIC}}


@figure("dense", "a decode step beside dense attention over a long stream", bound="bytes")
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
