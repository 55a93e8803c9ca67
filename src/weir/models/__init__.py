"""What weir must know of a model, and how it gets inside."""

# First, before a file that needs what other releases of transformers do not have.
from weir.models.versions import check_versions

# isort: split
from weir.models.axes import MOST_OFFSET, OFFSETS, offsets
from weir.models.beside import file_beside
from weir.models.embedding import embed
from weir.models.endings import Endings
from weir.models.facts import (
    DROPPING,
    LayerFacts,
    ModelFacts,
    describe,
    input_device,
    transformers_model,
)
from weir.models.fewbits import BITS, quantize_weights
from weir.models.hooks import Attachment, attach, compile_steps, detach
from weir.models.images import PICTURES, Images, images_of
from weir.models.loading import (
    ASSETS,
    default_device,
    from_where,
    is_encoder,
    is_local,
    load,
    load_encoder,
    load_processor,
    skeleton,
)
from weir.models.memory import free_memory
from weir.models.output import OutputProjection, output_weight
from weir.models.products import choose_products
from weir.models.sinks import ModelSink, set_sink, sink_at_work, sink_of, zero_sink_attention
from weir.models.vocabulary import check_ids, out_of_range
from weir.models.weights import fingerprint, stored_bytes, weights_of
from weir.models.window import window_of

__all__ = [
    "ASSETS",
    "BITS",
    "DROPPING",
    "MOST_OFFSET",
    "OFFSETS",
    "PICTURES",
    "Attachment",
    "Endings",
    "Images",
    "LayerFacts",
    "ModelFacts",
    "ModelSink",
    "OutputProjection",
    "attach",
    "check_ids",
    "check_versions",
    "choose_products",
    "compile_steps",
    "default_device",
    "describe",
    "detach",
    "embed",
    "file_beside",
    "fingerprint",
    "free_memory",
    "from_where",
    "images_of",
    "input_device",
    "is_encoder",
    "is_local",
    "load",
    "load_encoder",
    "load_processor",
    "offsets",
    "out_of_range",
    "output_weight",
    "quantize_weights",
    "set_sink",
    "sink_at_work",
    "sink_of",
    "skeleton",
    "stored_bytes",
    "transformers_model",
    "weights_of",
    "window_of",
    "zero_sink_attention",
]
