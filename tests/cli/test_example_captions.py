"""The example `captions`: scores worked out by hand, COCO's files, and the command."""

from __future__ import annotations

import json
import math
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from reference.drawings import captioner
from reference.examples import import_example
from reference.subjects import quiet
from terminal import run
from transformers import AutoProcessor

import weir
from weir import WeirError
from weir.evals.task import TASKS, Subject, Task

SCRIPT = Path(__file__).parents[2] / "examples" / "captions" / "caption.py"
_spec = spec_from_file_location("caption_example", SCRIPT)
caption: Any = module_from_spec(_spec)
sys.modules["caption_example"] = caption
_spec.loader.exec_module(caption)
TASKS.pop("caption")  # the command below registers it itself


def split(*texts: str) -> list[list[str]]:
    return [text.split() for text in texts]


def test_words_are_told_apart_as_coco_does() -> None:
    found = caption.words("A man’s dog doesn't run; it's well-fed!")
    assert found == ["a", "man", "'s", "dog", "does", "n't", "run", "it", "'s", "well-fed"]


def test_bleu_counts_a_word_no_more_often_than_a_reference_has_it() -> None:
    # The reference has "the" once and "cat" once, so 2 of 4 words count. The caption is longer than
    # the reference, so there is no penalty.
    assert caption.bleu(split("the the the cat"), [split("the cat sat")], 1) == pytest.approx(2 / 4)
    # One of the three pairs of words is right. The mean is the root of 1/2 times 1/3.
    assert caption.bleu(split("the the the cat"), [split("the cat sat")], 2) == pytest.approx(
        math.sqrt(2 / 4 * 1 / 3)
    )


def test_bleu_takes_the_reference_nearest_in_length() -> None:
    short = caption.bleu(split("the cat"), [split("the cat sat on", "the cat sat")], 1)
    assert short == pytest.approx(math.exp(1 - 3 / 2))


def test_bleu_is_of_the_whole_set_and_images_may_have_different_numbers_of_captions() -> None:
    # 2 of 2 words and 1 of 3 are right, together 3 of 5. Captions and references are equally long.
    found = caption.bleu(split("a b", "c x y"), [split("a b"), split("c d e", "q")], 1)
    assert found == pytest.approx(3 / 5)


@pytest.mark.slow
def test_rouge_takes_the_best_precision_and_the_best_recall() -> None:
    # In common are "a c", 2 words of the caption's 4 and of the reference's 2, and "a b c", 3 words
    # of the caption's 4 and of the reference's 6.
    found = caption.rouge_l(split("a b c d"), [split("a c", "a b c x y z")])
    precision, recall, beta = 3 / 4, 2 / 2, 1.2**2
    assert found == pytest.approx((1 + beta) * precision * recall / (recall + beta * precision))
    assert caption.rouge_l(split("q"), [split("a c")]) == 0.0


def test_cider_of_a_caption_that_is_its_reference() -> None:
    # Words and pairs are all the same, and there are no longer n-grams: 2 of 4 similarities are 1,
    # which is 5 of 10. The other image gets 0.
    assert caption.cider(split("a b", "x"), [split("a b"), split("c d")]) == pytest.approx(5 / 2)


def test_cider_takes_off_for_length_and_for_words_that_every_image_has() -> None:
    alike = (2 / math.sqrt(2 * 5) + 1 / math.sqrt(1 * 4)) / 4
    apart = math.exp(-((1 - 4) ** 2) / (2 * 6**2))
    found = caption.cider(split("a b", "q"), [split("a b c d e"), split("z")])
    assert found == pytest.approx(10 * alike * apart / 2)
    # A word of every image weighs nothing.
    assert caption.cider(split("the", "the"), [split("the"), split("the")]) == 0.0


def test_cider_does_not_pay_for_a_word_said_over_and_over() -> None:
    # The word counts once as in the reference, and not 3 times: its similarity is 1 / sqrt(9 + 0).
    once = caption.cider(split("a", "x"), [split("a"), split("z")])
    often = caption.cider(split("a a a", "x"), [split("a"), split("z")])
    assert once == pytest.approx(10 / 4 / 2)
    assert often == pytest.approx(10 / 4 / 2 / 3 * math.exp(-((2 - 0) ** 2) / 72))


def test_all_figures_of_a_set() -> None:
    right = [["A red circle.", "a circle"], ["the blue square"]]
    found = caption.caption_scores(["a red circle", "the blue square"], right)
    assert set(found) == {"bleu1", "bleu2", "bleu3", "bleu4", "rougeL", "cider"}
    assert found["bleu1"] == pytest.approx(1.0)
    assert found["rougeL"] == pytest.approx(1.0)


# --- the file

IMAGES = [{"id": 7, "file_name": "a.jpg"}, {"id": 3, "file_name": "b.jpg"}]
NOTES = [
    {"image_id": 3, "id": 1, "caption": "a dog"},
    {"image_id": 7, "id": 2, "caption": "a cat"},
    {"image_id": 3, "id": 3, "caption": "one dog"},
]


def written(path: Path, values: Any) -> Path:
    path.write_text(json.dumps(values))
    return path


def test_images_come_in_their_order_with_all_their_captions(tmp_path: Path) -> None:
    more = [*IMAGES, {"id": 9, "file_name": "nobody-wrote-about.jpg"}]
    path = written(tmp_path / "c.json", {"images": more, "annotations": NOTES, "info": {}})
    assert caption.read_captions(path) == [
        ("a.jpg", ["a cat"]),
        ("b.jpg", ["a dog", "one dog"]),
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "expected a JSON object with images and annotations"),
        ({"annotations": NOTES}, "the field 'images' is missing"),
        ({"images": IMAGES, "annotations": []}, "'annotations' must have at least 1 entry, got 0"),
        ({"images": [{"id": "x", "file_name": "a"}], "annotations": NOTES}, r"images\[0\]\.id"),
        (
            {"images": [*IMAGES, {**IMAGES[0], "file_name": "z.jpg"}], "annotations": NOTES},
            r"images\[\d\]\.id' is already the id of .\.jpg",
        ),
        (
            {"images": IMAGES, "annotations": [{"image_id": 5, "caption": "x"}]},
            "names the image 5, which is not among images",
        ),
        (
            {"images": IMAGES, "annotations": [{"image_id": 3, "caption": " "}]},
            r"annotations\[0\]\.caption' is empty",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, values: Any, said: str) -> None:
    with pytest.raises(WeirError, match=said):
        caption.read_captions(written(tmp_path / "c.json", values))


def test_a_file_that_is_missing_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeirError, match=r"cannot read .*: No such file"):
        caption.read_captions(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"images": [')
    with pytest.raises(WeirError, match="is not JSON"):
        caption.read_captions(tmp_path / "half.json")


# --- the task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("captioner")
    captioner(path)
    return path


def test_under_dense_captions_are_those_of_the_plain_model(folder: Path) -> None:
    model, tokenizer = weir.load(str(folder), device="cpu")
    task = caption.Caption(str(folder / "captions.json"), str(folder / "images"), most=5)
    found = task.run(Subject(str(folder), model, tokenizer, weir.policy("dense")), quiet)
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
    scores = caption.caption_scores(wanted, right)
    assert {name: found[name] for name in caption.Caption.metrics} == scores
    assert (found["asked"], found["missing"]) == (4, [])
    assert found["tokens"] > 64 and found["share"] == 1.0


def test_an_image_too_large_to_open_cannot_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 8)
    with pytest.raises(WeirError, match=r"0000\.png is not an image: Image size"):
        caption.read_image(folder / "images" / "0000.png")


def test_one_command_puts_policies_side_by_side(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("WEIR_IMPORT", "")
    monkeypatch.setattr("weir.policies.registry._loaded", set())
    monkeypatch.delitem(sys.modules, "caption", raising=False)
    monkeypatch.setitem(TASKS, "caption", caption.Caption)  # taken away again at the end
    (folder / "images" / "0003.png").rename(tmp_path / "elsewhere.png")
    task = f'caption(captions="{folder}/captions.json", images="{folder}/images", most=4)'
    ended = run(
        capsys, "--import", SCRIPT, "eval", "--model", folder, "--task", task, "--policies",
        "dense, balancekv", "--budgets", "32", "--chunk", 8, "--json", "--out",
        tmp_path / "r.jsonl",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    records = json.loads(ended.out)["records"]
    assert [record["policy"] for record in records] == ["dense", "balancekv(budget=32)"]
    assert all(record["metric"] == "cider" for record in records)
    assert all(record["result"]["asked"] == 3 for record in records)
    assert records[1]["result"]["share"] < 0.7
    assert "caption: left out, because images are missing: 0003.png" in ended.err


def test_what_drawings_py_trains_can_be_measured(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WEIR_IMPORT", "")
    monkeypatch.setattr("weir.policies.registry._loaded", set())
    monkeypatch.delitem(sys.modules, "caption", raising=False)
    monkeypatch.setitem(TASKS, "caption", Task)  # taken away again at the end
    out = tmp_path / "seer"
    tiny = ("--steps", "2", "--rows", "4", "--width", "16", "--layers", "1", "--held-out", "3")
    import_example("captions/drawings.py").main(["--out", str(out), *tiny])
    files = f'captions="{out}/captions.json", images="{out}/images"'
    ended = run(
        capsys, "--import", SCRIPT, "eval", "--model", out,
        "--task", f"caption({files}, samples=2, most=3)",
        "--policies", "streaming_llm", "--budgets", 16, "--chunk", 8,
        "--out", tmp_path / "r.jsonl", "--json",
    )  # fmt: skip
    assert ended.code == 0
    assert json.loads(ended.out)["records"][0]["result"]["asked"] == 2
