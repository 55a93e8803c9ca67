"""Images in a stream: which models have them, which weir streams, and which calls it refuses.

In these models image tokens are tokens like any other once the model has replaced their embeddings
with image features: attention is causal, and every token has one position, or three.

In Qwen2-VL and related models (M-RoPE; Wang et al. 2024, section 2.1) a text token advances time,
height and width alike; the tokens of an image or video spread over them. Here each token has
offsets within its own text token or image, so that a stream may be cut anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.errors import WeirError, quote

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
                    "the call has images, but its token ids contain no image token (id "
                    f"{self.tokens[0]}). Let the model's processor make ids and pixels together, "
                    "and pass images with their tokens."
                )
        elif ids.shape[1] > 1:
            self.check_words(ids)

    def check_words(self, ids: Tensor) -> None:
        """Refuse image tokens among ids that came without an image (WeirError)."""
        if self.in_ids(ids).any():
            if not self.causal:
                raise self.refusal
            raise WeirError(
                f"the token ids contain image tokens (id {self.tokens[0]}), but the call has no "
                "image. Pass pixel_values from the model's processor."
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
            f"the tokens of an image attend in both directions in {self.kind}, and weir streams "
            "only its text. Leave out images."
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
        f"the images of this call do not match its image tokens ({reason}). Pass each image with "
        "all of its tokens, and no image that was fed before. To cut inside an image, feed "
        "embeddings."
    )


OFFSETS = "weir_offsets"
"""The decoder argument that carries offsets to a weir cache."""

MOST_OFFSET = 2**20
"""Upper bound of offsets within an image."""

_KINDS = {"image": 1, "video": 2}
"""Token types, as models number them."""


def offsets(model: PreTrainedModel, given: Mapping[str, Any]) -> Tensor | None:
    """Compute each token's offsets within its text token or image, for models with three axes.

    Args:
        model: a model, or its base model.
        given: the model's arguments by name: `input_ids` [batch, length] and the processor's
            output for images, of which the sizes in patches are read (`image_grid_thw`,
            `video_grid_thw`); newer versions of `generate` pass features instead (`note_sizes`).

    Returns:
        [batch, length, 5], int64: a token's offset in time, height and width from the beginning of
        its text token or image; the extent of that text token or image; and how far after this
        token the next one begins, which is 0 until the last token of an image. A text token is
        0, 0, 0, 1, 1. None for models with one axis.

    Raises:
        WeirError: images and image tokens do not match.
    """
    images = images_of(model.config)
    if images is None or not images.axes:
        return None
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise WeirError(
            f"images of {images.kind} need token ids. Pass input_ids [batch, length] with them."
        )
    found = torch.zeros((*ids.shape, 5), dtype=torch.int64)
    found[:, :, 3:] = 1
    pictures = {
        getattr(model.config, f"{kind}_token_id"): _each(model, kind, given) for kind in _KINDS
    }
    for row, words in enumerate(ids.cpu()):
        pieces = images.in_ids(words).nonzero()[:, 0].tolist()
        while pieces:
            start = pieces[0]
            places = next(pictures[int(words[start])], None)
            if places is None:
                raise unfitting("there are more image tokens than pieces of images")
            stop = start + len(places)
            whole = words[start:stop] == words[start]
            if len(whole) < len(places) or not bool(whole.all()):
                raise unfitting(
                    f"an image has {len(places)} pieces, but fewer consecutive image tokens"
                )
            found[row, start:stop] = places
            pieces = pieces[len(places) :]
    if any(next(left, None) is not None for left in pictures.values()):
        raise unfitting("there are more images than image tokens")
    return found.to(ids.device)


def note_sizes(kind: str) -> Callable[..., Any]:
    """Make a patch for a vision tower's method that records the sizes of a kind, image or video.

    `generate` passes features instead of pixels to the decoder, without their sizes.
    """

    def around(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = own(*args, **kwargs)
        sizes = signature(own).bind_partial(*args, **kwargs).arguments.get(f"{kind}_grid_thw")
        features = getattr(made, "pooler_output", None)
        if sizes is not None and features is not None:
            for feature, size in zip(features, sizes.tolist(), strict=False):
                feature.weir_size = size
        return made

    return around


def _sizes(kind: str, given: Mapping[str, Any]) -> list[list[int]]:
    """Return the patches of each image, or video, in time, height and width."""
    name = f"{kind}_grid_thw"
    sizes = given.get(name)
    if sizes is None:
        made = (given.get("mm_encoder_outputs") or {}).get(kind)
        features = () if made is None else made.pooler_output
        noted = [t.weir_size for t in features if hasattr(t, "weir_size")]
        if len(noted) < len(features):
            raise WeirError(
                f"the size of the {kind} is unknown, because its features came without sizes. "
                f"Pass pixels with {name}, and leave out prefill_chunk_size: weir limits a prompt "
                "without it."
            )
        return noted
    grid = isinstance(sizes, Tensor) and sizes.ndim == 2 and sizes.shape[1] == 3
    if not grid or sizes.is_floating_point():
        raise WeirError(
            f"{name} must be a tensor [images, 3] with sizes in patches, as the model's processor "
            f"makes it, got {quote(sizes)}"
        )
    whole: list[list[int]] = sizes.long().tolist()
    return whole


def check_sizes(given: Mapping[str, Any]) -> None:
    """Refuse pixels whose sizes are missing or do not match, before the model reads them
    (WeirError).
    """
    for kind, name in zip(_KINDS, PICTURES, strict=False):
        pixels = given.get(name)
        if not isinstance(pixels, Tensor):
            continue
        if given.get(f"{kind}_grid_thw") is None:
            raise WeirError(
                f"{name} came without {kind}_grid_thw, the sizes in patches that the model's "
                "processor makes with them"
            )
        if (patches := sum(map(math.prod, _sizes(kind, given)))) != len(pixels):
            raise WeirError(
                f"{kind}_grid_thw declares {patches:,} patches, but {name} has {len(pixels):,}"
            )


def _each(model: PreTrainedModel, kind: str, given: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the offsets of each image, or of each video [pieces, 5]."""
    sizes = _sizes(kind, given)
    seconds = _seconds(given, len(sizes)) if kind == "video" else None
    merged = model.config.vision_config.spatial_merge_size**2
    known: dict[tuple[float, ...], Tensor] = {}
    for index, size in enumerate(sizes):
        pieces = math.prod(size) // merged
        if min(size) < 1 or pieces < 1:
            raise WeirError(
                f"the size of an {kind} must be at least one patch in each direction, got {size}"
            )
        more = {f"{kind}_grid_thw": torch.tensor([size])}
        if seconds is not None:
            more["second_per_grid_ts"] = seconds[index : index + 1]
        which = tuple(n for t in more.values() for n in t.flatten().tolist())
        if which not in known:
            known[which] = _of_one(model, kind, pieces, more)
        yield known[which]


def _seconds(given: Mapping[str, Any], videos: int) -> Tensor | None:
    """Return the duration of a piece of each video [videos]; None where it is not given."""
    durations = given.get("second_per_grid_ts")
    if durations is None:
        return None
    seconds = torch.as_tensor(durations).flatten()
    if len(seconds) < videos or not bool(((seconds >= 0) & seconds.isfinite()).all()):
        raise WeirError(
            f"second_per_grid_ts must give the seconds per piece for each of the {videos} videos, "
            f"got {quote(durations)}"
        )
    return seconds


def _of_one(model: PreTrainedModel, kind: str, pieces: int, more: dict[str, Tensor]) -> Tensor:
    """Compute the offsets of one image [pieces, 5], by the model, with a text token behind it."""
    base: Any = model.base_model
    ids = torch.full((1, pieces + 1), getattr(model.config, f"{kind}_token_id"))
    kinds = torch.full_like(ids, _KINDS[kind])
    ids[0, -1] = kinds[0, -1] = 0
    places, _ = base.get_rope_index(ids, mm_token_type_ids=kinds, **more)
    found = torch.zeros((pieces, 5), dtype=torch.int64)
    found[:, :3] = places[:, 0, :-1].T
    found[:, 3] = found[-1, 4] = int(places[0, 0, -1])
    if bool(((found < 0) | (found >= MOST_OFFSET)).any()):
        raise WeirError(
            f"a piece of this {kind} is {MOST_OFFSET:,} or more places after its beginning. Check "
            "its sizes and its second_per_grid_ts."
        )
    return found
