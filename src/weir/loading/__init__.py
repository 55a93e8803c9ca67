"""Load models by name: packaged, from a folder, a GGUF file or the Hub, as saved or with fewer
bits.
"""

from weir.loading.loader import (
    check_has_weights,
    default_device,
    from_where,
    has_weights,
    is_encoder,
    is_gguf,
    is_local,
    load,
    load_encoder,
    load_processor,
    skeleton,
)

__all__ = ["load", "load_processor"]
