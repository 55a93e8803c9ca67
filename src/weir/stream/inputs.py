"""Inputs of a stream: token ids in any form, embeddings instead of ids, or a processor's output."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.errors import WeirError, quote
from weir.models import MOST_OFFSET, OFFSETS, PICTURES, Images, embed, offsets, out_of_range

Tokens = (
    Tensor
    | np.ndarray[Any, Any]
    | Sequence[int]
    | Sequence[Sequence[int]]
    | Mapping[str, Any]  # with `input_ids`, as a tokenizer returns them
)

NOTHING = "no tokens were fed, and a stream needs at least one"


def read_ids(given: Tokens | None, vocabulary: int) -> Tensor:
    """Check token ids [length] or [batch, length], and return them [batch, length], int64.

    A tokenizer's output without padding is accepted. Raises WeirError if they are not ids, are
    empty or padded, or are not from 0 to `vocabulary`, exclusive.
    """
    if isinstance(given, str):
        raise WeirError("token ids must be numbers, got text. Use tokenizer(text).input_ids.")
    ids = _tensor(_of_tokenizer(given) if isinstance(given, Mapping) else given)
    if ids.numel() == 0:
        raise WeirError(NOTHING)
    if not _is_whole(ids) or ids.ndim not in (1, 2):
        raise WeirError(
            f"token ids must be whole numbers [length] or [batch, length], got {ids.dtype} "
            f"{list(ids.shape)}"
        )
    ids = ids.to(torch.int64)
    low, high = map(int, ids.aminmax())
    if low < 0 or high >= vocabulary:
        raise out_of_range(low if low < 0 else high, vocabulary)
    return ids[None] if ids.ndim == 1 else ids


def pieces_of(given: Iterator[int], size: int) -> Iterator[list[int]]:
    """Yield the ids of an iterator in pieces of `size`, and read each piece only when it is needed.

    Raises WeirError if the iterator yields nothing, or something that is not a whole number.
    """
    last: list[int] | None = None
    while piece := list(itertools.islice(given, size)):
        last = [_index(token) for token in piece]
        yield last
    if last is None:
        raise WeirError(NOTHING)


def _index(token: Any) -> int:
    """Return an id as an int, from any kind of whole number."""
    with contextlib.suppress(TypeError):  # a tensor has `__index__`, which can fail
        if not isinstance(token, bool):
            return operator.index(token)
    raise WeirError(f"an iterator of ids must yield whole numbers, got {quote(token)}")


def read_stops(given: int | Sequence[int]) -> set[int]:
    """Return the set of token ids that end an answer, from one or several ids; WeirError if they
    are not ids.
    """
    found: Any = [given] if is_count(given) else given
    try:
        if not isinstance(found, str) and all(map(is_count, found)):
            return {int(token) for token in found}
    except TypeError:
        pass  # not iterable
    raise WeirError(f"stop must be a token id or several, got {quote(given)}")


def is_count(value: object) -> bool:
    """Return whether a value is a whole number of at least 0."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _tensor(given: Any) -> Tensor:
    """Make a tensor of numbers."""
    try:
        # Copy, because torch would warn about sharing a read-only array.
        return torch.tensor(given) if isinstance(given, np.ndarray) else torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WeirError(
            "token ids must be whole numbers [length] or, in rows of one length, "
            f"[batch, length] ({error})"
        ) from None


def _of_tokenizer(given: Mapping[str, Any]) -> Any:
    """Take the ids from a tokenizer's output."""
    if "input_ids" not in given:
        raise WeirError(f"token ids must be in 'input_ids', got only {list(given)}")
    mask = given.get("attention_mask")
    if mask is not None and not bool(_tensor(mask).all()):
        raise WeirError(
            "a stream cannot have padding, but the attention_mask has some. Feed rows of one "
            "length, or use model.generate(..., past_key_values=weir.StreamingCache(...))."
        )
    return given["input_ids"]


NO_ID = -1
"""Stands for the id of a token that was fed as an embedding without an id."""


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of the model.

    Attributes:
        ids: [batch, length], int64; `NO_ID` where a token has none.
        embeddings: vectors instead of the ids [batch, length, width], or None.
        offsets: for a model whose positions have three axes, five numbers for each token [batch,
            length, 5] that say where it is within its image (see `models.offsets`); None if there
            are no images.
    """

    ids: Tensor
    embeddings: Tensor | None = None
    offsets: Tensor | None = None

    def __len__(self) -> int:
        return self.ids.shape[1]

    @property
    def rows(self) -> int:
        """Number of rows of the batch."""
        return self.ids.shape[0]

    @property
    def last(self) -> list[int | None]:
        """The id of the last token of each row; None if the token has no id."""
        return [None if token == NO_ID else token for token in self.ids[:, -1].tolist()]

    @property
    def given(self) -> dict[str, Tensor]:
        """The arguments that the model is called with."""
        if self.embeddings is None:
            return {"input_ids": self.ids}
        if self.offsets is None:
            return {"inputs_embeds": self.embeddings}
        return {"inputs_embeds": self.embeddings, OFFSETS: self.offsets}

    def part(self, start: int, stop: int) -> Inputs:
        """Return the tokens from `start` to `stop`, exclusive."""
        return self._map(lambda t: t[:, start:stop])

    def to(self, device: torch.device) -> Inputs:
        """Return the same on another device."""
        return self._map(lambda t: t.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        others = (None if t is None else change(t) for t in (self.embeddings, self.offsets))
        return Inputs(change(self.ids), *others)


def read_inputs(
    given: Tokens | None,
    embeddings: Tensor | None,
    model: PreTrainedModel,
    images: Images | None,
    vocabulary: int,
    within: Tensor | None = None,
) -> Inputs:
    """Check inputs, and make embeddings of images.

    Args:
        given: as for `read_ids`, or the output of the model's processor, with pixels.
        embeddings: [length, width] or [batch, length, width]; `given` has their ids, or is None.
        images: the description of the model's images; None if the model accepts none.
        within: with embeddings, their offsets [length, 5] or [batch, length, 5]
            (`models.offsets`); None if there are no images.
    """
    if embeddings is not None:
        inputs = _with_embeddings(given, embeddings, model, vocabulary)
        if within is None:
            return inputs
        return replace(inputs, offsets=_check_offsets(within, inputs, model, images))
    if within is not None:
        raise WeirError(
            "offsets are only for embeddings. For ids and images, weir computes them. Leave out "
            "offsets."
        )
    ids = read_ids(given, vocabulary)
    pictures = _pictures(given)
    if not pictures:
        if images is not None:
            images.check_words(ids)
        return Inputs(ids)
    if images is None:
        raise WeirError(f"a {type(model).__name__} sees no images, but {list(pictures)} was fed")
    both = {"input_ids": ids, **pictures}
    return Inputs(ids, embed(model, both), offsets(model, both))


def _pictures(given: Tokens | None) -> dict[str, Any]:
    """Return the fields for images of a processor's output; none if it has no pixels."""
    if not isinstance(given, Mapping) or all(given.get(name) is None for name in PICTURES):
        return {}
    return {name: it for name, it in given.items() if name not in ("input_ids", "attention_mask")}


def _with_embeddings(
    given: Tokens | None, embeddings: Tensor, model: PreTrainedModel, vocabulary: int
) -> Inputs:
    vectors = _check_embeddings(embeddings, model)
    if given is None:
        return Inputs(torch.full(vectors.shape[:2], NO_ID), vectors)
    if isinstance(given, Mapping) and _pictures(given):
        raise WeirError(
            "feed either images or embeddings, not both. The embeddings may include the images."
        )
    ids = read_ids(given, vocabulary)
    if ids.shape != vectors.shape[:2]:
        raise WeirError(
            f"the ids of embeddings must have the shape {list(vectors.shape[:2])}, got "
            f"{list(ids.shape)}"
        )
    return Inputs(ids, vectors)


def _check_embeddings(embeddings: object, model: PreTrainedModel) -> Tensor:
    """Check embeddings, and return them [batch, length, width]."""
    weight: Any = model.get_input_embeddings().weight
    width, dtype = weight.shape[1], _name(weight.dtype)
    if not isinstance(embeddings, Tensor):
        raise WeirError(
            f"embeddings must be a tensor [tokens, {width}] or [batch, tokens, {width}], got "
            f"{quote(embeddings)}"
        )
    if embeddings.ndim not in (2, 3) or embeddings.shape[-1] != width:
        raise WeirError(
            f"embeddings must be [tokens, {width}] or [batch, tokens, {width}], got "
            f"{list(embeddings.shape)}"
        )
    if embeddings.dtype != weight.dtype:
        raise WeirError(
            f"embeddings must be {dtype}, got {_name(embeddings.dtype)}. Use "
            f"embeddings.to(torch.{dtype})."
        )
    vectors = embeddings.detach()
    vectors = vectors[None] if vectors.ndim == 2 else vectors
    if vectors.shape[0] == 0 or vectors.shape[1] == 0:
        raise WeirError("a stream needs at least one embedding, got none")
    wrong = (~vectors.isfinite().all(dim=-1)).nonzero().tolist()
    if wrong:
        row, place = wrong[0]
        where = f" of row {row}" if vectors.shape[0] > 1 else ""
        raise WeirError(
            f"embedding {place + 1}{where} of this call is infinite or NaN, so nothing was fed"
        )
    return vectors


def _check_offsets(
    within: object, inputs: Inputs, model: PreTrainedModel, images: Images | None
) -> Tensor:
    """Check offsets as `models.offsets` makes them, and return them [batch, length, 5], int64."""
    if images is None or not images.axes:
        raise WeirError(
            f"the tokens of a {type(model).__name__} have one place each, so they take no offsets"
        )
    wanted = [*inputs.ids.shape, 5]
    if isinstance(within, Tensor) and within.ndim == 2:
        within = within[None]
    if not isinstance(within, Tensor) or list(within.shape) != wanted:
        what = list(within.shape) if isinstance(within, Tensor) else quote(within)
        raise WeirError(f"the offsets of these embeddings must be {wanted}, got {what}")
    if not _is_whole(within) or not bool(((within >= 0) & (within < MOST_OFFSET)).all()):
        raise WeirError(
            f"offsets must be whole numbers from 0 to {MOST_OFFSET - 1:,}, as models.offsets "
            "returns them"
        )
    if bool((within[:, :, 3] < 1).any()):
        raise WeirError(
            "the fourth offset, the extent of a text token or image, must be at least 1, got 0"
        )
    return within.to(torch.int64)


def _is_whole(t: Tensor) -> bool:
    """Return whether a tensor has whole numbers; bool does not count."""
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
