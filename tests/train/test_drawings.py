"""The captioner example: drawings match their captions, and a model learns from them."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from reference.examples import import_example
from transformers import AutoModelForImageTextToText, AutoProcessor

import weir
from weir import WeirError
from weir.loading import load_processor

drawings = import_example("captions/drawings.py")
TINY = drawings.ImageRecipe(steps=6, rows=8, held_out=3, width=16, layers=1)


def center(picture: Any, color: str) -> tuple[float, float]:
    """Return the mean position of a color's pixels, and check that there are enough."""
    found = [
        (x, y)
        for x in range(drawings.SIDE)
        for y in range(drawings.SIDE)
        if picture.getpixel((x, y)) == drawings.COLORS[color]
    ]
    assert len(found) > 80
    return tuple(sum(each) / len(found) for each in zip(*found, strict=True))  # type: ignore


@pytest.mark.parametrize("form", ["circle", "square", "triangle"])
def test_a_drawing_shows_what_its_caption_says(form: str) -> None:
    dice = random.Random(0)
    for _ in range(5):
        beside = drawings.draw(drawings.Scene(("red", form), ("blue", "square"), "left of"), dice)
        assert center(beside, "red")[0] + 8 < center(beside, "blue")[0]
        over = drawings.draw(drawings.Scene(("red", form), ("blue", "square"), "above"), dice)
        assert center(over, "red")[1] + 8 < center(over, "blue")[1]
        assert over.getpixel((0, 0)) == drawings.GRAY


def test_captions_in_other_words_say_the_same() -> None:
    assert drawings.Scene(("red", "circle"), ("blue", "square"), "left of").captions == (
        "a red circle left of a blue square",
        "a blue square right of a red circle",
        "a red circle and a blue square",
    )
    every = drawings.scenes()
    assert len(every) == len({one.caption for one in every}) == 18 * 17 * 2


def test_the_folder_is_an_ordinary_model_with_its_processor(tmp_path: Path) -> None:
    told: list[tuple[int, int, float]] = []
    figures = drawings.train_captioner(TINY, tmp_path, lambda *facts: told.append(facts))
    assert [step for step, _, _ in told] == [1, 2, 3, 4, 5, 6]
    assert figures["loss"] == told[-1][2] < told[0][2]
    rows = list(csv.DictReader((tmp_path / "loss.csv").read_text().splitlines()))
    assert [float(row["loss"]) for row in rows] == [loss for _, _, loss in told]
    notes = json.loads((tmp_path / "captions.json").read_text())
    assert len(notes["images"]) == 3 and len(notes["annotations"]) == 9
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    processor: Any = AutoProcessor.from_pretrained(tmp_path)
    picture = Image.open(tmp_path / "images" / "0000.png")
    given = processor(text="<image>", images=[picture], return_tensors="pt")
    assert given["input_ids"].shape == (1, 1 + 64)
    stream = weir.Stream(weir.load(str(tmp_path), device="cpu")[0], "streaming_llm(budget=100)")
    with torch.no_grad():
        plain = model(**given).logits[:, -1]
    assert torch.allclose(stream.feed(given), plain, atol=1e-4)
    assert type(load_processor(str(tmp_path))) is type(processor)
    with pytest.raises(WeirError, match="holds a model already"):
        drawings.train_captioner(TINY, tmp_path)


def test_the_same_seed_trains_the_same_model(tmp_path: Path) -> None:
    ours, theirs = (drawings.train_captioner(TINY, tmp_path / name) for name in ("a", "b"))
    assert ours == theirs
    other = drawings.train_captioner(replace(TINY, seed=1), tmp_path / "c")
    assert other["loss"] != ours["loss"]


def test_held_out_drawings_are_not_trained_on() -> None:

    known, kept = drawings._parted(TINY)
    assert len(kept) == 3 and len(known) == 612 - 3
    assert not {one.caption for one in known} & {one.caption for one in kept}


def test_the_command_writes_a_model_and_prints_its_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--steps", "2", "--rows", "4", "--width", "16", "--layers", "1", "--held-out", "3"]
    drawings.main(["--out", str(tmp_path), *words])
    facts = json.loads(capsys.readouterr().out)
    assert (facts["recipe"]["steps"], facts["held_out"]) == (2, 3)
    assert (tmp_path / "config.json").exists() and (tmp_path / "captions.json").exists()
    with pytest.raises(SystemExit, match=r"weir: .*holds a model already"):
        drawings.main(["--out", str(tmp_path), *words])


def test_recipes_that_make_no_sense() -> None:
    with pytest.raises(WeirError, match="steps must be 1 or more, got 0"):
        drawings.ImageRecipe(steps=0)
    with pytest.raises(WeirError, match="multiple of 8, got 20"):
        drawings.ImageRecipe(width=20)
    with pytest.raises(WeirError, match="there are 612 scenes"):
        drawings.train_captioner(drawings.ImageRecipe(held_out=612), Path("nowhere"))


def test_only_the_caption_and_its_end_are_learned() -> None:

    _, processor = drawings.make_captioner(TINY)
    given = drawings._batch(processor, drawings.scenes()[:2], random.Random(0))
    learned = given["labels"][0][given["labels"][0] != -100]
    tokenizer: Any = processor.tokenizer  # type: ignore[attr-defined]
    assert tokenizer.decode(learned) == f"{drawings.scenes()[0].caption} </s>"
