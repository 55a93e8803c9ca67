"""`weir calibrate` writes a policy file, and every command takes one."""

from __future__ import annotations

import json

import pytest
from reference.models import make
from terminal import make_model, run

import weir
from weir.evals.notation import read_policies, takes_budget


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


FEW = ("--policy", "streaming_llm", "--budget", 24, "--chunk", 8)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text("It was a bright morning, and they walked on. " * 20)
    return str(path)


@pytest.mark.slow
def test_the_file_is_a_policy_for_every_command(capsys, model, text, tmp_path):
    path = tmp_path / "budgets.toml"
    words = ("calibrate", "--model", model, "--text", text, *FEW)
    ended = run(capsys, *words, "--out", path, "--json")
    assert (ended.code, ended.err) == (0, "")
    facts = json.loads(ended.out)
    assert facts["policy"] == "[sink(4) | recent(20)]"  # a single layer shares with none
    assert facts["bytes"] == facts["bytes_before"]
    assert facts["layers"][0]["slots"] == 24
    sized = json.loads(run(capsys, "size", model, "--policy", path, "--json").out)
    assert (sized["policy"], sized["slots"]) == ("[sink(4) | recent(20)]", [24])
    ended = run(
        capsys, "eval", "--model", model, "--policies", f"window(24), {path}", "--out",
        tmp_path / "results.jsonl", "--tasks", f"ppl(tokens=60, text={text})", "--json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "[sink(4) | recent(20)]" in ended.out
    for words in (
        ("size", "nano", "--policy", path),
        ("eval", "--policies", path, "--tasks", "ppl", "--out", tmp_path / "none.jsonl"),
    ):
        ended = run(capsys, *words)
        assert ended.code == 1
        assert "was calibrated for another model (layers 1, here 4," in ended.err


@pytest.mark.slow
def test_a_table_says_what_was_found(capsys, model, text, tmp_path):
    path = tmp_path / "budgets.toml"
    ended = run(
        capsys, "calibrate", "--model", model, "--text", text, "--policy", "h2o", "--memory",
        "20kB", "--out", path, "--chunk", 8,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "budgets.toml: mean error of attention" in ended.out
    assert weir.cache.size_of(weir.load(model)[0], str(path), chunk=8).stream <= 20_000


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--out", "budgets.txt"), "must end with .toml"),
        (("--out", "nowhere/budgets.toml"), "the folder nowhere for budgets.toml does not exist"),
        (
            ("--budget", 24, "--memory", "1MB"),
            "--budget and --memory both set the size of the cache",
        ),
        (("--budget", 4), "a budget of 4 leaves no slots"),
        (("--memory", "100B"), "100 bytes are too few for weir: weir(budget=5) takes"),
        (("--policy", "h2o(8)", "--budget", 24), "h2o(8) cannot get a budget here"),
        (("--policy", "no.toml"), "cannot read the policy file no.toml: No such file"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(capsys, model, text, tmp_path, more, said):
    words = ("calibrate", "--model", model, "--text", text, "--out", tmp_path / "budgets.toml")
    ended = run(capsys, *words, *more)
    assert ended.code == 1
    assert said in ended.err


@pytest.mark.slow
def test_files_stand_in_lists_of_policies(model, text, tmp_path, capsys):
    path = tmp_path / "budgets.toml"
    words = ("calibrate", "--model", model, "--text", text, *FEW)
    run(capsys, *words, "--out", path)
    found = read_policies(f"h2o, {path} , [h2o(8), kcenter(16)],{path}")
    listed = "[sink(4) | recent(20)]"
    assert found == ["h2o", listed, "[h2o(8), kcenter(16)]", listed]
    assert [takes_budget(it) for it in found] == [True, False, False, False]


@pytest.mark.slow
def test_gates_are_trained_and_found(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = tmp_path / "text.txt"
    text.write_text("The pump house stood beside the weir, and Anna has 482. " * 90)
    words = "calibrate", "--text", text, "--tokens", 1024
    ended = run(capsys, *words, "--gates", "--json")
    assert ended.code == 0, ended.err
    assert len(json.loads(ended.out)["layers"]) == 4
    weir.Stream(weir.load("nano")[0], "recent(70) | gated(32)").feed([5, 6, 7])
    ended = run(capsys, *words)
    assert (ended.code, ended.out) == (1, "")
    assert "calibrate needs a file to write the policy to. Use --out" in ended.err


@pytest.mark.slow
def test_the_table_names_the_model_s_layers(capsys, text, tmp_path):
    """Of Gemma 2, every other layer slides, and is left out."""
    folder = make_model(tmp_path / "model")
    make("gemma2", vocab_size=300).save_pretrained(folder)
    ended = run(
        capsys, "calibrate", "--model", folder, "--text", text, *FEW, "--tokens", 192,
        "--out", tmp_path / "budgets.toml",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert (
        ended.out.splitlines()[3].split()[1] == "1"
        and ("measured on 1 passage of 192 tokens") in ended.out
    )
