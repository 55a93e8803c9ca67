"""Weights that stay in the blocks of their GGUF file: `weir.load(name, weights="gguf")`.

The blocks are read from the file, some rows at a time, and put into the order that kernels need.
They are not dequantized, and no second copy of them is kept. This module does not use caches.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from weir.models.gguf import Filling
from weir.native.block_formats import PANEL
from weir.native.block_types import describe_widened
from weir.native.block_weights import LINEAR, STORED_FORMATS, Blocks, fits_blocks, looks_up, put
from weir.native.huge_pages import LargePages

TOGETHER = 1 << 20
"""Bytes of a file that a thread reads at a time."""
AHEAD = 2
"""Number of weights for each thread that are read before they are needed."""


def stored_in_blocks(
    model: PreTrainedModel, fillings: Mapping[str, Filling]
) -> dict[str, list[nn.Module]]:
    """Return the parameters whose blocks can be multiplied, and the modules that have them.

    A table that the embedding and the head share is listed for both, or only for the head if the
    embedding computes something that blocks do not support. If only the embedding and the head have
    such blocks, the result is empty.

    Args:
        model: a model without weights.
        fillings: the tensors of each parameter.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    holders: dict[int, list[Any]] = {}
    for module in model.modules():
        linear = type(module).__name__ in LINEAR and fits_blocks(module)
        if linear or (module is embedding and looks_up(module)):
            holders.setdefault(id(module.weight), []).append(module)
    parameters = dict(model.named_parameters())
    found = {
        name: holders[id(parameters[name])]
        for name, filling in fillings.items()
        if filling.kind in STORED_FORMATS and id(parameters.get(name)) in holders
    }
    ends = (embedding, head)
    inner = any(module not in ends for modules in found.values() for module in modules)
    return found if inner else {}


def put_stored_blocks(
    model: PreTrainedModel,
    found: Mapping[str, list[nn.Module]],
    fillings: Mapping[str, Filling],
    advance: Callable[[int], Any],
) -> set[str]:
    """Give modules of a model the blocks of its file.

    Args:
        model: a model without weights.
        found: the parameters, as `stored_in_blocks` returns them.
        fillings: the tensors of each parameter.
        advance: called with the number of bytes that were read.

    Returns:
        The parameters that no module needs any longer.
    """
    for name, blocks in _read_ahead({name: fillings[name] for name in found}):
        for module in found[name]:
            put(module, blocks)
        advance(fillings[name].nbytes)
    widened = describe_widened(fillings[name].kind for name in found)
    if widened:
        warnings.warn(widened, stacklevel=4)
    # A table may still be needed by an embedding that cannot look up rows in blocks.
    return set(found) - dict(model.named_parameters()).keys()


def shrink_to_stored(skeleton: PreTrainedModel, fillings: Mapping[str, Filling]) -> None:
    """Replace weights of a model on the device `meta` by blocks of the sizes that
    `put_stored_blocks` would read.
    """
    for name, modules in stored_in_blocks(skeleton, fillings).items():
        weight = skeleton.get_parameter(name)
        blocks = Blocks(fillings[name].kind, weight.shape[0], weight.shape[1], weight.device)
        for module in modules:
            put(module, blocks)


def _read_ahead(fillings: Mapping[str, Filling]) -> Iterator[tuple[str, Blocks]]:
    """Yield the blocks of each parameter, which threads read ahead."""
    pages, threads = LargePages(), torch.get_num_threads()
    waiting: deque[tuple[str, Blocks, Future[None]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for name, filling in fillings.items():
            blocks = Blocks(filling.kind, *filling.shape)
            # The memory that this replaces was never written to, so it never took any space.
            blocks.codes = pages.empty(blocks.codes.shape, blocks.codes.dtype)
            blocks.scales = pages.empty(blocks.scales.shape, blocks.scales.dtype)
            waiting.append((name, blocks, pool.submit(_read, blocks, filling)))
            if len(waiting) > AHEAD * threads:
                yield _wait(*waiting.popleft())
        while waiting:
            yield _wait(*waiting.popleft())


def _wait(name: str, blocks: Blocks, read: Future[None]) -> tuple[str, Blocks]:
    read.result()
    return name, blocks


def _read(blocks: Blocks, filling: Filling) -> None:
    """Read the blocks of one parameter, some rows at a time."""
    rows = max(PANEL, TOGETHER * blocks.outputs // max(1, filling.nbytes) // PANEL * PANEL)
    for start, part in filling.raw_parts(rows):
        blocks.fill(start, part)
