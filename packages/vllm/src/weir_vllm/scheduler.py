"""The scheduler's side: which blocks a request holds.

A request keeps the blocks of its sinks and of its window. The blocks between them go back to vLLM's
pool. Importing this module registers the spec and its manager with vLLM, so that every process that
receives a spec also knows its manager.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from weir_vllm.errors import StreamError


@dataclass(frozen=True, kw_only=True)
class StreamSpec(SlidingWindowSpec):
    """What a layer keeps: blocks of sinks, a window of `sliding_window - 1` tokens, and the block
    that is being filled.

    Attributes:
        sink_blocks: blocks at the beginning of the stream that are never freed.
        scratch: blocks that the worker fills with rotated copies of sinks.
    """

    sink_blocks: int
    scratch: int

    def max_admission_blocks_per_request(self, *args: Any, **kwargs: Any) -> int:
        """Return the most blocks that a request holds: those of its window and of its sinks."""
        return self.sink_blocks + super().max_admission_blocks_per_request(*args, **kwargs)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        """Return whether all layers keep the same. Otherwise, they need separate block tables."""
        return all(spec == self for spec in kv_cache_specs.values())


class StreamManager(SlidingWindowManager):
    """Frees the blocks between sinks and window, and finds both again in the prefix cache."""

    def __init__(self, kv_cache_spec: StreamSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.sinks = kv_cache_spec.sink_blocks
        self.reserve(kv_cache_spec.scratch)

    def reserve(self, count: int) -> None:
        """Take the scratch blocks out of the pool permanently.

        The pool's size is reduced by their number, so that its usage is 0 when no request runs, and
        `reset_prefix_cache` succeeds.
        """
        pool = self.block_pool
        free = pool.get_num_free_blocks()
        if count >= free:
            raise StreamError(
                f"the KV cache has {free} free blocks, and weir-vllm needs {count} of them for "
                "rotated sinks. Give the KV cache more memory, or lower --max-num-batched-tokens, "
                "--max-num-seqs or the number of sinks."
            )
        if not count:
            return
        first = len(pool.blocks) - free
        ids = [block.block_id for block in pool.get_new_blocks(count)]
        if ids != list(range(first, first + count)):
            raise StreamError(
                "vLLM's block pool does not hand out blocks in order, so the worker cannot know "
                "which blocks are scratch. Use another version of vLLM."
            )
        pool.num_gpu_blocks -= count

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        """Free the blocks that the window has passed, except the sinks."""
        if request_id not in self.req_to_blocks:
            return
        blocks = self.req_to_blocks[request_id]
        skipped = self.get_num_skipped_tokens(processed_computed_tokens) // self.block_size
        freed = []
        for place in range(min(skipped, len(blocks)) - 1, self.sinks - 1, -1):
            if blocks[place].is_null:  # then all blocks before it are, too
                break
            freed.append(blocks[place])
            blocks[place] = self.block_pool.null_block
        if freed:
            self.block_pool.free_blocks(freed)

    # The methods below are for prefix caching: a hit also needs the sinks.

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Find a window in the prefix cache, and the sinks that belong to it."""
        found, length = super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, *args, **kwargs
        )
        for place in range(min(kv_cache_spec.sink_blocks, len(found[0]))):
            cached = block_pool.get_cached_block(block_hashes[place], kv_cache_group_ids)
            if cached is None:
                return tuple([] for _ in kv_cache_group_ids), 0
            for blocks, block in zip(found, cached, strict=True):
                blocks[place] = block
        return found, length

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: Any,
        *args: Any,
        **kwargs: Any,
    ) -> list[bool] | None:
        """Return which blocks the prefix cache keeps: sinks, and windows that a hit can need."""
        mask = super().reachable_block_mask(
            start_block, end_block, alignment_tokens, kv_cache_spec, *args, **kwargs
        )
        if mask is not None:
            for place in range(start_block, min(end_block, kv_cache_spec.sink_blocks)):
                mask[place - start_block] = True
        return mask

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Any,
        total_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Count the blocks that a request needs, including free blocks that hold cached sinks."""
        count = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **kwargs
        )
        skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        taken = new_computed_blocks[: min(self.sinks, skipped)]
        return count + sum(block.ref_cnt == 0 and not block.is_null for block in taken)

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Give a request the blocks that were found in the prefix cache, including sinks."""
        super().add_local_computed_blocks(request_id, new_computed_blocks, *args, **kwargs)
        blocks = self.req_to_blocks[request_id]
        for place, block in enumerate(new_computed_blocks[: self.sinks]):
            if blocks[place].is_null:
                self.block_pool.touch([block])
                blocks[place] = block


def register_spec() -> None:
    """Tell vLLM which manager a `StreamSpec` has."""
    # vLLM registers its own specs only while its list is empty, so this must come first.
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    KVCacheSpecRegistry.register(StreamSpec, StreamManager, uniform_type_base_spec=StreamSpec)


register_spec()
