"""`caption`: images described in a sentence, by BLEU, ROUGE-L and CIDEr.

BalanceKV (Han et al. 2025), section 4.5 and Table 4: InternVL2.5-8B on MS COCO, caches compressed
to a fourth and a sixteenth. For models that see; the model's own processor reads the images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from transformers import ProcessorMixin

from weir.errors import WeirError
from weir.evals.data import Captioned, needed, read_captions
from weir.evals.measures import caption_scores, costs, generate_answer
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.models import from_where, load_processor


@task("caption")
@dataclass(frozen=True)
class Caption(Task):
    """Captions of images: CIDEr, BLEU-1 to BLEU-4 and ROUGE-L against those that people wrote.

    Attributes:
        captions: COCO's file, `captions_val2017.json`.
        images: the folder of its images.
        samples: the first so many images that are there; none takes all.
        most: tokens of a caption.
        prompt: what stands after the image.
        chat: put image and prompt into the model's chat template.
    """

    captions: str
    images: str
    samples: int | None = None
    most: int = 32
    prompt: str = ""
    chat: bool = False

    metrics: ClassVar[dict[str, Better]] = {
        "cider": "higher",
        "bleu1": "higher",
        "bleu2": "higher",
        "bleu3": "higher",
        "bleu4": "higher",
        "rougeL": "higher",
    }

    def __post_init__(self) -> None:
        if self.most < 1 or (self.samples is not None and self.samples < 1):
            raise WeirError("caption takes 1 sample and 1 token or more")

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Have every image described on a stream of its own.

        A caption is what stands up to the end of its first line.

        Returns:
            "cider" (from 0 to 10), "bleu1" to "bleu4" and "rougeL" (from 0 to 1); "asked";
            "missing", the images of the file that the folder lacks or that cannot be read, each
            with its reason; "answers"; and what `costs` says of the caches.

        Raises:
            WeirError: the model has no processor for images, a file is not in the format, or no
                image is there.
        """
        caption_scores(["ready"], [["ready"]])  # rather no package now than after hours of captions
        processor = _processor(subject.name, subject.loading)
        entries = read_captions(self.captions)
        missing: list[str] = []
        folder = Path(self.images).expanduser()
        if not folder.is_dir():
            raise WeirError(f"there is no folder of images {self.images!r}")
        asked: list[Captioned] = []
        answers, texts = [], []
        expected = min(len(entries), self.samples or len(entries))
        for entry in entries:
            if len(asked) == self.samples:
                break
            try:
                image = read_image(folder / entry.file)
            except WeirError as error:
                missing.append(str(error))
                continue
            given = self._given(processor, image)
            length = len(given["input_ids"][0])
            stream = subject.stream(length, self.most)
            stops = () if self.chat else ("\n",)
            answer = generate_answer(stream, subject.tokenizer, given, self.most, stops)
            asked.append(entry)
            answers.append(answer)
            texts.append(answer.text.strip().partition("\n")[0].strip())
            progress(min(1.0, (len(asked) + len(missing)) / (expected + len(missing))))
        if not asked:
            raise WeirError(f"none of the {len(missing)} images is there; the first: {missing[0]}")
        return {
            **caption_scores(texts, [entry.captions for entry in asked]),
            "asked": len(asked),
            "missing": missing,
            "answers": texts,
            **costs(answers),
        }

    def _given(self, processor: Any, image: Any) -> Mapping[str, Any]:
        """Ids and pixels of an image and the prompt."""
        if self.chat:
            if getattr(processor, "chat_template", None) is None:
                raise WeirError(
                    "this model's processor has no chat template, which chat=true needs; write "
                    "chat=false to have the image followed by the prompt"
                )
            content = [{"type": "image"}, {"type": "text", "text": self.prompt}]
            turns = [{"role": "user", "content": content}]
            text = processor.apply_chat_template(turns, add_generation_prompt=True)
        else:
            text = f"{processor.image_token}{self.prompt}"
        found: Mapping[str, Any] = processor(text=text, images=[image], return_tensors="pt")
        return found


@lru_cache(maxsize=1)
def _processor(name: str, loading: tuple[tuple[str, Any], ...]) -> ProcessorMixin:
    """The model's own, from the files that the model was loaded from."""
    return load_processor(name, **from_where(dict(loading)))


def read_image(path: Path) -> Any:
    """An image in red, green and blue.

    Raises:
        WeirError: it is missing or no image; or Pillow is not installed.
    """
    image = needed("PIL.Image", "an image", "images")
    try:
        with image.open(path) as found:
            return found.convert("RGB")
    except FileNotFoundError:
        raise WeirError(f"{path.name} is not there") from None
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        raise WeirError(f"{path.name} is no image: {error}") from None
