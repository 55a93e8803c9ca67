"""Check the sizes that a configuration declares, before transformers builds anything from them.

A configuration from elsewhere can declare two billion layers. transformers would create lists and
modules for all of them before it looks at a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weir.errors import WeirError, quote

DEEPEST = 2000
"""The most layers that a configuration may declare. Creating a layer takes time even without
weights.
"""
MOST_HEADS = 1 << 16
"""The most attention heads, or experts, that a layer may have."""
LARGEST = 1 << 24
"""The largest vocabulary, hidden size or head size that a configuration may declare."""
MOST_PER_BYTE = 8
"""The most weights that one byte of a file can hold. Formats with the fewest bits store about five
weights in a byte.
"""
NESTED = 64
"""Number of nested levels in which sizes are checked. A model of several parts has three levels."""

_MOST = {
    **dict.fromkeys(
        (
            *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth"),
            *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
        ),
        DEEPEST,
    ),
    **dict.fromkeys(
        (
            *("num_attention_heads", "num_key_value_heads", "num_heads", "n_heads", "n_head"),
            *("num_experts", "num_local_experts", "n_routed_experts"),
        ),
        MOST_HEADS,
    ),
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "vocab_size", "head_dim", "n_embd", "d_model"),
        LARGEST,
    ),
}
"""The largest allowed number under each name, in any part of a configuration."""
_NEEDED = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "head_dim", "max_position_embeddings"),
)
"""Numbers of a decoder that must be at least 1 if it has them."""


def check_declared(name: str, declared: Any, level: int = 0) -> None:
    """Refuse sizes that are texts, booleans, negative, or larger than in any model.

    Args:
        name: the model, for errors.
        declared: the content of a config.json, or of a part of it.
        level: how deeply this part is nested.
    """
    if not isinstance(declared, Mapping) or level > NESTED:
        return
    for key, value in declared.items():
        most = _MOST.get(key)
        if most is None:
            check_declared(name, value, level + 1)
        elif isinstance(value, str | bool) or (
            isinstance(value, int | float) and not 0 <= value <= most
        ):
            _refuse(name, key, value, 0, most)


def check_decoder(name: str, config: Any) -> None:
    """Refuse a decoder without layers, heads or tokens, with any other size in `_NEEDED` below 1 or
    larger than in any model, or with a sliding window that is not a whole number.

    Args:
        config: a configuration of transformers.
    """
    decoder = config.get_text_config(decoder=True)
    window = getattr(decoder, "sliding_window", None)
    if window is not None and type(window) is not int:
        _refuse(name, "sliding_window", window, 1, None)
    for key in _NEEDED:
        value = getattr(decoder, key, None)
        most = _MOST.get(key)
        if isinstance(value, int) and (value < 1 or (most is not None and value > most)):
            _refuse(name, key, value, 1, most)


def check_ids(name: str, generation: Any) -> None:
    """Refuse token ids that are not whole numbers of 32 bits, because they would never be
    generated.

    Args:
        generation: a generation configuration of transformers.
    """
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(generation, key, None)
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if any(type(each) is not int or not -(2**31) <= each < 2**31 for each in ids):
            raise WeirError(
                f"the generation configuration of {name} has {key} = {quote(value)}, which must "
                "be a token id. Correct its generation_config.json, or get another copy of the "
                "model."
            )


def check_matrices(name: str, config: Any, stored: int) -> None:
    """Refuse matrices that are larger than all weights of the model together.

    transformers would fill them with random numbers before it finds that the sizes differ.

    Args:
        config: a configuration of transformers.
        stored: bytes of the files that hold the weights; 0 if unknown, which skips the check.
    """
    decoder = config.get_text_config(decoder=True)
    hidden = getattr(decoder, "hidden_size", None)
    if not isinstance(hidden, int) or not stored:
        return
    for key in ("vocab_size", "intermediate_size", "head_dim"):
        rows = getattr(decoder, key, None)
        if isinstance(rows, int) and rows * hidden > stored * MOST_PER_BYTE:
            raise WeirError(
                f"the configuration of {name} has {key} = {rows} and hidden_size = {hidden}, but "
                f"its weights have only {stored:,} bytes. Get another copy of the model."
            )


def _refuse(name: str, key: str, value: Any, least: int, most: int | None) -> None:
    wanted = f"of at least {least:,}" if most is None else f"from {least:,} to {most:,}"
    raise WeirError(
        f"the configuration of {name} has {key} = {quote(value)}, which must be a whole number "
        f"{wanted}. Correct its config.json, or get another copy of the model."
    )
