"""GGUF files as model folders: read once by transformers, then kept as safetensors.

transformers takes half a minute for a file of 100 MB, so what it has read is kept in weir's cache
folder, under the file's size and SHA-256. Headers are checked here first, since transformers and
the package `gguf` trust every size that a file declares.

Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from weir.errors import WeirError, describe_missing
from weir.models.cache_folder import cache_folder
from weir.models.gguf.config import read_config
from weir.models.gguf.header import GGUFHeader, read_header
from weir.models.gguf.tokenizer import read_tokenizer
from weir.models.library_errors import report_as
from weir.models.memory import free_memory

FLOAT32_BELOW = 1 << 30
"""The dense copy is float32 below this many parameters, and bfloat16 from there on."""


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


def unpack(path: Path) -> Path:
    """Return the folder with a file's model and tokenizer, converting the file on first use.

    Raises WeirError if the file cannot be read, or the cache folder has no room.
    """
    home = cache_folder() / "gguf"
    with path.open("rb") as whole:
        digest = hashlib.file_digest(whole, "sha256").hexdigest()
    folder = home / f"{path.stem}-{path.stat().st_size}-{digest[:16]}"
    if folder.is_dir():
        return folder
    header = read_header(path)
    check_readable(path, header)
    # transformers makes all weights float32 at first.
    in_memory, free_there = header.parameters * 4, free_memory(torch.device("cpu"))
    if free_there is not None and in_memory > free_there:
        raise WeirError(
            f"{path} has {header.parameters:,} parameters, and reading them takes "
            f"{in_memory / 1e9:,.1f} GB of memory, where {free_there / 1e9:,.1f} GB are free; take "
            "a smaller model, or convert it on a larger machine and load the folder"
        )
    dtype = torch.float32 if header.parameters < FLOAT32_BELOW else torch.bfloat16
    needed = header.parameters * dtype.itemsize
    try:
        home.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(home).free) < needed + (1 << 26):
            raise WeirError(
                f"what is read of {path.name} takes {needed:,} bytes in {home}, where {free:,} are "
                "free; set XDG_CACHE_HOME to a folder with more"
            )
        with tempfile.TemporaryDirectory(dir=home, prefix=".unpacking-") as made:
            _convert(path, Path(made), dtype)
            Path(made).chmod(0o755)
            if not folder.is_dir():  # another process may have finished first
                os.replace(made, folder)
                Path(made).mkdir()  # for the context manager to remove
    except OSError as error:
        raise WeirError(f"what is read of {path.name} cannot be kept in {home} ({error})") from None
    return folder


def _convert(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Read a file with transformers, and save model and tokenizer."""
    place, file = str(path.parent), path.name
    with logging.tqdm(total=3, desc=f"Reading {file} (once)", leave=False) as progress:
        tokenizer = read_tokenizer(path)
        progress.update()
        config = read_config(path)
        with report_as(f"transformers cannot read {path}", "; take the model in another form"):
            model = AutoModelForCausalLM.from_pretrained(
                place, gguf_file=file, config=config, dtype=dtype
            )
        progress.update()
        # transformers takes a model from GGUF for quantized and would not save it, but it is dense.
        model.hf_quantizer = None  # type: ignore[assignment]
        model.config.__dict__.pop("quantization_config", None)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        progress.update()
