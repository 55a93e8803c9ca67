"""Weights that stay in the blocks of their GGUF file: `weir.load(name, weights="gguf")`.

The blocks are read from the file into the order that kernels multiply them in, some rows at a time,
and are neither dequantized nor stored elsewhere. Knows nothing about caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from weir.models.block_weights import LINEAR, STORED_FORMATS, Blocks, fits_blocks, looks_up, put
from weir.models.gguf import Filling
from weir.models.memory import LargePages

AHEAD = 2
"""Weights for each thread that are read before they are needed."""


def stored_in_blocks(
    model: PreTrainedModel, fillings: Mapping[str, Filling]
) -> dict[str, list[nn.Module]]:
    """Return the parameters whose blocks can be multiplied, with the modules that have them.

    A table that the embedding and the head share is listed for both, or for the head alone where
    the embedding computes something that blocks cannot. A model of which no layer but the head is
    linear has none.

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
        found: the parameters in question, as `stored_in_blocks` returns them.
        fillings: the tensors of each parameter.
        advance: called with the bytes that were read.

    Returns:
        The parameters that no module needs any more.
    """
    for name, blocks in _read_ahead({name: fillings[name] for name in found}):
        for module in found[name]:
            put(module, blocks)
        advance(fillings[name].nbytes)
    # A table may still be needed by an embedding that cannot look up rows in blocks.
    return set(found) - dict(model.named_parameters()).keys()


def shrink_to_stored(skeleton: PreTrainedModel, fillings: Mapping[str, Filling]) -> None:
    """Give a model on the device `meta` blocks of the sizes that `put_stored_blocks` would read."""
    for name, modules in stored_in_blocks(skeleton, fillings).items():
        weight = skeleton.get_parameter(name)
        blocks = Blocks.quantize(weight, STORED_FORMATS[fillings[name].kind])
        for module in modules:
            put(module, blocks)


def _read_ahead(fillings: Mapping[str, Filling]) -> Iterator[tuple[str, Blocks]]:
    """Yield the blocks of each parameter, which threads read meanwhile."""
    pages, waiting = LargePages(), list[tuple[str, Future[Blocks]]]()
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        for name, filling in fillings.items():
            waiting.append((name, pool.submit(_read, filling)))
            if len(waiting) > AHEAD * threads:
                yield _take(*waiting.pop(0), pages)
        while waiting:
            yield _take(*waiting.pop(0), pages)


def _take(name: str, future: Future[Blocks], pages: LargePages) -> tuple[str, Blocks]:
    blocks = future.result()
    blocks.codes = pages.empty(blocks.codes.shape, blocks.codes.dtype).copy_(blocks.codes)
    blocks.scales = pages.empty(blocks.scales.shape, blocks.scales.dtype).copy_(blocks.scales)
    return name, blocks


def _read(filling: Filling) -> Blocks:
    """Read the blocks of one parameter."""
    rows = next(iter(filling.raw_parts(filling.shape[0])))[1]
    return Blocks.read(rows, filling.kind)
