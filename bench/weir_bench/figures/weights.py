"""Figures of weights of few bits: a decode step with them beside one with all bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from weir.errors import describe_missing
from weir.models import BITS, quantize_weights, stored_bytes
from weir_bench.caches import Weir, full, full_compiled
from weir_bench.figure import Row, Setting, Skipped, figure
from weir_bench.model import twin_of
from weir_bench.timing import in_turns, middle

PLAIN = "streaming_llm"


@figure(
    "weights", "a decode step with weights of 8 and 4 bits beside one with all bits", bound="bytes"
)
def weights(setting: Setting) -> Iterator[Row]:
    """`streaming_llm` with int8 and int4 weights against the same model as it was."""
    if find_spec("torchao") is None:
        raise Skipped(describe_missing("this figure", "torchao"))
    slots = setting.sizes.slots
    for kind, make in {"": full, ", compiled": full_compiled}.items():
        made = {bits: make(setting, _model(setting, bits), PLAIN, slots) for bits in ("", *BITS)}
        caches = {bits: cache for bits, cache in made.items() if cache is not None}
        yield from _rows(setting, caches, kind)


def _model(setting: Setting, bits: str) -> PreTrainedModel:
    """The model of figures with weights of so few bits; all of them for none."""
    model = twin_of(setting)
    if bits:
        quantize_weights(model, bits)
    return model


def _rows(setting: Setting, caches: Mapping[str, Weir], kind: str) -> Iterator[Row]:
    """Each of few bits beside that of all bits, timed in turns."""
    times = middle(in_turns(caches, setting.sizes.steps, warm=3))
    for bits in BITS:
        if bits not in caches or "" not in caches:
            continue
        ours, peer = caches[bits].model, caches[""].model
        asked = bits == "int8" and kind and setting.dtype == torch.float32
        yield Row(
            f"decode step, {bits} weights ÷ all bits, `{PLAIN}` at {setting.sizes.slots:,} "
            f"slots{kind}",
            times[bits] * 1e3,
            times[""] * 1e3,
            "ms",
            times[bits] / times[""],
            0.35 if asked else None,
            note=f"weights take {stored_bytes(ours) / stored_bytes(peer):.2f} of the bytes",
        )
