"""An answer as text while its tokens come: whole characters only, and up to a text that ends it.

A token costs the same however long the answer is already. Knows nothing about models or streams.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

PARTIAL = "\ufffd"
"""What a tokenizer writes for bytes that are no character, or none yet."""
LONGEST = 16
"""Tokens that may stay without a character; more are none, since a character has four bytes."""


class Detokenizer:
    """The text of one answer, a piece for each token.

    A piece has whole characters only, leaves special tokens out, and holds back what may be the
    beginning of a stop. All pieces together are what the tokenizer makes of all tokens at once;
    where it makes something else of earlier tokens when later ones come, what was given out stays.

    Args:
        tokenizer: of the model that answers.
        stops: texts that end the answer and are no part of it; the empty text is none.
        kept: special tokens that are part of the text.

    Attributes:
        special: tokens that add nothing unless they are kept, such as those of a template, and
            what they say.
        stopped: whether a stop has come; tokens after it add nothing.
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
        # Tokenizers write a token after others in another way than at the beginning (spaces, most
        # of all), so those of the last piece are decoded again in front of what comes.
        self._before: list[int] = []
        self._open: list[int] = []
        self._given = ""  # of the text of `_before` and `_open`, what `_decoded` has returned
        self._held = ""  # text that may be the beginning of a stop

    def add(self, token: int) -> str:
        """The text that one more token adds; often none, where a character takes several."""
        if self.stopped:
            return ""
        if token in self.special:
            return self._until_stop(self.special[token]) if token in self._kept else ""
        return self._until_stop(self._decoded(token))

    def end(self) -> str:
        """No token comes any more: the text held back because a stop might have been coming."""
        held, self._held = self._held, ""
        return held

    def _decoded(self, token: int) -> str:
        """The whole characters that a token completes."""
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

    def _until_stop(self, new: str) -> str:
        """What of the text held back and the new text can be given out."""
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
    """What each token says by which text, and whether it is a special token.

    A character that takes several tokens is said by the last of them, and what no page can show,
    such as NUL, by U+FFFD.
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
    """A text up to where the first of the stops in it begins; the empty stop is none."""
    found = [text.find(stop) for stop in stops if stop]
    return text[: min((at for at in found if at >= 0), default=len(text))]


def count_stop_prefix(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
