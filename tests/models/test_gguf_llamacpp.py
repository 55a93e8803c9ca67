"""Models from GGUF files compute what llama.cpp computes from the same files.

This needs a llama.cpp that is compiled on this machine, in the environment that `make peers` makes.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_headers import write
from models.gguf_files import tensors_of
from reference.models import randomized
from test_gguf_config import FILES, keys_of
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from weir.models.gguf import fill, make_empty, plan_fillings, read_config, read_header

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers" / "llamacpp_native" / "bin" / "python"
SIDE = ROOT / "bench" / "weir_bench" / "peers" / "sides" / "llamacpp_logits.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs `make peers`"),
]

LONG, SHORT = 48, 24
"""Numbers of tokens to read: more than the windows of these files (32 tokens) hold, and fewer."""
LAYERS, VOCABULARY, WIDTH = 4, 100, 64
TIED = ("gemma", "gemma2", "gemma3", "bloom", "mpt")
"""Architectures whose files have no `output.weight`, because the head is the embedding."""
TABLED = {
    *("gemma", "gemma2", "gemma3", "phi2", "starcoder2", "gptneox", "falcon", "falcon-grouped"),
    *("mpt", "bloom"),
}
"""Architectures with GELU, which llama.cpp looks up in a table of float16."""

NO_YARN = {
    ".rope.scaling.type": "none",
    ".rope.scaling.factor": 1.0,
    ".rope.scaling.original_context_length": 256,
}
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    **{name: (name, {}, ()) for name in FILES},
    # One key and value head for each query head, as in all OLMoE files.
    "olmoe": ("olmoe", {".attention.head_count_kv": 4}, ()),
    # In this family, llama.cpp uses windows only for the model with 64 layers.
    "exaone4": ("exaone4", {".attention.sliding_window": 0}, ()),
    # llama.cpp rounds the two dimensions between which YaRN blends, but gpt-oss does not.
    "gpt-oss": ("gpt-oss", NO_YARN, ()),
    "starcoder2": ("starcoder2", {}, ("attn_q.bias", "ffn_up.bias")),
    "gptneox": ("gptneox", {}, ("attn_qkv.bias",)),
    "mixtral": ("llama", {".expert_count": 4, ".expert_used_count": 2}, ()),
    "falcon-grouped": ("falcon", {".attention.head_count_kv": 2}, ("attn_norm_2.weight",)),
    "llama-biases": ("llama", {}, ("attn_q.bias", "ffn_up.bias")),
    "nemotron-biases": ("nemotron", {}, ("attn_q.bias", "ffn_up.bias")),
    "seed_oss-biases": ("seed_oss", {}, ("attn_q.bias",)),
    "stablelm-norms": ("stablelm", {}, ("attn_q.bias", "attn_q_norm.weight")),
    "stablelm-serial": ("stablelm", {}, ("ffn_norm.weight",)),
}
"""For each case, the architecture, keys that are added, and tensors that are added to each layer
because the configuration depends on whether they exist.
"""


def write_model(path: Path, name: str) -> Path:
    """Write the file of a random model with the configuration that a case's keys give."""
    architecture, more, marks = CASES[name]
    keys = keys_of(architecture) | more
    keys |= {".vocab_size": VOCABULARY, "tokenizer.ggml.model": "no_vocab"}
    named: dict[str, Any] = {"token_embd.weight": (VOCABULARY, WIDTH)}
    if architecture not in TIED:
        named["output.weight"] = named["token_embd.weight"]
    for layer in range(LAYERS):
        named |= {f"blk.{layer}.{part}": (WIDTH,) for part in ("attn_norm.weight", *marks)}
    config = read_config(write(path, architecture, keys, named))
    model = randomized(AutoModelForCausalLM.from_config(config))
    tensors = {key: weight.detach().numpy() for key, weight in tensors_of(model).items()}
    return write(path, architecture, keys, tensors)


def read_model(path: Path) -> PreTrainedModel:
    config = read_config(path)
    model = make_empty(lambda: AutoModelForCausalLM.from_config(config))
    fillings = plan_fillings(model, read_header(path))
    fill(model, ((key, each.read(torch.float32)) for key, each in fillings.items()))
    return model.eval()


def llamacpp_logits(ids: list[int], path: Path) -> Tensor:
    command = [str(PYTHON), str(SIDE), json.dumps(ids), str(path)]
    answered = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(answered.stdout)
    assert found is not None, answered.stderr[-500:]
    return torch.tensor(found)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", name)
    # llama.cpp ignores the windows of Phi 3, so the text must be shorter.
    count = SHORT if name == "phi3" else LONG
    ids = [int(token) for token in np.random.default_rng(0).integers(0, VOCABULARY, count)]
    with torch.no_grad():
        found = read_model(path)(torch.tensor([ids])).logits[0]
    wanted = llamacpp_logits(ids, path)
    off = float((found - wanted).norm() / wanted.norm())
    # In each layer, a dozen sums of up to 256 terms are rounded in float32. GELU adds a rounding to
    # float16, if it comes from a table.
    sums = LAYERS * 12 * 256**0.5 * torch.finfo(torch.float32).eps / 2
    assert off <= sums + (LAYERS * torch.finfo(torch.float16).eps / 2 if name in TABLED else 0)
