"""How many tokens at once a model was made for, whatever its configuration calls that.

Knows nothing about attention windows of layers: those are in `facts.py`.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

NAMES = ("max_position_embeddings", "max_seq_len", "seq_length")
"""What it is called: by most, by MPT, and by Bloom where it says so at all."""


def window_of(config: PreTrainedConfig) -> int | None:
    """How many tokens a model reads at once as it was trained; None where it does not say.

    Args:
        config: of a model; of one with several parts, the text decoder's is read.
    """
    text = config.get_text_config(decoder=True)
    return next((int(size) for name in NAMES if (size := getattr(text, name, None))), None)
