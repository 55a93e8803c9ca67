"""A model of 1.1 billion parameters for every peer: TinyLlama's shape, random blocks.

    .peers/llamacpp/bin/python bench/weir_bench/peers/sides/random_model.py .peers/models

How fast a file is read, and how fast its weights are multiplied, does not depend on their values.
The vocabulary is the first 32,000 tokens of SmolLM2's, which `convert.py` has put in the folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, VOCABULARY = 22, 2048, 5632, 32, 4, 32_000
MIXES = ("Q4_0", "Q8_0", "Q4_K_M")
FIELDS = {
    "llama.block_count": LAYERS,
    "llama.context_length": 2048,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.dimension_count": WIDTH // HEADS,
    "llama.rope.freq_base": 10_000.0,
    "llama.vocab_size": VOCABULARY,
    "general.name": "random TinyLlama",
}
"""Fields with other values than in SmolLM2's file."""


def main() -> None:
    """Write a file for each mix of block types whose file does not exist yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mixes", nargs="+", default=MIXES, choices=MIXES)
    parser.add_argument("--source", type=Path, help="a file with SmolLM2's vocabulary")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for mix in given.mixes:
        path = given.folder / f"tinyllama-{mix}.gguf"
        if not path.exists():
            part = path.with_suffix(".part")
            write(part, mix, given.source or given.folder / "smollm2-Q4_1.gguf")
            part.rename(path)


def write(path: Path, mix: str, source: Path) -> None:
    """Write a file of random weights, with the vocabulary of the file `source`."""
    writer = GGUFWriter(path, "llama")
    copy_fields(GGUFReader(source), writer)
    rng = np.random.default_rng(0)
    for name, (rows, columns) in shapes():
        if rows == 0:  # a norm
            writer.add_tensor(name, np.ones(columns, np.float32))
            continue
        kind = kind_of(name, mix)
        data = random_blocks(rng, rows, columns, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shapes() -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name of each tensor with its rows and columns; a norm has no rows."""
    kv = WIDTH // HEADS * KV_HEADS
    yield "token_embd.weight", (VOCABULARY, WIDTH)
    for layer in range(LAYERS):
        for part, shape in {
            "attn_norm": (0, WIDTH),
            "attn_q": (WIDTH, WIDTH),
            "attn_k": (kv, WIDTH),
            "attn_v": (kv, WIDTH),
            "attn_output": (WIDTH, WIDTH),
            "ffn_norm": (0, WIDTH),
            "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER),
        }.items():
            yield f"blk.{layer}.{part}.weight", shape
    yield "output_norm.weight", (0, WIDTH)
    yield "output.weight", (VOCABULARY, WIDTH)


def kind_of(name: str, mix: str) -> GGMLQuantizationType:
    """Return the type that llama.cpp's `llama-quantize` gives a matrix under a mix."""
    kinds = GGMLQuantizationType
    if mix == "Q8_0":
        return kinds.Q8_0
    if name == "output.weight":
        return kinds.Q6_K
    if mix == "Q4_0":
        return kinds.Q4_0
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer = int(name.split(".")[1])
        eighth = LAYERS // 8
        first, last = layer < eighth, layer >= 7 * LAYERS // 8
        if first or last or (layer - eighth) % 3 == 2:
            return kinds.Q6_K
    return kinds.Q4_K


def random_blocks(
    rng: np.random.Generator, rows: int, columns: int, kind: GGMLQuantizationType
) -> np.ndarray:
    """Return random blocks [rows, bytes] of numbers that keep a layer's outputs near one."""
    numbers, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // numbers, size), np.uint8)
    # With a block scale of 1 / step, uniformly random codes have a standard deviation of one.
    step, place = {"Q4_0": (4.6, 0), "Q8_0": (73.9, 0), "Q4_K": (257, 0), "Q6_K": (1367, 208)}[
        kind.name
    ]
    put = _half(1 / step / np.sqrt(columns))
    blocks[..., place : place + 2] = put
    if kind.name == "Q4_K":  # minima that make the mean zero
        blocks[..., 2:4] = _half(7.5 / step / np.sqrt(columns))
    return blocks.reshape(rows, -1)


def _half(number: float) -> np.ndarray:
    return np.array([number], np.float16).view(np.uint8)


def copy_fields(reader: GGUFReader, writer: GGUFWriter) -> None:
    """Copy the fields of SmolLM2's file, with this model's sizes and only the first tokens."""
    tokens: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()[:VOCABULARY]
    known = set(tokens)
    shortened: dict[str, Callable[[list[Any]], list[Any]]] = {
        "tokenizer.ggml.tokens": lambda _: tokens,
        "tokenizer.ggml.token_type": lambda types: types[:VOCABULARY],
        "tokenizer.ggml.scores": lambda scores: scores[:VOCABULARY],
        "tokenizer.ggml.merges": lambda merges: [
            merge for merge in merges if merge.replace(" ", "", 1) in known
        ],
    }
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value: Any = FIELDS.get(field.name, field.contents())
        if field.name in shortened:
            value = shortened[field.name](value)
        first, last = field.types[0], field.types[-1]
        inner = last if first == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, first, inner)
    if "llama.vocab_size" not in reader.fields:
        writer.add_vocab_size(VOCABULARY)


if __name__ == "__main__":
    main()
