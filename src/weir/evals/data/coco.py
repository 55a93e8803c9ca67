"""COCO's files of captions: a JSON object with `images` and `annotations`, beside a folder.

Chen et al. 2015, "Microsoft COCO Captions". Knows nothing about models or what captions are worth.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from weir.errors import WeirError
from weir.evals.data.records import Record


@dataclass(frozen=True)
class Captioned:
    """An image and what people wrote about it.

    Attributes:
        file: its name in the folder of images.
        captions: one or more.
    """

    file: str
    captions: tuple[str, ...]


def read_captions(path: str | Path) -> list[Captioned]:
    """The images of a file, in its order; those without a caption are left out.

    Raises:
        WeirError: no file is named, it is missing or no JSON, an entry is not as it should be
            (named by its field), or no image has a caption.
    """
    if not str(path):
        raise WeirError("no file of captions is named: give the path of COCO's captions_....json")
    try:
        values = json.loads(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise WeirError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise WeirError(f"{path} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise WeirError(f"{path}: expected a JSON object with images and annotations")
    record = Record(str(path), values)
    files: dict[int, str] = {}
    for image in record.records("images", least=1):
        number, file = image.count("id"), image.words("file_name")
        if files.setdefault(number, file) != file:
            raise image.wrong("id", f"is that of {files[number]} already; each image has its own")
    said: dict[int, list[str]] = {}
    for note in record.records("annotations", least=1):
        number = note.count("image_id")
        if number not in files:
            raise note.wrong("image_id", f"names the image {number}, which is not among images")
        said.setdefault(number, []).append(note.words("caption"))
    return [
        Captioned(file, tuple(said[number])) for number, file in files.items() if number in said
    ]
