"""`weir inspect`: one page from a model and a text, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from terminal import make_model, run
from transformers import BertConfig, BertForMaskedLM, BertTokenizer, MambaConfig, MambaForCausalLM

WORDS = "The prince was silent, but she looked at him significantly, awaiting a reply. "


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("<model>"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book&.txt"
    path.write_text(WORDS * 20)
    return path


def make_bert(folder: Path) -> str:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += sorted(set(WORDS.lower().replace(",", " ,").replace(".", " .").split()))
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=64,
    )
    BertForMaskedLM(config).save_pretrained(folder)
    return str(folder)


def test_a_page_and_its_pictures_are_written(capsys, model, text, tmp_path):
    ended = run(
        capsys, "inspect", "--model", model, "--text", text, "--out", tmp_path / "page",
        "--only", "maps, shares", "--sequences", 6,
    )  # fmt: skip
    assert (ended.code, ended.err) == (0, "")
    names = ["index.html", "maps.png", "shares.png"]
    assert ended.out.split("\n")[:-1] == [str(tmp_path / "page" / name) for name in names]
    page = (tmp_path / "page" / "index.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") == 2
    assert "book&amp;.txt" in page and "&lt;model&gt;" in page and "<model>" not in page


def test_json_has_every_sections_figures(capsys, model, text, tmp_path):
    ended = run(
        capsys, "inspect", "--model", model, "--text", text, "--out", tmp_path,
        "--only", "shares,layers,kept", "--heads", 1, "--tokens", 450, "--json",
        "--policy", "streaming_llm", "--budget", 100,
    )  # fmt: skip
    assert ended.code == 0
    facts = json.loads(ended.out)
    assert set(facts["sections"]) == {"shares", "layers", "kept"}
    assert facts["sections"]["kept"]["policy"] == "streaming_llm(budget=100)"
    assert facts["sections"]["layers"]["tokens"] == 450
    assert facts["left_out"] == {}
    assert all(Path(path).is_file() for path in facts["files"])


@pytest.mark.slow
def test_an_encoder_is_looked_into_as_well(capsys, text, tmp_path):
    bert = make_bert(tmp_path)
    ended = run(
        capsys, "inspect", "--model", bert, "--text", text, "--out", tmp_path / "page", "--json",
        "--sequences", 4,
    )  # fmt: skip
    assert ended.code == 0
    facts = json.loads(ended.out)
    maps = facts["sections"]["maps"]
    assert maps["fixed_tokens"] == {"0": "[CLS]", "15": "[SEP]"}
    assert all(len(it["logits"]) == 16 and None not in it["logits"][0] for it in maps["maps"])
    assert "sees its whole text at once" in facts["left_out"]["shares"]
    assert "so it has no stream" in facts["left_out"]["layers"]
    assert "bert is an encoder, whose tokens also see later tokens" in facts["left_out"]["keys"]
    assert facts["left_out"]["norms"] == facts["left_out"]["kept"] == "for the same reason as keys"
    assert "shares is left out: " in ended.err
    page = (tmp_path / "page" / "index.html").read_text("utf-8")
    assert "Every token sees every other." in page and "Left out: " in page


def test_a_model_without_attention_is_refused_in_one_line(capsys, model, text, tmp_path):
    for path in Path(model).glob("token*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    ended = run(
        capsys, "inspect", "--model", tmp_path, "--text", text, "--out", tmp_path / "page",
        "--only", "maps",
    )  # fmt: skip
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "this mamba has no attention weights to show" in ended.err
    assert not (tmp_path / "page" / "index.html").exists()


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (["--layers", "1"], 1, "layer 1 does not exist. The model's layers are 0 to 0"),
        (["--heads", "0,2"], 1, "head 2 does not exist. The model's heads are 0 to 1"),
        (
            ["--layers", "all"],
            2,
            "--layers must be whole numbers of at least 0, separated by commas",
        ),
        (["--only", "map"], 1, "unknown section 'map'. Use one of maps, "),
        (["--policy", "sink("], 1, "sink("),
        (["--policy", "sink(4) | recent(8)", "--budget", "9"], 1, "budget"),
        (["--length", "4", "--only", "maps"], 1, "a map of 4 tokens shows nothing. Use at least 8"),
        (["--text", "none.txt"], 1, "cannot read none.txt"),
    ],
)
def test_what_makes_no_sense_is_one_line(capsys, model, text, tmp_path, given, code, said):
    ended = run(
        capsys, "inspect", "--model", model, "--text", text, "--out", tmp_path / "page", *given
    )
    assert (ended.code, ended.err.count("\n")) == (code, 1)
    assert said in ended.err


def test_a_text_that_is_too_short_is_refused(capsys, model, tmp_path):
    (tmp_path / "short.txt").write_text("Yes.")
    ended = run(
        capsys, "inspect", "--model", model, "--text", tmp_path / "short.txt",
        "--out", tmp_path / "page", "--only", "maps,shares",
    )  # fmt: skip
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "the text is too short to inspect: it has 5 tokens" in ended.err
