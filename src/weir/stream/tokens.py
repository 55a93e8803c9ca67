"""Token ids as people have them: lists, arrays, tensors, what a tokenizer returned.

Knows nothing about models or streams.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weir.errors import WeirError, quote
from weir.models import check_ids

Tokens = (
    Tensor
    | np.ndarray[Any, Any]
    | Sequence[int]
    | Sequence[Sequence[int]]
    | Mapping[str, Any]  # with `input_ids`, as a tokenizer returns them
)

NOTHING = "zero tokens were fed; a stream needs at least one"


def read_ids(given: Tokens | None, vocabulary: int) -> Tensor:
    """Token ids, checked.

    Args:
        given: ids [length] or [batch, length], or what a tokenizer returned, without padding; None
            is refused like anything else that is no ids.
        vocabulary: ids run from 0 to this, exclusive.

    Returns:
        [batch, length], int64, where they were.

    Raises:
        WeirError: they are no ids, none at all, out of range, or padded.
    """
    if isinstance(given, str):
        raise WeirError("text is not token ids; write tokenizer(text).input_ids")
    if isinstance(given, Mapping):
        given = _of_tokenizer(given)
    ids = _tensor(given)
    if ids.numel() == 0:
        raise WeirError(NOTHING)
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not whole or ids.ndim not in (1, 2):
        raise WeirError(
            f"token ids must be whole numbers [length] or [batch, length], not {ids.dtype} "
            f"{list(ids.shape)}"
        )
    ids = ids.to(torch.int64)
    check_ids(ids, vocabulary)
    return ids[None] if ids.ndim == 1 else ids


def pieces_of(given: Iterator[int], size: int) -> Iterator[list[int]]:
    """The ids that an iterator yields, `size` at a time and never more ahead.

    Raises:
        WeirError: it yields something else, or nothing at all.
    """
    last: list[int] | None = None
    while piece := list(itertools.islice(given, size)):
        last = [_index(token) for token in piece]
        yield last
    if last is None:
        raise WeirError(NOTHING)


def _index(token: Any) -> int:
    """An id, of whatever kind of whole number."""
    with contextlib.suppress(TypeError):  # a tensor has `__index__`, and not always an index
        if not isinstance(token, bool):
            return operator.index(token)
    raise WeirError(f"an iterator yields ids one by one, whole numbers, not {quote(token)}")


def read_stops(given: int | Sequence[int]) -> set[int]:
    """The ids of tokens that end an answer, from one or several.

    Raises:
        WeirError: they are no ids.
    """
    found: Any = [given] if is_count(given) else given
    try:
        if not isinstance(found, str) and all(map(is_count, found)):
            return {int(token) for token in found}
    except TypeError:
        pass  # nothing that holds several
    raise WeirError(f"stop must be a token id or several, not {quote(given)}")


def is_count(value: object) -> bool:
    """Whether it is a whole number from 0 on."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _tensor(given: Any) -> Tensor:
    """Numbers as a tensor.

    Raises:
        WeirError: they are none, or rows of them have different lengths.
    """
    try:
        # A copy, since torch would warn about sharing an array that nobody may write to.
        return torch.tensor(given) if isinstance(given, np.ndarray) else torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WeirError(
            "token ids must be whole numbers [length] or, in rows of one length, "
            f"[batch, length] ({error})"
        ) from None


def _of_tokenizer(given: Mapping[str, Any]) -> Any:
    """The ids of what a tokenizer returned.

    Raises:
        WeirError: it has none, or some of them are padding.
    """
    if "input_ids" not in given:
        raise WeirError(f"token ids are looked for in 'input_ids', and {list(given)} has none")
    mask = given.get("attention_mask")
    if mask is not None and not bool(_tensor(mask).all()):
        raise WeirError(
            "a stream takes no padding, and the attention_mask has some; feed rows of one length, "
            "or use model.generate(..., past_key_values=weir.StreamingCache(...))"
        )
    return given["input_ids"]
