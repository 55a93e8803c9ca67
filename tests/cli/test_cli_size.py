"""`weir size`: the bytes of a model and its streams, computed from its configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from terminal import make_model, run
from transformers import AutoModelForCausalLM

import weir
from weir.models import fingerprint, set_sink, stored_bytes
from weir.policies import format_policy_file, with_pin

SMALL = "sink(4) | recent(20)"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model, tmp_path):
    """A folder that has the model's config.json, but no weights."""
    path = tmp_path / "only" / "config.json"
    path.parent.mkdir()
    AutoModelForCausalLM.from_pretrained(model).config.save_pretrained(path.parent)
    return path


def facts_of(capsys, *words):
    ended = run(capsys, "size", *words, "--json")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith("}\n")
    assert ended.out.count("\n") == 1
    return json.loads(ended.out)


def test_json_is_one_object_with_every_figure_and_nothing_else(capsys, model):
    facts = facts_of(
        capsys, model, "--policy", SMALL, "--chunk", 8, "--memory", "1MB", "--bandwidth", "1GB/s"
    )
    loaded = AutoModelForCausalLM.from_pretrained(model)
    cache = weir.StreamingCache(loaded, SMALL, chunk=8)
    with torch.no_grad():
        loaded(torch.tensor([[1]]), past_key_values=cache)
    weights = sum(t.nbytes for t in [*loaded.parameters(), *loaded.buffers()])
    table = loaded.get_input_embeddings().weight.nbytes
    pairs = 2 * 32 * 16 * 4  # keys and values, 32 slots, 16 numbers each, in float32
    streams = (10**6 - weights) // cache.nbytes
    assert facts == {
        "model": model,
        "policy": SMALL,
        "chunk": 8,
        "dtype": "float32",
        "weights_format": "float32",
        "layers": 1,
        "slots": [24],
        "sink": {"kind": "none", "tokens": [], "slots": None},
        "stream_bytes": cache.nbytes,
        "stream_bytes_at_most": cache.nbytes,
        "weights_bytes": weights,
        "step_bytes": {"weights": weights - table, "each_stream": pairs},
        "memory_bytes": 10**6,
        "streams": streams,
        "bandwidth_bytes_per_s": 10**9,
        "tokens_per_s": {
            "one": pytest.approx(1e9 / (weights - table + pairs)),
            "all": pytest.approx(streams * 1e9 / (weights - table + streams * pairs)),
        },
    }
    assert streams > 1


def test_for_people_it_is_a_few_lines(capsys, model):
    ended = run(capsys, "size", model, "--memory", "1MB", "--bandwidth", "1GB/s")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "model", "policy", "weights", "a stream", "a step", "streams", "pace"
    ]  # fmt: skip
    assert lines[0] == f"model     {model}, 1 layer, float32"
    assert lines[1].endswith("weir(budget=448), 448 slots per KV head, and room for 64 new tokens")
    assert " fit in 1.0 MB next to the weights" in lines[5]
    assert lines[6].endswith(" together, at 1.0 GB/s")
    plain = run(capsys, "size", model).out.splitlines()
    assert plain == lines[:5]
    large = run(capsys, "size", model, "--policy", "window(4000)", "--chunk", 2000).out
    assert "window(4000), 4,000 slots per KV head, and room for 2,000 new tokens\n" in large


@pytest.mark.parametrize(
    ("kind", "tokens", "said"),
    [
        (
            "zero",
            [],
            "a Zero Sink (1 is added to the denominator of attention), which needs no slot",
        ),
        ("learnable", [3], "a learned token before every text, so sink(1) is enough"),
        ("learnable", [3, 5], "2 learned tokens before every text, so sink(2) is enough"),
    ],
)
def test_a_sink_that_the_model_was_trained_with_is_told(
    capsys, model, tmp_path, kind, tokens, said
):
    config = AutoModelForCausalLM.from_pretrained(model).config
    set_sink(config, kind, tokens)
    config.save_pretrained(tmp_path)
    ended = run(capsys, "size", tmp_path)
    assert ended.out.splitlines()[1] == f"sink      {said}"
    wanted = {"kind": kind, "tokens": tokens, "slots": len(tokens)}
    assert facts_of(capsys, tmp_path)["sink"] == wanted


def test_layers_of_unlike_budgets_are_told_as_a_range(capsys):
    ended = run(capsys, "size", "nano", "--policy", "pyramid(snap(64, 8, 7), beta=3)")
    assert ended.code == 0
    slots = facts_of(capsys, "nano", "--policy", "pyramid(snap(64, 8, 7), beta=3)")["slots"]
    assert len(slots) == 4
    assert min(slots) < max(slots)
    assert f"{min(slots)} to {max(slots)} slots per KV head" in ended.out


def test_heads_of_unlike_budgets_are_told_as_a_range(capsys):
    heads = "[recent(8), recent(40)]"
    asked = ("nano", "--policy", f"[recent(8), {heads}, recent(8), recent(8)]")
    assert facts_of(capsys, *asked)["slots"] == [8, 24, 8, 8]
    assert "8 to 40 slots per KV head" in run(capsys, "size", *asked).out


def test_a_configuration_is_enough_and_no_weight_is_looked_for(capsys, model, config):
    with_weights = facts_of(capsys, model, "--slots", "int4")
    for given in (config, config.parent):
        facts = facts_of(capsys, given, "--slots", "int4")
        assert facts == {**with_weights, "model": str(given)}


def test_without_the_weights_it_says_what_they_decide(capsys, model, config):
    facts = facts_of(capsys, config)
    wider = facts_of(capsys, config, "--slots", "int8")["stream_bytes"]
    assert facts["stream_bytes"] == facts_of(capsys, config, "--slots", "int4")["stream_bytes"]
    assert facts["stream_bytes_at_most"] == wider > facts["stream_bytes"]
    for given, place in ((config, "file"), (config.parent, "folder")):
        said = run(capsys, "size", given).out.splitlines()[3]
        assert said.endswith(
            " kB with 8-bit slots: the default policy chooses by the weights, which "
            f"are not in this {place}"
        )
    pinned = facts_of(capsys, config, "--pin", 8)
    assert pinned["stream_bytes_at_most"] > pinned["stream_bytes"]


def test_weights_that_cannot_be_read_are_not_said_to_be_elsewhere(capsys, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    ended = run(capsys, "size", folder)
    assert ended.code == 1
    assert "cut cannot be read as a causal language model" in ended.err
    assert run(capsys, "size", folder, "--policy", SMALL).code == 0


def test_a_file_that_is_cut_off_is_not_said_to_be_elsewhere(capsys, tmp_path):
    from loading.test_gguf_loading import write_large  # skips the test without the package gguf

    file = write_large(tmp_path / "some.gguf", 64, 1)
    assert run(capsys, "size", file).code == 0
    file.write_bytes(file.read_bytes()[:-64])
    for more in ([], ["--policy", SMALL]):  # with a policy, it needs no weights
        ended = run(capsys, "size", file, *more)
        assert ended.code == 1
        assert "some.gguf is cut off" in ended.err


def test_a_type_of_tensors_that_nobody_knows_is_refused_from_the_header(capsys, tmp_path):
    from loading.test_gguf_loading import write_large

    from weir.models.gguf import read_header

    file = write_large(tmp_path / "some.gguf", 64, 1)
    tensor = read_header(file).tensors[-1]
    name = tensor.name.encode()
    raw = bytearray(file.read_bytes())
    at = raw.index(len(name).to_bytes(8, "little") + name) + 8 + len(name)
    kind = at + 4 + 8 * len(tensor.shape)  # skips the number of dimensions and the dimensions
    raw[kind : kind + 4] = (99).to_bytes(4, "little")
    file.write_bytes(raw)
    ended = run(capsys, "size", file, "--policy", SMALL)
    assert ended.code == 1
    assert f"stores {tensor.name} as type 99, which the package gguf cannot read" in ended.err


def test_weights_larger_than_the_memory_are_said_to_be(capsys, model, monkeypatch):
    monkeypatch.setattr("weir.loading.loader.free_memory", lambda device: 1000)
    ended = run(capsys, "size", model)
    assert ended.code == 0
    assert "by the weights, which do not fit in the memory of this machine" in ended.out


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory) -> str:
    """A nano with a few large channels in its keys, so that slots of 4 bits would lose too much."""
    folder = tmp_path_factory.mktemp("spoiled")
    model, tokenizer = weir.load("nano")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[::16] *= 30
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory) -> str:
    """A model with a policy file next to it."""
    folder = make_model(tmp_path_factory.mktemp("calibrated"))
    loaded, _ = weir.load(folder)
    layers = [{"policy": "sink(1) | recent(8) | recent(11):int8"}]
    text = format_policy_file({"chunk": 16}, fingerprint(loaded), layers)
    (Path(folder) / "weir.toml").write_text(text)
    return folder


@pytest.mark.parametrize("name", ["nano", "spoiled", "calibrated"])
@pytest.mark.parametrize("loading", [{}, {"dtype": "bfloat16"}, {"weights": "q8_0"}])
@pytest.mark.parametrize("positions", ["rolling", "original"])
@pytest.mark.parametrize(
    ("policy", "slots", "chunk"),
    [
        (None, None, None),
        (None, "exact", 16),
        (None, "int8", None),
        ("weir(budget=128)", None, 32),
        ("streaming_llm(100)", None, None),
        ("snapkv(96)", None, 8),
        ("h2o(64)", "int8", None),
        ("reservoir(64, weighted=true)", None, None),
        ("dense", None, None),
        ("sink(2) | recent(none)", None, 7),
    ],
)
@pytest.mark.thinned(6)
def test_it_says_what_a_cache_takes(
    capsys, request, name, loading, positions, policy, slots, chunk
):
    """Combines all arguments that change the number of bytes."""
    if name != "nano":
        name = request.getfixturevalue(name)
    if loading.get("weights"):
        pytest.importorskip("numba", reason="not installed: pip install 'weir-kv[fast]'")
    words = [name, "--positions", positions]
    for option, value in [("policy", policy), ("slots", slots), ("chunk", chunk)]:
        words += [f"--{option}", value] if value is not None else []
    for option, value in loading.items():
        words += [f"--{option}", value]
    if policy is not None and ("dense" in policy or "none" in policy):
        words += ["--tokens", 70]
    facts = facts_of(capsys, *words)
    loaded, _ = weir.load(name, **loading)
    cache = weir.StreamingCache(loaded, policy, slots=slots, chunk=chunk, positions=positions)
    with torch.no_grad():
        for piece in torch.arange(70).split(30):
            loaded(piece[None] % 60, past_key_values=cache)
    report = cache.report()
    assert facts["stream_bytes"] == facts["stream_bytes_at_most"] == report["bytes"]
    assert (facts["chunk"], facts["dtype"]) == (report["chunk"], str(loaded.dtype)[6:])
    assert facts["weights_bytes"] == stored_bytes(loaded)


def test_the_weights_decide_the_format_of_the_default(capsys, spoiled):
    default = "--policy", "weir"  # nano's own is in its weir.toml
    assert "slots=int8" in facts_of(capsys, spoiled, *default)["policy"]
    assert "int8" not in facts_of(capsys, "nano", *default)["policy"]


def test_another_dtype_is_what_the_model_would_be_loaded_in(capsys, config):
    words = (config, "--policy", SMALL)
    whole, half = facts_of(capsys, *words), facts_of(capsys, *words, "--dtype", "bfloat16")
    assert (whole["dtype"], half["dtype"]) == ("float32", "bfloat16")
    assert half["step_bytes"]["each_stream"] * 2 == whole["step_bytes"]["each_stream"]
    assert half["weights_bytes"] < whole["weights_bytes"]


@pytest.mark.parametrize("gpu", [False, True])
def test_nano_takes_what_it_would_be_loaded_in(capsys, monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert facts_of(capsys, "nano")["dtype"] == ("bfloat16" if gpu else "float32")
    if not gpu:
        assert str(weir.load("nano")[0].dtype) == "torch.float32"


def test_a_configuration_of_more_layers_than_any_model_has_is_refused_at_once(capsys, config):
    facts = json.loads(config.read_text())
    config.write_text(json.dumps({**facts, "num_hidden_layers": 10**6}))
    ended = run(capsys, "size", config)
    assert (ended.code, ended.out) == (1, "")
    assert (
        "has num_hidden_layers = 1000000, which must be a whole number from 0 to 2,000" in ended.err
    )


def test_a_memory_that_holds_no_stream_says_so_after_the_figures(capsys, model):
    ended = run(capsys, "size", model, "--memory", "1kB", "--bandwidth", "1GB/s", "--json")
    assert ended.code == 1
    facts = json.loads(ended.out)
    assert facts["streams"] == 0
    assert list(facts["tokens_per_s"]) == ["one"]
    assert ended.err.count("\n") == 1
    assert "1kB is too small for a stream: the weights take " in ended.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--policy", "dense"),
            "Give a length, as in --tokens 8192",
        ),
        (("--policy", "recent(2) | recent"), "recent"),
        (
            ("--memory", "much"),
            ("'much' must be a number of bytes, at least 1 and less than 2^63. Write, for example"),
        ),
        (("--bandwidth", "-3GB/s"), "'-3GB/s' must be a number of bytes, at least 1"),
        (("--dtype", "float99"), "float99"),
        (("--dtype", "int8"), "int8"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(capsys, model, words, sentence):
    ended = run(capsys, "size", model, *words)
    assert (ended.code, ended.out) == (1, "")
    assert sentence in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("words", [("size",), ("chat",), ("serve",), ("chat", "--weights", "q8_0")])
def test_a_folder_without_a_model_is_refused_by_every_command_alike(
    capsys, config, tmp_path, words
):
    pytest.importorskip("fastapi")
    (tmp_path / "empty").mkdir()
    lacks = {"empty": "it has no config.json"}
    if words != ("size",):
        lacks["only"] = "it has no weights (.safetensors or .bin files)"
    for name, lack in lacks.items():
        ended = run(capsys, words[0], tmp_path / name, *words[1:])
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.splitlines()[-1] == (
            f"weir: the folder {tmp_path / name} does not contain a model: {lack}. Use a folder "
            "that save_pretrained wrote, a .gguf file, or an id on the Hub."
        )


def test_of_a_stream_with_a_beginning_the_slots_of_the_beginning_are_told(capsys, model):
    def line(*words):
        return run(capsys, "size", model, "--policy", SMALL, *words).out.splitlines()[3]

    told = "{} for the beginning of a conversation (see --pin)"
    assert line().endswith(" kB") and line("--rows", 2, "--pin", 0) == line()
    assert line("--rows", 2).endswith(f" kB. This includes {told.format('6 slots')}")
    assert line("--pin", 1).endswith(f" kB. This includes {told.format('1 slot')}")


def test_a_pin_counts(capsys, model):
    facts = facts_of(capsys, model, "--policy", SMALL, "--pin", 8)
    assert facts["slots"] == [24 + 8 + 16]
    assert facts["policy"] == f"pinned({SMALL}, n=8, header=16)"


def test_a_pin_goes_around_the_slots_as_in_serve(capsys, model):
    facts = facts_of(capsys, model, "--policy", "weir(24)", "--pin", 8, "--slots", "exact")
    assert facts["policy"] == "pinned(weir(budget=24, slots=exact), n=8, header=16)"


def test_what_is_no_configuration_is_refused(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    for given in (path, tmp_path, tmp_path / "nowhere"):
        ended = run(capsys, "size", given)
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.count("\n") == 1
        assert str(given) in ended.err


def test_a_model_that_cannot_be_served_has_no_size(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    ended = run(capsys, "size", path)
    assert (ended.code, ended.out) == (1, "")
    assert "gpt2" in ended.err


def test_quantized_slots_count(capsys, model):
    policy = "sink(4) | recent(8) | kcenter(8)"
    exact, int8 = (
        facts_of(capsys, model, "--policy", policy, "--slots", slots) for slots in ("exact", "int8")
    )
    assert exact["policy"] == policy
    assert int8["policy"] == f"quantized({policy}, slots=int8)"
    assert int8["stream_bytes"] < exact["stream_bytes"]
    assert int8["step_bytes"]["each_stream"] < exact["step_bytes"]["each_stream"]
    ended = run(capsys, "size", model, "--policy", policy, "--slots", "int7")
    sentence = "unknown format of slots 'int7'. Use one of int8, int4, k8v4, fp8. For exact slots"
    assert ended.code == 1 and sentence in ended.err
    ended = run(capsys, "size", model, "--policy", policy, "--slots", "k8v4")
    assert ended.code == 1 and "in groups of 32 numbers" in ended.err


@pytest.mark.slow
def test_a_policy_without_a_limit_is_sized_at_a_length_and_a_named_one_by_its_budget(capsys):
    def bytes_of(*words: object) -> int:
        return json.loads(run(capsys, "size", *words, "--json").out)["stream_bytes"]

    dense = bytes_of("nano", "--policy", "dense", "--tokens", 8192)
    assert dense == 8192 * 4096  # keys and values, as transformers holds them
    assert bytes_of("nano", "--budget", 448) == bytes_of("nano", "--policy", "weir")
    ended = run(capsys, "size", "nano", "--tokens", 9)
    assert "--tokens has no effect" in ended.err
    for words, said in (((), "Missing argument 'MODEL'"), (("a", "--model", "b"), "two models")):
        ended = run(capsys, "size", *words)
        assert (ended.code, ended.err.count("\n")) == (2, 1) and said in ended.err


def test_the_rest_of_a_long_command_is_estimated_once(capsys, monkeypatch):
    from weir.cli import common

    now = iter((0.0, 1.0, 30.0, 31.0))
    monkeypatch.setattr(common.time, "monotonic", lambda: next(now))
    rest = common.RemainingTime("the rest")
    for share in (0.5, 0.1, 0.2):
        rest.at(share)
    assert capsys.readouterr().err == "the rest: about 4 minutes left at this pace\n"


def test_what_a_server_holds_is_counted(capsys, model):
    """Pinned tokens and states of prompts are counted, as in the first lines of `weir serve`."""
    pytest.importorskip("fastapi")
    from weir.serve import estimate_memory

    how = (model, "--policy", SMALL, "--chunk", 8, "--pin", 40)
    facts = facts_of(capsys, *how, "--rows", 3)
    server = facts["server"]
    pinned = weir.policy(f"pinned({SMALL}, n=40)")
    estimate = estimate_memory(model, pinned, chunk=8, rows=3, kept=None)
    assert estimate.policy == pinned
    assert facts["stream_bytes"] == estimate.row
    assert server["prompt_states_bytes"] == estimate.prefixes * estimate.row > 0
    assert server["total_bytes"] == estimate.total
    parts = sum(server[f"{part}_bytes"] for part in ("rows", "turns", "prompt_states"))
    assert parts + facts["weights_bytes"] == server["total_bytes"]
    assert "server" not in facts_of(capsys, *how)
    quantized = facts_of(capsys, *how, "--pin-slots", "int8")
    assert quantized["stream_bytes"] < facts["stream_bytes"]
    shown = run(capsys, "size", *how, "--rows", 3).out
    with_data, without = shown[shown.index("server ") :].splitlines()[:2]
    assert with_data.startswith("server    with --data ")
    assert ", 3 rows " in with_data
    assert ", states of 8 prompts " in with_data
    assert without.startswith("          without --data ")
    assert ": also the states of 256 turns, " in without


def test_without_a_pin_a_server_s_is_counted(capsys, model):
    pytest.importorskip("fastapi")
    how = (model, "--policy", "streaming_llm(256)", "--chunk", 8)
    assert facts_of(capsys, *how)["policy"] == "streaming_llm(256)"
    served = facts_of(capsys, *how, "--rows", 3)
    assert served["policy"] == str(with_pin(weir.policy("streaming_llm(256)"), None))
    assert served["stream_bytes"] > facts_of(capsys, *how)["stream_bytes"]
    assert "pinned" in facts_of(capsys, *how, "--rows", 3, "--pin", "auto")["policy"]
    ended = run(capsys, "size", *how, "--pin", "auto")
    assert ended.code == 1 and "Add --rows" in ended.err
    ended = run(capsys, "size", *how, "--pin", "9" * 12)
    assert ended.code == 1 and "from 0 to 999,999,999" in ended.err
