"""Recipes: all settings of a training run except its text, and named presets.

This module knows nothing about text, tokenizers or the training loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from weir.errors import WeirError, quote
from weir.pools import check_arguments

ROOM = 192
"""Tokens of text in the shortest sample that has space for the exercises and for the sink loss."""
MOST_SINKS = 64


@dataclass(frozen=True)
class SinkKind:
    """Kind of attention sink that a model is trained with.

    StreamingLLM (Xiao et al. 2024), section 3.3: `none` is the paper's Vanilla, samples of plain
    text; `zero` is softmax-off-by-one, with samples of plain text; `learnable` has dedicated tokens
    in front of every sample. `taught` is nano's kind: one such token, and a loss that asks for
    attention on it, for models too small to learn that on their own.

    Attributes:
        kind: none, zero or learnable, as in the model's configuration.
        count: tokens in front of every sample.
        taught: whether the sink loss is added.
    """

    kind: str
    count: int = 0
    taught: bool = False

    @classmethod
    def of(cls, text: str) -> SinkKind:
        """Parse `none`, `zero`, `learnable`, `learnable:2` or `taught`; WeirError for others."""
        word, colon, number = text.strip().partition(":")
        if word in ("none", "zero") and not colon:
            return cls(word)
        if word == "taught" and not colon:
            return cls("learnable", 1, taught=True)
        if word == "learnable" and (not colon or number.strip().isdecimal()):
            count = int(number) if colon else 1
            if not 1 <= count <= MOST_SINKS:
                raise WeirError(
                    f"a learnable sink must have 1 to {MOST_SINKS} tokens, got {count}. Use none "
                    "for a model without a sink."
                )
            return cls("learnable", count)
        raise WeirError(
            "sink must be none, zero, learnable, learnable:N with N tokens, or taught, got "
            f"{quote(text)}"
        )

    def __str__(self) -> str:
        """Return the text that `of` reads; `learnable`, not `learnable:1`."""
        if self.taught:
            return "taught"
        return self.kind if self.count < 2 else f"{self.kind}:{self.count}"


@dataclass(frozen=True)
class TrainingRecipe:
    """All settings of a run except its text and tokenizer.

    Attributes:
        tokens: total tokens of books and exercises together; tokens of sinks do not count.
        rows, length: samples per step, and tokens of text in a sample; the model's window is
            `length` plus the sinks in front.
        shape: `llama`, `qwen3` (a Llama with normalized queries and keys) or `alibi` (an MPT: no
            rotation, a bias that grows with distance, no grouped heads, GELU).
        width, layers, heads, kv_heads, inner: the sizes of the model. `inner` of `alibi` is four
            times the width.
        optimizer: `muon` for the matrices inside the layers and AdamW for the rest, or `adamw`.
        rate, falling: the highest learning rate, and the share of the run over which it falls to 0.
        decay: weight decay of the matrices inside the layers.
        exercise_rows, exercise_weight: number of samples of a step that are exercises, and the
            weight of their loss relative to the books' loss.
        only_segments: the share of the run, at its beginning, in which all exercises are repeated
            segments of random words.
        sink: `none`, `zero`, `learnable`, `learnable:N` or `taught`; see `SinkKind`.
        sinks_after, sink_weight, sink_share: with `taught`, the share of the run after which the
            model is taught to put unused attention on the start token, the weight of that loss, and
            the share of attention that it asks for.
        seed: seed of the weights and of every random draw.

    Raises:
        WeirError: the settings do not fit each other; the message says what to choose.
    """

    tokens: int = 31_936_000
    rows: int = 16
    length: int = 511
    shape: Literal["llama", "qwen3", "alibi"] = "llama"
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    inner: int = 768
    optimizer: Literal["muon", "adamw"] = "muon"
    rate: float = 4e-3
    decay: float = 0.05
    falling: float = 0.23
    exercise_rows: int = 5
    exercise_weight: float = 0.5
    only_segments: float = 0.3438
    sink: str = "taught"
    sinks_after: float = 0.6051
    sink_weight: float = 0.08
    sink_share: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sink", str(SinkKind.of(self.sink)))
        if self.shape == "alibi":
            self._check_alibi()
        if self.width % (2 * self.heads):
            raise WeirError(
                f"width must be a multiple of {2 * self.heads}, so that {self.heads} heads have an "
                f"even size, got {self.width}"
            )
        if self.heads % self.kv_heads:
            raise WeirError(
                f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly. Use a number of "
                "KV heads that divides the number of heads."
            )
        if not self.exercise_rows < self.rows:
            raise WeirError(
                f"{self.exercise_rows} of {self.rows} samples are exercises, which leaves none for "
                "the text. Use more rows."
            )
        if self.exercise_rows and self.length < ROOM:
            raise WeirError(
                f"the exercises do not fit in samples of {self.length} tokens. Use {ROOM} or more, "
                "or no exercises."
            )
        if self.kind.taught and self.length < ROOM:
            raise WeirError(
                f"a sink cannot be taught on samples of {self.length} tokens. Use {ROOM} or more, "
                "or another sink."
            )
        if not self.steps:
            raise WeirError(
                f"{self.tokens:,} tokens are less than one step of {self.rows} samples of "
                f"{self.length}. Use {self.rows * self.length:,} or more."
            )

    def _check_alibi(self) -> None:
        """Refuse settings that an ALiBi model cannot have."""
        object.__setattr__(self, "inner", 4 * self.width)
        if self.kv_heads != self.heads:
            raise WeirError(
                f"an ALiBi model must have as many KV heads as heads, {self.heads}, got "
                f"{self.kv_heads}"
            )
        if self.kind.taught:
            raise WeirError(
                "with ALiBi, heads with a steep slope hardly attend to the start of a text, so no "
                "sink can be taught to them. Use learnable or none."
            )
        if self.kind.kind == "zero":
            raise WeirError(
                "an ALiBi model has its own attention, without softmax-off-by-one. Use learnable "
                "or none."
            )

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.tokens // (self.rows * self.length)

    @property
    def kind(self) -> SinkKind:
        """The parsed sink."""
        return SinkKind.of(self.sink)

    @property
    def window(self) -> int:
        """Tokens in a sample, including sinks: the model's window."""
        return self.length + self.kind.count

    @property
    def least(self) -> int:
        """Smallest number of tokens of a text; its held-out tenth then fills two samples."""
        return 20 * self.length

    def taught_at(self, step: int) -> bool:
        """Return whether the sink loss is added at a step."""
        return self.kind.taught and self.sink_weight > 0 and step >= self.sinks_after * self.steps

    def check_same(self, begun: Mapping[str, Any], where: Path) -> None:
        """Refuse to continue a run that was begun with another recipe.

        The number of tokens can differ, because a run can be made longer or shorter while it is
        running.
        """
        for field in fields(self):
            name = field.name
            if name != "tokens" and begun.get(name) != getattr(self, name):
                raise WeirError(
                    f"{where} was begun with {name}={begun.get(name)}, got {getattr(self, name)}. "
                    "Use the first value, or another folder."
                )


check_arguments(TrainingRecipe, "a recipe")


@dataclass(frozen=True)
class Preset:
    """A recipe with its vocabulary size."""

    recipe: TrainingRecipe
    vocabulary: int


TEXT_ALONE = replace(TrainingRecipe(), optimizer="adamw", decay=0.1, exercise_rows=0, sink="none")
"""The recipe of StreamingLLM's models (section 4.2): AdamW, and text only."""
_FIELDS = ("tokens", "rows", "length", "width", "layers", "heads", "kv_heads", "inner", "rate")
PRESETS = {"nano": Preset(TrainingRecipe(), 4096)}
for _name, _vocabulary, *_values in (
    ("small", 2048, 4_000_000, 8, 256, 128, 4, 4, 4, 352, 3e-3),
    ("medium", 8192, 600_000_000, 128, 1024, 512, 8, 8, 8, 1408, 1e-3),
    ("large", 32_768, 3_000_000_000, 256, 2048, 960, 12, 15, 15, 2560, 6e-4),
):
    _sizes: dict[str, Any] = dict(zip(_FIELDS, _values, strict=True))
    PRESETS[_name] = Preset(replace(TEXT_ALONE, **_sizes), _vocabulary)
"""`nano` is the packaged model's recipe; the others train on text only, so that sinks can be
compared. `small` has a million parameters and suits two cores; `medium` (30 million) and `large`
(160 million, as in StreamingLLM's section 3.3) need a GPU."""
