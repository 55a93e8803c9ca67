"""Apply the policy to a model while vLLM creates it, and refuse what the plug-in cannot serve.

PyTorch calls `watch_modules` for every module that becomes part of another. If there is a policy,
attention layers get a backend that keeps sinks and a window, and rotary embeddings are made to work
at any position (`rotary.py`).
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType

from weir_vllm.errors import StreamError
from weir_vllm.policy import Ends
from weir_vllm.rotary import SERVED, Endless
from weir_vllm.settings import KEY, UNTESTED_VARIABLE, Settings, read_settings
from weir_vllm.worker import BACKENDS, count_rows, make_backend

logger = init_logger(f"vllm.{__name__}")  # a child of vLLM's logger, with its settings

MODELS = (
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "StableLmForCausalLM",
)
"""The architectures that the tests compare with weir."""
DTYPES = ("auto", "float32", "float16", "bfloat16")
"""The precisions of a KV cache that can be served."""
TOKEN_BYTES = 120
"""The most bytes of host memory that each token of a running request takes. Its id is in lists of
the scheduler and of the process that sends answers, and in a table of the worker. This is an
estimate; `bench memory` measures the whole process.
"""


def watch_modules(parent: Any, name: str, child: Any) -> None:
    """Apply the policy, if there is one, to an attention layer or a rotary embedding."""
    if isinstance(child, AttentionLayerBase):
        if (streams := find_streams()) is not None:
            streams.add_attention(parent, child)
    elif isinstance(child, RotaryEmbeddingBase) and (streams := find_streams()) is not None:
        streams.add_rotary(child)


_latest: tuple[weakref.ref[Any], Streams | None] | None = None


def find_streams() -> Streams | None:
    """Return the `Streams` of the model that vLLM is creating, or None if there is no policy."""
    global _latest
    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None:
        return None
    if _latest is None or _latest[0]() is not config:
        settings = read_settings(config.additional_config)
        streams = None if settings is None else Streams(settings, config)
        _latest = weakref.ref(config), streams
    return _latest[1]


class Streams:
    """A model's layers under a policy, and the scratch blocks for rotated copies of sinks.

    Attributes:
        settings: the user's settings.
        requests: the most requests of a step.
        tokens: the most tokens of a step.
        full: the number of layers so far in which the model has no sliding window.
        scratch: the scratch blocks of each group of layers.
        layers: the layers so far in which the model has no sliding window.
        checked: whether `check_layers` has run.
    """

    def __init__(self, settings: Settings, config: Any) -> None:
        self.settings = settings
        check_features(config, settings)
        # vLLM looks up compiled code by its configuration. If the policy is in an environment
        # variable, vLLM would otherwise find code that was compiled without a policy. Therefore
        # the policy is written into the configuration.
        from weir_vllm import __version__

        if not isinstance(config.additional_config, dict):
            raise StreamError(
                "additional_config must be a dictionary, in which weir-vllm writes its policy, got "
                f"{type(config.additional_config).__name__}"
            )
        config.additional_config[KEY] = settings.as_config() | {"version": __version__}
        scheduler = config.scheduler_config
        self.requests = scheduler.max_num_seqs
        self.tokens = scheduler.max_num_batched_tokens
        self.full = 0
        self.scratch: dict[tuple[str, ...], range] = {}
        self.layers: list[Any] = []
        self.checked = False
        self.report(config)

    def report(self, config: Any) -> None:
        """Log how the policy is rounded, and how many blocks and how much memory it takes."""
        size = config.cache_config.block_size
        asked = self.settings.policy.layers
        for ends in dict.fromkeys(asked):
            whole = ends.whole_blocks(size)
            rounded = "" if whole == ends else f", rounded up from {ends}"
            assert whole.recent is not None
            sinks, window = whole.sinks // size, whole.recent // size
            logger.warning(
                "weir-vllm keeps %s in blocks of %d tokens%s. A stream holds %d blocks of sinks "
                "and window, and one that is being filled. While a prompt is read, it holds more. "
                "%d blocks are reserved for rotated sinks.",
                whole, size, rounded, sinks + window,
                sinks * count_rows(self.requests, self.tokens, size),
            )  # fmt: skip
        bound = self.requests * config.model_config.max_model_len * TOKEN_BYTES
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        text = (
            f"vLLM keeps the token ids of running requests: up to {bound / 2**30:.1f} GiB of "
            f"host memory for {self.requests} requests (--max-num-seqs) of "
            f"{config.model_config.max_model_len} tokens (--max-model-len)"
        )
        if bound > there:
            raise StreamError(
                f"{text}, and this machine has {there / 2**30:.1f} GiB. Lower one of the two."
            )
        logger.warning("weir-vllm: %s.", text)

    def add_attention(self, parent: Any, layer: Any) -> None:
        """Apply the policy to an attention layer."""
        if hasattr(layer, "weir_streams"):
            return
        if type(layer) is not Attention:
            raise StreamError(
                f"weir-vllm cannot serve {type(layer).__name__}, which this model uses. It serves "
                f"plain attention. Architectures that are tested: {', '.join(MODELS)}."
            )
        check_attention(layer)
        layer.weir_streams = self
        layer.weir_parent = weakref.ref(parent)
        if layer.sliding_window is not None:
            return  # this layer keeps the model's own window, as in weir
        layers = self.settings.policy.layers
        if self.settings.policy.is_list:
            if self.full >= len(layers):
                raise StreamError(
                    f"the policy lists {len(layers)} layers, but the model has more layers "
                    "without a sliding window. Give a policy for each of them."
                )
            ends = layers[self.full]
        else:
            ends = layers[0]
        self.full += 1
        layer.weir_ends = ends
        layer.attn_backend = make_backend(layer.attn_backend, ends, self.requests, self.tokens)
        self.layers.append(layer)

    def add_rotary(self, rotary: Any) -> None:
        """Make a rotary embedding work at any position."""
        if not isinstance(rotary, Endless):
            raise StreamError(
                f"weir-vllm cannot serve the rotary embedding {type(rotary).__name__}, which this "
                f"model uses. It serves {', '.join(SERVED)}."
            )
        rotary.make_endless()

    def find_rotary(self, layer: Any) -> Any:
        """Return the rotary embedding of an attention layer: the one next to it in the model."""
        parent = layer.weir_parent()
        found = [m for m in parent.children() if isinstance(m, RotaryEmbeddingBase)]
        if len(found) != 1:
            raise StreamError(
                f"weir-vllm needs exactly one rotary embedding next to {layer.layer_name} in "
                f"{type(parent).__name__} to rotate sinks, got {len(found)}. Use another model."
            )
        return found[0]

    def take_scratch(self, layers: tuple[str, ...], count: int) -> range:
        """Return the scratch blocks of a group of layers.

        Groups take blocks in the order in which the scheduler reserves them. A group that asks
        again gets the same blocks.
        """
        if layers not in self.scratch:
            start = max((taken.stop for taken in self.scratch.values()), default=1)  # 0: null block
            self.scratch[layers] = range(start, start + count)
        return self.scratch[layers]

    def check_layers(self, config: Any) -> None:
        """Refuse layers that the policy cannot cover, once all layers have been created."""
        if self.checked:
            return
        self.checked = True
        policy = self.settings.policy
        if policy.is_list and self.full != len(policy.layers):
            raise StreamError(
                f"the policy lists {len(policy.layers)} layers, but the model has {self.full} "
                "layers without a sliding window. Give a policy for each of them."
            )
        alike: dict[Ends, tuple[Any, ...]] = {}
        size = config.cache_config.block_size
        for layer in self.layers:
            self.find_rotary(layer)
            ends = layer.weir_ends.whole_blocks(size)
            shape = (layer.num_heads, layer.num_kv_heads, layer.head_size, layer.head_size_v)
            if alike.setdefault(ends, shape) != shape or layer.head_size_v != layer.head_size:
                raise StreamError(
                    f"{layer.layer_name} does not have the same heads as the layers before it, "
                    "or its keys are not as wide as its values. weir-vllm needs layers with the "
                    "same policy to have the same heads, and keys as wide as values."
                )
        windows = {ends.recent + 1 for ends in alike if ends.recent is not None}
        for layer in config.compilation_config.static_forward_context.values():
            window = getattr(layer, "sliding_window", None)
            if window in windows:
                raise StreamError(
                    f"the model's sliding window of {window} tokens cannot be distinguished from "
                    f"recent({window - 1}). Choose another size for recent."
                )


def check_attention(layer: Any) -> None:
    """Refuse attention that cannot use a shorter block table, and name the reason."""
    name = layer.attn_backend.get_name()
    if name not in BACKENDS:
        raise StreamError(
            f"weir-vllm cannot serve the attention backend {name}. It serves "
            f"{', '.join(BACKENDS)}. Choose one with --attention-backend."
        )
    problems = {
        "cross-attention or an encoder": layer.attn_type != AttentionType.DECODER,
        "keys that layers share": layer.kv_sharing_target_layer_name is not None,
        "ALiBi": getattr(layer.impl, "alibi_slopes", None) is not None,
        "a KV cache that is written inside attention": (
            layer.attn_backend.forward_includes_kv_cache_update
        ),
        f"a KV cache of {layer.kv_cache_dtype}": layer.kv_cache_dtype not in DTYPES,
    }
    refuse(problems, f"{layer.layer_name} has ")


def check_features(config: Any, settings: Settings) -> None:
    """Refuse features of vLLM that the plug-in cannot serve, and name them."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    scheduler = config.scheduler_config
    problems = {
        "speculative decoding (--speculative-config)": config.speculative_config is not None,
        "decode context parallelism (--decode-context-parallel-size)": (
            parallel.decode_context_parallel_size > 1
        ),
        "prefill context parallelism (--prefill-context-parallel-size)": (
            parallel.prefill_context_parallel_size > 1
        ),
        "pipeline parallelism (--pipeline-parallel-size)": parallel.pipeline_parallel_size > 1,
        "microbatches (--enable-dbo)": parallel.use_ubatching,
        "a KV connector (--kv-transfer-config)": config.kv_transfer_config is not None,
        "the hybrid KV cache manager switched off (--disable-hybrid-kv-cache-manager)": bool(
            scheduler.disable_hybrid_kv_cache_manager
        ),
        f"a KV cache of {cache.cache_dtype} (--kv-cache-dtype)": cache.cache_dtype not in DTYPES,
        "fast prefill with shared keys (--kv-sharing-fast-prefill)": cache.kv_sharing_fast_prefill,
        "Model Runner V2 (set VLLM_USE_V2_MODEL_RUNNER=0)": config.use_v2_model_runner,
        # Compiled code read past the end of a table of rotations if a prompt was longer.
        "compiled models (start with --enforce-eager)": not model.enforce_eager,
        "multi-head latent attention (MLA)": model.use_mla,
        "encoder-decoder models": model.is_encoder_decoder,
        "positions of several axes (M-RoPE)": model.uses_mrope,
        "images, audio or video": model.is_multimodal_model,
        "pooling models": model.runner_type != "generate",
        "state-space or linear attention layers": model.is_hybrid,
    }
    refuse(problems, "weir-vllm cannot serve ")
    odd = [name for name in model.architectures if name not in MODELS]
    if odd and not settings.untested_models:
        raise StreamError(
            f"weir-vllm has not been tested with {', '.join(odd)}. It has been compared with weir "
            f"on {', '.join(MODELS)}. To try it nevertheless, set {UNTESTED_VARIABLE}=1."
        )
    if odd:
        logger.warning(
            "weir-vllm has not been tested with %s: compare its output with that of weir or of "
            "vLLM without the plug-in.", ", ".join(odd),
        )  # fmt: skip
    if not current_platform.is_cpu():
        logger.warning(
            "weir-vllm is experimental and has never run on a GPU. Compare its output with that of "
            "weir."
        )


def refuse(problems: dict[str, bool], start: str) -> None:
    """Raise an error that names all problems whose value is True, if there are any."""
    there = [problem for problem, is_there in problems.items() if is_there]
    if there:
        raise StreamError(f"{start}{', '.join(there)}. The plug-in does not support this.")
