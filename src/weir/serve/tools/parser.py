"""Incremental parser of the tool calls in an answer.

A grammar (`grammar.py`) makes an answer follow its call format, so a call that has begun continues
in that format until it is complete or the answer ends. Everything else is text. None of it is lost,
except white space around calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from weir.serve.messages import Call, Message
from weir.serve.tools.formats import CallFormat
from weir.stream import count_stop_prefix


@dataclass(frozen=True)
class TextDelta:
    """More text of the answer.

    Attributes:
        text: the text.
        call: the index of the call whose arguments the text continues; None if it continues the
            text of the answer.
    """

    text: str
    call: int | None = None


@dataclass(frozen=True)
class CallStart:
    """The start of a call."""

    call: int
    name: str


@dataclass(frozen=True)
class CallEnd:
    """The end of a call, which is complete."""

    call: int


PARAGRAPH = "\n\n"
"""Separator between the texts before and after a call that the server runs."""
AnswerPart = TextDelta | CallStart | CallEnd


@dataclass
class _Json:
    """Finds the end of a JSON object or list, character by character."""

    depth: int = 0
    quoted: bool = False
    escaped: bool = False

    def ends(self, char: str) -> bool:
        """Take the next character. Returns True if the value ends with it."""
        if self.quoted:
            if self.escaped:
                self.escaped = False
            else:
                self.escaped = char == "\\"
                self.quoted = char != '"'
            return False
        self.quoted = char == '"'
        self.depth += (char in "{[") - (char in "}]")
        return self.depth == 0


@dataclass
class CallParser:
    """Parser of one answer.

    Attributes:
        form: the format of calls. Its `trigger` is the text before a call.
        names: names of the functions that may be called; a call of another function is text.
        calls_only: whether the answer consists of calls and has no text.
        own: the names among `names` whose functions the server runs. Calls of these functions are
            in no `AnswerPart`.
        num_complete: number of complete calls of the client's functions.
        own_calls: name and arguments of each complete call of the server's functions in the current
            round. A round is what the model writes until the server runs the functions that the
            model has called.
    """

    form: CallFormat
    names: Collection[str]
    calls_only: bool = False
    own: Collection[str] = ()
    num_complete: int = 0
    own_calls: list[tuple[str, str]] = field(default_factory=list)
    _started: int = 0
    _own_call: tuple[str, str] | None = None  # the call of `own` that is being parsed
    _has_call: bool = False  # whether a call has begun in this round
    _said: bool = False  # whether there was text in any round
    _gap: str = ""  # what is put before the next text
    _state: str = "text"
    _rest: str = ""
    _spaces: str = ""  # the latest white space, which is text if more text follows
    _has_text: bool = False
    _json: _Json = field(default_factory=_Json)
    _whole_head: re.Pattern[str] = field(init=False)
    _partial_head: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self._whole_head = re.compile("".join(_head(self.form)))
        self._partial_head = _prefix_pattern(_head(self.form))

    @property
    def in_call(self) -> bool:
        """Whether the next text is part of a call."""
        return self._state in ("call", "between")

    @property
    def is_undecided(self) -> bool:
        """Whether text that may be the beginning of a call is held back."""
        return self._state == "head" or bool(self._rest)

    def feed(self, text: str) -> list[AnswerPart]:
        """Parse more text."""
        self._rest += text
        parts: list[AnswerPart] = []
        while self._rest:
            before = (self._state, self._rest)
            parts += getattr(self, f"_{self._state}")()
            if before == (self._state, self._rest):
                break
        return parts

    def finish(self, *, cut: bool = False) -> list[AnswerPart]:
        """Parse the end of the answer.

        If the answer ends after the name of a call, but before its arguments, the call is returned
        without arguments, or dropped if it is a call of `own`. A call whose name is not complete
        is dropped. In a format without a trigger, such an answer is text, unless it was cut or must
        consist of calls.

        Text that was held back because it could have been the beginning of a trigger is returned as
        text. If the answer was cut or must consist of calls, this text belongs to a call, and is
        dropped.

        Args:
            cut: whether the answer ran into its limit.
        """
        cut = cut or self.calls_only
        rest, self._rest = self._rest, ""
        if self._state == "head":
            return self._finish_in_head(rest, cut)
        if self.in_call or (cut and rest):
            return []
        return self._text_delta(rest, last=True)

    def next_round(self) -> list[AnswerPart]:
        """Parse the end of a round in which one of the server's functions was called.

        If there was text before, the next text begins a new paragraph.
        """
        parts = self.finish()
        self._state, self._spaces, self._has_text, self._has_call = "text", "", False, False
        self._own_call, self.own_calls = None, []
        self.calls_only = False  # the required call was made
        self._gap = PARAGRAPH if self._said else ""
        return parts

    def _finish_in_head(self, rest: str, cut: bool) -> list[AnswerPart]:
        trigger = self.form.trigger
        head = self._partial_head.fullmatch(rest)
        if head and (trigger or cut):
            name, known = head["name"] or "", head["known"] is not None
            if known and name in self.own:
                return []
            if known and name in self.names:
                self._state = "call"
                self._started += 1
                return [CallStart(self._started - 1, name)]
            if not known and any(one.startswith(name) for one in self.names):
                return []
        if self.form.is_list and self._has_call:
            return []
        return self._text_delta(trigger + rest, last=True)

    def _text(self) -> list[AnswerPart]:
        """Parse text, up to the trigger of a call."""
        trigger, rest = self.form.trigger, self._rest
        if not trigger:
            # The whole answer is either text or a call, depending on its first character.
            if self._has_text or not rest.lstrip().startswith("{"):
                self._rest = ""
                return self._text_delta(rest)
            self._state, self._rest = "head", rest.lstrip()
            return []
        text, found, after = rest.partition(trigger)
        if found:
            self._state, self._rest = "head", after
            return self._text_delta(text)
        held = count_stop_prefix(text, trigger)
        self._rest = text[len(text) - held :]
        return self._text_delta(text[: len(text) - held])

    def _head(self) -> list[AnswerPart]:
        """Parse a call up to its arguments."""
        head = self._whole_head.match(self._rest)
        if head and head["name"] in self.names:
            if self._rest[head.end() :][:1] != "{":
                return [] if head.end() == len(self._rest) else self._not_a_call()
            self._rest = self._rest[head.end() :]
            self._state, self._json = "call", _Json()
            self._has_call, self._spaces = True, ""
            if head["name"] in self.own:
                self._own_call = (head["name"], "")
                return []
            self._started += 1
            return [CallStart(self._started - 1, head["name"])]
        longest = max(map(len, self.names), default=0) + 64
        return self._not_a_call() if head or len(self._rest) > longest else []

    def _not_a_call(self) -> list[AnswerPart]:
        """Return text that looked like a call."""
        text = self.form.trigger + self._rest
        self._state, self._rest = "text", ""
        if not self.form.trigger:
            self._has_text = True
        return self._text_delta(text)

    def _call(self) -> list[AnswerPart]:
        """Parse arguments, up to their end."""
        for at, char in enumerate(self._rest):
            if self._json.ends(char):
                own, self._rest = self._rest[: at + 1], self._rest[at + 1 :]
                self._state = "between"
                if self._own_call is not None:
                    name, before = self._own_call
                    self.own_calls.append((name, before + own))
                    self._own_call = None
                    return []
                self.num_complete += 1
                return [TextDelta(own, self._started - 1), CallEnd(self._started - 1)]
        own, self._rest = self._rest, ""
        if self._own_call is not None:
            name, before = self._own_call
            self._own_call = (name, before + own)
            return []
        return [TextDelta(own, self._started - 1)]

    def _between(self) -> list[AnswerPart]:
        """Skip what the format has between calls, or after the last. Anything else is text."""
        rest = self._rest.lstrip(" \n}")
        form = self.form
        if form.is_list and rest.startswith(","):
            self._state, self._rest = "head", rest[1:]
        elif form.close and rest.startswith(form.close):
            self._state, self._rest = "text", rest[len(form.close) :]
        elif rest and not (form.close.startswith(rest) and form.close):
            self._state, self._rest = "text", rest
            self._has_text = True
        return []

    def _text_delta(self, text: str, *, last: bool = False) -> list[AnswerPart]:
        """Return text, but hold back white space at its end, which may surround a call."""
        text = self._spaces + text
        shown = text if last and not self._has_call else text.rstrip()
        self._spaces = text[len(shown) :]
        self._has_text = self._has_text or bool(shown)
        if shown and self._gap:
            shown, self._gap = self._gap + shown.lstrip(), ""
        self._said = self._said or bool(shown)
        return [TextDelta(shown)] if shown else []


def _head(form: CallFormat) -> list[str]:
    """Return the patterns of a call up to its arguments, in their order.

    The group `known` is what follows the name, so it matches only if the name is complete.
    """
    name = "(?P<name>[A-Za-z0-9_-]+)"
    if form.between:
        first, *more = map(re.escape, form.between)
        return [r"\s*", name, f"(?P<known>{first})", *more, r"\s*"]
    key = [r"\s*", ",", r"\s*", *map(re.escape, f'"{form.key}"'), r"\s*", ":", r"\s*"]
    opened = [r"[\s\[]*", r"\{", r"\s*", *'"name"', r"\s*", ":", r"\s*", '"']
    return [*opened, name, '(?P<known>")', *key]


def _prefix_pattern(patterns: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of every prefix of a text that matches patterns in their order."""
    nested = ""
    for pattern in reversed(patterns):
        nested = f"(?:{pattern}{nested})?"
    return re.compile(nested)


def join_parts(parts: Sequence[AnswerPart], make_id: Callable[[int], str]) -> Message:
    """Make the message from all parts of an answer. `make_id` gives calls their ids, by index."""
    content = ""
    names: list[str] = []
    arguments: list[str] = []
    for part in parts:
        if isinstance(part, CallStart):
            names.append(part.name)
            arguments.append("")
        elif isinstance(part, TextDelta) and part.call is not None:
            arguments[part.call] += part.text
        elif isinstance(part, TextDelta):
            content += part.text
    pairs = enumerate(zip(names, arguments, strict=True))
    calls = tuple(Call(make_id(number), *pair) for number, pair in pairs)
    return Message("assistant", content, calls=calls)
