"""What a training run is decided by, besides its text; and the recipes that have a name.

Knows nothing of text, tokenizers or the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from weir.errors import WeirError, quote

ROOM = 192
"""Tokens of text in the shortest sample that has room for the exercises and for the sink loss."""
MOST_SINKS = 64
OPTIMIZERS = ("muon", "adamw")
SHAPES = ("llama", "qwen3", "alibi")
"""Rotary embeddings; the same with QK norm, as in Qwen3; ALiBi, as in MPT."""


@dataclass(frozen=True)
class SinkKind:
    """How the model is trained to deal with attention it has no use for.

    StreamingLLM (Xiao et al. 2024), section 3.3: `none` is its Vanilla, samples of plain text;
    `zero` is softmax-off-by-one, and samples of plain text; `learnable` has dedicated tokens in
    front of every sample. `taught` is nano's: one such token, and a loss that asks for attention
    on it, for where a model is too small to come to that by itself.

    Attributes:
        kind: none, zero or learnable, as the model's configuration says it.
        count: tokens in front of every sample.
        taught: whether the sink loss is added.
    """

    kind: str
    count: int = 0
    taught: bool = False

    @classmethod
    def of(cls, text: str) -> SinkKind:
        """What `none`, `zero`, `learnable`, `learnable:2` or `taught` says.

        Raises:
            WeirError: it is none of these, or no such number of tokens can be had.
        """
        word, colon, number = text.strip().partition(":")
        if word in ("none", "zero") and not colon:
            return cls(word)
        if word == "taught" and not colon:
            return cls("learnable", 1, taught=True)
        if word == "learnable" and (not colon or number.strip().isdecimal()):
            count = int(number) if colon else 1
            if not 1 <= count <= MOST_SINKS:
                raise WeirError(
                    f"a learnable sink has 1 to {MOST_SINKS} tokens, not {count}: "
                    "choose none for a model without"
                )
            return cls("learnable", count)
        raise WeirError(
            f"a sink is none, zero, learnable, learnable:N with N tokens, or taught, not "
            f"{quote(text)}"
        )

    def __str__(self) -> str:
        """As `of` reads it; `learnable`, not `learnable:1`."""
        if self.taught:
            return "taught"
        return self.kind if self.count < 2 else f"{self.kind}:{self.count}"


@dataclass(frozen=True)
class TrainingRecipe:
    """Everything a run is decided by, besides its text and tokenizer.

    Attributes:
        tokens: tokens of text in all, books and exercises together; sinks do not count.
        rows: samples in a step.
        length: tokens of text in a sample. The model's window is these and the sinks in front.
        shape: `llama`, `qwen3` (as a Llama, with queries and keys brought to one length) or `alibi`
            (an MPT: no rotation, a bias that grows with distance, no grouped heads, GELU).
        width, layers, heads, kv_heads, inner: the sizes of the model. `inner` of `alibi` is four
            times the width.
        optimizer: `muon` for the matrices inside the layers and AdamW for the rest, or `adamw`.
        rate: the highest learning rate.
        decay: weight decay of the matrices inside the layers.
        falling: the share of the run over which the rate falls to zero.
        exercise_rows: samples of a step that are exercises.
        exercise_weight: weight of their loss beside the books' loss.
        only_segments: the share of the run in which all exercises are segments.
        sink: `none`, `zero`, `learnable`, `learnable:N` or `taught`; see `SinkKind`.
        sinks_after: with `taught`, the share of the run after which the model is taught to rest
            its attention on the start token.
        sink_weight: weight of that loss.
        sink_share: the share of attention it asks for.
        seed: of the weights and of every draw.

    Raises:
        WeirError: such a run cannot be had; the message says what to choose.
    """

    tokens: int = 31_936_000
    rows: int = 16
    length: int = 511
    shape: str = "llama"
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    inner: int = 768
    optimizer: str = "muon"
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
        self._check_shape()
        if self.width % (2 * self.heads):
            raise WeirError(
                f"a model {self.width} wide has no {self.heads} heads of an even size: choose a "
                f"multiple of {2 * self.heads}"
            )
        if self.heads % self.kv_heads:
            raise WeirError(
                f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly: choose a number "
                "that divides them"
            )
        if self.optimizer not in OPTIMIZERS:
            raise WeirError(
                f"the optimizer is {' or '.join(OPTIMIZERS)}, not {quote(self.optimizer)}"
            )
        if not self.exercise_rows < self.rows:
            raise WeirError(
                f"{self.exercise_rows} of {self.rows} samples are exercises, which leaves none for "
                "the text: choose more rows"
            )
        if self.exercise_rows and self.length < ROOM:
            raise WeirError(
                f"the exercises do not fit in samples of {self.length} tokens: choose {ROOM} or "
                "more, or no exercises"
            )
        if self.kind.taught and self.length < ROOM:
            raise WeirError(
                f"a sink cannot be taught on samples of {self.length} tokens: choose {ROOM} or "
                "more, or another sink"
            )
        if not self.steps:
            raise WeirError(
                f"{self.tokens:,} tokens are less than one step of {self.rows} samples of "
                f"{self.length}: choose {self.rows * self.length:,} or more"
            )

    def _check_shape(self) -> None:
        """Refuse a shape there is not, and what an ALiBi model cannot have."""
        if self.shape not in SHAPES:
            raise WeirError(f"a shape is {', '.join(SHAPES)}, not {quote(self.shape)}")
        if self.shape != "alibi":
            return
        object.__setattr__(self, "inner", 4 * self.width)
        if self.kv_heads != self.heads:
            raise WeirError(
                f"an ALiBi model has as many KV heads as heads, {self.heads}, not {self.kv_heads}"
            )
        if self.kind.taught:
            raise WeirError(
                "ALiBi keeps heads with a steep slope from the start of a text, so no sink can be "
                "taught to them: choose learnable or none"
            )
        if self.kind.kind == "zero":
            raise WeirError(
                "an ALiBi model has an attention of its own, without softmax-off-by-one: choose "
                "learnable or none"
            )

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.tokens // (self.rows * self.length)

    @property
    def kind(self) -> SinkKind:
        """The sink, read."""
        return SinkKind.of(self.sink)

    @property
    def window(self) -> int:
        """Tokens in a sample, with its sinks: the window of the model."""
        return self.length + self.kind.count

    @property
    def least(self) -> int:
        """Tokens that a text must have: a tenth of it, which is held out, fills two samples."""
        return 20 * self.length

    def taught_at(self, step: int) -> bool:
        """Whether the sink loss is added at a step."""
        return self.kind.taught and self.sink_weight > 0 and step >= self.sinks_after * self.steps

    def differs_from(self, begun: Mapping[str, Any]) -> str | None:
        """The first field in which a run that was begun has another value than this recipe.

        The number of tokens may differ: a run can be made longer or shorter under way.
        """
        # A field that an older run does not know has the value that all runs had then.
        held = {field.name: begun.get(field.name, field.default) for field in fields(self)}
        names = (name for name in held if name != "tokens")
        return next((name for name in names if held[name] != getattr(self, name)), None)


@dataclass(frozen=True)
class Preset:
    """A recipe and a vocabulary that go together."""

    recipe: TrainingRecipe
    vocabulary: int


TEXT_ALONE = replace(TrainingRecipe(), optimizer="adamw", decay=0.1, exercise_rows=0, sink="none")
"""As StreamingLLM trained its models (section 4.2): AdamW, and nothing but text."""
PRESETS = {
    "nano": Preset(TrainingRecipe(), 4096),
    "small": Preset(
        replace(
            TEXT_ALONE,
            tokens=4_000_000,
            rows=8,
            length=256,
            width=128,
            layers=4,
            heads=4,
            kv_heads=4,
            inner=352,
            rate=3e-3,
        ),
        2048,
    ),
    "medium": Preset(
        replace(
            TEXT_ALONE,
            tokens=600_000_000,
            rows=128,
            length=1024,
            width=512,
            layers=8,
            heads=8,
            kv_heads=8,
            inner=1408,
            rate=1e-3,
        ),
        8192,
    ),
    "large": Preset(
        replace(
            TEXT_ALONE,
            tokens=3_000_000_000,
            rows=256,
            length=2048,
            width=960,
            layers=12,
            heads=15,
            kv_heads=15,
            inner=2560,
            rate=6e-4,
        ),
        32_768,
    ),
}
"""`nano` is the packaged model's; the others are of text alone, so that sinks can be compared. Of
these `small` has a million parameters and is for two cores; `medium` (30 million) and `large` (160
million, as in StreamingLLM's section 3.3) want a GPU."""
