"""The figure of the decode kernel on a GPU, compared with a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weir import kernels
from weir_bench.figure import Row, Setting, Skipped, figure
from weir_bench.timing import in_turns, middle

HEADS = 8
DIM = 128
BATCH, SLOTS, GROUP = 32, 2048, 4
"""Batch size, slots, and query heads for each KV head, as in a layer of an 8B Llama."""


@figure("kernel", by_dtype=False)
def kernel(setting: Setting) -> Iterator[Row]:
    """Measure the decode kernel of one layer of an 8B Llama in bfloat16 on a GPU."""
    if not torch.cuda.is_available():
        raise Skipped("this machine has no GPU")
    yield reached(torch.device("cuda"), BATCH, SLOTS, rounds=50)


def reached(device: torch.device, batch: int, slots: int, rounds: int) -> Row:
    """Return a row for the kernel's bandwidth ÷ that of a copy that moves as many bytes."""
    decode = kernels.decode(device)
    if decode is None:
        raise Skipped(f"there is no decode kernel for {device.type}; the extra .[gpu] installs it")
    queries = torch.randn(batch, HEADS, GROUP, 1, DIM, device=device).bfloat16()
    keys, values = torch.randn(2, batch, HEADS, slots, DIM, device=device).bfloat16()
    a, b = torch.zeros(2, batch, HEADS, slots, device=device)
    moved = sum(t.nbytes for t in (queries, keys, values, a, b))
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)  # read and written
    target = torch.empty_like(source)
    both = {
        "ours": lambda: decode(queries, keys, values, a, b, DIM**-0.5),
        "copy": lambda: target.copy_(source),
    }
    times = middle(in_turns(both, rounds, warm=3))
    share = times["copy"] / times["ours"]
    return Row(
        f"decode kernel at batch {batch}, {slots:,} slots: its bandwidth ÷ a copy's",
        moved / times["ours"] / 1e9,
        moved / times["copy"] / 1e9,
        "GB/s",
        share,
        0.8,
        least=True,
        note=f"decode: {kernels.paths(device)['decode']}; {HEADS} key-value heads, {GROUP} "
        f"queries each, {DIM} dimensions, bfloat16",
    )
