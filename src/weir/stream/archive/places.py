"""Where the texts of a conversation are among its tokens, so that the archive knows which texts
have left the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Encode = Callable[[str], list[int]]
"""Tokenizes a text without the tokens that a chat template puts around it."""
Ids = np.ndarray[Any, np.dtype[np.int64]]

ENDS = 16
"""Number of tokens at each end of a long text that are looked for."""
SHORT = 3
"""In the search for a text of at most this many tokens, its first and last token are not both left
out, as they are for a longer text.
"""


def find_texts(ids: Sequence[int], texts: Sequence[str], encode: Encode) -> list[tuple[int, int]]:
    """Find the tokens of some texts in the tokens that a chat template has made of them.

    The tokens between the texts, such as a system message that the template adds, definitions of
    tools and quotations, belong to none of them.

    Args:
        ids: all tokens.
        texts: the texts, in the order in which their tokens are.
        encode: tokenizes a text.

    Returns:
        The first place of each text, and the place after its last. The place of a text whose
        tokens are not there, because the template changes it, is estimated: the tokens between
        known places are divided among such texts by their numbers of characters.
    """
    tokens = np.asarray(ids, dtype=np.int64)
    found: list[tuple[int, int] | None] = []
    end = len(tokens)
    # Begin with the last text, and take the last place of each. Roles and definitions of tools may
    # contain the same words, and they come before the messages.
    for text in reversed(texts):
        place = _find(tokens[:end], np.asarray(encode(text), dtype=np.int64))
        end = end if place is None else place[0]
        found.append(place)
    found.reverse()
    return _estimate(found, texts, len(tokens))


def _find(ids: Ids, text: Ids) -> tuple[int, int] | None:
    """Find the last place of a text. Its first and last token can differ from those of the text
    alone, because the tokenizer can join them with the characters next to the text.
    """
    n = len(text)
    if n == 0:
        return None
    if n <= 2 * ENDS:
        # If the text has only a few tokens, at most one end is left out, so that enough remain.
        for before, after in ((1, 1),) if n > SHORT else ((0, 0), (1, 0), (0, 1)):
            hits = _all_places(ids, text[before : n - after])
            if len(hits):
                first = max(0, int(hits[-1]) - before)
                return first, min(len(ids), first + n)
        return None
    lasts = _all_places(ids, text[n - 1 - ENDS : n - 1])
    firsts = _all_places(ids, text[1 : 1 + ENDS]) - 1
    if not len(lasts) or not len(firsts):
        return None
    stop = min(len(ids), int(lasts[-1]) + ENDS + 1)
    # The beginning of a text can occur in it again. Take the place whose distance from the end of
    # the text is closest to its length.
    start = int(firsts[np.abs(firsts - (stop - n)).argmin()])
    return (max(0, start), stop) if start < stop else None


def _all_places(ids: Ids, wanted: Ids) -> Ids:
    """Find where some tokens occur, ascending; nowhere if there are none."""
    if not len(wanted):
        return np.empty(0, dtype=np.int64)
    places = np.flatnonzero(ids[: max(0, len(ids) - len(wanted) + 1)] == wanted[0])
    for offset in range(1, len(wanted)):
        if not len(places):
            break
        places = places[ids[places + offset] == wanted[offset]]
    return places


def _estimate(
    found: Sequence[tuple[int, int] | None], texts: Sequence[str], end: int
) -> list[tuple[int, int]]:
    """Estimate unknown places: divide the tokens between known texts by numbers of characters."""
    places: list[tuple[int, int]] = []
    for index, place in enumerate(found):
        if place is not None:
            places.append(place)
            continue
        later = [known[0] for known in found[index:] if known is not None]
        first, last = places[-1][1] if places else 0, later[0] if later else end
        run = index
        while run < len(found) and found[run] is None:
            run += 1
        whole = sum(len(text) for text in texts[index:run]) or 1
        share = -(-max(0, last - first) * len(texts[index]) // whole)
        places.append((first, min(last, first + share)))
    return places
