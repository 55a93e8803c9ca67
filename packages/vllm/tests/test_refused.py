"""What the plug-in cannot serve is refused at startup, by name, with what works."""

from types import SimpleNamespace

import pytest

from engines import ask, engine, held, scheduler_of, variables
from reference import allowed, weir_says
from small_models import random_tokens
from weir_vllm import streams
from weir_vllm.errors import StreamError, StreamPolicyError
from weir_vllm.settings import Settings, read_settings


def make_config(**changed):
    """Make a configuration that the plug-in serves, except for changes (`part__name=value`)."""
    parts = {
        "model_config": {
            "enforce_eager": True,
            "use_mla": False,
            "is_encoder_decoder": False,
            "uses_mrope": False,
            "is_multimodal_model": False,
            "runner_type": "generate",
            "is_hybrid": False,
            "architectures": ["LlamaForCausalLM"],
            "max_model_len": 1000,
        },
        "parallel_config": {
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "use_ubatching": False,
        },
        "cache_config": {
            "cache_dtype": "auto",
            "kv_sharing_fast_prefill": False,
            "block_size": 16,
        },
        "scheduler_config": {
            "disable_hybrid_kv_cache_manager": False,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
        },
    }
    top = {
        "speculative_config": None,
        "kv_transfer_config": None,
        "use_v2_model_runner": False,
        "additional_config": {},
    }
    for place, value in changed.items():
        part, _, name = place.partition("__")
        if name:
            assert name in parts[part]
            parts[part][name] = value
        else:
            assert part in top
            top[part] = value
    return SimpleNamespace(**{k: SimpleNamespace(**v) for k, v in parts.items()}, **top)


def settings(text="sink(4) | recent(60)", **more):
    return Settings(read_settings({"weir": text}, {}).policy, **more)


FEATURES = {
    "speculative_config": (object(), "speculative decoding"),
    "kv_transfer_config": (object(), "KV connector"),
    "use_v2_model_runner": (True, "VLLM_USE_V2_MODEL_RUNNER=0"),
    "model_config__enforce_eager": (False, "--enforce-eager"),
    "model_config__use_mla": (True, "MLA"),
    "model_config__is_encoder_decoder": (True, "encoder-decoder"),
    "model_config__uses_mrope": (True, "M-RoPE"),
    "model_config__is_multimodal_model": (True, "images"),
    "model_config__runner_type": ("pooling", "pooling"),
    "model_config__is_hybrid": (True, "state-space"),
    "parallel_config__decode_context_parallel_size": (2, "decode context parallelism"),
    "parallel_config__prefill_context_parallel_size": (2, "prefill context parallelism"),
    "parallel_config__pipeline_parallel_size": (2, "pipeline parallelism"),
    "parallel_config__use_ubatching": (True, "microbatches"),
    "cache_config__cache_dtype": ("fp8", "KV cache of fp8"),
    "cache_config__kv_sharing_fast_prefill": (True, "fast prefill"),
    "scheduler_config__disable_hybrid_kv_cache_manager": (True, "hybrid KV cache manager"),
    "model_config__architectures": (["DeepseekV3ForCausalLM"], "DeepseekV3ForCausalLM"),
}


def test_a_plain_configuration_is_served():
    streams.check_features(make_config(), settings())


@pytest.mark.parametrize("place", FEATURES)
def test_features_are_refused_by_name(place):
    value, name = FEATURES[place]
    with pytest.raises(StreamError, match="weir-vllm") as error:
        streams.check_features(make_config(**{place: value}), settings())
    assert name in str(error.value)


def test_untested_models_can_be_tried():
    config = make_config(model_config__architectures=["OlmoForCausalLM"])
    streams.check_features(config, settings(untested_models=True))
    with pytest.raises(StreamError, match="WEIR_VLLM_UNTESTED_MODELS=1"):
        streams.check_features(config, settings())


def test_backends_are_refused_by_name():
    impl = SimpleNamespace(alibi_slopes=None)
    backend = SimpleNamespace(get_name=lambda: "FLASHINFER", forward_includes_kv_cache_update=False)
    layer = SimpleNamespace(
        attn_backend=backend,
        attn_type="decoder",
        impl=impl,
        kv_cache_dtype="auto",
        kv_sharing_target_layer_name=None,
        layer_name="model.layers.0.self_attn.attn",
    )
    with pytest.raises(StreamError, match=r"FLASHINFER\. It serves CPU_ATTN, FLASH_ATTN"):
        streams.check_attention(layer)
    backend.get_name = lambda: "FLASH_ATTN"
    streams.check_attention(layer)
    for name, value, says in (
        ("kv_cache_dtype", "fp8", "fp8"),
        ("kv_sharing_target_layer_name", "model.layers.1", "share"),
        ("attn_type", "encoder", "encoder"),
    ):
        with pytest.raises(StreamError, match=says):
            streams.check_attention(SimpleNamespace(**{**vars(layer), name: value}))
    impl.alibi_slopes = [0.5]
    with pytest.raises(StreamError, match="ALiBi"):
        streams.check_attention(layer)


def test_groups_take_scratch_blocks_one_after_the_other():
    """Groups take blocks after the null block, in the scheduler's order, and always the same."""
    made = streams.Streams(settings(), make_config())
    assert made.take_scratch(("a", "b"), 5) == range(1, 6)
    assert made.take_scratch(("c",), 3) == range(6, 9)
    assert made.take_scratch(("a", "b"), 5) == range(1, 6)
    assert made.take_scratch(("d",), 2) == range(9, 11)


def test_host_memory_is_bounded_and_reported(monkeypatch):
    said = []
    monkeypatch.setattr(streams.logger, "warning", lambda text, *given: said.append(text % given))
    streams.Streams(settings(), make_config())
    assert any("sink(16) | recent(64) in blocks of 16 tokens, rounded up from" in s for s in said)
    assert any("GiB of host memory for 4 requests" in s for s in said)
    too_long = make_config(model_config__max_model_len=10**12)
    with pytest.raises(StreamError, match="--max-model-len"):
        streams.Streams(settings(), too_long)


@pytest.mark.parametrize(
    ("name", "policy", "says"),
    [
        ("bloom", "recent(64)", "BloomForCausalLM"),
        ("phi3", "recent(64)", "Phi3ForCausalLM"),
        ("dynamic-rope", "recent(64)", "DynamicNTKScalingRotaryEmbedding"),
        ("llama", "h2o(64)", "h2o cannot be served by vLLM"),
        ("llama", "[recent(64), recent(64)]", "the policy lists 2 layers"),
        ("llama", "[recent(64), recent(64), recent(64), recent(64)]", "lists 4 layers"),
    ],
)
def test_startup_is_refused(models, name, policy, says):
    with pytest.raises(Exception, match=r"weir|policy|h2o") as error, engine(models(name), policy):
        pass
    chain, problem = [], error.value
    while problem is not None:
        chain.append(str(problem))
        problem = problem.__cause__ or problem.__context__
    assert any(says in text for text in chain), chain


def test_a_pool_that_is_too_small_is_refused(models):
    with (
        pytest.raises(StreamError, match="rotated sinks"),
        engine(models("llama"), "sink(32) | recent(64)", num_gpu_blocks_override=20,
               max_model_len=300),
    ):  # fmt: skip
        pass


def test_a_wrong_environment_variable_is_an_error_before_a_model_is_loaded():
    from weir_vllm import register

    with variables(WEIR_VLLM="h2o(64)"), pytest.raises(StreamPolicyError, match="h2o"):
        register()


def test_without_a_policy_nothing_changes(models):
    with engine(models("llama"), None, max_model_len=512) as llm:
        manager = scheduler_of(llm).kv_cache_manager.coordinator.single_type_managers[0]
        assert type(manager).__name__ == "FullAttentionManager"
        ask(llm, [random_tokens(100)])
        assert held(llm) == 0
    with engine(models("llama"), "dense", max_model_len=512) as llm:
        manager = scheduler_of(llm).kv_cache_manager.coordinator.single_type_managers[0]
        assert type(manager).__name__ == "FullAttentionManager"


@pytest.mark.parametrize(
    "policy", ["recent(128)", "[sink(4) | recent(96), window(64), sink(4) | recent(96)]"]
)
def test_other_policies_equal_weir(models, policy):
    """A policy without sinks; and windows that differ by layer, in several groups of blocks."""
    folder = models("llama")
    prompt = random_tokens(700)
    with engine(folder, policy, num_gpu_blocks_override=600) as llm:
        ((said, ours, _),) = ask(llm, [prompt], tokens=60, prompt_logprobs=0)
        assert held(llm) == 0
        assert llm.reset_prefix_cache()
    whole = policy.replace("sink(4)", "sink(32)")
    theirs = weir_says(folder, whole, prompt + said)
    assert (ours - theirs).abs().max() <= allowed(folder)
