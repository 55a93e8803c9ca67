"""`weir train`: from a text to a folder that the other commands can use."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
from terminal import run

import weir
from weir.loading.loader import ASSETS
from weir.stream.text import BOOK_SEPARATOR, read_text
from weir.train.exercises import NAMES

SIZE = ("--width", 32, "--layers", 1, "--length", 192, "--rows", 2, "--vocabulary", 640)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Two books, with the names and numbers that exercises are about."""
    draw = random.Random(0)
    gossip = "\n".join(
        f"Then {name} has {draw.randrange(1000)}." for name in draw.choices(NAMES[:24], k=1500)
    )
    path = tmp_path_factory.mktemp("books") / "books.txt"
    book = read_text(ASSETS / "war-and-peace.txt.xz")[:40_000]
    path.write_text(book + BOOK_SEPARATOR + gossip, "utf-8")
    return path


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """Record the steps that training takes, and let it compute its figures from few exercises."""
    from weir.train import loop

    figures, taken = loop.figures, []
    monkeypatch.setattr(loop, "figures", lambda *given: figures(*given, questions=16))
    batch = loop.batch
    monkeypatch.setattr(loop, "batch", lambda *given: taken.append(given[-1]) or batch(*given))
    return taken


@pytest.mark.slow
def test_a_trained_folder_is_a_model_for_every_other_command(capsys, text, tmp_path, steps):
    out = tmp_path / "model"
    words = ("--text", text, "--out", out, "--tokens", 10_000, "--no-compiled", *SIZE)
    ended = run(capsys, "train", *words, "--json")
    assert ended.code == 0, ended.err
    facts = json.loads(ended.out)
    assert ended.out.count("\n") == 1
    assert facts["out"] == str(out)
    assert (facts["recipe"]["width"], facts["recipe"]["length"]) == (32, 192)
    assert facts["parameters"] > 0
    assert 1 < facts["book_ppl"] < 640
    assert 0 <= facts["recall"] <= 1
    assert "step 26 of 26: 9,984 tokens, loss" in ended.err and "tokens/s" in ended.err
    assert steps == list(range(26))

    model, tokenizer = weir.load(str(out), device="cpu")
    assert model.config.max_position_embeddings == 193  # 192 tokens of text and the start token
    assert sum(p.numel() for p in model.parameters()) == facts["parameters"]
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id

    words = ("--model", out, "--policy", "streaming_llm(64)", "--tokens", 1000, "--json")
    read = json.loads(run(capsys, "stream", "--text", text, *words).out)
    assert read["tokens"] == 1000
    assert 1 < read["ppl"] < 640  # better than guessing


@pytest.mark.slow
def test_the_shape_is_chosen_and_a_sink_that_it_cannot_have_is_another_one(
    capsys, text, tmp_path, steps
):
    words = ("--text", text, "--tokens", 1000, "--no-compiled", *SIZE, "--json")
    grouped = ("--shape", "qwen3", "--heads", 4, "--kv-heads", 2)
    ended = run(capsys, "train", *words, "--out", tmp_path / "grouped", *grouped)
    recipe = json.loads(ended.out)["recipe"]
    assert [recipe[name] for name in ("shape", "heads", "kv_heads")] == ["qwen3", 4, 2]
    ended = run(capsys, "train", *words, "--out", tmp_path / "alibi", "--shape", "alibi")
    recipe = json.loads(ended.out)["recipe"]
    assert [recipe[name] for name in ("heads", "kv_heads", "sink")] == [4, 4, "learnable"]
    assert "using a learnable sink: a sink cannot be taught to an ALiBi model" in ended.err
    ended = run(capsys, "train", *words, "--out", tmp_path / "no", "--kv-heads", 3)
    assert ended.code == 1
    assert "4 heads cannot share 3 KV heads evenly" in ended.err
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_a_run_that_was_interrupted_says_so_and_goes_on(capsys, text, tmp_path, steps, monkeypatch):
    from weir.train import loop

    out = tmp_path / "model"
    words = ("--text", text, "--out", out, "--tokens", 10_000, "--no-compiled", *SIZE, "--json")
    train = loop.train

    def pressed(*given, **more):
        def on_step(step, steps, facts):
            if step == 9:
                raise KeyboardInterrupt

        return train(*given, **{**more, "look_every": 4, "on_step": on_step})

    monkeypatch.setattr(loop, "train", pressed)
    ended = run(capsys, "train", *words)
    assert (ended.code, ended.out) == (130, "")
    assert "run the same command again to continue from the last checkpoint" in ended.err
    assert ended.err.endswith("weir: interrupted\n")
    monkeypatch.setattr(loop, "train", train)
    steps.clear()
    assert run(capsys, "train", *words).code == 0
    assert steps == list(range(8, 26))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (("--text", "nowhere.txt"), "cannot read nowhere.txt"),
        (("--out", "/dev/null/model"), "/dev/null/model"),
        (("--width", 33), "33"),
        (("--rows", 500), "500"),
        (("--sink", "some"), "none, zero, learnable"),
        (("--preset", "huge"), "unknown preset 'huge'. Use one of nano, small, medium, large"),
        (("--exercises", "maybe"), "auto, on, off"),
        (("--length", 2000), "samples of 2000 need at least 40,000"),
    ],
)
def test_what_cannot_be_trained_is_one_line(capsys, text, tmp_path, changes, says):
    words = ("--text", text, "--out", tmp_path / "model", "--tokens", 10_000, *SIZE)
    ended = run(capsys, "train", *words, *changes)
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1), ended
    assert ended.err.startswith("weir: ")
    assert says in ended.err


@pytest.mark.slow
def test_on_the_packaged_book_a_model_is_trained_that_chat_opens(
    capsys, monkeypatch, tmp_path, steps
):
    """The vocabulary of a short text lacks the names that exercises need; a note says so."""
    out = tmp_path / "model"
    book = ASSETS / "war-and-peace.txt.xz"
    small = ("--width", 32, "--layers", 1, "--rows", 2, "--tokens", 3000, "--no-compiled")
    ended = run(capsys, "train", "--text", book, "--out", out, *small)
    assert ended.code == 0, ended.err
    assert "training on the text alone, without exercises: the exercises need" in ended.err
    assert "recall" not in ended.out
    typed = io.TextIOWrapper(io.BytesIO(b"Good evening, Prince\n"), "utf-8")
    monkeypatch.setattr("sys.stdin", typed)
    answered = run(capsys, "chat", "--model", out, "--max-tokens", 5, "--temperature", 0)
    assert answered.code == 0, answered.err
    assert "continues your text" in answered.err
    assert "tokens seen" in answered.err


@pytest.mark.slow
def test_another_sink_is_refused_where_a_run_was_begun(capsys, text, tmp_path, steps):
    words = ("--text", text, "--out", tmp_path, "--tokens", 2000, "--no-compiled", *SIZE)
    assert run(capsys, "train", *words, "--sink", "none").code == 0
    steps.clear()
    ended = run(capsys, "train", *words, "--sink", "learnable:2")
    assert (ended.code, ended.out, steps) == (1, "", [])
    assert "was begun with sink=none, got learnable:2" in ended.err
