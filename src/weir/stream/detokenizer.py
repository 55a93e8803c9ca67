"""Incremental detokenization: turns tokens into text as they arrive, up to a stop text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

PARTIAL = "\ufffd"
"""The character that tokenizers write for bytes that are not a character, or not yet a complete
one.
"""
LONGEST = 16
"""Number of tokens after which an incomplete character is returned as it is. A character has at
most four bytes.
"""


class Detokenizer:
    """Converts the tokens of one answer to text, piece by piece.

    A piece has only whole characters (but see `LONGEST`), and no special tokens except those in
    `kept`. Text that may be the beginning of a stop is held back until later tokens show whether it
    is one; if none follow, `end` returns it. All pieces together are the text that the tokenizer
    makes of all tokens, up to a stop, and without an incomplete character at the end. If later
    tokens change the text of earlier ones, the returned text stays as it was.

    Args:
        stops: texts that end the answer and are not part of it; empty ones are ignored.
        kept: special tokens that are part of the text.

    Attributes:
        special: the special tokens and their texts.
        stopped: whether a stop has been found; later tokens then add nothing.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str] = (),
        kept: Collection[int] = (),
    ) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        special = tokenizer.added_tokens_decoder.items()
        self.special = {token: how.content for token, how in special if how.special}
        self._kept = frozenset(kept)
        # Tokenizers decode a token after others differently than alone (especially spaces), so the
        # tokens of the last piece are decoded again together with the new ones.
        self._before: list[int] = []
        self._open: list[int] = []
        self._given = ""  # the returned part of the text of `_before` and `_open`
        self._held = ""  # text that may be the beginning of a stop

    def add(self, token: int) -> str:
        """Return the text that one more token adds; empty, for example, while a character is
        incomplete.
        """
        if self.stopped:
            return ""
        if token in self.special:
            return self._release(self.special[token]) if token in self._kept else ""
        return self._release(self._complete(token))

    def end(self) -> str:
        """End the answer, and return the text held back as the beginning of a stop."""
        held, self._held = self._held, ""
        return held

    def _complete(self, token: int) -> str:
        """Return the whole characters that a token completes."""
        self._open.append(token)
        text = self._decode([*self._before, *self._open])
        late = len(self._open) >= LONGEST
        whole = text if late else text.rstrip(PARTIAL)
        new = whole[len(self._given) :]
        if new:
            self._given = whole
        if late or (new and whole == text):
            self._before, self._open = self._open, []
            self._given = self._decode(self._before)
        return new

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _release(self, new: str) -> str:
        """Return the part of the held and the new text that does not belong to a stop."""
        text = self._held + new
        before = cut_at_stop(text, self._stops)
        if len(before) < len(text):
            self.stopped, self._held = True, ""
            return before
        held = max((count_stop_prefix(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def describe_tokens(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]
) -> list[tuple[str, bool]]:
    """Return the text of each token, and whether it is a special token.

    The text of a character that has several tokens is given to the last of them. Bytes that are not
    a character, and the control characters before U+0020 other than line feeds and tabs, are
    U+FFFD.
    """
    text = Detokenizer(tokenizer)
    found = []
    for token in ids:
        if token in text.special:
            found.append((str(tokenizer.convert_ids_to_tokens(token)), True))
        else:
            said = text.add(token)
            shown = (c if c >= " " or c in "\n\t" else PARTIAL for c in said)
            found.append(("".join(shown), False))
    return found


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Cut a text where the first stop in it begins; empty stops are ignored."""
    found = [text.find(stop) for stop in stops if stop]
    return text[: min((at for at in found if at >= 0), default=len(text))]


def count_stop_prefix(text: str, stop: str) -> int:
    """Count the characters at the end of a text that may be the beginning of a stop."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
