"""The task `caption`: what a model writes of images, and images that are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from reference.drawings import captioner
from reference.subjects import quiet
from transformers import AutoProcessor

import weir
from weir import WeirError
from weir.evals.grid.grid import Cell
from weir.evals.grid.runner import subject_of
from weir.evals.measures import caption_scores
from weir.evals.task import Subject
from weir.evals.tasks import Caption
from weir.evals.tasks.caption import read_image


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("captioner")
    captioner(path)
    return path


def subject(folder: Path, policy: str = "dense", **options: Any) -> Subject:
    model, tokenizer = weir.load(str(folder), device="cpu")
    return Subject(str(folder), model, tokenizer, weir.policy(policy), **options)


def of(folder: Path, **options: Any) -> Caption:
    return Caption(str(folder / "captions.json"), str(folder / "images"), most=5, **options)


def test_under_dense_captions_are_those_of_the_plain_model(folder: Path) -> None:
    found = of(folder).run(subject(folder), quiet)
    model, tokenizer = weir.load(str(folder), device="cpu")
    processor: Any = AutoProcessor.from_pretrained(folder)
    wanted = []
    for path in sorted((folder / "images").iterdir()):
        given = processor(text="<image>", images=[Image.open(path)], return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**given, max_new_tokens=5, do_sample=False)
        new = ids[0, given["input_ids"].shape[1] :]
        wanted.append(tokenizer.decode(new, skip_special_tokens=True).strip())
    assert found["answers"] == wanted
    notes = json.loads((folder / "captions.json").read_text())["annotations"]
    right = [[n["caption"] for n in notes if n["image_id"] == i] for i in range(4)]
    assert {name: found[name] for name in Caption.metrics} == caption_scores(wanted, right)
    assert (found["asked"], found["missing"]) == (4, [])
    assert found["tokens"] > 64 and found["share"] == 1.0


def test_a_policy_holds_less_of_an_image(folder: Path) -> None:
    found = of(folder, samples=2).run(subject(folder, "streaming_llm(budget=16)", chunk=8), quiet)
    assert found["asked"] == 2
    assert found["share"] < 0.4


def test_the_processor_is_read_from_the_files_that_the_model_came_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def load_processor(name: str, **where: Any) -> None:
        asked.append((name, where))
        raise WeirError("far enough")

    monkeypatch.setattr("weir.evals.tasks.caption.load_processor", load_processor)
    monkeypatch.setattr(
        "weir.evals.grid.runner.load", lambda name, **how: weir.load("nano", device="cpu")
    )
    where = {"revision": "a-tag", "trust_remote_code": True}
    loading = tuple(sorted({**where, "dtype": "float32"}.items()))
    cell = Cell("org/seeing", "dense", None, "caption(a, b)", 0, loading=loading)
    with pytest.raises(WeirError, match="far enough"):
        cell.the_task().run(subject_of(cell), quiet)
    assert asked == [("org/seeing", where)]


def test_an_image_too_large_to_open_is_one_that_cannot_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 8)
    with pytest.raises(WeirError, match=r"0000\.png is no image: Image size"):
        read_image(folder / "images" / "0000.png")


def test_images_that_are_not_there_are_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    captioner(tmp_path)
    (tmp_path / "images" / "0001.png").unlink()
    (tmp_path / "images" / "0002.png").write_bytes(b"no picture")
    found = of(tmp_path).run(subject(tmp_path), quiet)
    assert found["asked"] == 2
    assert found["missing"][0] == "0001.png is not there"
    assert found["missing"][1].startswith("0002.png is no image")
    for path in (tmp_path / "images").iterdir():
        path.unlink()
    with pytest.raises(WeirError, match=r"none of the 4 images is there; the first: 0000\.png"):
        of(tmp_path).run(subject(tmp_path), quiet)


def test_what_makes_no_sense(folder: Path) -> None:
    with pytest.raises(WeirError, match="no folder of images"):
        Caption(str(folder / "captions.json"), "nowhere").run(subject(folder), quiet)
    with pytest.raises(WeirError, match="no chat template, which chat=true needs"):
        of(folder, chat=True).run(subject(folder), quiet)
    model, tokenizer = weir.load("nano", device="cpu")
    blind = Subject("nano", model, tokenizer, weir.policy("dense"))
    with pytest.raises(WeirError, match="nano has no processor for images"):
        of(folder).run(blind, quiet)
    with pytest.raises(WeirError, match="1 sample and 1 token"):
        of(folder, samples=0)
