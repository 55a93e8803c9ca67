"""COCO's files of captions, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weir import WeirError
from weir.evals.data import Captioned, read_captions

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
    assert read_captions(path) == [
        Captioned("a.jpg", ("a cat",)),
        Captioned("b.jpg", ("a dog", "one dog")),
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "expected a JSON object with images and annotations"),
        ({"annotations": NOTES}, "the field 'images' is missing"),
        ({"images": IMAGES, "annotations": []}, "'annotations' needs 1 or more"),
        ({"images": [{"id": "x", "file_name": "a"}], "annotations": NOTES}, r"images\[0\]\.id"),
        (
            {"images": [*IMAGES, {**IMAGES[0], "file_name": "z.jpg"}], "annotations": NOTES},
            r"images\[\d\]\.id' is that of .\.jpg already",
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
        read_captions(written(tmp_path / "c.json", values))


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(WeirError, match="no file of captions is named"):
        read_captions("")
    with pytest.raises(WeirError, match=r"cannot read .*: No such file"):
        read_captions(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"images": [')
    with pytest.raises(WeirError, match="is no JSON"):
        read_captions(tmp_path / "half.json")
