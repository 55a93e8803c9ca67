"""Loading and describing transformers models, and the hooks that weir puts on them."""

# First, before files that import names which other releases of transformers lack.
from weir.models.versions import check_versions

# isort: split
from weir.models.attention_sinks import (
    ModelSink,
    set_sink,
    sink_at_work,
    sink_of,
    zero_sink_attention,
)
from weir.models.block_weights import has_block_weights
from weir.models.cache_name import CACHE, cache_of, with_one_name
from weir.models.embedding import embed
from weir.models.fingerprints import fingerprint, weights_of
from weir.models.gates import Gate, features, load_gates, save_gates
from weir.models.head_facts import find_head_facts, measure_heads
from weir.models.hooks import attach, compile_steps, detach
from weir.models.images import MOST_OFFSET, OFFSETS, PICTURES, Images, images_of, offsets
from weir.models.linear_kernels import choose_products
from weir.models.loading import (
    ASSETS,
    default_device,
    from_where,
    has_weights,
    is_encoder,
    is_gguf,
    is_local,
    load,
    load_encoder,
    load_processor,
    sidecar_path,
    skeleton,
)
from weir.models.memory import free_memory, stored_bytes
from weir.models.model_spec import (
    DROPPING,
    ModelSpec,
    StopTokens,
    describe,
    frequencies_change_at,
    input_device,
    out_of_range,
    sight_of,
    transformers_model,
    window_of,
)
from weir.models.native_step import UNFINISHED
from weir.models.o_proj import OutputProjection, output_weight
from weir.models.quantized_weights import BITS, quantize_weights
from weir.models.rotary_watch import RotaryWatch, rotary_of

__all__ = [
    "ModelSink",
    "choose_products",
    "compile_steps",
    "embed",
    "load",
    "load_processor",
    "offsets",
    "set_sink",
    "sink_of",
    "zero_sink_attention",
]
