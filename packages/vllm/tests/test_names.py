"""Everything of vLLM that the plug-in uses is still there, by name.

A new release of vLLM that moves one of these fails here and says which, before a comparison with
weir fails and says nothing. Names that begin with an underscore are vLLM's private ones.
"""

import dataclasses
import inspect
from importlib import import_module

import pytest
import torch

from weir_vllm.rotary import SERVED
from weir_vllm.worker import KEPT, RECUT, UNUSED

ATTRIBUTES = {
    "vllm.config:get_current_vllm_config_or_none": [],
    "vllm.config:VllmConfig": ["use_v2_model_runner"],
    "vllm.config:ModelConfig": [
        "architectures",
        "is_encoder_decoder",
        "is_hybrid",
        "is_multimodal_model",
        "use_mla",
        "uses_mrope",
    ],
    "vllm.config:ParallelConfig": ["use_ubatching"],
    "vllm.forward_context:get_forward_context": [],
    "vllm.forward_context:is_forward_context_available": [],
    "vllm.logger:init_logger": [],
    "vllm.platforms:current_platform": ["is_cpu"],
    "vllm._custom_ops:rotary_embedding": [],
    "vllm.model_executor.custom_op:op_registry_oot": [],
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": [],
    "vllm.model_executor.layers.attention:Attention": ["get_attn_backend", "get_kv_cache_spec"],
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase": ["_compute_inv_freq"],
    "vllm.model_executor.layers.rotary_embedding:RotaryEmbedding": ["forward_static"],
    "vllm.v1.attention.backend:AttentionBackend": [
        "customize_spec",
        "forward_includes_kv_cache_update",
        "get_builder_cls",
        "get_name",
    ],
    "vllm.v1.attention.backend:AttentionCGSupport": ["NEVER"],
    "vllm.v1.attention.backend:AttentionType": ["DECODER"],
    "vllm.v1.attention.backend:AttentionMetadataBuilder": [
        "build",
        "get_cudagraph_support",
        "supports_update_block_table",
    ],
    "vllm.v1.attention.backend:CommonAttentionMetadata": ["replace"],
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl": [
        "do_kv_cache_update",
        "forward",
    ],
    "vllm.v1.core.block_pool:BlockPool": [
        "free_blocks",
        "get_cached_block",
        "get_new_blocks",
        "get_num_free_blocks",
        "touch",
    ],
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": ["block_id", "is_null", "ref_cnt"],
    "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager": [
        "add_local_computed_blocks",
        "find_longest_cache_hit",
        "get_num_blocks_to_allocate",
        "get_num_skipped_tokens",
        "reachable_block_mask",
        "remove_skipped_blocks",
    ],
    "vllm.v1.kv_cache_interface:AttentionSpec": [],
    "vllm.v1.kv_cache_interface:FullAttentionSpec": [],
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": [
        "is_uniform_with_collection",
        "max_admission_blocks_per_request",
    ],
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry": [
        "check_kv_cache_spec_registry",
        "register",
    ],
}
SET_IN_INIT = {
    "vllm.config:VllmConfig": [
        "additional_config",
        "cache_config",
        "compilation_config",
        "kv_transfer_config",
        "model_config",
        "parallel_config",
        "scheduler_config",
        "speculative_config",
    ],
    "vllm.config:CacheConfig": ["block_size", "cache_dtype", "kv_sharing_fast_prefill"],
    "vllm.config:ModelConfig": ["max_model_len"],
    "vllm.config:ParallelConfig": [
        "decode_context_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
    ],
    "vllm.config:SchedulerConfig": [
        "disable_hybrid_kv_cache_manager",
        "max_num_batched_tokens",
        "max_num_seqs",
    ],
    "vllm.config:CompilationConfig": ["static_forward_context"],
}
"""Fields of dataclasses."""
ASSIGNED = {
    "vllm.config:ModelConfig": ["runner_type"],
    "vllm.model_executor.layers.attention:Attention": [
        "attn_backend",
        "attn_type",
        "head_size",
        "head_size_v",
        "impl",
        "kv_cache",
        "kv_cache_dtype",
        "kv_cache_torch_dtype",
        "kv_sharing_target_layer_name",
        "layer_name",
        "num_heads",
        "num_kv_heads",
        "sliding_window",
    ],
    "vllm.v1.core.block_pool:BlockPool": ["blocks", "null_block", "num_gpu_blocks"],
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": [
        "block_pool",
        "block_size",
        "req_to_blocks",
    ],
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase": [
        "base",
        "cos_sin_cache",
        "head_size",
        "is_neox_style",
        "rotary_dim",
    ],
    "vllm.model_executor.layers.rotary_embedding:LinearScalingRotaryEmbedding": ["scaling_factors"],
    "vllm.model_executor.layers.rotary_embedding:YaRNScalingRotaryEmbedding": [
        "mscale",
        "scaling_factor",
    ],
}
"""Attributes that `__init__` assigns."""


def find(place):
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("place", ATTRIBUTES)
def test_attributes_are_there(place):
    found = find(place)
    fields = {f.name for f in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else ()
    assert [
        name for name in ATTRIBUTES[place] if not hasattr(found, name) and name not in fields
    ] == []


@pytest.mark.parametrize("place", SET_IN_INIT)
def test_fields_are_there(place):
    names = {field.name for field in dataclasses.fields(find(place))}
    assert [name for name in SET_IN_INIT[place] if name not in names] == []


@pytest.mark.parametrize("place", ASSIGNED)
def test_attributes_are_assigned(place):
    source = inspect.getsource(find(place))
    lost = [
        name
        for name in ASSIGNED[place]
        if f"self.{name} =" not in source
        and f"self.{name}:" not in source
        and f'"{name}"' not in source
    ]
    assert lost == []


def test_metadata_has_no_field_that_is_unknown_and_set():
    """A field that a release adds must be None by default, so that `check_fields` sees its use."""
    names = find("vllm.v1.attention.backend:CommonAttentionMetadata")
    fields = {field.name: field for field in dataclasses.fields(names)}
    assert {name for name in RECUT | KEPT if name not in fields} <= {"req_idx", "positions"}
    for name, field in fields.items():
        if name not in RECUT | KEPT | UNUSED:
            assert field.default is None, name


def test_attention_is_called_with_what_the_plug_in_takes():
    impl = find("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl")
    assert list(inspect.signature(impl.forward).parameters)[:7] == [
        "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata",
    ]  # fmt: skip
    assert list(inspect.signature(impl.do_kv_cache_update).parameters) == [
        "self", "layer", "key", "value", "kv_cache", "slot_mapping",
    ]  # fmt: skip
    builder = find("vllm.v1.attention.backend:AttentionMetadataBuilder")
    assert list(inspect.signature(builder.build).parameters)[:4] == [
        "self", "common_prefix_len", "common_attn_metadata", "fast_build",
    ]  # fmt: skip


def test_rotary_embeddings_are_made_by_these_names():
    """vLLM looks a replacement up by the name of the class it was asked for."""
    module = import_module("vllm.model_executor.layers.rotary_embedding")
    for name, made in SERVED.items():
        assert getattr(module, name) is made.__mro__[2]


def test_pytorch_tells_of_modules():
    from torch.nn.modules.module import register_module_module_registration_hook

    seen = []
    handle = register_module_module_registration_hook(lambda *given: seen.append(given[1:]))
    parent, child = torch.nn.Module(), torch.nn.Identity()
    parent.child = child
    handle.remove()
    assert seen == [("child", child)]
