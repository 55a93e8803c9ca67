"""Configurations and tokenizers of GGUF files, read by transformers.

Headers are checked here first, since transformers and the package `gguf` trust every size that a
file declares.

Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from weir.errors import WeirError, describe_missing
from weir.models.gguf.header import GGUFHeader
from weir.models.library_errors import report_as


def check_readable(path: Path, header: GGUFHeader) -> None:
    """Refuse a file that transformers cannot read, before half a minute is spent on it.

    Raises WeirError if the package `gguf` is missing, the architecture or the quantization of a
    tensor is unknown, or the file ends before its weights do.
    """
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import _type_traits as dequantizers
    except ImportError:
        raise WeirError(describe_missing("reading GGUF files", "gguf")) from None
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    known = sorted(GGUF_CONFIG_MAPPING.keys() - {"general", "tokenizer"})
    named = header.architecture.replace("-", "_").replace("moe", "_moe").replace("__", "_")
    if not {header.architecture, named} & set(known):
        raise WeirError(
            f"{path} holds a model of the architecture {header.architecture!r}, which this "
            f"transformers does not read from GGUF; it reads {', '.join(known)}"
        )
    dense = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16}
    sizes = {shard: shard.stat().st_size for shard in header.paths}
    for tensor in header.tensors:
        try:
            kind = GGMLQuantizationType(tensor.type)
        except ValueError:
            kind = None
        if kind is None or not (kind in dense or kind in dequantizers):
            called = f"type {tensor.type}" if kind is None else kind.name
            raise WeirError(
                f"{path} stores {tensor.name} as {called}, which the package gguf cannot read; "
                "take the model in another quantization, as Q4_K_M, Q8_0 or F16"
            )
        block, block_bytes = GGML_QUANT_SIZES[kind]
        end = tensor.at + math.prod(tensor.shape) // block * block_bytes
        if end > sizes[tensor.path]:
            raise WeirError(
                f"{tensor.path} is cut off: {tensor.name} ends at byte {end:,}, and the file has "
                f"{sizes[tensor.path]:,}; download it again"
            )


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Read a model's tokenizer from a file (WeirError)."""
    with report_as(f"the tokenizer in {path} is broken", "; take another file of the model"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name
        )
    return tokenizer
