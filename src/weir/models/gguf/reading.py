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
import struct
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils import logging

from weir.errors import WeirError, describe_missing
from weir.models.cache_folder import cache_folder
from weir.models.gguf.header import GGUFHeader, read_header
from weir.models.library_errors import report_as
from weir.models.memory import free_memory

LONG_ARRAY = 4096
"""Larger arrays are vocabularies, which a configuration does not need."""
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


def read_config(path: Path) -> PretrainedConfig:
    """Read a model's configuration from a file's header alone.

    transformers would walk through the vocabulary, so it gets a copy of the header without one, in
    front of a sparse hole as large as the weights.
    """
    header = read_header(path)
    check_readable(path, header)
    left = [
        (start, stop)
        for key, (start, stop) in header.spans.items()
        if not key.startswith("tokenizer.")
        or isinstance(header.fields[key], str)
        or stop - start <= LONG_ARRAY
    ]
    with tempfile.TemporaryDirectory() as folder, path.open("rb") as file:
        slim = Path(folder) / "header.gguf"
        with slim.open("wb") as out:
            out.write(
                struct.pack("<4sIQQ", b"GGUF", header.version, len(header.tensors), len(left))
            )
            for start, stop in left:
                file.seek(start)
                out.write(file.read(stop - start))
            file.seek(header.tensors_at)
            out.write(file.read(header.data_at - header.tensors_at))
            alignment = header.fields.get("general.alignment", 32)
            out.truncate(out.tell() + alignment + path.stat().st_size - header.data_at)
        with report_as(f"transformers cannot read the header of {path}", "; download it again"):
            config = AutoConfig.from_pretrained(folder, gguf_file=slim.name)
    if f"{header.architecture}.vocab_size" not in header.fields:
        config.vocab_size = header.fields.get("tokenizer.ggml.tokens", config.vocab_size)
    return config


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
        with report_as(f"the tokenizer in {path} is broken", "; take another file of the model"):
            tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file)
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
