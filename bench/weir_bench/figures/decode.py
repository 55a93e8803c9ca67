"""Figures of one decode step: transformers' caches, recomputation, quantized slots and weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from statistics import mean

import torch
from transformers import PreTrainedModel

from weir.errors import WeirError, describe_missing
from weir.models import stored_bytes
from weir.native import BITS, quantize_weights
from weir.slab import FORMATS
from weir.stream import Stream
from weir_bench.caches import (
    CompiledStatic,
    Dynamic,
    Static,
    Weir,
    as_it_is_and_compiled,
    full,
    full_compiled,
)
from weir_bench.figure import Row, Setting, Skipped, compare, figure
from weir_bench.model import bandwidth, model_of, twin_of, weight_bytes
from weir_bench.timing import Contender, in_turns, middle

PLAIN = "streaming_llm"
COMPILED = ", compiled"
COMPILED_STATIC = "compiled StaticCache"
NEWEST = 64
"""The number of exact slots at the end of a cache whose other slots are quantized."""


@figure("decode")
def decode(setting: Setting) -> Iterator[Row]:
    """Compare `streaming_llm` with DynamicCache, StaticCache and the roofline.

    The roofline is the time that moving the bytes of a step takes at the bandwidth of a copy.
    """
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
    for kind, cache in ours.items():
        own = times[kind] + _fold(cache)
        for name, target in _targets(kind, peers, moved / speed / times["DynamicCache"]).items():
            what = f"`{PLAIN}` at {slots} slots{kind}, folds included ÷ {name} of {slots} tokens"
            yield compare(f"decode step, {what}", own, times[name], target)
        half = kind and setting.dtype != torch.float32
        note = f"{moved / 1e6:.0f} MB a step; a copy moves {speed / 1e9:.1f} GB/s"
        yield roofline(f"{slots} slots{kind}", own, moved / speed, 0.6 if half else 0.7, note)


def roofline(what: str, own: float, least: float, target: float, note: str = "") -> Row:
    """Return a row for the share of a step's time that moving its bytes would take.

    Args:
        what: the kind of step, in words.
        own: seconds of the step.
        least: seconds that moving its bytes takes at the bandwidth of a copy.
        target: the lower limit of the share.
        note: a remark.
    """
    what = f"share of the roofline, decode at batch 1, {what}"
    share = least / own
    return Row(what, own * 1e3, least * 1e3, "ms", share, target, True, note=note)


def _fold(cache: Weir) -> float:
    """Return the seconds of folds per token, which the median over all steps leaves out."""
    return mean(cache.folds or [0.0]) / cache.cache.chunk


def _targets(kind: str, peers: Collection[str], share: float) -> dict[str, float]:
    """Return the target of a step for each peer.

    `share` is the part of a DynamicCache step that moving its bytes would take.
    """
    if kind != COMPILED:
        return {"DynamicCache": 0.95, "StaticCache": 1.00}
    targets = {"DynamicCache": 0.35 if share < 0.5 else 0.75, "StaticCache": 1.00}
    return {**targets, **{name: 1.00 for name in peers if name == COMPILED_STATIC}}


@figure("recompute")
def recompute(setting: Setting) -> Iterator[Row]:
    """Compare the time per token of `recompute` with that of `streaming_llm`, including folds.

    The paper reports up to 22.2 times at 4,096 slots, on a GPU (StreamingLLM, Xiao et al. 2024,
    section 4.5).
    """
    sizes, model = setting.sizes, model_of(setting)
    # The targets are for float32. In half precision, the matrix products of a prompt, and so
    # recomputation, are much faster.
    asked = setting.dtype == torch.float32
    for slots, target in ((sizes.slots, 32.0), (sizes.many_slots, 80.0)):
        setting.say(f"re-computation of {slots:,} tokens")
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(sizes.vocabulary, (slots,), generator=generator)
        peer = Stream(model, f"recompute({slots})")
        peer.feed(ids)
        ours = as_it_is_and_compiled(setting, PLAIN, slots)
        # A round of weir feeds all tokens between two folds, and includes the fold.
        rounds = {name: partial(_steps, each, sizes.chunk) for name, each in ours.items()}
        feeding = partial(peer.feed, ids[:1])
        times = middle(in_turns({**rounds, "peer": feeding}, sizes.slow, warm=1))
        for name in ours:
            own = times[name] / sizes.chunk
            yield compare(
                f"`recompute` ÷ `{PLAIN}`{name}, per token at {slots:,} slots",
                own,
                times["peer"],
                target if asked else None,
                inverse=True,
                least=True,
            )


def _steps(cache: Weir, count: int) -> None:
    for _ in range(count):
        cache.step()


@figure("slots")
def slots(setting: Setting) -> Iterator[Row]:
    """Compare `streaming_llm` with quantized and with exact slots. The newest slots stay exact."""
    sizes, model = setting.sizes, model_of(setting)
    plain = f"{PLAIN}(budget={sizes.slots})"
    newest = min(NEWEST, sizes.slots // 2)
    policies = {"exact": plain} | {
        name: f"quantized({plain}, slots={name}, newest={newest})" for name in FORMATS
    }
    caches = {name: Weir(model, policy, sizes.chunk) for name, policy in policies.items()}
    for cache in caches.values():
        cache.fill(sizes.slots + sizes.chunk)
        cache.start_afresh()
    times = middle(in_turns(caches, sizes.steps, warm=3))
    own = {name: times[name] + _fold(cache) for name, cache in caches.items()}
    for name in FORMATS:
        part = caches[name].cache.nbytes / caches["exact"].cache.nbytes
        what = f"{name} slots ÷ exact ones, {sizes.slots:,} of them, folds included"
        note = f"the cache has {part:.2f} of the bytes"
        yield compare(f"decode step, {what}", own[name], own["exact"], 1.0, note=note)


@figure("weights")
def weights(setting: Setting) -> Iterator[Row]:
    """Compare `streaming_llm` on a model with int8 or int4 weights with the original model."""
    if find_spec("torchao") is None:
        raise Skipped(describe_missing("this figure", "torchao"))
    slots = setting.sizes.slots
    for kind, make in {"": full, COMPILED: full_compiled}.items():
        made = {bits: make(setting, _model(setting, bits), PLAIN, slots) for bits in ("", *BITS)}
        caches = {bits: cache for bits, cache in made.items() if cache is not None}
        times = middle(in_turns(caches, setting.sizes.steps, warm=3))
        for bits in BITS:
            if not {"", bits} <= caches.keys():
                continue
            part = stored_bytes(caches[bits].model) / stored_bytes(caches[""].model)
            asked = bits == "int8" and kind and setting.dtype == torch.float32
            what = f"{bits} weights ÷ all bits, `{PLAIN}` at {slots:,} slots{kind}"
            yield compare(
                f"decode step, {what}",
                times[bits],
                times[""],
                0.35 if asked else None,
                note=f"weights take {part:.2f} of the bytes",
            )


def _model(setting: Setting, bits: str) -> PreTrainedModel:
    """Return a new model with weights in a format such as int8, or unchanged weights for ""."""
    model = twin_of(setting)
    if bits:
        quantize_weights(model, bits)
    return model
