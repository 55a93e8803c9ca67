"""Each parameter is read from its tensor of a GGUF file, and the changes that llama.cpp's converter
makes are undone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.gguf_files import architecture_of, quantized, tensors_of, write_tensors
from reference.models import CONFIGS, make
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from weir.errors import WeirError
from weir.models.gguf import read_header
from weir.models.gguf.families import FAMILIES
from weir.models.gguf.weights import LAYOUTS, fill, make_empty, plan_fillings
from weir.native.block_weights import fits_blocks
from weir.native.stored_blocks import put_stored_blocks, stored_in_blocks

gguf = pytest.importorskip("gguf")

_READ = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2"),
    *("smollm3", "gpt-neox", "gpt-oss", "arcee", "exaone4", "granite", "granitemoe", "mixtral"),
    *("nemotron", "olmo", "olmo3", "olmoe", "phi", "qwen2-moe", "qwen3-moe", "seed-oss"),
    *("stablelm", "starcoder2", "falcon", "falcon-new", "mpt", "bloom"),
)
READ = tuple(name for name in _READ if name in CONFIGS)  # older transformers lack some
"""Families that can be read from GGUF files, by the names that `reference.models` uses."""
MORE = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "stablelm-biases": ("stablelm", {"use_qkv_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
}
"""Variants of these families that have other tensors."""


def empty_like(model: PreTrainedModel) -> PreTrainedModel:
    return make_empty(lambda: AutoModelForCausalLM.from_config(model.config, dtype=model.dtype))


def read_back(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    empty = empty_like(model)
    fillings = plan_fillings(empty, read_header(path))
    fill(empty, ((name, each.read(model.dtype)) for name, each in fillings.items()))
    return empty.eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, dict, Path]]:
    """Return a function that makes a model by name, and returns it with the tensors of its file and
    the file's path.
    """
    folder, made = tmp_path_factory.mktemp("files"), {}

    def make_file(name: str) -> tuple[PreTrainedModel, dict[str, Tensor], Path]:
        if name not in made:
            family, changes = MORE.get(name, (name, {}))
            model = make(family, **changes)
            tensors = tensors_of(model)
            path = write_tensors(folder / f"{name}.gguf", architecture_of(model), tensors)
            made[name] = model, tensors, path
        return made[name]

    return make_file


@pytest.mark.parametrize("name", [*READ, *MORE])
def test_every_parameter_is_read_as_it_was_written(files, name):
    model, _, path = files(name)
    found, wanted = read_back(model, path).state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    for key, weight in wanted.items():
        # In some families, norms are stored with 1 added, which rounds them.
        torch.testing.assert_close(found[key], weight, rtol=0, atol=2**-22, msg=key)
    buffers = dict(model.named_buffers())
    for key, buffer in read_back(model, path).named_buffers():
        assert torch.equal(buffer, buffers[key]) and buffer.dtype == buffers[key].dtype, key


def test_every_architecture_whose_configuration_is_read_is_read_and_tested():
    tested = {architecture_of(make(name)) for name in READ}
    older = {architecture for architecture in ("nemotron",) if architecture not in CONFIGS}
    assert set(LAYOUTS) - tested == {"mistral3"} | older
    assert LAYOUTS.keys() == FAMILIES.keys()


THEIRS = (
    *("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "starcoder2", "stablelm"),
    *("falcon", "nemotron", "bloom", "qwen2-moe", "qwen3-moe"),
)
"""Families that transformers can also read from GGUF files."""


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", [name for name in THEIRS if name in CONFIGS])
@pytest.mark.thinned(4)
def test_numbers_are_those_that_transformers_reads(files, tmp_path, name, kind):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model, tensors, _ = files(name)
    arch = architecture_of(model)

    def fields(out: Any) -> None:
        config = model.config
        out.add_block_count(config.num_hidden_layers)
        out.add_embedding_length(config.hidden_size)
        out.add_head_count(config.num_attention_heads)
        out.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))

    def store(name: str, weight: Any) -> Any:
        if weight.ndim < 2 or weight.shape[-1] % 32:
            return weight, None
        return quantized(kind)(name, weight)

    path = write_tensors(tmp_path / "a.gguf", arch, tensors, store, fields)
    wanted = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    found = {
        dtype: {
            key: each.read(dtype)
            for key, each in plan_fillings(empty_like(model), read_header(path)).items()
        }
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert len(found[torch.float32]) >= len(model.state_dict()) - 1  # a tied head is not stored
    for dtype, weights in found.items():
        for key, weight in weights.items():
            if name == "stablelm" and "layernorm.norms" in key:
                continue  # transformers does not read StableLM's norms of heads
            assert torch.equal(weight, wanted[key].to(dtype)), (key, dtype)


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt-oss", "granitemoe", "stablelm", "tied"])
def test_a_file_that_lacks_any_tensor_is_refused_by_its_name(files, tmp_path, name):
    model, tensors, _ = files(name)
    for left_out in tensors:
        kept = {key: weight for key, weight in tensors.items() if key != left_out}
        path = write_tensors(tmp_path / "less.gguf", architecture_of(model), kept)
        with pytest.raises(WeirError, match=rf"lacks 1 of the tensors .*{left_out} \(for "):
            read_back(model, path)


def test_a_file_that_lacks_a_tensor_of_one_layer_only_is_refused(files, tmp_path):
    model, tensors, _ = files("bloom")
    for left_out in tensors:
        kept = {key: weight for key, weight in tensors.items() if key != left_out}
        path = write_tensors(tmp_path / "less.gguf", "bloom", kept)
        with pytest.raises(WeirError, match=rf"{left_out}"):
            read_back(model, path)


@pytest.mark.parametrize(
    "extra", ["blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight", "blk.2.attn_q.weight", "v.weight"]
)
def test_tensors_that_nothing_reads_are_refused_by_name(files, tmp_path, extra):
    model, tensors, _ = files("llama")
    path = write_tensors(
        tmp_path / "more.gguf",
        "llama",
        tensors | {extra: torch.ones(32), "rope_freqs.weight": torch.ones(4)},
    )
    with pytest.raises(
        WeirError, match=rf"holds 1 tensor .* know how to use: {extra}\. Without it a model"
    ):
        read_back(model, path)


def test_tensors_of_positions_are_left_to_the_configuration(files, tmp_path):
    model, tensors, _ = files("llama")
    extra = {"rope_freqs.weight": torch.ones(4), "blk.0.attn_rot_embd.weight": torch.ones(4)}
    read_back(model, write_tensors(tmp_path / "more.gguf", "llama", tensors | extra))


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt-oss", "granitemoe", "stablelm", "falcon"])
def test_a_tensor_of_another_shape_is_refused_by_its_name(files, tmp_path, name):
    model, tensors, _ = files(name)
    for wrong, weight in tensors.items():
        other = torch.cat([weight, weight], dim=-1)
        path = write_tensors(
            tmp_path / "wrong.gguf", architecture_of(model), tensors | {wrong: other}
        )
        with pytest.raises(WeirError, match=rf"stores {wrong} with the shape \[.*needs \["):
            read_back(model, path)


def test_an_architecture_that_is_not_read_is_named(files, tmp_path):
    model, tensors, _ = files("llama")
    for name in ("rwkv7", "unheard"):
        path = write_tensors(tmp_path / "other.gguf", name, tensors)
        with pytest.raises(
            WeirError, match=rf"architecture '{name}'.*It can read arcee, .*starcoder2"
        ):
            read_back(model, path)


def test_a_file_that_ends_within_a_tensor_is_refused(files, tmp_path):
    model, _, path = files("llama")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-4])
    last = max(read_header(cut).tensors, key=lambda tensor: tensor.at).name
    sentence = rf"cut\.gguf is cut off: it ends within {last}\. Download it again"
    with pytest.raises(WeirError, match=sentence):
        read_back(model, cut)


def test_projections_are_read_joined_and_apart(files, tmp_path):
    """Queries, keys and values are joined in old files of Phi 2, and separate in some of Phi 3."""
    model, tensors, _ = files("phi")
    joined = {key: weight for key, weight in tensors.items() if not key[6:].startswith("attn_q")}
    for layer in range(2):
        for suffix in ("weight", "bias"):
            names = [f"blk.{layer}.attn_{part}.{suffix}" for part in "qkv"]
            joined[f"blk.{layer}.attn_qkv.{suffix}"] = torch.cat([tensors[n] for n in names])
            for each in names:
                joined.pop(each, None)
    path = write_tensors(tmp_path / "joined.gguf", "phi2", joined)
    for key, weight in read_back(model, path).state_dict().items():
        assert torch.equal(weight, model.state_dict()[key]), key
    model, tensors, _ = files("phi3")
    apart = {key: w for key, w in tensors.items() if "qkv" not in key and "ffn_up" not in key}
    for layer in range(2):
        parts = tensors[f"blk.{layer}.attn_qkv.weight"].split([64, 32, 32])
        for letter, part in zip("qkv", parts, strict=True):
            apart[f"blk.{layer}.attn_{letter}.weight"] = part
        halves = tensors[f"blk.{layer}.ffn_up.weight"].chunk(2)
        for called, part in zip(("gate", "up"), halves, strict=True):
            apart[f"blk.{layer}.ffn_{called}.weight"] = part
    path = write_tensors(tmp_path / "apart.gguf", "phi3", apart)
    for key, weight in read_back(model, path).state_dict().items():
        assert torch.equal(weight, model.state_dict()[key]), key


def test_slices_of_any_size_give_the_same_numbers(files, monkeypatch):
    from weir.models.gguf import weights

    for name in ("llama", "gpt-oss", "bloom"):
        model, _, path = files(name)
        wanted = read_back(model, path).state_dict()
        monkeypatch.setattr(weights, "TOGETHER", 100)
        for key, weight in read_back(model, path).state_dict().items():
            assert torch.equal(weight, wanted[key]), key
        monkeypatch.undo()


def test_biases_that_no_layer_has_are_zeros_and_one_that_is_missing_is_refused(files, tmp_path):
    """llama.cpp reads a Llama with biases for queries, keys and values, but none for the output."""
    model, tensors, _ = files("llama-biases")
    without = {key: weight for key, weight in tensors.items() if "attn_output.bias" not in key}
    read = read_back(model, write_tensors(tmp_path / "a.gguf", "llama", without)).state_dict()
    for key, weight in model.state_dict().items():
        wanted = torch.zeros_like(weight) if key.endswith("o_proj.bias") else weight
        assert torch.equal(read[key], wanted), key
    del tensors["blk.1.attn_output.bias"]
    path = write_tensors(tmp_path / "b.gguf", "llama", tensors)
    with pytest.raises(WeirError, match=r"lacks 1 of .*blk\.1\.attn_output\.bias"):
        read_back(model, path)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0"])
@pytest.mark.parametrize("name", READ)
@pytest.mark.thinned(3)
def test_blocks_are_the_dense_numbers_in_the_same_order(tmp_path, name, kind):
    """Rows in blocks are reordered like rows of dense weights: rotated pairs, fused projections and
    tied weights.
    """
    wide = {"hidden_size": 64} if "falcon" in name or name == "bloom" else {}
    heads = {"num_attention_heads": 4} if "falcon" in name else {"n_head": 4} if wide else {}
    model = make(name, **({"d_model": 64, "n_heads": 4} if name == "mpt" else wide | heads))

    def store(name: str, weight: Any) -> Any:
        return (weight, None) if weight.shape[-1] % 32 else quantized(kind)(name, weight)

    tensors = tensors_of(model)
    path = write_tensors(tmp_path / "blocks.gguf", architecture_of(model), tensors, store)
    few = empty_like(model)
    fillings = plan_fillings(few, read_header(path))
    found = stored_in_blocks(few, fillings)
    # The gate of a shared expert has a single row, which files store as a vector.
    linear = [it for it in few.modules() if fits_blocks(it) and it.out_features > 1]
    assert linear and all(any(it in each for each in found.values()) for it in linear)
    done = put_stored_blocks(few, found, fillings, lambda nbytes: None)
    fill(few, ((key, it.read(torch.float32)) for key, it in fillings.items() if key not in done))
    dense = read_back(model, path)
    for key, module in few.named_modules():
        if hasattr(module, "weight"):
            assert torch.equal(module.weight, dense.get_submodule(key).weight), key


def test_the_private_names_that_are_read_exist() -> None:
    """If a release of PyTorch removes a private name that weir uses, this test fails by name."""
    assert torch.nn.Linear(1, 1)._non_persistent_buffers_set == set()
    made: list[str] = []
    hook = torch.nn.modules.module.register_module_parameter_registration_hook
    handle: Any = hook(lambda module, name, parameter: made.append(name))
    torch.nn.Linear(1, 1)
    handle.remove()
    assert made == ["weight", "bias"]
