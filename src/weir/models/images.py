"""Images in a stream: which models have them, which weir streams, and which calls it refuses.

In these models image tokens are tokens like any other once the model has replaced their embeddings
with image features: attention is causal, and every token has one position, or three (`mrope`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weir.errors import WeirError

THREE_AXES = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Model types whose tokens have positions in time, height and width."""

CAUSAL = THREE_AXES | {"idefics3", "internvl", "llava", "llava_next", "mistral3", "smolvlm"}
"""Multimodal model types whose image tokens attend causally; Pixtral is a `llava`."""

TEXT_ONLY = frozenset({"gemma3"})
"""Multimodal model types of which weir streams the text and refuses the images."""

BOTH_WAYS = frozenset({"gemma3", "gemma4", "molmo2", "paligemma"})
"""Model types whose image tokens attend in both directions."""

PICTURES = ("pixel_values", "pixel_values_videos", "mm_encoder_outputs")
"""Arguments of a decoder that carry images, or the vision tower's features of them."""


@dataclass(frozen=True)
class Images:
    """Description of a model's images.

    Attributes:
        kind: the model type around the decoder.
        tokens: ids of image tokens.
        causal: whether image tokens are tokens like any other; otherwise images are refused.
        axes: whether image tokens have three positions, in time, height and width.
    """

    kind: str
    tokens: tuple[int, ...]
    causal: bool
    axes: bool = False

    def check(self, given: Mapping[str, Any]) -> None:
        """Refuse a call whose images cannot be streamed or do not match its ids (WeirError).

        In a call of one token, an image token counts as one that the model itself has generated.
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
        """Refuse image tokens among ids that came without an image (WeirError)."""
        if self.in_ids(ids).any():
            if not self.causal:
                raise self.refusal
            raise WeirError(
                f"the token ids hold image tokens (id {self.tokens[0]}) but no image came with "
                "them; pass pixel_values as the model's processor makes them"
            )

    def in_ids(self, ids: Tensor) -> Tensor:
        """Return a mask of the ids that are image tokens; bool, same shape."""
        found = torch.zeros_like(ids, dtype=torch.bool)
        for token in self.tokens:
            found |= ids == token
        return found

    @property
    def refusal(self) -> WeirError:
        """The error that says why images of this model are refused."""
        return WeirError(
            f"the tokens of an image attend both ways in {self.kind}; weir streams its text only"
        )


def pictures_in(given: Mapping[str, Any]) -> list[str]:
    """Return the names of the decoder's arguments that carry images.

    `generate()` passes the vision tower's features in every call; without images they are empty.
    """

    def brings(value: Any) -> bool:
        if isinstance(value, dict):
            return any(map(brings, value.values()))
        return value is not None

    return [name for name in PICTURES if brings(given.get(name))]


def images_of(config: Any) -> Images | None:
    """Describe the images of a multimodal model; None for a text model."""
    kind = config.model_type
    if kind not in CAUSAL | TEXT_ONLY:
        return None
    named = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    tokens = dict.fromkeys(getattr(config, name, None) for name in named)
    there = tuple(token for token in tokens if token is not None)
    return Images(kind, there, kind in CAUSAL, kind in THREE_AXES)


def unfitting(reason: str) -> WeirError:
    """Return the error for images that do not match their tokens, with the reason."""
    return WeirError(
        f"the images of this call do not fit its image tokens ({reason}); pass each image with "
        "all of its tokens, and none that was fed before; what is to be cut inside an image is fed "
        "as embeddings"
    )
