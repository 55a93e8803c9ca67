"""Writes GGUF files of small models. Tensors are named and changed as by llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

Store = Callable[[str, np.ndarray], tuple[np.ndarray, Any]]
"""Returns the array that a file stores for a tensor, and its ggml type; None as the type for an
array that is stored as it is.
"""

ARCHITECTURES = {
    "mixtral": "llama",
    "mistral": "llama",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "phi": "phi2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "granitemoeshared": "granitemoe",
    "minimax_m2": "minimax-m2",
}
"""Model types of transformers whose architecture has another name in GGUF files, with this name."""

INTERLEAVED = {"llama", "granite", "granitemoe", "olmo", "smollm3", "arcee"}
"""Architectures in which llama.cpp rotates pairs of neighboring numbers of queries and keys."""
ABOVE_ONE = {"gemma", "gemma2", "gemma3", "nemotron"}
"""Architectures whose norms multiply by a weight plus one. Files store the sum."""


def architecture_of(model: PreTrainedModel) -> str:
    kind = model.config.model_type
    return ARCHITECTURES.get(kind, kind)


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a query or key projection so that two numbers that are rotated together
    are neighbors.
    """
    halves = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(weight.shape)


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of the file that llama.cpp's converter makes of a model."""
    import gguf

    config = model.config.get_text_config(decoder=True)
    arch = architecture_of(model)
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    tied = config.tie_word_embeddings
    found: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        for called, part in _converted(name, weight, arch, config, heads, groups):
            base, suffix = called, ""
            if called.endswith((".weight", ".bias")):
                base, _, ending = called.rpartition(".")
                suffix = "." + ending
            theirs = base if base.startswith("blk.") else names.get_name(base)
            theirs = theirs or names.get_name(base.removeprefix("transformer."))
            assert theirs is not None, called
            assert theirs + suffix not in found, called
            found[theirs + (suffix or ".weight")] = part.contiguous()
    if arch == "stablelm":
        _stack_norms(found)
    return found


def _converted(
    name: str, weight: Tensor, arch: str, config: Any, heads: int, groups: int
) -> Iterable[tuple[str, Tensor]]:
    layer = (re.findall(r"\.(\d+)\.", name) or ["0"])[0]
    if arch in INTERLEAVED and ".q_proj." in name:
        weight = interleave(weight, heads)
    if arch in INTERLEAVED and ".k_proj." in name:
        weight = interleave(weight, groups)
    if arch in ABOVE_ONE and name.endswith("norm.weight"):
        weight = weight + 1
    if arch in ("bloom", "gptneox") and "query_key_value" in name:
        weight = weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).reshape(weight.shape)
    if arch == "falcon" and "query_key_value" in name:
        kv = config.num_kv_heads if config.new_decoder_architecture else heads
        kv = 1 if config.multi_query and not config.new_decoder_architecture else kv
        parts = weight.unflatten(0, (kv, heads // kv + 2, -1))
        kept = parts[:, :-2], parts[:, -2:-1], parts[:, -1:]
        weight = torch.cat([part.flatten(0, 2) for part in kept])
    if arch == "gpt2" and name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
        weight = weight.T
    if name.endswith("shared_expert_gate.weight"):
        weight = weight[0]
    if "conv.conv" in name:
        weight = weight[:, 0]
    if arch == "gpt-oss" and ".experts." in name:
        own, part = name.removesuffix("_bias"), ".bias" if name.endswith("_bias") else ".weight"
        if part == ".weight":
            weight = weight.transpose(1, 2)
        if own.endswith("gate_up_proj"):
            yield f"blk.{layer}.ffn_gate_exps{part}", weight[:, 0::2]
            yield f"blk.{layer}.ffn_up_exps{part}", weight[:, 1::2]
        else:
            yield f"blk.{layer}.ffn_down_exps{part}", weight
        return
    if name.endswith("sinks"):
        name += ".weight"
    if name.endswith("e_score_correction_bias"):
        name = f"blk.{layer}.exp_probs_b.bias"
    if "experts.gate_up_proj" in name or "input_linear" in name:
        kind = "shexp" if "shared_mlp" in name else "exps"
        gate, up = weight.chunk(2, dim=-2)
        yield f"blk.{layer}.ffn_gate_{kind}.weight", gate
        yield f"blk.{layer}.ffn_up_{kind}.weight", up
        return
    if "experts.down_proj" in name or "block_sparse_moe.output_linear" in name:
        name = f"blk.{layer}.ffn_down_exps.weight"
    if "block_sparse_moe.router" in name:
        name = f"blk.{layer}.ffn_gate_inp.weight"
    if "layernorm.norms." in name:
        part, head = re.findall(r"\.([qk])_layernorm\.norms\.(\d+)\.", name)[0]
        name = f"blk.{layer}.attn_{part}_norm.{head}.weight"
    yield name, weight


def _stack_norms(found: dict[str, Tensor]) -> None:
    """Stack StableLM's norms of the heads into one tensor for each layer."""
    for name in [name for name in found if re.search(r"_norm\.\d+\.weight", name)]:
        whole = re.sub(r"\.\d+\.weight", ".weight", name)
        weight = found.pop(name)[None]
        found[whole] = torch.cat([found[whole], weight]) if whole in found else weight


def plain(name: str, weight: np.ndarray) -> tuple[np.ndarray, Any]:
    """Store a tensor in float32."""
    return weight, None


def quantized(kind: str, **kinds: str) -> Store:
    """Return a `Store` that quantizes matrices to blocks of type `kind`; `kinds` names other types
    for some parts, as in `attn_v="Q6_K"`.
    """
    import gguf

    def store(name: str, weight: np.ndarray) -> tuple[np.ndarray, Any]:
        wanted = kinds.get(name.split(".")[-2], kind)
        if weight.ndim < 2 or wanted == "F32":
            return weight, None
        of = gguf.GGMLQuantizationType[wanted]
        return gguf.quantize(weight, of), of

    return store


def write_tensors(
    path: Path,
    architecture: str,
    tensors: dict[str, Tensor],
    store: Store = plain,
    fields: Callable[[Any], None] | None = None,
) -> Path:
    """Write a file with these tensors. `fields` is called with the writer, to add header fields."""
    import gguf

    out = gguf.GGUFWriter(path, architecture)
    if fields is not None:
        fields(out)
    for name, weight in tensors.items():
        data, kind = store(name, weight.detach().float().numpy())
        out.add_tensor(name, data, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
