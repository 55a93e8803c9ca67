"""Train a tiny model that reads images, from scratch and in minutes, on drawings of colored shapes.

    python examples/captions/drawings.py --out seer

Each drawing has two shapes, as in "a red circle left of a blue square". With this model, the task
in caption.py can run on any machine. The model is a LLaVA (Liu et al. 2023, "Visual Instruction
Tuning"): a CLIP-shaped vision tower, a projector and a Llama. The script writes an ordinary
transformers folder with the model and its processor. The folder also has drawings that the model
was not trained on, with captions in COCO's format.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel, ProcessorMixin

from weir.errors import WeirError, describe_missing

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 205, 50),
    "purple": (150, 60, 190),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle")
RELATIONS = {"left of": "right of", "above": "below"}
"""Relation of the first shape to the second, and of the second to the first."""
GRAY = (128, 128, 128)
"""Background color, which the processor turns into zeros."""
SIDE, PATCH = 64, 8
"""Pixels of a drawing and of a patch: 64 patches, each a token."""
PAD, BEGIN, END, UNKNOWN, IMAGE = "<pad>", "<s>", "</s>", "<unk>", "<image>"
IGNORED = -100
"""Label of tokens that the loss ignores."""


@dataclass(frozen=True)
class Scene:
    """What a drawing shows.

    Attributes:
        one, other: a shape as (color, form).
        relation: where the first shape is, relative to the other.
    """

    one: tuple[str, str]
    other: tuple[str, str]
    relation: str

    @property
    def caption(self) -> str:
        """The caption that the model learns."""
        return f"{_named(self.one)} {self.relation} {_named(self.other)}"

    @property
    def captions(self) -> tuple[str, ...]:
        """`caption` and other ways to say it, as several people would write them."""
        return (
            self.caption,
            f"{_named(self.other)} {RELATIONS[self.relation]} {_named(self.one)}",
            f"{_named(self.one)} and {_named(self.other)}",
        )


@dataclass(frozen=True)
class ImageRecipe:
    """Settings for making and training the captioner.

    Attributes:
        steps: training steps.
        rows: drawings in a step.
        held_out: drawings that the model is not trained on, but measured on.
        width: width of the hidden states of the vision tower and the Llama.
        layers: layers of each of the two.
        rate: the highest learning rate.
        seed: seed of the drawings, of their order and of the weights.
    """

    steps: int = 2500
    rows: int = 32
    held_out: int = 100
    width: int = 64
    layers: int = 2
    rate: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "held_out", "layers"):
            if getattr(self, name) < 1:
                raise WeirError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.width < 8 or self.width % 8:
            raise WeirError(f"width must be a multiple of 8, got {self.width}")


def scenes() -> list[Scene]:
    """Every scene of two different shapes, in a fixed order."""
    things = list(product(COLORS, SHAPES))
    return [
        Scene(one, other, relation)
        for one, other, relation in product(things, things, RELATIONS)
        if one != other
    ]


def draw(scene: Scene, dice: random.Random) -> Any:
    """Draw a scene as a PIL image; sizes and places are random within the relation."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (SIDE, SIDE), GRAY)
    pen = ImageDraw.Draw(picture)
    quarter = SIDE // 4
    across, down = (-1, 0) if scene.relation == "left of" else (0, -1)
    for sign, (color, form) in ((1, scene.one), (-1, scene.other)):
        radius = dice.randint(7, 11)
        room = quarter - radius
        x = SIDE // 2 + sign * across * quarter + dice.randint(-room, room)
        y = SIDE // 2 + sign * down * quarter + dice.randint(-room, room)
        box = (x - radius, y - radius, x + radius, y + radius)
        if form == "circle":
            pen.ellipse(box, fill=COLORS[color])
        elif form == "square":
            pen.rectangle(box, fill=COLORS[color])
        else:
            corners = [(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)]
            pen.polygon(corners, fill=COLORS[color])
    return picture


def make_captioner(recipe: ImageRecipe) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Make the model with new weights, and its processor.

    Raises:
        WeirError: Pillow is not installed.
    """
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise WeirError(describe_missing("drawing", "PIL")) from None
    processor = _processor()
    names: Any = processor
    vocabulary = names.tokenizer.get_vocab()
    tower = {
        "hidden_size": recipe.width,
        "intermediate_size": 4 * recipe.width,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": max(1, recipe.width // 32),
    }
    config = LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model",
            "image_size": SIDE,
            "patch_size": PATCH,
            **tower,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(vocabulary),
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "pad_token_id": vocabulary[PAD],
            "bos_token_id": vocabulary[BEGIN],
            "eos_token_id": vocabulary[END],
            **tower,
        },
        image_token_index=vocabulary[IMAGE],
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    torch.manual_seed(recipe.seed)
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        # Embeddings of positions get the scale of a patch's embedding. With CLIP's smaller values,
        # the model learns positions last.
        for name, weight in model.named_parameters():
            if "position_embedding" in name:
                weight.normal_(std=0.3)
    model.generation_config.eos_token_id = vocabulary[END]
    model.generation_config.pad_token_id = vocabulary[PAD]
    return model, processor


def train_captioner(
    recipe: ImageRecipe,
    out: Path,
    on_step: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> dict[str, Any]:
    """Train a captioner and write it to a folder.

    The folder gets the model with its processor and `loss.csv`. It also gets the drawings that
    the model was not trained on, in `images/` and `captions.json` (COCO's format).

    Args:
        recipe: settings.
        out: the folder; created if it does not exist.
        on_step: called after each step with the number of steps done, their total, and the loss.

    Returns:
        "parameters", "loss" of the last step, "right": the share of held-out drawings described
        word for word, and "held_out", how many they are.

    Raises:
        WeirError: Pillow is not installed, the folder holds a model or cannot be written, or the
            loss is not a finite number.
    """
    if (out / "config.json").exists():
        raise WeirError(f"the folder {out} holds a model already; choose another")
    model, processor = make_captioner(recipe)
    known, kept = _parted(recipe)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeirError(f"cannot create the folder {out}: {error.strerror}") from None
    write_captions(kept, out, recipe.seed)
    losses = []
    for step, loss in enumerate(_steps(model, processor, known, recipe), 1):
        if not math.isfinite(loss):
            raise WeirError(f"the loss of step {step} is not a finite number; choose a lower rate")
        losses.append(loss)
        on_step(step, recipe.steps, loss)
    with (out / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss"])
        writer.writerows(enumerate(losses, 1))
    model.eval().save_pretrained(out)
    processor.save_pretrained(out)
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "loss": losses[-1],
        "right": _right(model, processor, kept, recipe),
        "held_out": len(kept),
    }


def write_captions(kept: list[Scene], out: Path, seed: int) -> None:
    """Draw scenes into `images/` and write `captions.json` as COCO does."""
    (out / "images").mkdir(exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, scene in enumerate(kept):
        name = f"{number:04d}.png"
        _held_out(scene, seed, number).save(out / "images" / name)
        images.append({"id": number, "file_name": name, "width": SIDE, "height": SIDE})
        for caption in scene.captions:
            annotations.append({"id": len(annotations), "image_id": number, "caption": caption})
    text = json.dumps({"images": images, "annotations": annotations}, indent=1)
    (out / "captions.json").write_text(text + "\n", encoding="utf-8")


def _named(thing: tuple[str, str]) -> str:
    return f"a {thing[0]} {thing[1]}"


def _parted(recipe: ImageRecipe) -> tuple[list[Scene], list[Scene]]:
    """Scenes to train on, and held-out scenes."""
    every = scenes()
    random.Random(recipe.seed).shuffle(every)
    if recipe.held_out >= len(every):
        raise WeirError(
            f"there are {len(every)} scenes, so held_out must be less, got {recipe.held_out}"
        )
    return every[recipe.held_out :], every[: recipe.held_out]


def _held_out(scene: Scene, seed: int, number: int) -> Any:
    return draw(scene, random.Random(f"{seed} held out {number}"))


def _processor() -> ProcessorMixin:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import LlavaProcessor, PreTrainedTokenizerFast
    from transformers.models.clip import image_processing_pil_clip

    words = {word for scene in scenes() for caption in scene.captions for word in caption.split()}
    special = [PAD, BEGIN, END, UNKNOWN, IMAGE]
    vocabulary = {word: i for i, word in enumerate([*special, *sorted(words)])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(special)
    made.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, vocabulary[BEGIN])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        unk_token=UNKNOWN,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
    )
    return LlavaProcessor(
        image_processor=image_processing_pil_clip.CLIPImageProcessorPil(
            size={"height": SIDE, "width": SIDE},
            do_center_crop=False,
            image_mean=[GRAY[0] / 255] * 3,
            image_std=[0.25] * 3,
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _steps(
    model: PreTrainedModel, processor: ProcessorMixin, known: list[Scene], recipe: ImageRecipe
) -> Iterator[float]:
    """Train, and yield the loss of each step."""
    dice = random.Random(f"{recipe.seed} drawings")
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98))
    warm = max(1, recipe.steps // 20)

    def rate(step: int) -> float:
        left = (recipe.steps - step) / max(1, recipe.steps - warm)
        return min((step + 1) / warm, 0.5 - 0.5 * math.cos(math.pi * min(1.0, left)) + 0.01)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    for _ in range(recipe.steps):
        chosen = [dice.choice(known) for _ in range(recipe.rows)]
        loss = model(**_batch(processor, chosen, dice)).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield float(loss.detach())


def _batch(
    processor: ProcessorMixin, chosen: list[Scene], dice: random.Random
) -> dict[str, Tensor]:
    """Drawings and their captions. Only captions and their end tokens have labels to learn."""
    call: Any = processor
    given = call(
        text=[f"{IMAGE} {scene.caption} {END}" for scene in chosen],
        images=[draw(scene, dice) for scene in chosen],
        return_tensors="pt",
        padding=True,
    )
    tokenizer = call.tokenizer
    labels = given["input_ids"].clone()
    for token in (PAD, BEGIN, IMAGE):
        labels[labels == tokenizer.convert_tokens_to_ids(token)] = IGNORED
    return {**given, "labels": labels}


@torch.no_grad()
def _right(
    model: PreTrainedModel, processor: ProcessorMixin, kept: list[Scene], recipe: ImageRecipe
) -> float:
    """The share of held-out drawings described word for word by the model with its plain cache."""
    call: Any = processor
    right = 0
    for begin in range(0, len(kept), 32):
        these = kept[begin : begin + 32]
        drawn = [_held_out(one, recipe.seed, begin + i) for i, one in enumerate(these)]
        given = call(text=[IMAGE] * len(these), images=drawn, return_tensors="pt")
        generate: Any = model.generate
        found = generate(**given, max_new_tokens=16, do_sample=False)
        said = call.batch_decode(found[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(text.strip() == one.caption for text, one in zip(said, these, strict=True))
    return right / len(kept)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a model on drawings and print its figures as one JSON object."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", required=True, type=Path, help="a folder for the model")
    for field in fields(ImageRecipe):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    given = vars(parser.parse_args(arguments))
    out = given.pop("out")

    def show(step: int, steps: int, loss: float) -> None:
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {loss:.3f}", file=sys.stderr)

    try:
        recipe = ImageRecipe(**given)
        figures = train_captioner(recipe, out, show)
    except WeirError as error:
        sys.exit(f"weir: {error}")
    print(json.dumps({"out": str(out), "recipe": asdict(recipe), **figures}))


if __name__ == "__main__":
    main()
