"""What is fed to a stream: token ids, embeddings in their place, or what a processor returned.

Embeddings are vectors as the decoder reads them: those of words, of pieces of an image, or learned
ones. Knows nothing about caches or pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.errors import WeirError, quote
from weir.models import MOST_OFFSET, OFFSETS, PICTURES, Images, embed, offsets
from weir.stream.tokens import Tokens, read_ids

NO_ID = -1
"""Stands for the id of a token that was fed as an embedding without one."""


@dataclass(frozen=True)
class Fed:
    """Tokens on their way to the model.

    Attributes:
        ids: [batch, length], int64; `NO_ID` where a token has none.
        embeddings: what the decoder reads in place of the ids [batch, length, width], or None.
        offsets: of a model with three axes, where each stands within its word or image [batch,
            length, 5]; None for words.
    """

    ids: Tensor
    embeddings: Tensor | None = None
    offsets: Tensor | None = None

    def __len__(self) -> int:
        return self.ids.shape[1]

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.ids.shape[0]

    @property
    def last(self) -> list[int | None]:
        """The last token of each row; None where it has no id."""
        return [None if token == NO_ID else token for token in self.ids[:, -1].tolist()]

    @property
    def given(self) -> dict[str, Tensor]:
        """The model's arguments."""
        if self.embeddings is None:
            return {"input_ids": self.ids}
        if self.offsets is None:
            return {"inputs_embeds": self.embeddings}
        return {"inputs_embeds": self.embeddings, OFFSETS: self.offsets}

    def part(self, start: int, stop: int) -> Fed:
        """The tokens from `start` to `stop`, exclusive."""
        embeddings = None if self.embeddings is None else self.embeddings[:, start:stop]
        within = None if self.offsets is None else self.offsets[:, start:stop]
        return Fed(self.ids[:, start:stop], embeddings, within)

    def to(self, device: torch.device) -> Fed:
        """The same on another device."""
        moved = None if self.embeddings is None else self.embeddings.to(device)
        within = None if self.offsets is None else self.offsets.to(device)
        return Fed(self.ids.to(device), moved, within)


def read_fed(
    given: Tokens | None,
    embeddings: Tensor | None,
    model: PreTrainedModel,
    images: Images | None,
    vocabulary: int,
    within: Tensor | None = None,
) -> Fed:
    """What somebody feeds, checked; images are turned into embeddings.

    Args:
        given: as for `read_ids`, or what the model's processor returned, with pixels.
        embeddings: [length, width] or [batch, length, width]; `given` are their ids then, if there
            are any.
        model: who is to read it.
        images: what is known of the model's images.
        vocabulary: ids run from 0 to this, exclusive.
        within: with embeddings, their offsets [length, 5] or [batch, length, 5]
            (`models.offsets`); None for words.

    Raises:
        WeirError: there is nothing, ids embeddings or offsets are none or not the model's, or
            images and image tokens do not go together.
    """
    if embeddings is not None:
        fed = _with_embeddings(given, embeddings, model, vocabulary)
        if within is None:
            return fed
        return replace(fed, offsets=_checked_offsets(within, fed, model, images))
    if within is not None:
        raise WeirError("offsets are those of embeddings; of ids and images weir makes them itself")
    ids = read_ids(given, vocabulary)
    pictures = _pictures(given)
    if not pictures:
        if images is not None:
            images.check_words(ids)
        return Fed(ids)
    if images is None:
        raise WeirError(f"a {type(model).__name__} sees no images, and {list(pictures)} was fed")
    both = {"input_ids": ids, **pictures}
    return Fed(ids, embed(model, both), offsets(model, both))


def _pictures(given: Tokens | None) -> dict[str, Any]:
    """What a processor returned beside the ids, if there are pixels among it."""
    if not isinstance(given, Mapping) or all(given.get(name) is None for name in PICTURES):
        return {}
    return {name: it for name, it in given.items() if name not in ("input_ids", "attention_mask")}


def _with_embeddings(
    given: Tokens | None, embeddings: Tensor, model: PreTrainedModel, vocabulary: int
) -> Fed:
    vectors = _checked(embeddings, model)
    if given is None:
        return Fed(torch.full(vectors.shape[:2], NO_ID), vectors)
    if isinstance(given, Mapping) and _pictures(given):
        raise WeirError("feed images or embeddings, not both; the embeddings may hold the images")
    ids = read_ids(given, vocabulary)
    if ids.shape != vectors.shape[:2]:
        raise WeirError(
            f"the ids of embeddings are {list(vectors.shape[:2])} like these, not {list(ids.shape)}"
        )
    return Fed(ids, vectors)


def _checked(embeddings: object, model: PreTrainedModel) -> Tensor:
    """Embeddings that the model can read [batch, length, width].

    Raises:
        WeirError: they are none, of another width or dtype, or not finite.
    """
    weight: Any = model.get_input_embeddings().weight
    width, dtype = weight.shape[1], _name(weight.dtype)
    if not isinstance(embeddings, Tensor):
        raise WeirError(
            f"embeddings are a tensor [tokens, {width}] or [batch, tokens, {width}], not "
            f"{quote(embeddings)}"
        )
    if embeddings.ndim not in (2, 3) or embeddings.shape[-1] != width:
        raise WeirError(
            f"this model reads embeddings [tokens, {width}] or [batch, tokens, {width}], not "
            f"{list(embeddings.shape)}"
        )
    if embeddings.dtype != weight.dtype:
        raise WeirError(
            f"the embeddings are {_name(embeddings.dtype)} and this model reads {dtype}; write "
            f"embeddings.to(torch.{dtype})"
        )
    vectors = embeddings.detach()
    vectors = vectors[None] if vectors.ndim == 2 else vectors
    if vectors.shape[0] == 0 or vectors.shape[1] == 0:
        raise WeirError("zero embeddings were fed; a stream needs at least one")
    wrong = (~vectors.isfinite().all(dim=-1)).nonzero().tolist()
    if wrong:
        row, place = wrong[0]
        where = f" of row {row}" if vectors.shape[0] > 1 else ""
        raise WeirError(
            f"embedding {place + 1}{where} of this call is infinite or no number; nothing was fed"
        )
    return vectors


def _checked_offsets(
    within: object, fed: Fed, model: PreTrainedModel, images: Images | None
) -> Tensor:
    """Offsets as `models.offsets` makes them [batch, length, 5], int64.

    Raises:
        WeirError: they are not, or the model has one axis.
    """
    if images is None or not images.axes:
        raise WeirError(f"the tokens of a {type(model).__name__} have one place each, no offsets")
    wanted = [*fed.ids.shape, 5]
    if isinstance(within, Tensor) and within.ndim == 2:
        within = within[None]
    if not isinstance(within, Tensor) or list(within.shape) != wanted:
        what = list(within.shape) if isinstance(within, Tensor) else quote(within)
        raise WeirError(f"the offsets of these embeddings are {wanted}, not {what}")
    whole = not (within.is_floating_point() or within.is_complex() or within.dtype == torch.bool)
    found = within.to(torch.int64) if whole else within
    if not whole or bool((found < 0).any()) or bool((found >= MOST_OFFSET).any()):
        raise WeirError(
            f"offsets are whole numbers from 0 to {MOST_OFFSET - 1:,}, as models.offsets"
        )
    if bool((found[:, :, 3] < 1).any()):
        raise WeirError("a word or image reaches 1 at least, the fourth of the offsets; 0 is none")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
