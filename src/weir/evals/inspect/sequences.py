"""A text cut into sequences of one length, each with the tokens that stand around any text.

Knows nothing about models.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.models import ModelSink

NO_SINK = ModelSink()
LEAST = 8
"""Tokens; in shorter sequences there is nothing to see."""
_END = re.compile(r"(?<=[.!?…。！？])[\"'”’»)]*\s+|(?<=[。！？])|\n\s*\n")
_QUIET = {"verbose": False, "return_attention_mask": False}


def sentences(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    count: int,
    length: int,
    sink: ModelSink = NO_SINK,
) -> Tensor:
    """Sentences of a text, cut after `length` tokens; shorter ones are left out.

    A text that has more pieces of that length than such sentences gives pieces.

    Args:
        tokenizer: of the model that will read.
        text: the text.
        count: how many, at most; the first ones.
        length: tokens of each, those that stand around any text among them.
        sink: of the model; the tokens of a learned one stand in front.

    Returns:
        [sentences, length], int64.

    Raises:
        WeirError: the text has fewer than `length` tokens.
    """
    found: list[list[int]] = []
    parts = [part for part in _END.split(text) if part and part.strip()]
    # In steps, since a text may be a library.
    for begin in range(0, len(parts), 4 * count):
        some = [part[: 64 * length] for part in parts[begin : begin + 4 * count]]
        rows = tokenizer(some, truncation=True, max_length=length, **_QUIET)["input_ids"]
        found += [sink.first(row)[:length] for row in rows if len(row) == length]
        if len(found) >= count:
            break
    if len(found) < count:
        others = pieces(tokenizer, text, count, length, sink)
        if len(others) > len(found):
            return others
    return torch.tensor(found[:count], dtype=torch.int64)


def pieces(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    count: int,
    length: int,
    sink: ModelSink = NO_SINK,
) -> Tensor:
    """Pieces of a text, one after the other.

    Args:
        tokenizer, text, count, length, sink: as for `sentences`.

    Returns:
        [pieces, length], int64: each with the tokens around it that the tokenizer puts there.

    Raises:
        WeirError: the text has fewer than `length` tokens.
    """
    front, back = around(tokenizer)
    front = sink.first(front)
    own = length - len(front) - len(back)
    # So many characters are enough for prose; where they are not, the whole text is.
    for piece in (text[: 16 * count * length], text):
        ids = list(tokenizer(piece, add_special_tokens=False, **_QUIET)["input_ids"])
        if len(ids) >= own * count:
            break
    if own < 1 or len(ids) < own:
        raise WeirError(
            f"the text is too short to inspect: it has {len(ids) + length - own} tokens, and "
            f"sequences of {length} are asked for; take a longer text"
        )
    rows = [
        [*front, *ids[begin : begin + own], *back]
        for begin in range(0, min(count * own, len(ids) - own + 1), own)
    ]
    return torch.tensor(rows, dtype=torch.int64)


def around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and behind any text, as a start token."""
    plain = list(tokenizer("a", add_special_tokens=False, **_QUIET)["input_ids"])
    full = list(tokenizer("a", **_QUIET)["input_ids"])
    for at in range(len(full) - len(plain) + 1):
        if full[at : at + len(plain)] == plain:
            return full[:at], full[at + len(plain) :]
    return [], []


def count_of(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> int:
    """Tokens of a text, those around it among them; `most` if it has more."""
    for piece in (text[: 16 * most], text):
        if (found := len(tokenizer(piece, **_QUIET)["input_ids"])) >= most:
            return most
    return found


def shared(ids: Tensor, tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens that stand at one place of every sequence, by place: a start token, [SEP].

    Args:
        ids: [sequences, length]; of a single sequence only special tokens count.
        tokenizer: tells their names.
    """
    special = set(tokenizer.all_special_ids)
    return {
        place: str(tokenizer.convert_ids_to_tokens(int(column[0])))
        for place, column in enumerate(ids.T)
        if int(column[0]) in special and bool((column == column[0]).all())
    }
