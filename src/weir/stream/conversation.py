"""A conversation over one `Stream`, in which only new tokens are fed."""

from __future__ import annotations

import time
import warnings
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.models import sink_of, transformers_model
from weir.pools import Marks
from weir.stream.archive import (
    Archive,
    ArchiveProblem,
    Excerpt,
    IsHeld,
    find_texts,
    write_quotes,
)
from weir.stream.chat_template import ChatTemplate, PromptEncoder
from weir.stream.detokenizer import Detokenizer
from weir.stream.held import HeldPlaces
from weir.stream.stream import Stream
from weir.stream.transcript import Transcript, Turn, repeats

UNTIMED = 2
"""Number of tokens at the start of an answer that its rate leaves out if the answer has more: the
first comes from the prompt's logits, and the second from the first step, which may include
compilation.
"""
RECALL = 256
"""Largest number of tokens of recalled text in a turn, by default."""
JOINT = 2
"""A quotation and the words after it, encoded together, can take this many tokens more than if each
is encoded alone.
"""
RECALL_SHARE = 4
"""Recalled text also has at most as many tokens as the cache has slots, divided by this number, so
that it does not push everything else out.
"""


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


class Conversation:
    """A conversation of a user and a model, turn by turn.

    With a chat template, each turn is the text that the template adds for it. A model without a
    template continues the text up to the first line break. The tokens of a learnable sink come
    before the first turn. For a policy that keeps a stream's beginning (`pinned`), the beginning
    ends before the user's first words.

    Args:
        stream: the stream; a restored stream continues its conversation.
        system: the system message. It can be forgotten, except under a policy that keeps the
            beginning.
        transcript: records every turn; None for no transcript.
        archive: stores the text of all turns, and is searched for answers to each turn's questions.
            Text that it finds and that has left the cache is quoted in front of the user's words.
            None for no recall.
        recall: largest number of tokens of recalled text in a turn; with 0, the archive is only
            filled.
        warn: called once with a text if the archive can no longer be used; by default, issues a
            Python warning. The conversation goes on without the archive.

    Attributes:
        recalled: excerpts that were quoted in the last turn, the best first.
        recalled_tokens: the number of tokens that the quotation added to the last turn.
        held: a function that tells whether the cache still holds the archived text at given places
            of the stream; if None, the cache of `stream` is asked.
        repeats: length in tokens of the loop in which the last answer ended; 0 for none.
        rate: tokens per second of the last answer, without its first two tokens if it has more,
            because the first step may include compilation.
    """

    def __init__(
        self,
        stream: Stream,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None = None,
        transcript: Transcript | None = None,
        archive: Archive | None = None,
        recall: int = RECALL,
        warn: Callable[[str], None] = _warn,
    ) -> None:
        self.stream = stream
        self.tokenizer = tokenizer
        self.system = system
        self.transcript = transcript
        self.archive, self.recall = archive, recall
        self.recalled: list[Excerpt] = []
        self.recalled_tokens = 0
        self.held: IsHeld | None = None
        self._warn = warn
        self._resumed = False
        self.rate, self.repeats = 0.0, 0

    def say(
        self, text: str, *, max_new_tokens: int = 256, **sampling: Any
    ) -> Generator[str, None, None]:
        """Feed the user's words and yield the answer piece by piece. Closing the generator leaves
        the stream in a valid state.

        Sampling is as for `Stream.generate`. Raises WeirError if the text has no tokens, or cannot
        be encoded in UTF-8.
        """
        plain = self.turn(text)
        if not plain:
            raise WeirError("the message has no tokens. Write some text.")
        quoted = self._recall(text)
        ids = self.turn(text, quoted) if quoted else plain
        self.recalled_tokens = len(ids) - len(plain)
        self._note(Turn(True, self.stream.seen, text, array("I", ids)))
        self._feed(quoted + text, ids)
        self._keep("user", text, ids)
        answer = Turn(False, self.stream.seen)
        try:
            yield from self._answer(answer, max_new_tokens, **sampling)
        finally:
            if self.stream.seen > answer.end:  # interrupted between feeding and yielding
                answer.ids.append(self.stream.last[0] or 0)
            self.repeats = repeats(answer.ids)
            self._note(answer)
            self._keep("assistant", answer.text, answer.ids)

    # --- the archive

    def use_archive(self, archive: Archive | None) -> None:
        """Use another archive from now on; None for no archive. At the next turn, the archive is
        told where the stream continues.
        """
        self.archive, self._resumed = archive, False

    @property
    def most_recalled(self) -> int:
        """Largest number of tokens of recalled text that a turn can have."""
        slots = self.stream.capacity
        return self.recall if slots is None else min(self.recall, slots // RECALL_SHARE)

    def _recall(self, text: str) -> str:
        """Find answers to a turn's questions in text that has left the cache, and write them as a
        quotation; empty if there are none.
        """
        self.recalled = []
        if self.archive is None:
            return ""
        self._resume()
        if self.archive is None or (most := self.most_recalled) <= 0:
            return ""
        try:
            found = self.archive.search(text, is_held=self.held or HeldPlaces(self.stream))
        except ArchiveProblem as error:
            self._lose_archive(error)
            return ""
        if not found:
            return ""
        encoder = PromptEncoder(self.tokenizer)
        quoted, self.recalled = write_quotes(
            found, most - JOINT, lambda quotes: len(encoder.encode_message(quotes))
        )
        return quoted

    def _resume(self) -> None:
        """Tell the archive, before the first turn, where the stream continues."""
        if self.archive is None or self._resumed:
            return
        try:
            self.archive.resume(self.stream.seen)
            self._resumed = True
        except ArchiveProblem as error:
            self._lose_archive(error)

    def _keep(self, role: str, text: str, ids: Sequence[int]) -> None:
        """Add a text that was just said to the archive. `ids` are the newest tokens of the stream,
        which contain the tokens of the text.

        The other tokens in `ids`, such as those of a quotation or of a template's system message,
        are not archived.
        """
        if self.archive is None:
            return
        ((first, last),) = find_texts(ids, [text], PromptEncoder(self.tokenizer).encode_message)
        start = self.stream.seen - len(ids)
        try:
            self._add(self.archive, role, text, start + first, start + last)
        except ArchiveProblem as error:
            self._lose_archive(error)

    def _add(self, archive: Archive, role: str, text: str, start: int, stop: int) -> None:
        """Add a text to the archive; its tokens are at `start` to `stop` of the stream."""
        archive.add(role, text, start=start, stop=stop)

    def _lose_archive(self, error: ArchiveProblem) -> None:
        """Go on without the archive, and say so once."""
        self.archive = None
        self._warn(f"{error} The conversation goes on, but recalls nothing from now on.")

    def take_in(self, text: str, answer: str) -> None:
        """Feed a turn of the user and a given answer, as if the model had generated it.

        Nothing is recalled. WeirError as for `say`.
        """
        ids = self.turn(text)
        if not ids:
            raise WeirError("the message has no tokens. Write some text.")
        self._resume()
        self._note(Turn(True, self.stream.seen, text, array("I", ids)))
        self._feed(text, ids)
        self._keep("user", text, ids)
        said = list(self.tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"])
        said += sorted(self.stream.ends)[:1] if self._turns.templated else []
        start = self.stream.seen
        if said:
            self.stream.feed(said)
        self._note(Turn(False, start, answer, array("I", said)))
        self._keep("assistant", answer, said)

    def _answer(self, answer: Turn, limit: int, **sampling: Any) -> Generator[str, None, None]:
        """Generate an answer, add it to the turn `answer`, and yield it piece by piece."""
        self.rate = 0.0
        # Without a template, the model does not end its turn, so the first line is the answer.
        stops = ["\n"] if self.tokenizer.chat_template is None else []
        text, ends = Detokenizer(self.tokenizer, stops), self.stream.ends
        began = stepped = time.perf_counter()
        for count, token in enumerate(self.stream.generate(limit, **sampling), 1):
            answer.ids.append(token)
            now = time.perf_counter()
            if count <= UNTIMED:
                stepped, self.rate = now, count / (now - began)
            else:
                self.rate = (count - UNTIMED) / (now - stepped)
            if token in ends:
                return
            if new := text.add(token):
                answer.text += new
                yield new
            if text.stopped:
                return

    def _note(self, turn: Turn) -> None:
        if self.transcript is not None and turn.ids:
            self.transcript.add(turn)

    def read_again(self, turns: Iterable[Turn]) -> None:
        """Feed turns from the transcript. The stream must not have seen any of their tokens."""
        for turn in turns:
            if turn.by_user:
                self._feed(turn.text, turn.ids.tolist())
            else:
                self.stream.feed(turn.ids.tolist())

    def turn(self, text: str, quoted: str = "") -> list[int]:
        """Return the ids of a turn of the user, up to the model's answer, with recalled text in
        front of the user's words; WeirError if the text is not UTF-8.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise WeirError(f"character {error.start + 1} of the input is not UTF-8") from None
        text = quoted + text
        said = [{"role": "user", "content": text}]
        if self.stream.seen == 0:
            return _opened(self.stream.model, self._turns.whole(_opening(self.system, text)))
        after = self._turns.after(said, self.stream.last[0])
        return self._turns.whole(said) if after is None else after

    @property
    def _turns(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.stream.ends)

    def _feed(self, text: str, ids: list[int]) -> None:
        """Feed a turn. If the policy keeps the beginning, or the template's tokens in front of an
        answer, mark where they are.
        """
        cache = self.stream.cache
        if cache is None or not any(pipe.needs_marks for pipe in self.stream.policy.pipes):
            self.stream.feed(ids)
            return
        header = self._turns.header(ids)
        answer = cache.origin + self.stream.seen + len(ids)
        if self.stream.seen == 0:
            beginning: int | None = count_beginning(
                self.stream.model, self.tokenizer, self.system, text
            )
        else:
            beginning = cache.marks[0].beginning
        cache.mark(0, Marks(beginning, answer - header, header))
        self.stream.feed(ids)


def count_beginning(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    system: str | None = None,
    text: str = "x",
) -> int:
    """Count the tokens of a conversation before the user's first words: those of the system
    message, of the template and of a learnable sink. WeirError if the template refuses a system
    turn.
    """
    turns, messages = ChatTemplate(tokenizer, ()), _opening(system, text)
    ids = turns.whole(messages)
    return turns.beginning(messages, ids) + len(_opened(model, ids)) - len(ids)


def _opening(system: str | None, text: str) -> list[dict[str, str]]:
    """Return the messages of a conversation that begins with a user's words."""
    told = [] if system is None else [{"role": "system", "content": system}]
    return [*told, {"role": "user", "content": text}]


def _opened(model: PreTrainedModel, ids: list[int]) -> list[int]:
    """Return the ids of a whole conversation, with those of a learnable sink in front."""
    return sink_of(transformers_model(model).config).first(ids)
