"""Descriptions of transformers models, the hooks that weir puts on them, and readers of GGUF
files.
"""

# Imported first, because other files import names that other releases of transformers lack.
from weir.models.versions import check_versions

# isort: split
from weir.models.attention_sinks import (
    ATTENTION,
    ModelSink,
    attend_by_sink,
    begin_with_sink,
    set_sink,
    sink_at_work,
    sink_of,
    zero_sink_attention,
)
from weir.models.cache_name import CACHE, cache_of, with_one_name
from weir.models.compiled_step import CompiledStep
from weir.models.embedding import embed
from weir.models.few_bits import FewBits, has_few_bits
from weir.models.fingerprints import compare_fingerprints, fingerprint, weights_of
from weir.models.gates import Gate, features, load_gates, save_gates
from weir.models.head_facts import find_head_facts, measure_heads
from weir.models.hooks import NOT_ASKED, Chosen, attach, attention_name, choose_engine, detach
from weir.models.images import MOST_OFFSET, OFFSETS, PICTURES, Images, images_of, offsets
from weir.models.interception import MethodPatch, forward_lock_of, has_class_forward, has_hooks
from weir.models.kept_files import cache_folder, read_json, write_json
from weir.models.library_errors import report_as
from weir.models.maskless_cache import MasklessCache
from weir.models.memory import free_memory, stored_bytes
from weir.models.model_spec import (
    DROPPING,
    OWN_FAMILIES,
    ModelLayerSpec,
    ModelSpec,
    StopTokens,
    attention_modules,
    describe,
    frequencies_change_at,
    input_device,
    is_encoder_config,
    out_of_range,
    sight_of,
    transformers_model,
    window_of,
)
from weir.models.notices import say, say_once
from weir.models.o_proj import OutputProjection, output_weight
from weir.models.observing import AttentionInputs, bias_of, observe_attention
from weir.models.places import ASSETS, sidecar_path
from weir.models.rotary_watch import RotaryWatch, rotary_of
from weir.models.step_engine import Given, MakeEngine, OwnForward, RunWhole, StepEngine

__all__ = [
    "ModelSink",
    "embed",
    "offsets",
    "set_sink",
    "sink_of",
    "zero_sink_attention",
]
