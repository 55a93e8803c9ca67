"""`weir.load` loads models by name. For a model that cannot be loaded, it raises an error of one
sentence.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaConfig, T5Config, T5ForConditionalGeneration

import weir
from weir.errors import WeirError
from weir.loading.loader import (
    ASSETS,
    drop_kernels,
    is_encoder,
    is_local,
    load_processor,
    skeleton,
)

NANO = ASSETS / "nano"


@pytest.fixture
def folder(llama, tmp_path) -> Path:
    """Return a folder with a small model and a tokenizer."""
    llama.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Keep tests from sending requests to the Hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_nano_is_ready_to_read_in_float32_on_a_cpu():
    model, tokenizer = weir.load("nano", device="cpu")
    assert (model.dtype, model.training, model.device.type) == (torch.float32, False, "cpu")
    ids = tokenizer("Well, Prince,")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == "Well, Prince,"
    assert max(tokenizer.get_vocab().values()) < model.config.vocab_size


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "torch.bfloat16"])
def test_weights_come_in_the_dtype_asked_for(dtype):
    assert weir.load("nano", dtype=dtype, device="cpu")[0].dtype == torch.bfloat16


def test_a_folder_is_loaded_as_it_was_saved(folder, llama, monkeypatch):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in (str(folder), "model", "./model", "~/model"):
        assert is_local(name)
        model, _ = weir.load(name, device="cpu")
        assert not model.training
        for mine, theirs in zip(model.parameters(), llama.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_folder_may_be_a_path_and_other_names_are_refused_in_a_sentence(folder):
    assert weir.load(folder, device="cpu")[0].config.model_type == "llama"
    for name in (None, 3, b"nano", ["nano"]):
        for load in (weir.load, load_processor):
            with pytest.raises(WeirError, match="a model name must be a text, as in weir"):
                load(name)
    with pytest.raises(WeirError, match=r"the model folder .* does not exist"):
        weir.load(folder / "none")


def test_weights_saved_in_half_stay_in_half(folder, fresh_llama):
    fresh_llama().to(torch.bfloat16).save_pretrained(folder)
    assert weir.load(str(folder), device="cpu")[0].dtype == torch.bfloat16


def refused(name: str, sentence: str, **more: Any) -> None:
    with pytest.raises(WeirError, match=sentence) as error:
        weir.load(name, **more)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "~/no-such-model", "../model", ""])
def test_a_folder_that_is_not_there_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    refused(name, f"the model folder '{name}' does not exist")


@pytest.mark.parametrize("name", ["nobody/nothing", "nosuchmodel", "no spaces/allowed", "a/b/c"])
def test_a_name_that_is_nowhere_is_named(name):
    assert not is_local(name)
    refused(
        name,
        (
            f"model '{name}' not found: there is no such folder, and it cannot be loaded "
            f"from the Hub"
        ),
    )


def test_a_hub_that_cannot_be_reached_is_told_at_once(monkeypatch):
    """transformers would retry for half a minute, so weir asks the Hub itself first, and once."""
    asked = []

    def ask(self: Any, name: str, **given: Any) -> None:
        asked.append(name)
        raise ConnectionError("Name or service not known\nand more")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", ask)
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", None)  # would fail
    for take in (weir.load, skeleton, is_encoder, load_processor):
        with pytest.raises(WeirError) as refused:
            take("d/none")
        assert str(refused.value) == (
            "model 'd/none' not found: there is no such folder, and it cannot be "
            "loaded from the Hub, "
            "because the Hub cannot be reached (Name or service not known)"
        )
    assert asked == ["d/none"] * 4


def test_a_model_that_was_fetched_before_is_read_without_the_hub(folder, monkeypatch):
    given = []

    def read(place: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        given.append(more["local_files_only"])
        raise OSError("nothing here")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *a, **k: 1 / 0)
    monkeypatch.setattr("weir.loading.loader.try_to_load_from_cache", lambda *a, **k: "a/path")
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", read)
    refused("some/model", "nothing here")
    assert given == [True]


def test_a_file_that_is_not_there_is_not_sought_on_the_hub_and_a_misspelt_name_is_noticed():
    refused("folder/none.gguf", "the file 'folder/none.gguf' does not exist")
    refused("nanoo", "model 'nanoo' not found, did you mean 'nano'")


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        facts = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**facts, **changes}))

    return change


def weights(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        held = {**load_file(folder / "model.safetensors"), **changes}
        held = {name: t for name, t in held.items() if t is not None}
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def without(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names]


def written(name: str, holds: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(holds)


def tokenizer_config(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def untold(folder: Path) -> None:
    """Turn the model into a GPT-2 without tokenizer files."""
    without("tokenizer.json", "tokenizer_config.json")(folder)
    config(model_type="gpt2")(folder)


def of_another_kind(folder: Path) -> None:
    T5ForConditionalGeneration(
        T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).save_pretrained(folder)


DAMAGED = {
    "an empty folder": (
        lambda folder: [path.unlink() for path in folder.iterdir()],
        "does not contain a model: it has no config.json. Use a folder that save_pretrained wrote",
    ),
    "no configuration": (
        without("config.json"),
        ("does not contain a model: it has no config.json. Use"),
    ),
    "a configuration of nothing": (written("config.json", "{}"), "names no model_type. Use a"),
    "a configuration that is a list": (written("config.json", "[]"), "names no model_type. Use a"),
    "a configuration that is no JSON": (written("config.json", "{"), "does not contain a model"),
    "a kind nobody knows": (config(model_type="nosuch"), "does not contain a model .*nosuch"),
    "a number that is text": (
        config(num_hidden_layers="four"),
        "has num_hidden_layers = 'four', which must be a whole number from 0 to 2,000",
    ),
    "a configuration nested too deep": (
        written("config.json", "[" * 5000 + "]" * 5000),
        "does not contain a model: its config.json is nested too deeply. Use",
    ),
    **{
        f"{key} = {value}": (
            config(**{key: value}),
            (f"has {key} = {value}, which must be a whole number"),
        )
        for key, value in (
            ("num_hidden_layers", 2**31),
            ("num_hidden_layers", -1),
            ("num_hidden_layers", 0),
            ("num_key_value_heads", 0),
            ("num_attention_heads", -4),
            ("hidden_size", 2**62),
            ("vocab_size", 2**31),
            ("max_position_embeddings", -1),
            ("sliding_window", 1.5),
        )
    },
    "layers of another part": (
        config(vision_config={"num_hidden_layers": 2**31}),
        "has num_hidden_layers = 2147483648, which must be a whole number from 0 to 2,000",
    ),
    "more tokens than the weights have bytes": (
        config(vocab_size=10**7),
        r"has vocab_size = 10000000 and hidden_size = 32, but its weights have only [\d,]+ bytes",
    ),
    "a window of tokens that is text": (
        config(sliding_window="x"),
        "(has|for field) .?sliding_window",
    ),
    "an end of answers that is text": (
        written("generation_config.json", '{"eos_token_id": [1, "x"]}'),
        r"has eos_token_id = \[1, 'x'\], which must be a token id. Correct its gener",
    ),
    "an end of answers in two lists": (
        written("generation_config.json", '{"eos_token_id": [[1]]}'),
        r"has eos_token_id = \[\[1\]\], which must be a token id",
    ),
    "no generation configuration, but a file": (
        written("generation_config.json", ""),
        "generation_config.json of .* is not a JSON object. Remove it",
    ),
    "a generation configuration nested too deep": (
        written("generation_config.json", '{"a":' * 5000 + "1" + "}" * 5000),
        "generation_config.json of .* is not a JSON object. Remove it",
    ),
    "a length that is text": (
        lambda folder: tokenizer_config(folder, model_max_length="x"),
        "the tokenizer of .* has model_max_length = 'x', which must be a number",
    ),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "has no tokenizer"),
    "no tokenizer, where transformers makes an empty one": (untold, "has no tokenizer files"),
    "a tokenizer that is no JSON": (written("tokenizer.json", "{"), "has no tokenizer"),
    "no weights": (
        without("model.safetensors"),
        r"does not contain a model: it has no weights \(\.safetensors or \.bin files\)\. Use a",
    ),
    "a configuration alone": (
        lambda folder: [path.unlink() for path in folder.iterdir() if path.name != "config.json"],
        "does not contain a model: it has no weights",
    ),
    "weights cut short": (cut, "cannot be read as a causal language model"),
    "weights that are missing": (
        weights(**{"model.layers.1.mlp.up_proj.weight": None, "model.norm.weight": None}),
        "lacks 2 of its weights, such as model.layers.1.mlp.up_proj.weight",
    ),
    **{
        f"a weight with {value} in {weight}": (
            weights(**{weight: torch.full(shape, value)}),
            f"its weight {weight} has numbers that are not finite",
        )
        for value in (float("nan"), float("inf"), -float("inf"))
        for weight, shape in (("model.norm.weight", (32,)), ("lm_head.weight", (61, 32)))
    },
    "weights of another shape": (
        weights(**{"model.norm.weight": torch.ones(16)}),
        "other shapes than its config.json declares for 1 of its weights, such as "
        "model.norm.weight",
    ),
    "an encoder-decoder": (of_another_kind, "cannot be read as a causal language model .*T5"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_folder_without_a_whole_model_is_refused_and_says_what_is_wrong(folder, name):
    damage, sentence = DAMAGED[name]
    damage(folder)
    refused(str(folder), sentence)


def test_weights_that_belong_to_nothing_do_no_harm(folder):
    weights(extra=torch.zeros(3))(folder)
    assert weir.load(str(folder), device="cpu")[0].config.vocab_size == 61


@pytest.mark.parametrize("dtype", ["float31", torch.int8, "Tensor", "int64", "float8_e4m3fn"])
def test_a_dtype_that_weights_cannot_have_is_refused(dtype):
    refused("nano", "dtype must be 'auto', 'float32'", dtype=dtype)


def test_a_device_that_is_not_there_is_refused():
    refused("nano", "cannot be put on the device 'nosuch'", device="nosuch")


def test_a_name_in_place_of_a_model_is_refused_in_a_sentence() -> None:
    for make in (weir.StreamingCache, weir.Stream):
        with pytest.raises(weir.WeirError, match=r"got a str\. weir\.load returns such a model"):
            make("nano")


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own-llama"


class OwnLlama(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_a_model_brings_runs_only_where_that_is_asked_for(folder, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    (folder / "own.py").write_text(OWN_CODE)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnLlama"}
    config(model_type="own-llama", auto_map=classes)(folder)
    refused(str(folder), "contains Python code, which runs only with trust_remote_code")
    model, _ = weir.load(str(folder), device="cpu", trust_remote_code=True)
    assert type(model).__name__ == "OwnLlama"
    assert type(skeleton(str(folder), trust_remote_code=True)).__name__ == "OwnLlama"


def test_a_revision_is_asked_for_wherever_files_are(monkeypatch):
    asked = []

    def read(place: str, **given: Any) -> None:
        asked.append(given["revision"])
        raise OSError("nothing here")

    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", read)
    for take in (weir.load, skeleton, is_encoder):
        with pytest.raises(WeirError, match="nothing here"):
            take("some/model", revision="v2")
    assert asked == ["v2"] * 3


def test_a_model_on_this_machine_has_no_revision(folder):
    config = folder / "config.json"
    for name, take in (("nano", weir.load), (folder, weir.load), (str(config), skeleton)):
        with pytest.raises(WeirError, match=r"on this machine.* got revision 'v2'\. Leave out"):
            take(name, revision="v2")


def test_a_model_may_be_spread_and_then_has_no_device_of_its_own(folder):
    pytest.importorskip("accelerate")  # transformers asks for it
    model, _ = weir.load(str(folder), device_map={"": "meta"}, dtype="bfloat16")
    assert (model.device.type, model.dtype) == ("meta", torch.bfloat16)
    refused(str(folder), "Give only one of them", device="cpu", device_map="auto")


@pytest.mark.parametrize("key", ["{}_implementation", "_{}_implementation_internal"])
def test_a_folder_s_configuration_reaches_no_kernel_of_the_hub(folder, monkeypatch, key):
    """The configuration names kernels for which transformers would load code from the Hub, although
    the user did not allow that.
    """
    asked: list[Any] = []
    monkeypatch.setattr(
        "transformers.modeling_utils.lazy_import_flash_attention", lambda *a, **k: asked.append(a)
    )
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    named = {key.format("attn"): "someone/kernel", key.format("experts"): "sonicmoe"}
    path.write_text(json.dumps({**config, **named}), "utf-8")
    for load in (lambda: weir.load(str(folder), device="cpu")[0], lambda: skeleton(str(folder))):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = load()
        assert model.config._attn_implementation in ("eager", "sdpa")
        # Newer versions of transformers ignore the second key.
        expected = {"someone/kernel", "sonicmoe"} if key == "{}_implementation" else set()
        assert expected <= {str(each.message).split(",")[0].split()[-1] for each in told}
    assert not asked


def test_kernels_named_for_a_part_of_a_model_are_dropped_too():
    whole = LlavaConfig(attn_implementation={"": "sdpa", "text_config": "someone/kernel"})
    assert whole.text_config._attn_implementation == "someone/kernel"
    assert list(drop_kernels(whole)) == ["someone/kernel"]
    assert whole.text_config._attn_implementation is None
    assert whole._attn_implementation == "sdpa"
