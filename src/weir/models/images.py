"""Images in a stream: which models have them, which are streamed, and what makes no sense.

In the models named here an image is tokens like any other once the model has put its features in
the place of image tokens: causal attention, and one place each, or three (`mrope`). weir lets the
model do that and has nothing else to know of pixels. Knows nothing about caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weir.errors import WeirError

THREE_AXES = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Model types whose tokens stand at places in time, height and width."""

CAUSAL = THREE_AXES | {"idefics3", "internvl", "llava", "llava_next", "mistral3", "smolvlm"}
"""Model types around a decoder whose image tokens are causal; Pixtral is a `llava`."""

TEXT_ONLY = frozenset({"gemma3"})
"""Model types around a decoder that streams their text, and whose images are refused."""

BOTH_WAYS = frozenset({"gemma3", "gemma4", "molmo2", "paligemma"})
"""Model types whose image tokens see each other both ways."""

PICTURES = ("pixel_values", "pixel_values_videos", "mm_encoder_outputs")
"""Arguments of a decoder that bring images, or what a vision tower made of them."""


@dataclass(frozen=True)
class Images:
    """What weir knows of a model's images.

    Attributes:
        kind: the model type around the decoder.
        tokens: ids that stand for a piece of an image.
        causal: images are tokens like any other; otherwise they are refused.
        axes: a piece of an image has three places, in time, height and width.
    """

    kind: str
    tokens: tuple[int, ...]
    causal: bool
    axes: bool = False

    def check(self, given: Mapping[str, Any]) -> None:
        """Refuse a call whose images cannot be streamed, or do not go with its ids.

        Of a call of one column, an image token is taken for a word that the model itself has said.

        Args:
            given: the decoder's arguments by name.

        Raises:
            WeirError: the model's images are refused, there are images without image tokens, or
                image tokens without images.
        """
        pictures = bool(pictures_in(given))
        if not self.causal:
            kinds = given.get("token_type_ids")
            if pictures or (kinds is not None and bool(kinds.any())):
                raise self.refusal
        ids: Tensor | None = given.get("input_ids")
        if ids is None:
            return
        if pictures:
            if not self.in_ids(ids).any():
                raise WeirError(
                    "the images of this call have no place in it: its token ids hold no image "
                    f"token (id {self.tokens[0]}); let the model's processor make ids and pixels "
                    "together, and pass images with their own tokens only"
                )
        elif ids.shape[1] > 1:
            self.check_words(ids)

    def check_words(self, ids: Tensor) -> None:
        """Refuse image tokens among ids that came without an image.

        Raises:
            WeirError: there are some.
        """
        if self.in_ids(ids).any():
            if not self.causal:
                raise self.refusal
            raise WeirError(
                f"the token ids hold image tokens (id {self.tokens[0]}) but no image came with "
                "them; pass pixel_values as the model's processor makes them"
            )

    def in_ids(self, ids: Tensor) -> Tensor:
        """Which of the ids stand for a piece of an image; bool, same shape."""
        found = torch.zeros_like(ids, dtype=torch.bool)
        for token in self.tokens:
            found |= ids == token
        return found

    @property
    def refusal(self) -> WeirError:
        """Why images of the model are not streamed."""
        return WeirError(
            f"the tokens of an image attend both ways in {self.kind}; weir streams its text only"
        )


def pictures_in(given: Mapping[str, Any]) -> list[str]:
    """Which of a decoder's arguments bring images.

    `generate()` names what its vision tower made in every call; of a call without images it is an
    empty mapping.

    Args:
        given: the arguments by name.
    """

    def brings(it: Any) -> bool:
        return any(map(brings, it.values())) if isinstance(it, dict) else it is not None

    return [name for name in PICTURES if brings(given.get(name))]


def images_of(config: Any) -> Images | None:
    """What is known of the images of a model with this configuration; None for a text model.

    Args:
        config: of the model around the decoder.
    """
    kind = config.model_type
    if kind not in CAUSAL | TEXT_ONLY:
        return None
    named = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    tokens = dict.fromkeys(getattr(config, name, None) for name in named)
    there = tuple(token for token in tokens if token is not None)
    return Images(kind, there, kind in CAUSAL, kind in THREE_AXES)


def unfitting(reason: str) -> WeirError:
    """Images and image tokens of a call do not fit each other, for this reason."""
    return WeirError(
        f"the images of this call do not fit its image tokens ({reason}); pass each image with "
        "all of its tokens, and none that was fed before; what is to be cut inside an image is fed "
        "as embeddings"
    )
