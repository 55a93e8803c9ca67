"""Calls in what a model says, read while it comes.

An answer is held to its form (`rules.py`), so that a call that has begun goes on as one; what is no
call is text, and nothing of it is lost. Knows nothing about tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from weir.serve.messages import Call, Message
from weir.serve.tools.formats import CallFormat
from weir.serve.tools.tool import Tool
from weir.stream import count_stop_prefix


@dataclass(frozen=True)
class Said:
    """Text of the answer, or of the arguments of a call.

    Attributes:
        text: what comes next of it.
        call: which call's arguments it is part of, from 0; None for the answer's own text.
    """

    text: str
    call: int | None = None


@dataclass(frozen=True)
class CallStart:
    """A call begins.

    Attributes:
        call: which, from 0.
        name: of the function.
    """

    call: int
    name: str


@dataclass(frozen=True)
class CallEnd:
    """A call is whole.

    Attributes:
        call: which, from 0.
    """

    call: int


Part = Said | CallStart | CallEnd


@dataclass
class _Json:
    """Where the end of a JSON value is, while it comes."""

    depth: int = 0
    quoted: bool = False
    escaped: bool = False

    def ends(self, char: str) -> bool:
        """Whether the value, an object or a list, ends with a character."""
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
    """Reads one answer.

    Attributes:
        form: in which its calls are written.
        names: of the functions that may be called; a call of another is text.
        alone: whether the answer is made of calls and has no text.
        whole: how many calls have come to their end.
    """

    form: CallFormat
    names: Collection[str]
    alone: bool = False
    whole: int = 0
    _begun: int = 0
    _state: str = "text"
    _rest: str = ""
    _spaces: str = ""  # that came last; they are text if more text comes
    _said: bool = False
    _json: _Json = field(default_factory=_Json)
    _head_of_call: re.Pattern[str] = field(init=False)
    _begun_head: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self._head_of_call = re.compile("".join(_head(self.form)))
        self._begun_head = _beginnings(_head(self.form))

    @property
    def calling(self) -> bool:
        """Whether what comes next is part of a call, and not text."""
        return self._state in ("call", "between")

    @property
    def held(self) -> bool:
        """Whether something is held back that may be the beginning of a call."""
        return self._state == "head" or bool(self._rest)

    def add(self, text: str) -> list[Part]:
        """What more text brings."""
        self._rest += text
        parts: list[Part] = []
        while self._rest:
            before = (self._state, self._rest)
            parts += getattr(self, f"_{self._state}")()
            if before == (self._state, self._rest):
                break
        return parts

    def end(self, *, cut: bool = False) -> list[Part]:
        """No more comes.

        A call whose name has come begins, without arguments. Of one whose name has not come nothing
        is told, and what was held back as no more than the beginning of a trigger is text.

        Args:
            cut: the answer was to go on, so that such a beginning is one of a call.
        """
        cut = cut or self.alone
        rest, self._rest = self._rest, ""
        if self._state == "head":
            return self._end_in_head(rest, cut)
        if self.calling or (cut and rest):
            return []
        return self._told(rest, last=True)

    def _end_in_head(self, rest: str, cut: bool) -> list[Part]:
        trigger = self.form.trigger
        head = self._begun_head.fullmatch(rest)
        if head and (trigger or cut):
            name, known = head["name"] or "", head["known"] is not None
            if known and name in self.names:
                self._state = "call"
                self._begun += 1
                return [CallStart(self._begun - 1, name)]
            if not known and any(each.startswith(name) for each in self.names):
                return []
        if self.form.listed and self._begun:
            return []
        return self._told(trigger + rest, last=True)

    def _text(self) -> list[Part]:
        """Text, until something begins a call."""
        trigger, rest = self.form.trigger, self._rest
        if not trigger:
            # The answer is text or a call as a whole, and its first character tells which.
            if self._said or not rest.lstrip().startswith("{"):
                self._rest = ""
                return self._told(rest)
            self._state, self._rest = "head", rest.lstrip()
            return []
        text, found, after = rest.partition(trigger)
        if found:
            self._state, self._rest = "head", after
            return self._told(text)
        held = count_stop_prefix(text, trigger)
        self._rest = text[len(text) - held :]
        return self._told(text[: len(text) - held])

    def _head(self) -> list[Part]:
        """The beginning of a call, up to its arguments."""
        head = self._head_of_call.match(self._rest)
        if head and head["name"] in self.names:
            if self._rest[head.end() :][:1] != "{":
                return [] if head.end() == len(self._rest) else self._no_call()
            self._rest = self._rest[head.end() :]
            self._state, self._json = "call", _Json()
            self._begun += 1
            self._spaces = ""
            return [CallStart(self._begun - 1, head["name"])]
        longest = max(map(len, self.names), default=0) + 64
        return self._no_call() if head or len(self._rest) > longest else []

    def _no_call(self) -> list[Part]:
        """What looked like a call is text."""
        text = self.form.trigger + self._rest
        self._state, self._rest = "text", ""
        if not self.form.trigger:
            self._said = True
        return self._told(text)

    def _call(self) -> list[Part]:
        """Arguments, until they are whole."""
        for at, char in enumerate(self._rest):
            if self._json.ends(char):
                own, self._rest = self._rest[: at + 1], self._rest[at + 1 :]
                self._state = "between"
                self.whole += 1
                return [Said(own, self._begun - 1), CallEnd(self._begun - 1)]
        own, self._rest = self._rest, ""
        return [Said(own, self._begun - 1)]

    def _between(self) -> list[Part]:
        """What stands between calls, or after the last."""
        rest = self._rest.lstrip(" \n}")
        form = self.form
        if form.listed and rest.startswith(","):
            self._state, self._rest = "head", rest[1:]
        elif form.close and rest.startswith(form.close):
            self._state, self._rest = "text", rest[len(form.close) :]
        elif rest and not (form.close.startswith(rest) and form.close):
            self._state, self._rest = "text", rest
            self._said = True
        return []

    def _told(self, text: str, *, last: bool = False) -> list[Part]:
        """Text, but for spaces at its ends, which stand around calls too."""
        text = self._spaces + text
        whole = text if last and not self._begun else text.rstrip()
        self._spaces = text[len(whole) :]
        self._said = self._said or bool(whole)
        return [Said(whole)] if whole else []


def _head(form: CallFormat) -> list[str]:
    """What a call begins with, up to its arguments: patterns of what comes one after the other.

    `known` is the first that cannot come before all of the name has.
    """
    name = "(?P<name>[A-Za-z0-9_-]+)"
    if form.between:
        first, *more = map(re.escape, form.between)
        return [r"\s*", name, f"(?P<known>{first})", *more, r"\s*"]
    key = [r"\s*", ",", r"\s*", *map(re.escape, f'"{form.key}"'), r"\s*", ":", r"\s*"]
    opened = [r"[\s\[]*", r"\{", r"\s*", *'"name"', r"\s*", ":", r"\s*", '"']
    return [*opened, name, '(?P<known>")', *key]


def _beginnings(patterns: Sequence[str]) -> re.Pattern[str]:
    """All that what fits patterns may begin with."""
    nested = ""
    for pattern in reversed(patterns):
        nested = f"(?:{pattern}{nested})?"
    return re.compile(nested)


def read_calls(
    form: CallFormat,
    tools: Sequence[Tool],
    text: str,
    ids: Callable[[int], str],
    *,
    cut: bool = False,
    alone: bool = False,
) -> Message:
    """An answer with the calls in it.

    Args:
        form: of the calls.
        tools: that may be called.
        text: all of the answer.
        ids: names its calls, by which they are, from 0.
        cut: whether the answer was to go on.
        alone: whether it is made of calls and has no text.
    """
    reader = CallParser(form, {tool.name for tool in tools}, alone)
    return message_of([*reader.add(text), *reader.end(cut=cut)], ids)


def message_of(parts: Sequence[Part], ids: Callable[[int], str]) -> Message:
    """The answer that parts are all of; `ids` as `read_calls` has it."""
    content = ""
    names: list[str] = []
    arguments: list[str] = []
    for part in parts:
        if isinstance(part, CallStart):
            names.append(part.name)
            arguments.append("")
        elif isinstance(part, Said) and part.call is not None:
            arguments[part.call] += part.text
        elif isinstance(part, Said):
            content += part.text
    each = enumerate(zip(names, arguments, strict=True))
    calls = tuple(Call(ids(number), *call) for number, call in each)
    return Message("assistant", content, calls=calls)
