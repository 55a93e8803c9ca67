"""Chat templates: make the ids of a whole conversation, or of the messages after an answer.

Templates rewrite earlier messages, and a tokenizer may split a text into other tokens than the
model generated. So only new messages are rendered, and tokens that were fed are never rendered
again.

A tokenizer converts `<|im_end|>` to the control token even in the words of a user, who could use it
to end the turn and speak as the system. So weir marks such text before it renders the template, and
cuts the text at the marks before it tokenizes it.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from io import StringIO
from itertools import chain, islice, pairwise
from types import MappingProxyType
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.sandbox import MAX_RANGE
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError, shorten
from weir.stream.template_bounds import OutOfBounds, bounded

MARK = "\ufdd0"
"""The character that is inserted into control tokens in a message; Unicode reserves it for internal
use.
"""
PIECE = 16_384
"""Largest number of characters that are tokenized at once, unless the tokenizer makes other tokens
of a text that is cut (`PromptEncoder._may_cut`). Longer texts take much memory and block other
threads.
"""
KNOWN = 32
"""Number of pieces whose tokens are cached, so that repeated text is tokenized once."""
SLACK = 64
"""Number of tokens by which the total can change if a text is cut in two."""
SEVERAL = 256
"""Number of parts between the characters `MARK` that are tokenized together if all of them are
short.
"""
LONGEST = 512
"""Largest number of characters of a control token; the longest known one has about thirty."""
WINDOW = 65_536
"""Number of characters that are searched at once. No other Python thread runs during a search."""
MOST_TEMPLATE, MOST_WORDS = 65_536, 8192
"""Largest number of characters of a chat template, and of tokens of its Jinja program. The longest
known templates have about twenty thousand characters.
"""
_BREAK = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
"""A space between two letters, where tokens of most tokenizers begin."""


class PromptTooLong(WeirError):
    """A prompt has more tokens than are allowed."""

    def __init__(self, most: int) -> None:
        super().__init__(
            f"the prompt has more than {most:,} tokens, the limit of a request. Send the rest in "
            "further turns"
        )


@dataclass(frozen=True)
class TextPlace:
    """Where a marked text is, in characters or in tokens.

    Attributes:
        name: the number that `mark_text` was given for the text.
        start: the first character or token of the text.
        stop: the character or token after its last.
    """

    name: int
    start: int
    stop: int


_NONCE = secrets.token_hex(8)
_BEGIN, _END = f"\ufdd1{_NONCE}", f"\ufdd2{_NONCE}"
_MARKED = re.compile(f"{_BEGIN}([0-9]+)\ufdd3|{_END}")


def mark_text(text: str, name: int) -> str:
    """Mark a text with a number, its `name`, so that `ChatTemplate` finds its tokens. Whitespace
    around the text stays outside the marks.

    `ChatTemplate` removes the marks from the rendered text. No client can write them, because they
    have a random part.
    """
    core = text.strip()
    before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    return f"{before}{_BEGIN}{name}\ufdd3{core}{_END}{after}" if core else text


def take_marks(text: str) -> tuple[str, list[TextPlace]]:
    """Return a text without its marks, and where the marked texts are in it, in characters."""
    if _NONCE not in text:
        return text, []
    parts: list[str] = []
    places: list[TextPlace] = []
    open_at: tuple[int, int] | None = None
    at = length = 0
    for mark in _MARKED.finditer(text):
        parts.append(text[at : mark.start()])
        length += mark.start() - at
        at = mark.end()
        if mark[1] is not None:
            open_at = (int(mark[1]), length)
        elif open_at is not None:
            places.append(TextPlace(*open_at, length))
            open_at = None
    return "".join([*parts, text[at:]]), places


def _has_parts_of_marks(text: str) -> bool:
    """Return whether there are marks, or parts of them, that `take_marks` did not remove."""
    return _NONCE in text.lower() or any(mark in text for mark in "\ufdd1\ufdd2\ufdd3")


class PromptEncoder:
    """Tokenizes prompts for one model. Can be called from any thread.

    Args:
        most: the largest number of tokens in a prompt; None for no limit.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._most = most
        self._one_piece = threading.Lock()  # only for long texts; short ones do not wait
        # A tokenizer that is written in Python must not be called from two threads at once.
        self._lock = None if getattr(tokenizer, "is_fast", False) else threading.Lock()
        known = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in known if token.special}
        template = str(tokenizer.chat_template or "")
        others = {token.content for token in known} - special
        named = {text for text in others if text in template and re.search(r"[^\w\s]", text)}
        self._special = _pattern(special)
        self._named = _pattern(special | named)

    def mark(self, value: Any, *, trusted: bool = False) -> Any:
        """Insert `MARK` into the control tokens in all texts of a value of JSON.

        In `trusted` texts, tokens that only the template uses as control tokens, such as `<think>`,
        are not marked.
        """
        if isinstance(value, str):
            pattern = self._special if trusted else self._named
            while pattern is not None and (marked := _mark(pattern, value)) is not None:
                value = marked
            return value
        mark = partial(self.mark, trusted=trusted)
        if isinstance(value, dict):
            return {mark(name): mark(each) for name, each in value.items()}
        return [mark(each) for each in value] if isinstance(value, list) else value

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Tokenize a text, cutting it at each `MARK`.

        `special` adds the tokens that the tokenizer puts around a text, such as a start token.
        Raises PromptTooLong if there are too many tokens.
        """
        if special and MARK not in text and len(text) <= PIECE:
            return self._checked(self._encode(text, special=True))
        ids: list[int] = []
        parts = _split(text)
        while several := list(islice(parts, SEVERAL)):
            if max(map(len, several)) <= PIECE // SEVERAL:
                ids += chain.from_iterable(self._encode(several))
            else:
                for part in several:
                    ids += self._encode_long(part, len(ids))
            self._checked(ids)
        if special:
            before, after = self._around
            ids = [*before, *ids, *after]
        return self._checked(ids)

    def encode_message(self, text: str) -> list[int]:
        """Tokenize the text of a message, in which control tokens are plain text."""
        return self.encode(self.mark(text))

    def find_places(
        self, text: str, places: Sequence[TextPlace], ids: Sequence[int]
    ) -> list[TextPlace]:
        """Find the tokens of parts of a text. `places` has the parts in characters, and the result
        has them in tokens.

        `ids` are the result of `encode` for the text. Returns nothing if the tokenizer does not
        tell which characters a token stands for.
        """
        if not places or self._lock is not None:
            return []
        pieces: list[tuple[int, str]] = []  # the texts that are tokenized separately
        at = 0
        for part in text.split(MARK):
            start = at
            several = list(_pieces(part)) if len(part) > PIECE and self._may_cut else [part]
            for piece in filter(None, several):
                pieces.append((start, piece))
                start += len(piece)
            at += len(part) + len(MARK)
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        number = which = 0
        for start, piece in pieces:
            options = {"add_special_tokens": False, "return_offsets_mapping": True}
            offsets = self._tokenizer(piece, **options)["offset_mapping"]
            for token, (begin, end) in enumerate(offsets, number):
                while which < len(places) and places[which].stop < start + end:
                    which += 1
                if which == len(places):
                    break
                if places[which].start <= start + begin < start + end:
                    first.setdefault(which, token)
                    last[which] = token + 1
            number += len(offsets)
        shift = len(ids) - number
        if shift not in (0, sum(map(len, self._around))):
            return []
        before = len(self._around[0]) if shift else 0
        return [
            TextPlace(places[which].name, first[which] + before, last[which] + before)
            for which in first
        ]

    def _encode_long(self, text: str, before: int) -> list[int]:
        """Tokenize a long text in pieces, after `before` tokens of the same prompt."""
        if len(text) <= PIECE:
            return self._encode(text)
        ids: list[int] = []
        same: dict[int, int] = {}  # equal ids share an object: 8 bytes instead of 40
        known: dict[str, list[int]] = {}
        for number, piece in enumerate(_pieces(text)):
            if piece not in known:
                if len(known) >= KNOWN:
                    del known[next(iter(known))]
                with self._one_piece:
                    some = self._encode(piece)
                known[piece] = list(map(same.setdefault, some, some))
            ids += known[piece]
            if self._most is not None and before + len(ids) > self._most + SLACK * number:
                raise PromptTooLong(self._most)
        if not self._may_cut:
            with self._one_piece:
                ids = self._encode(text)
        return ids

    @cached_property
    def _may_cut(self) -> bool:
        """Whether a text that is cut in front of a word has the same tokens as its parts."""
        return self._encode("one word") == [*self._encode("one"), *self._encode(" word")]

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the tokenizer puts before and after a text."""
        plain, whole = self._encode("x"), self._encode("x", special=True)
        starts = range(len(whole) - len(plain) + 1)
        at = next((n for n in starts if whole[n : n + len(plain)] == plain), len(whole))
        return whole[:at], whole[at + len(plain) :]

    def _encode(self, text: str | list[str], *, special: bool = False) -> list[Any]:
        with self._lock or nullcontext():
            return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def _checked(self, ids: list[int]) -> list[int]:
        if self._most is not None and len(ids) > self._most:
            raise PromptTooLong(self._most)
        return ids


def _mark(pattern: re.Pattern[str], text: str) -> str | None:
    """Return a text with `MARK` in all matches of a pattern; None if there are no matches.

    Parts are joined one window at a time, because a text can have a control token in every ten
    characters, and all parts together would take much more memory than the text.
    """
    marked, start = StringIO(), 0
    for cuts in _find_cuts(pattern, text):
        ends = pairwise([start, *cuts])
        marked.write("".join(f"{text[one:other]}{MARK}" for one, other in ends))
        start = cuts[-1]
    if not start:
        return None
    marked.write(text[start:])
    return marked.getvalue()


def _find_cuts(pattern: re.Pattern[str], text: str) -> Iterator[list[int]]:
    """Find where to cut a text so that no match of the pattern stays whole: after the first
    character of each match. Matches that overlap an earlier match are not found. Yields a list for
    each window that has matches.
    """
    after = 0
    for start in range(0, len(text), WINDOW):
        cuts = []
        for found in pattern.finditer(text, max(start, after), start + WINDOW + LONGEST):
            if found.start() >= start + WINDOW:
                break
            after = found.end()
            cuts.append(found.start() + 1)
        if cuts:
            yield cuts


def _split(text: str) -> Iterator[str]:
    """Yield the parts of a text between the characters `MARK`, without empty ones."""
    start = 0
    while (end := text.find(MARK, start)) >= 0:
        if end > start:
            yield text[start:end]
        start = end + 1
    if start < len(text):
        yield text[start:]


def _pieces(text: str) -> Iterator[str]:
    """Cut a text into pieces, in front of words if possible."""
    at = 0
    while len(text) - at > PIECE:
        near = at + PIECE - 1024
        found = _BREAK.search(text, near, at + PIECE)
        end = found.start() if found else at + PIECE
        yield text[at:end]
        at = end
    yield text[at:]


def _pattern(texts: Collection[str]) -> re.Pattern[str] | None:
    """Make a pattern that matches any of some texts. Texts with the same beginning share that part
    of the pattern. Texts of one character cannot be cut and are left out.
    """
    tree: dict[str, Any] = {}
    for text in (text for text in texts if len(text) > 1):
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}

    def write(node: dict[str, Any]) -> str:
        more = [re.escape(char) + write(below) for char, below in node.items() if char]
        if not more:
            return ""
        group = more[0] if len(more) == 1 else f"(?:{'|'.join(more)})"
        return f"(?:{group})?" if "" in node else group

    return re.compile(write(tree)) if tree else None


ANSWER = "an-answer-that-stands-for-all"
"""A made-up answer, to render the turn that comes after any answer."""

SYSTEM = ("system", "developer")
"""Roles of instructions, which come before the conversation."""
TRUSTED = (*SYSTEM, "assistant")
"""Roles in whose texts tokens such as `<think>` are not marked; control tokens are."""


class BrokenTemplate(WeirError):
    """A chat template fails, takes too much memory or does not end."""


class ChatTemplate:
    """Renders messages of a conversation as token ids for one model.

    A model without a chat template continues the text of all messages, each on a separate line.

    Args:
        ends: the tokens that end an answer.
        tools: functions that the model may call, as JSON schemas.
        encoder: tokenizes the rendered text; by default, one without a limit.
        variables: further variables of the template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ends: Collection[int],
        tools: Sequence[dict[str, Any]] = (),
        encoder: PromptEncoder | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._variables = variables
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._tools = tools
        self._encoder = encoder or PromptEncoder(tokenizer)

    def with_tools(
        self, tools: Sequence[dict[str, Any]], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> ChatTemplate:
        """Return the same template with these tools and variables instead of its own."""
        return ChatTemplate(self._tokenizer, self._ends, tools, self._encoder, variables)

    @property
    def templated(self) -> bool:
        """Whether the model has a chat template."""
        return self._tokenizer.chat_template is not None

    def whole(
        self, messages: Sequence[dict[str, Any]], found: list[TextPlace] | None = None
    ) -> list[int]:
        """Render messages, each with "role" and "content", from the beginning up to the model's
        answer.

        `found` is filled with the places of texts that `mark_text` has marked. Raises WeirError if
        the template refuses the messages.
        """
        text = self._render(messages) if self.templated else self._lines(messages)
        text, places = take_marks(text)
        ids = self._encoder.encode(text, special=not self.templated)
        if found is not None:
            found += self._encoder.find_places(text, places, ids)
        return ids

    def after(
        self,
        messages: Sequence[dict[str, Any]],
        last: int | None,
        found: list[TextPlace] | None = None,
    ) -> list[int] | None:
        """Render messages that come after an answer, up to the next answer. `last` is the last
        token of the answer before them; None if it has no id.

        `found` is filled with the places of texts that `mark_text` has marked.

        Returns None if the template hides earlier answers, so that none can be continued; raises
        WeirError if it refuses the messages.
        """
        if not self.templated:
            text = self._lines(messages)
            said = [] if last is None else [last]
            ended = str(self._tokenizer.decode(said)).endswith("\n")
            text, places = take_marks(text if ended else f"\n{text}")
            ids = self._encoder.encode(text)
            if found is not None:
                found += self._encoder.find_places(text, places, ids)
            return ids
        # What comes after an answer does not depend on the turns before it, so a short made-up
        # history replaces the real one.
        history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER}]
        _, divided, after = self._render([*history, *messages]).partition(ANSWER)
        if not divided:
            return None
        text, places = take_marks(after)
        ids = self._encoder.encode(text)
        kept = self._drop_end(ids, last)
        if found is not None:
            cut = len(ids) - len(kept)
            all_places = self._encoder.find_places(text, places, ids)
            found += [TextPlace(one.name, one.start - cut, one.stop - cut) for one in all_places]
        return kept

    def beginning(self, messages: Sequence[dict[str, Any]], ids: Sequence[int]) -> int:
        """Count the ids before the first message that is not an instruction: the start token, the
        system turn, the tools, and the template's tokens in front of a user's words.

        `ids` are those that `whole` returned for the messages. Returns 0 if the number is not
        known.
        """
        roles = [message["role"] for message in messages]
        first = next((i for i, role in enumerate(roles) if role not in SYSTEM), None)
        words = "" if first is None else messages[first]["content"] or ""
        # Ids that stay the same if the words are replaced do not belong to the words.
        other = {"role": "user", "content": "x" if words.lstrip().startswith("0") else "0"}
        try:
            return _count_common(ids, self.whole([*messages[:first], other]))
        except WeirError:
            return 0  # not known: the template does not accept a system turn followed by a user's

    def header(self, ids: Sequence[int]) -> int:
        """Count the ids at the end that the template puts between a message and its answer."""
        return _count_common(ids[::-1], self._header[::-1])

    @cached_property
    def _header(self) -> list[int]:
        if not self.templated:
            return []
        try:
            turn = {"role": "user", "content": ANSWER}
            text = render_chat(self._tokenizer, [turn], variables=self._variables)
        except BrokenTemplate:
            raise
        except WeirError:
            return []
        return self._encoder.encode(text.partition(ANSWER)[2])

    def _drop_end(self, ids: list[int], last: int | None) -> list[int]:
        """Drop the end of the answer, with which `ids` begin, if the answer's last token shows that
        the model has generated its end itself.
        """
        place = next((i for i, token in enumerate(ids) if token in self._ends), None)
        if place is None or last not in self._ends:
            return ids
        between = str(self._tokenizer.decode(ids[:place]))
        return ids if between.strip() else ids[place + 1 :]

    def _render(self, messages: Sequence[dict[str, Any]]) -> str:
        mark = self._encoder.mark
        marked = [
            {**mark(one, trusted=one["role"] in TRUSTED), "role": one["role"]} for one in messages
        ]
        tools, variables = mark(list(self._tools)), mark(dict(self._variables))
        text = render_chat(self._tokenizer, marked, tools=tools, variables=variables)
        if _NONCE not in text or not _has_parts_of_marks(take_marks(text)[0]):
            return text
        # The template cuts or rewrites texts, so their places are not known.
        plain = [
            {**one, "content": take_marks(one["content"])[0]}
            if isinstance(one.get("content"), str)
            else one
            for one in marked
        ]
        return render_chat(self._tokenizer, plain, tools=tools, variables=variables)

    def _lines(self, messages: Sequence[dict[str, Any]]) -> str:
        return "\n".join(self._encoder.mark(message["content"]) for message in messages)


def _count_common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Count the ids that two lists share at the beginning."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ids), len(others)))


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Try a model's chat template, if it has one. Raises BrokenTemplate if it cannot render any
    turn.

    Call this before the first message, when an error costs the user nothing. A template that
    refuses the turn that is tried here is not broken.
    """
    ChatTemplate(tokenizer, ()).header([])


def _check_length(name: str, template: Any) -> None:
    """Refuse a template that would take long to compile. Nothing else limits that time."""
    for text in template.values() if isinstance(template, Mapping) else [template]:
        if isinstance(text, str) and (found := _too_long(text)):
            raise BrokenTemplate(
                f"the chat template of {name} has {found}. Give the model another template."
            )


@lru_cache(maxsize=16)
def _too_long(template: str) -> str:
    """Say what a template has too much of, and how much is allowed; "" if it is short enough."""
    if len(template) > MOST_TEMPLATE:
        return f"{len(template):,} characters, but at most {MOST_TEMPLATE:,} are allowed"
    words = 0
    with suppress(TemplateSyntaxError):  # rendering it reports the error
        for _, kind, _ in Environment().lex(template):
            words += kind not in ("whitespace", "data")
    if words <= MOST_WORDS:
        return ""
    return f"{words:,} Jinja tokens, but at most {MOST_WORDS:,} are allowed"


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[dict[str, Any]] = (),
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Render a conversation as text with a model's chat template.

    Without `add_generation_prompt`, the last turn is left open, so that the model continues it.

    Raises:
        WeirError: the template refuses the turns, for example because roles must alternate.
        BrokenTemplate: the template fails, takes too much memory, or does not end.
    """
    name = tokenizer.name_or_path or "this model"
    _check_length(name, tokenizer.chat_template)
    try:
        with bounded([*turns, *tools]):
            text = tokenizer.apply_chat_template(
                list(turns),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **variables,
            )
    except TemplateSyntaxError as error:
        why = shorten(str(error))
        raise BrokenTemplate(
            f"the chat template of {name} cannot be read: {why}. Give the model another template."
        ) from None
    except TemplateError as error:
        why = shorten(str(error))
        raise WeirError(f"the model's chat template refuses these messages: {why}") from None
    except OutOfBounds as error:
        raise BrokenTemplate(f"the chat template of {name} {error}") from None
    except Exception as error:
        if isinstance(error, OverflowError) and str(error).startswith("Range too big"):
            raise BrokenTemplate(
                f"the chat template of {name} has a range of more than {MAX_RANGE:,} numbers. "
                "Give the model another template."
            ) from None
        why = shorten(f"{type(error).__name__}: {error}")
        raise BrokenTemplate(f"the chat template of {name} fails with {why}") from None
    return str(text)
