"""From books to a folder with a model: what is checked first, and what remains after a failure."""

from __future__ import annotations

import json
import lzma
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from roundings import close_runs
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import weir
from weir.errors import WeirError
from weir.loading.loader import load
from weir.models import describe, sink_of, window_of
from weir.train import PRESETS, folder, loop, practiced
from weir.train.log import read_log
from weir.train.loop import Lesson
from weir.train.recipe import TrainingRecipe

TINY = TrainingRecipe(
    tokens=10 * 4 * 192,
    rows=4,
    length=192,
    width=32,
    layers=2,
    heads=2,
    kv_heads=1,
    inner=64,
    rate=2e-2,
    exercise_rows=2,
)
PLAIN = replace(TINY, tokens=6 * 4 * 32, length=32, exercise_rows=0, sink="none", optimizer="adamw")
RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива. "
CHINESE = "話說天下大勢，分久必合，合久必分。周末七國分爭，并入於秦。及秦滅之後，楚漢分爭。"


@pytest.fixture(scope="module")
def text(books, tmp_path_factory):
    """Return a file with the two books."""
    path = tmp_path_factory.mktemp("books") / "books.txt.xz"
    path.write_bytes(lzma.compress("\n\0\n".join(books).encode()))
    return path


def run(recipe, text, out, **options):
    return folder.run(recipe, text, out, **{"vocabulary": 640, "compiled": False, **options})


@pytest.mark.slow
def test_from_books_to_a_folder_with_a_model_and_its_figures(text, tokens, tmp_path):
    out = tmp_path / "deep" / "out"
    figures = run(TINY, text, out)
    reader, tokenizer = load(str(out))
    assert len(tokenizer) == figures["vocabulary"] == 640
    assert next(reader.parameters()).dtype == torch.bfloat16
    assert practiced(reader.config)
    assert figures["parameters"] == sum(p.numel() for p in reader.parameters())
    np.testing.assert_array_equal(np.load(out / "training" / "tokens.npy"), tokens)
    saved = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    again = loop.figures(saved, Lesson.of(TINY, tokenizer, tokens))
    assert again.items() <= figures.items()
    assert 1 < figures["book_ppl"] < 640
    assert 0 <= figures["recall"] <= 1
    picture = (out / "training" / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")

    told = []
    again = run(TINY, text, out, on_step=lambda *step: told.append(step))
    assert again == figures
    assert told == [], "a complete run must not be repeated"
    longer = replace(TINY, tokens=12 * 768)
    run(longer, text, out, on_step=lambda *step: told.append(step[:2]))
    assert told == [(11, 12), (12, 12)]


@pytest.mark.parametrize(
    ("sink", "kind", "front"),
    [
        ("none", "none", 0),
        ("zero", "zero", 0),
        ("learnable", "learnable", 1),
        ("learnable:3", "learnable", 3),
        ("taught", "learnable", 1),
    ],
)
@pytest.mark.slow
def test_a_model_of_every_sink_is_one_that_transformers_and_weir_load(
    text, tmp_path, sink, kind, front
):
    length = 192 if sink == "taught" else 32
    run(replace(PLAIN, sink=sink, length=length, tokens=6 * 4 * length), text, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("It was a dark night, and", return_tensors="pt")["input_ids"]
    unmarked = tokenizer("It was a dark night, and", add_special_tokens=False)["input_ids"]
    assert ids[0, front:].tolist() == unmarked
    assert len(set(ids[0, :front].tolist())) == front
    assert sink_of(plain.config).kind == kind
    assert list(sink_of(plain.config).tokens) == ids[0, :front].tolist()
    assert plain.config.max_position_embeddings == length + front

    model, _ = weir.load(str(tmp_path), dtype="float32")
    stream = weir.Stream(model, "streaming_llm(budget=64, sinks=4)")
    with torch.no_grad():
        wanted = plain(input_ids=ids).logits
    close_runs(stream.feed(ids, all_logits=True), wanted, plain)
    long = torch.randint(5, 600, (1, 300))
    assert stream.feed(long).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "kind", "kv_heads"),
    [
        ({"shape": "qwen3", "heads": 4, "kv_heads": 2, "sink": "taught"}, "qwen3", 2),
        ({"shape": "alibi", "heads": 4, "kv_heads": 4, "sink": "learnable"}, "mpt", 4),
    ],
)
@pytest.mark.slow
def test_a_model_of_every_shape_is_one_that_transformers_and_weir_load(
    text, tmp_path, changes, kind, kv_heads
):
    figures = run(replace(TINY, **changes), text, tmp_path, exercises="on")
    assert 0 <= figures["recall"] <= 1
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert plain.config.model_type == kind
    assert window_of(plain.config) == 193
    model, _ = weir.load(str(tmp_path), dtype="float32")
    stream = weir.Stream(model, "streaming_llm(budget=64)")
    ids = torch.randint(5, 600, (1, 50))
    with torch.no_grad():
        wanted = plain(input_ids=ids).logits
    close_runs(stream.feed(ids, all_logits=True), wanted, plain)
    assert [layer.heads.kv_heads for layer in describe(model).layers] == [kv_heads] * 2
    # This is far beyond the model's window.
    assert stream.feed(torch.randint(5, 600, (1, 300))).isfinite().all()


@pytest.mark.slow
def test_a_text_without_the_names_is_trained_on_without_exercises_and_says_so(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("\n".join(f"{RUSSIAN} {n}" for n in range(300)), "utf-8")
    notes = []
    figures = run(TINY, book, tmp_path / "model", on_note=notes.append)
    assert figures["recall"] is None
    assert figures["recipe"]["exercise_rows"] == 0
    assert "without exercises: the exercises need" in notes[0]
    assert "the text is enough for a vocabulary of" in notes[1] and len(notes) == 2
    assert not practiced(AutoConfig.from_pretrained(tmp_path / "model"))
    # The second time, the result is the same.
    assert run(TINY, book, tmp_path / "model") == figures
    with pytest.raises(WeirError, match="the exercises need"):
        run(TINY, book, tmp_path / "other", exercises="on")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("script", [RUSSIAN, CHINESE])
@pytest.mark.slow
def test_any_script_trains_and_is_read_back(tmp_path, script):
    book = tmp_path / "book.txt"
    book.write_text("".join(f"{script}{n}\n" for n in range(400)), "utf-8")
    figures = run(PLAIN, book, tmp_path / "model", vocabulary=400, exercises="off")
    _, tokenizer = weir.load(str(tmp_path / "model"))
    assert figures["book_ppl"] < 400
    assert tokenizer.decode(tokenizer(script)["input_ids"]) == script


def test_a_short_text_gets_fewer_tokens_than_a_long_one(text, tmp_path, monkeypatch):
    assert folder.fitting(32_000_000, 18_000_000) == 32_000_000
    assert folder.fitting(32_000_000, 400_000) == 3_200_000
    assert folder.fitting(32_000_000, 30_000) == 1_000_000
    assert folder.fitting(50_000, 30_000) == 50_000
    monkeypatch.setattr(folder, "fitting", lambda most, size: 500)
    figures = run(replace(PLAIN, tokens=10**9), text, tmp_path, fit_tokens=True)
    assert figures["recipe"]["tokens"] == 500


# --- what is refused, and what is left


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sink": "learnable"}, "begun with sink=none, got learnable"),
        ({"sink": "zero"}, "begun with sink=none, got zero"),
        ({"seed": 7}, "begun with seed=0, got 7"),
        ({"rate": 1e-4}, r"begun with rate=0.02, got 0.0001"),
    ],
)
@pytest.mark.slow
def test_a_run_by_another_recipe_is_refused_before_any_work(
    text, tmp_path, monkeypatch, changes, sentence
):
    run(PLAIN, text, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(folder.corpus, "load_or_train", None)  # the first step of the work
    with pytest.raises(WeirError, match=sentence):
        run(replace(PLAIN, **changes), text, tmp_path)
    with pytest.raises(WeirError, match="begun with vocabulary=640, got 700"):
        run(PLAIN, text, tmp_path, vocabulary=700)
    other = tmp_path.parent / "other.txt"
    other.write_text(RUSSIAN * 100, "utf-8")
    with pytest.raises(WeirError, match="a run on another text"):
        run(PLAIN, other, tmp_path)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_a_folder_with_another_model_is_not_overwritten(text, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeirError, match="holds a model that was not trained there"):
        run(PLAIN, text, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_that_cannot_be_made_is_named(text, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, not a folder")
    with pytest.raises(WeirError, match=r"cannot write to .*blocked"):
        run(TINY, text, blocked)


@pytest.mark.parametrize("size", [299, 65_001])
def test_a_vocabulary_that_cannot_be_stored_is_refused(text, tmp_path, size):
    with pytest.raises(WeirError, match=r"vocabulary must be 300 to 65,000 tokens, got "):
        run(PLAIN, text, tmp_path / "out", vocabulary=size)
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_too_short_leaves_nothing(tmp_path, monkeypatch):
    book = tmp_path / "book.txt"
    book.write_text("Too short. " * 20, "utf-8")
    for options in ({}, {"exercises": "off"}):
        with pytest.raises(
            WeirError, match=("has 220 bytes, but samples of 192 need at least 3,840 tokens")
        ):
            run(TINY, book, tmp_path / "deep" / "model", **options)
    # There are enough bytes but too few tokens, which is only known when the tokenizer is trained.
    book.write_text("Too short. " * 60, "utf-8")
    with pytest.raises(WeirError, match="samples of 32 need at least 640"):
        run(PLAIN, book, tmp_path / "deep" / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]


def test_an_unknown_word_for_exercises_is_refused(text, tmp_path):
    with pytest.raises(WeirError, match="exercises must be one of auto, on, off, got 'yes'"):
        run(TINY, text, tmp_path / "model", exercises="yes")


def test_the_presets_are_recipes_of_the_sizes_they_say():
    def parameters(name):
        recipe, size = PRESETS[name].recipe, PRESETS[name].vocabulary
        head = recipe.width // recipe.heads
        attention = recipe.width * head * (2 * recipe.heads + 2 * recipe.kv_heads)
        layer = attention + 3 * recipe.width * recipe.inner
        return size * recipe.width + recipe.layers * layer

    assert parameters("small") == pytest.approx(1.07e6, rel=0.01)
    assert parameters("nano") == pytest.approx(4.2e6, rel=0.01)
    assert parameters("medium") == pytest.approx(30e6, rel=0.01)
    assert parameters("large") == pytest.approx(164e6, rel=0.01)
    assert PRESETS["nano"].recipe.window == 512


SCRIPT = """
import os, signal
from functools import partial
from pathlib import Path
import torch
from weir.train import TrainingRecipe, run

torch.compile = partial(torch.compile, backend="aot_eager")

def stop(step, steps, facts):
    if step == {killed_after}:
        os.kill(os.getpid(), signal.SIGKILL)

recipe = TrainingRecipe(**{recipe!r})
run(recipe, Path({text!r}), Path({out!r}), vocabulary=640, compiled={compiled}, on_step=stop)
"""


def script(recipe, text, out, *, killed_after=None, compiled=False):
    """Return the source of a process that trains, and is killed after this many steps."""
    values = {name: getattr(recipe, name) for name in TrainingRecipe.__dataclass_fields__}
    return SCRIPT.format(
        recipe=values, text=str(text), out=str(out), killed_after=killed_after, compiled=compiled
    )


@pytest.mark.slow
@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_with_the_same_losses_to_the_last_bit(
    text, tmp_path, monkeypatch
):
    # Compile as usual, except for the last part, in which a graph becomes machine code.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    recipe = replace(PLAIN, tokens=14 * 128, sink="zero")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    source = script(recipe, text, killed, killed_after=8, compiled=True)
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not (killed / "config.json").exists()
    assert len(read_log(killed / "training" / "loss.csv")) == 8
    for out in (whole, killed):
        run(recipe, text, out, compiled=True)
    logs = [read_log(out / "training" / "loss.csv") for out in (whole, killed)]
    for log in logs:
        assert [row["step"] for row in log] == list(range(1, 15))
        for row in log:
            del row["tokens_per_s"]
    assert logs[0] == logs[1]
    files = [(out / "model.safetensors").read_bytes() for out in (whole, killed)]
    assert files[0] == files[1]


@pytest.mark.slow
@pytest.mark.slow
def test_two_processes_train_what_one_trains(text, tmp_path):
    pytest.importorskip("accelerate")
    source = tmp_path / "two.py"
    source.write_text(script(PLAIN, text, tmp_path / "two"))
    launch = ["accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--main_process_port", "0", str(source)]
    ended = subprocess.run([sys.executable, "-m", *launch], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    run(PLAIN, text, tmp_path / "one")
    one, two = (read_log(tmp_path / name / "training" / "loss.csv") for name in ("one", "two"))
    assert len(two) == len(one) == 6
    for left, right in zip(one, two, strict=True):
        # bfloat16 rounds each row alone. Only sums over rows are computed in another order, and the
        # effect of this on the first step grows from step to step.
        assert right["loss"] == pytest.approx(left["loss"], rel=2**-8)
    assert json.loads((tmp_path / "two" / "config.json").read_text())["model_type"] == "llama"
