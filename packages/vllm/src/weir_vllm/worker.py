"""The worker's side: what attention sees of the blocks that a request holds.

A step's tokens are cut into rows that end where a block of the stream ends, because the window
moves on there. Each row is given to vLLM's attention kernels as a request with a shorter block
table: its sinks, then its window. The sinks of a row are copies in scratch blocks. They are rotated
from the unchanged originals at every step, so that their positions are directly before the window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from weir_vllm.errors import StreamError
from weir_vllm.layout import BlockLayout, find_layout
from weir_vllm.policy import Ends
from weir_vllm.scheduler import StreamSpec

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""The attention backends that can be given shorter block tables."""
RECUT = {
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "seq_lens_cpu_upper_bound",
    "num_reqs",
    "max_query_len",
    "max_seq_len",
    "block_table_tensor",
    "is_prefilling",
    "req_idx",
}
"""Fields of vLLM's metadata that are computed again for rows."""
KEPT = {"num_actual_tokens", "slot_mapping", "positions", "causal"}
"""Fields that stay the same when requests are cut into rows."""
UNUSED = {
    # vLLM stores values here that it has computed from other fields. For rows, they are None.
    "_num_computed_tokens_cache",
    "_token_to_req_indices_cache",
    "_seq_lens_cpu",
    "_num_computed_tokens_cpu",
}
LATE = "weir_late_rows"
"""The attribute of attention metadata with the rows whose sinks are written in the same step."""


def count_rows(requests: int, tokens: int, block: int) -> int:
    """Return the most rows into which a step can be cut, given its requests and tokens."""
    return min(tokens, requests + (tokens + requests * (block - 2)) // block)


@dataclass(frozen=True)
class Rows:
    """A step, cut where the window moves on.

    Attributes:
        request: the request of each row.
        start: where each row's queries begin in the step, and where the last one ends.
        end: the position after the last token of each row.
        gap: blocks between the sinks and the window.
    """

    request: np.ndarray
    start: np.ndarray
    end: np.ndarray
    gap: np.ndarray


def cut_rows(starts: np.ndarray, seen: np.ndarray, size: int, kept: int) -> Rows:
    """Cut the tokens of a step into rows.

    Args:
        starts: where the queries of each request begin, and where the last one ends.
        seen: the length of each request's stream after the step.
        size: tokens of a block.
        kept: blocks of sinks and window together.
    """
    done = seen - np.diff(starts)
    # Tokens in blocks 0 to `kept` see everything before them, so those of a request are one row.
    low = np.maximum(done // size, kept)
    high = np.maximum((seen - 1) // size, low)
    counts = high - low + 1
    request = np.repeat(np.arange(len(seen)), counts)
    first = np.cumsum(counts) - counts
    block = low[request] + np.arange(len(request)) - first[request]
    begin = np.maximum(done[request], np.where(block > low[request], block * size, 0))
    end = np.minimum(seen[request], (block + 1) * size)
    start = starts[:-1][request] + begin - done[request]
    return Rows(request, np.append(start, starts[-1]), end, block - kept)


@cache
def make_backend(stock: Any, ends: Ends, requests: int, tokens: int) -> Any:
    """Return a backend that keeps sinks and a window, and computes as `stock` does.

    Args:
        stock: a backend of vLLM.
        ends: what each layer keeps.
        requests: most requests of a step.
        tokens: most tokens of a step.
    """

    def customize_spec(cls: Any, spec: Any) -> Any:
        spec = stock.customize_spec(spec)
        if type(spec) is not FullAttentionSpec:
            return spec
        size = spec.block_size
        whole = ends.whole_blocks(size)
        assert whole.recent is not None
        same = {field.name: getattr(spec, field.name) for field in fields(AttentionSpec)}
        sinks = whole.sinks // size
        scratch = sinks * count_rows(requests, tokens, size)
        return StreamSpec(
            **same, sliding_window=whole.recent + 1, sink_blocks=sinks, scratch=scratch
        )

    name = f"Stream_{stock.__qualname__}_{ends.sinks}_{ends.recent}"
    return type(
        name,
        (stock,),
        {
            "__module__": __name__,
            "__qualname__": name,
            "customize_spec": classmethod(customize_spec),
            "get_builder_cls": staticmethod(lambda: make_builder(stock.get_builder_cls())),
        },
    )


@cache
def make_builder(stock: Any) -> Any:
    """Return a metadata builder that gives `stock` rows in place of requests."""

    class StreamBuilder(stock):  # type: ignore[misc]
        """Cuts a step into rows, and rotates their sinks."""

        supports_update_block_table = False

        @classmethod
        def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
            """Return that there are no CUDA graphs, because steps differ in the number of rows."""
            return AttentionCGSupport.NEVER

        def __init__(
            self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            if not isinstance(kv_cache_spec, StreamSpec):
                raise StreamError(
                    f"vLLM stores the keys of {layer_names[0]} in a "
                    f"{type(kv_cache_spec).__name__}, which weir-vllm did not ask for. Remove "
                    "--disable-hybrid-kv-cache-manager."
                )
            layers = [vllm_config.compilation_config.static_forward_context[n] for n in layer_names]
            streams = layers[0].weir_streams
            streams.check_layers(vllm_config)
            self.size = kv_cache_spec.block_size
            self.sinks = kv_cache_spec.sink_blocks
            self.kept = self.sinks + (kv_cache_spec.sliding_window - 1) // self.size
            scratch = streams.take_scratch(tuple(layer_names), kv_cache_spec.scratch)
            self.turner = SinkTurner(layers, self.size, self.sinks, scratch, vllm_config)
            self.most_rows = kv_cache_spec.scratch // self.sinks if self.sinks else None
            self.places = torch.arange(self.kept + 1, device=device)

        def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
            """Return False, because rows share no blocks. Only vLLM before 0.32 calls this."""
            return False

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            """Build the metadata of a step's rows."""
            rows, late = self.recut(common_attn_metadata)
            metadata = super().build(0, rows, fast_build)
            if late is not None:
                setattr(metadata, LATE, late)
            return metadata

        def recut(self, common: Any) -> tuple[Any, SinkRows | None]:
            """Return vLLM's metadata for rows, and the rows whose sinks must be rotated later."""
            check_fields(common)
            requests = common.num_reqs
            starts = common.query_start_loc_cpu[: requests + 1].numpy().astype(np.int64)
            lengths = common.seq_lens_cpu_upper_bound
            lengths = common.seq_lens.cpu() if lengths is None else lengths
            seen = lengths[:requests].numpy().astype(np.int64)
            rows = cut_rows(starts, seen, self.size, self.kept)
            device = common.seq_lens.device

            def put(values: np.ndarray, dtype: torch.dtype = torch.long) -> torch.Tensor:
                return torch.from_numpy(values).to(device, dtype, non_blocking=True)

            request, gap = put(rows.request), put(rows.gap)
            old = common.block_table_tensor
            shift = torch.where(self.places < self.sinks, 0, gap[:, None])
            at = (self.places + shift).clamp_(max=old.shape[1] - 1)
            table = old[request[:, None], at]
            late = None
            moved = np.flatnonzero(rows.gap)
            if self.sinks and len(moved):
                if self.most_rows is not None and len(moved) > self.most_rows:
                    raise StreamError(
                        f"a step has {len(moved)} rows with rotated sinks, but there is scratch "
                        f"space for only {self.most_rows}. Please report this."
                    )
                scratch = self.turner.scratch[: len(moved)].to(device)
                table[put(moved), : self.sinks] = scratch.to(table.dtype)
                masters = old[put(rows.request[moved]), : self.sinks].long()
                turned = SinkRows(masters, scratch, put(rows.gap[moved] * self.size))
                # A step may write sinks that its own rows need. Where requests share a prefix,
                # these are also the sinks of others, so all rows wait for the layer's keys.
                new = np.diff(starts)
                if ((seen - new < self.sinks * self.size) & (new > 0)).any():
                    late = turned
                else:
                    self.turner.turn_all(turned)
            length = rows.end - rows.gap * self.size
            new = np.diff(rows.start)
            changed = {
                "query_start_loc": put(rows.start, common.query_start_loc.dtype),
                "query_start_loc_cpu": torch.from_numpy(rows.start).to(
                    common.query_start_loc_cpu.dtype
                ),
                "seq_lens": put(length, common.seq_lens.dtype),
                "seq_lens_cpu_upper_bound": torch.from_numpy(length).to(lengths.dtype),
                "num_reqs": len(length),
                "max_query_len": int(new.max(initial=0)),
                "max_seq_len": int(length.max(initial=0)),
                "block_table_tensor": table,
            }
            for name in ("is_prefilling", "req_idx"):
                if (value := getattr(common, name, None)) is not None:
                    changed[name] = value[rows.request]
            changed |= {name: None for name in UNUSED if hasattr(common, name)}
            return common.replace(**changed), late

    return StreamBuilder


def check_fields(common: Any) -> None:
    """Refuse metadata that would have to be cut in a way the plug-in does not know."""
    for field in fields(common):
        if field.name in RECUT or field.name in KEPT or field.name in UNUSED:
            continue
        value = getattr(common, field.name)
        if value is not None and not (isinstance(value, dict) and not value):
            raise StreamError(
                f"vLLM passes {field.name!r} to attention, which weir-vllm does not know. Turn "
                "the feature off, or use another version of vLLM."
            )
    if common.causal is not True:
        raise StreamError("weir-vllm serves causal attention only")


@dataclass(frozen=True)
class SinkRows:
    """Rows whose sinks must be rotated.

    Attributes:
        masters: the blocks of each row's sinks.
        scratch: the blocks for their copies.
        by: the positions by which each row's sinks must be moved.
    """

    masters: torch.Tensor
    scratch: torch.Tensor
    by: torch.Tensor


class SinkTurner:
    """Writes rotated copies of sinks into scratch blocks.

    Attributes:
        layers: the attention layers.
        config: vLLM's configuration.
        size: tokens of a block.
        scratch: the scratch blocks, `[rows, blocks of sinks]`.
        stacks: the caches of layers that are rotated together, each stack with its rotary
            embedding; None until there is a cache.
        layout: where a block stores keys; None until there is a cache.
        source: the first layer's cache, from which `layout` was found.
    """

    def __init__(
        self, layers: list[Any], size: int, sinks: int, scratch: range, config: Any
    ) -> None:
        self.layers = layers
        self.config = config
        self.size = size
        rows = len(scratch) // sinks if sinks else 0
        blocks = torch.arange(scratch.start, scratch.stop, dtype=torch.long)
        self.scratch = blocks.view(rows, -1) if rows else blocks.view(0, 0)
        self.stacks: list[tuple[torch.Tensor, Any]] | None = None
        self.layout: BlockLayout | None = None
        self.source: torch.Tensor | None = None
        if sinks:
            for layer in layers:
                if not hasattr(layer, "weir_turner"):
                    layer.impl.forward = self.turn_before(layer.impl.forward)
                layer.weir_turner = self  # vLLM can make builders again, and with them turners

    @staticmethod
    def turn_before(forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a layer's attention, extended to first rotate sinks that the same step wrote."""

        def turn_and_attend(
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            attn_metadata: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            late = getattr(attn_metadata, LATE, None)
            if late is not None:
                turner = layer.weir_turner
                turner.prepare()
                turner.turn(kv_cache[None], layer.weir_streams.find_rotary(layer), late)
            return forward(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)

        return turn_and_attend

    def prepare(self) -> None:
        """Find out how the cache is laid out, as soon as there is one."""
        first = self.layers[0]
        if self.stacks is not None and self.source is first.kv_cache:
            return
        self.source = first.kv_cache  # vLLM can allocate another one later
        device = first.kv_cache.device
        self.scratch = self.scratch.to(device)
        streams = first.weir_streams
        count = self.config.cache_config.num_gpu_blocks
        probe = int(self.scratch[-1, -1])
        self.layout = find_layout(first, first.kv_cache, probe, count, self.size)
        same = (first.kv_cache.shape, first.kv_cache.dtype, type(first.impl))
        by_rotary: dict[int, list[Any]] = {}
        for layer in self.layers:
            if (layer.kv_cache.shape, layer.kv_cache.dtype, type(layer.impl)) != same:
                raise StreamError(
                    f"{layer.layer_name} stores its keys differently than {first.layer_name}, but "
                    "all layers with one policy must store them in the same way"
                )
            by_rotary.setdefault(id(streams.find_rotary(layer)), []).append(layer)
        self.stacks = [
            (stack, streams.find_rotary(layers[0]))
            for layers in by_rotary.values()
            for stack in stack_caches([layer.kv_cache for layer in layers])
        ]

    def turn_all(self, rows: SinkRows) -> None:
        """Rotate sinks in all layers."""
        if not self.layers[0].kv_cache.numel():
            return  # vLLM tries the model out before there is a cache
        self.prepare()
        assert self.stacks is not None
        for stack, rotary in self.stacks:
            self.turn(stack, rotary, rows)

    def turn(self, stack: torch.Tensor, rotary: Any, rows: SinkRows) -> None:
        """Rotate sinks in caches `[layers, ...]`."""
        assert self.layout is not None
        axis = self.layout.axis + 1
        each = rows.masters.shape[1]
        copies = stack.index_select(axis, rows.masters.flatten()).movedim(axis, 1).contiguous()
        layers, blocks = copies.shape[:2]
        keys = self.layout.view_keys(copies.view(layers, blocks, -1))
        cos, sin = rotary.turn(rows.by)
        rotate_keys(
            keys,
            cos.repeat_interleave(each, 0),
            sin.repeat_interleave(each, 0),
            rotary.is_neox_style,
        )
        stack.index_copy_(axis, rows.scratch.flatten(), copies.movedim(1, axis))


def rotate_keys(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool) -> None:
    """Rotate keys in place.

    Args:
        keys: `[layers, blocks, heads, tokens, tokens, dimensions, dimensions]`, in which tokens and
            dimensions have two axes each, as in `BlockLayout`.
        cos, sin: cosines and sines for each block, `[blocks, half of the rotated dimensions]`.
        neox: whether the first half of the rotated dimensions is paired with the second half, as in
            GPT-NeoX. Otherwise, neighboring dimensions are pairs.
    """
    half = cos.shape[1]
    pair = keys.shape[-1]
    if neox:
        if half % pair:
            raise StreamError(f"{half} rotated pairs are not a multiple of {pair}")
        step = half // pair
        first, second = keys[..., :step, :], keys[..., step : 2 * step, :]
        shape = (len(cos), 1, 1, 1, step, pair)
    elif pair == 1:
        first, second = keys[..., 0 : 2 * half : 2, :], keys[..., 1 : 2 * half : 2, :]
        shape = (len(cos), 1, 1, 1, half, 1)
    else:
        step = 2 * half // pair
        first, second = keys[..., :step, 0::2], keys[..., :step, 1::2]
        shape = (len(cos), 1, 1, 1, step, pair // 2)
    cos, sin = cos.view(shape), sin.view(shape)
    one, two = first.float(), second.float()
    if first.dtype == torch.float32:
        one, two = one.clone(), two.clone()
    first.copy_(one * cos - two * sin)
    second.copy_(two * cos + one * sin)


def stack_caches(caches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the caches of layers as tensors `[layers, ...]`, which share their memory.

    Caches at equal distances in one allocation become one tensor, so that one operation rotates the
    sinks of all layers.
    """
    first = caches[0]
    if len(caches) == 1:
        return [first[None]]
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(caches)}
    together = len({c.untyped_storage().data_ptr() for c in caches}) == 1
    if not together or len(steps) != 1 or len({(c.shape, c.stride()) for c in caches}) != 1:
        return [cache[None] for cache in caches]
    (step,) = steps
    shape, stride = (len(caches), *first.shape), (step, *first.stride())
    return (
        [first.as_strided(shape, stride, first.storage_offset())]
        if step > 0
        else [cache[None] for cache in caches]
    )
