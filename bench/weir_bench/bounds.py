"""What bounds a figure: bytes that have to move, operations, or calls; and how near it comes.

A step that reads every weight once cannot be faster than memory, a prompt not faster than the
processor multiplies. What is neither is a matter of calls: many small operations, each of which
takes longer to ask for than to do. Knows nothing about what is timed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from weir_bench.caches import Weir
from weir_bench.figure import Bound, Setting
from weir_bench.model import bandwidth, weight_bytes
from weir_bench.timing import Doing, in_turns, middle

ROWS = (64, 256, 1024)
"""Rows that are multiplied at once to measure arithmetic; the fastest counts."""


CALLS = Bound("calls")
"""Of many small operations."""


def of_work(setting: Setting, seconds: float, moved: float = 0.0, operations: float = 0.0) -> Bound:
    """The bound that leaves the least room.

    Args:
        setting: whose machine and precision are meant.
        seconds: what it took.
        moved: bytes, at the bandwidth of a plain copy.
        operations: multiplications and additions, at the speed of plain products.
    """
    sizes = setting.sizes
    by_bytes = moved / bandwidth(sizes.copied)
    by_operations = 0.0
    if operations:
        by_operations = operations / arithmetic(sizes.inner, sizes.width, setting.dtype)
    if by_bytes >= by_operations:
        return Bound("bytes", by_bytes / seconds)
    return Bound("operations", by_operations / seconds)


def of_step(setting: Setting, seconds: float, cache: Weir, rows: int = 1) -> Bound:
    """The bound of a decode step, of so many rows: weights are read once, slots by each row."""
    model = cache.model
    moved = weight_bytes(model) + cache.read_bytes
    operations = rows * 2 * weights_of(model) + 2 * _queries(model) * cache.read_bytes / _size(
        model
    )
    return of_work(setting, seconds, moved, operations)


def of_prompt(setting: Setting, seconds: float, model: PreTrainedModel, tokens: int) -> Bound:
    """The bound that the products of a prompt give alone, but for the last one's logits."""
    weight: Any = model.get_input_embeddings().weight
    products = weights_of(model) - weight.numel()
    return of_work(setting, seconds, operations=2 * tokens * products + 2 * weight.numel())


def weights_of(model: PreTrainedModel) -> int:
    """Numbers that a token is multiplied with, the embedding once, which is the head too."""
    return weight_bytes(model) // _size(model)


@lru_cache(maxsize=8)
def arithmetic(rows: int, columns: int, dtype: torch.dtype) -> float:
    """Multiplications and additions a second of a product with a weight [rows, columns]."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    given = {n: torch.randn(n, columns, generator=generator).to(dtype) for n in ROWS}

    def product(x: torch.Tensor) -> Doing:
        return Doing(lambda: F.linear(x, weight))

    taken = middle(in_turns({str(n): product(x) for n, x in given.items()}, rounds=9))
    return max(2 * n * rows * columns / taken[str(n)] for n in ROWS)


def _queries(model: PreTrainedModel) -> int:
    """Query heads that share a key and a value."""
    config = model.config
    return int(config.num_attention_heads // config.num_key_value_heads)


def _size(model: PreTrainedModel) -> int:
    """Bytes of a number."""
    weight: Any = model.get_input_embeddings().weight
    return int(weight.element_size())
