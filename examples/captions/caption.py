"""The task `caption`: images described in a sentence, by BLEU, ROUGE-L and CIDEr.

This is the task of BalanceKV (Han et al. 2025), section 4.5 and Table 4: InternVL2.5-8B on MS COCO,
with caches compressed to a quarter and a sixteenth. It is for models that read images. The model's
own processor reads the files.

    weir --import examples/captions/caption.py eval --model seer --policies "dense, balancekv" \
        --task 'caption(captions="seer/captions.json", images="seer/images", most=16)'

Needs `pip install '.[eval,images]'`. COCO's evaluation (Chen et al. 2015, section 3) splits words
with a tokenizer in Java. `words` does nearly the same in one line. METEOR is left out.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from weir.errors import WeirError
from weir.evals.answers import costs, generate_answer
from weir.evals.records import JsonRecord, import_optional
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.loading import from_where, load_processor

BETA = 1.2
"""Weight of recall over precision in COCO's ROUGE-L."""
SIGMA = 6.0
"""Standard deviation, in words, of the length penalty of CIDEr-D."""
_WORD = re.compile(r"\w+(?=n't)|n't|'\w+|\w+(?:-\w+)*")


@task("caption")
@dataclass(frozen=True)
class Caption(Task):
    """Captions of images: CIDEr, BLEU-1 to BLEU-4 and ROUGE-L against those that people wrote.

    Attributes:
        captions: a file in COCO's format, such as `captions_val2017.json`.
        images: the folder of its images.
        samples: how many images to use, the first that can be read; None uses all.
        most: a caption's largest number of tokens.
        prompt: the text after the image.
        chat: put image and prompt into the model's chat template.
    """

    captions: str
    images: str
    samples: int | None = None
    most: int = 32
    prompt: str = ""
    chat: bool = False

    metrics: ClassVar[dict[str, Better]] = dict.fromkeys(
        ("cider", "bleu1", "bleu2", "bleu3", "bleu4", "rougeL"), "higher"
    )

    def __post_init__(self) -> None:
        if self.most < 1 or (self.samples is not None and self.samples < 1):
            raise WeirError("samples and most must be 1 or more")

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Describe each image on a separate stream; a caption ends with its first line.

        Returns:
            The figures of `metrics`, CIDEr from 0 to 10 and the others from 0 to 1; "asked";
            "missing", the reasons for images that cannot be read; "answers"; and `costs`.
        """
        caption_scores(["ready"], [["ready"]])  # find a missing package now, not in hours
        processor = load_cached_processor(subject.name, subject.loading)
        entries = read_captions(self.captions)
        folder = Path(self.images).expanduser()
        if not folder.is_dir():
            raise WeirError(f"the folder of images {self.images!r} does not exist")
        missing: list[str] = []
        answers, right = [], []
        expected = min(len(entries), self.samples or len(entries))
        for file, captions in entries:
            if len(answers) == self.samples:
                break
            try:
                image = read_image(folder / file)
            except WeirError as error:
                missing.append(str(error))
                continue
            prompt = self._prompt(processor, image)
            stream = subject.stream(len(prompt["input_ids"][0]), self.most)
            stops = () if self.chat else ("\n",)
            answers.append(generate_answer(stream, subject.tokenizer, prompt, self.most, stops))
            right.append(captions)
            progress(min(1.0, (len(answers) + len(missing)) / (expected + len(missing))))
        if not answers:
            raise WeirError(f"none of the {len(missing)} images can be read: {missing[0]}")
        texts = [answer.text.strip().partition("\n")[0].strip() for answer in answers]
        scores = caption_scores(texts, right)
        counts = {"asked": len(answers), "missing": missing, "answers": texts}
        return {**scores, **counts, **costs(answers)}

    def _prompt(self, processor: Any, image: Any) -> Any:
        """Ids and pixels of an image and the prompt."""
        text = f"{processor.image_token}{self.prompt}"
        if self.chat:
            if getattr(processor, "chat_template", None) is None:
                raise WeirError(
                    "this model's processor has no chat template, which chat=true needs; write "
                    "chat=false to give the model only the image and the prompt"
                )
            content = [{"type": "image"}, {"type": "text", "text": self.prompt}]
            turns = [{"role": "user", "content": content}]
            text = processor.apply_chat_template(turns, add_generation_prompt=True)
        return processor(text=text, images=[image], return_tensors="pt")


@lru_cache(maxsize=1)
def load_cached_processor(name: str, loading: tuple[tuple[str, Any], ...]) -> Any:
    """The processor of a model, from the files that the model was loaded from."""
    return load_processor(name, **from_where(dict(loading)))


def read_image(path: Path) -> Any:
    """An RGB image.

    Raises:
        WeirError: the file is missing or not an image, or Pillow is not installed.
    """
    pillow = import_optional("PIL.Image", "an image", "images")
    try:
        with pillow.open(path) as found:
            return found.convert("RGB")
    except FileNotFoundError:
        raise WeirError(f"{path.name} does not exist") from None
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise WeirError(f"{path.name} is not an image: {error}") from None


def read_captions(path: str | Path) -> list[tuple[str, list[str]]]:
    """The images of COCO's file that have captions, as (file name, captions), in its order.

    Raises:
        WeirError: the file is missing or not JSON, or an entry is wrong. The message names the
            entry's field.
    """
    try:
        values = json.loads(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise WeirError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise WeirError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise WeirError(f"{path}: expected a JSON object with images and annotations")
    record = JsonRecord(str(path), values)
    files: dict[int, str] = {}
    for image in record.records("images", least=1):
        number, file = image.count("id"), image.words("file_name")
        if files.setdefault(number, file) != file:
            raise image.wrong("id", f"is already the id of {files[number]}; ids must differ")
    captions: dict[int, list[str]] = {}
    for note in record.records("annotations", least=1):
        if (number := note.count("image_id")) not in files:
            raise note.wrong("image_id", f"names the image {number}, which is not among images")
        captions.setdefault(number, []).append(note.words("caption"))
    return [(files[number], captions[number]) for number in files if number in captions]


def words(text: str) -> list[str]:
    """The words of a caption as COCO compares them: lower case, without punctuation."""
    return _WORD.findall(text.lower().replace("’", "'"))


def caption_scores(captions: Sequence[str], right: Sequence[Sequence[str]]) -> dict[str, float]:
    """BLEU-1 to BLEU-4, ROUGE-L and CIDEr of a set of captions.

    Args:
        captions: the model's caption of each image.
        right: the captions that people wrote for each image; one or more.
    """
    written = [words(caption) for caption in captions]
    references = [[words(one) for one in several] for several in right]
    bleus = {f"bleu{order}": bleu(written, references, order) for order in (1, 2, 3, 4)}
    return {**bleus, "rougeL": rouge_l(written, references), "cider": cider(written, references)}


def bleu(written: list[list[str]], references: list[list[list[str]]], order: int) -> float:
    """sacrebleu's BLEU of a set up to n-grams of `order` words."""
    most = max(map(len, references))
    # One list for each reference, not for each image; None if an image has fewer references.
    streams = [[" ".join(r[i]) if i < len(r) else None for r in references] for i in range(most)]
    metric = import_optional("sacrebleu", "BLEU").BLEU(
        max_ngram_order=order, tokenize="none", smooth_method="none", force=True
    )
    return float(metric.corpus_score([" ".join(one) for one in written], streams).score) / 100


def rouge_l(written: list[list[str]], references: list[list[list[str]]]) -> float:
    """Mean ROUGE-L: for each image the best precision and the best recall over its references."""
    module = import_optional("rouge_score.rouge_scorer", "ROUGE-L")
    scorer = module.RougeScorer(["rougeL"], tokenizer=_Spaces())
    total = 0.0
    for one, several in zip(written, references, strict=True):
        scores = [scorer.score(" ".join(other), " ".join(one))["rougeL"] for other in several]
        precision = max(score.precision for score in scores)
        recall = max(score.recall for score in scores)
        if precision and recall:
            total += (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)
    return total / len(written)


class _Spaces:
    """rouge-score's tokenizer for text that is split into words by spaces."""

    def tokenize(self, text: str) -> list[str]:
        return text.split()


def cider(written: list[list[str]], references: list[list[list[str]]]) -> float:
    """CIDEr-D (Vedantam, Zitnick and Parikh 2015, section 7), from 0 to 10.

    An n-gram weighs more if fewer images have it among their references. With a single image, all
    weights are 0, so the score is 0.
    """
    images_with: Counter[tuple[str, ...]] = Counter()
    for several in references:
        images_with.update({gram for other in several for gram in n_grams(other)})
    images = math.log(len(references))

    def vectors(tokens: list[str]) -> list[dict[tuple[str, ...], float]]:
        found: list[dict[tuple[str, ...], float]] = [{}, {}, {}, {}]
        for gram, count in n_grams(tokens).items():
            found[len(gram) - 1][gram] = count * (images - math.log(images_with[gram] or 1))
        return found

    total = 0.0
    for one, several in zip(written, references, strict=True):
        for other in several:
            # COCO's code measures lengths in pairs of words.
            apart = max(0, len(one) - 1) - max(0, len(other) - 1)
            alike = sum(map(similarity, vectors(one), vectors(other))) / 4
            total += 10 * alike * math.exp(-(apart**2) / (2 * SIGMA**2)) / len(several)
    return total / len(written)


def n_grams(tokens: list[str]) -> Counter[tuple[str, ...]]:
    """How often each n-gram of 1 to 4 words occurs."""
    starts = [(order, i) for order in (1, 2, 3, 4) for i in range(len(tokens) - order + 1)]
    return Counter(tuple(tokens[i : i + order]) for order, i in starts)


def similarity(mine: dict[Any, float], other: dict[Any, float]) -> float:
    """The cosine of two vectors. In the product, `mine` is clipped to the values of `other`."""
    norms = math.hypot(*mine.values()) * math.hypot(*other.values())
    common = sum(min(mine[gram], other[gram]) * other[gram] for gram in mine if gram in other)
    return common / norms if norms else common
