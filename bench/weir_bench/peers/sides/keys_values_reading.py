"""Read the tasks of `quality` with the caches of the package keys_values (awslabs).

nano is converted to LitGPT's layout. A cache holds `cache_length` tokens in total, so it gets as
many as weir's slots and chunk together. Texts are read in pieces of the size of a chunk. Positions
are those of the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from keys_values.config import Config
from keys_values.kvcache.factory import KVCacheFactory
from keys_values.model import GPT
from protocol import serve
from reading import NANO, PIECE, Begin, Reader, size_of
from safetensors.torch import load_file
from torch import Tensor

CACHES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense-default": ("dense-default", {}),
    "lastrec-default": ("lastrec-default", {}),
    "h2o-default, grace_period": ("h2o-default", {"grace_period": PIECE}),
    "h2o-torch-quantized8, grace_period": ("h2o-torch-quantized8", {"grace_period": PIECE}),
}
LONGEST = 20_000
WINDOW = 512
EAGER: Mapping[str, Any] = {"use_eager_sdpa_always": True}
"""An option without which version 0.2.0 looks for a table that its wheel does not contain."""


def make_model() -> GPT:
    """Make nano as a LitGPT model."""
    facts = json.loads((NANO / "config.json").read_text("utf-8"))
    config = Config(
        name="nano",
        block_size=LONGEST,
        vocab_size=facts["vocab_size"],
        padded_vocab_size=facts["vocab_size"],
        n_layer=facts["num_hidden_layers"],
        n_head=facts["num_attention_heads"],
        n_query_groups=facts["num_key_value_heads"],
        n_embd=facts["hidden_size"],
        head_size=facts["head_dim"],
        intermediate_size=facts["intermediate_size"],
        rotary_percentage=1.0,
        rope_base=int(facts["rope_parameters"]["rope_theta"]),
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=facts["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
    )
    model = GPT(config, **EAGER).eval()
    model.max_seq_length = LONGEST
    theirs = load_file(NANO / "model.safetensors")
    weights = {
        "transformer.wte.weight": theirs["model.embed_tokens.weight"],
        "lm_head.weight": theirs["model.embed_tokens.weight"],
        "transformer.ln_f.weight": theirs["model.norm.weight"],
    }
    for n in range(config.n_layer):
        layer, own = f"model.layers.{n}", f"transformer.h.{n}"
        parts = [theirs[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        weights |= {
            f"{own}.attn.qkv.weight": torch.cat(parts),
            f"{own}.attn.proj.weight": theirs[f"{layer}.self_attn.o_proj.weight"],
            f"{own}.norm_1.weight": theirs[f"{layer}.input_layernorm.weight"],
            f"{own}.norm_2.weight": theirs[f"{layer}.post_attention_layernorm.weight"],
            f"{own}.mlp.fc_1.weight": theirs[f"{layer}.mlp.gate_proj.weight"],
            f"{own}.mlp.fc_2.weight": theirs[f"{layer}.mlp.up_proj.weight"],
            f"{own}.mlp.proj.weight": theirs[f"{layer}.mlp.down_proj.weight"],
        }
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model


class Kept:
    """nano with one of the caches."""

    def __init__(
        self, model: GPT, name: str, options: Mapping[str, Any], rows: int, slots: int
    ) -> None:
        length = WINDOW if name.startswith("dense") else slots + PIECE
        self.model, self.rows = model, rows
        self.caches = KVCacheFactory.create(
            model, name, rows, length, dtype=torch.float32, cache_kwargs={**options, **EAGER}
        )
        model.assign_kv_caches(self.caches)
        model.reset()

    def feed(self, ids: Tensor) -> Tensor:
        return self.model(ids)

    def nbytes(self) -> int:
        return size_of(*_held(self.caches)) // self.rows


def _held(caches: Iterable[torch.nn.Module]) -> list[Tensor]:
    """Return the tensors in the caches and in the package's objects inside them, each once."""
    found: dict[int, Tensor] = {}
    waiting: list[Any] = list(caches)
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            found[each.data_ptr()] = each
        elif isinstance(each, dict | list | tuple):
            waiting += each.values() if isinstance(each, dict) else each
        elif type(each).__module__.startswith("keys_values.kvcache") and id(each) not in seen:
            seen.add(id(each))
            waiting += vars(each).values()
    return list(found.values())


def offers() -> Mapping[str, Begin]:
    """Return functions that make each cache, by name."""
    model = make_model()
    return {shown: partial(Kept, model, *cache) for shown, cache in CACHES.items()}


if __name__ == "__main__":
    serve(partial(Reader, ("keys-vals", "litgpt", "torch"), offers))
