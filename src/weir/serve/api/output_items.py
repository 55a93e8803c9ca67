"""The items of a response, made of its answer while that comes, and the events that tell of them.

What a model says is a message, each of its calls an item beside it, in the order they come. Knows
nothing about responses but their items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weir.serve.messages import Call
from weir.serve.sessions import Item, answer_item, answer_part, call_item, new_id
from weir.serve.tools import CallEnd, CallParser, CallStart, Part, Said

Told = tuple[str, dict[str, Any]]
"""An event: of which kind, and what it says."""


@dataclass
class _Message:
    """A message that is being said."""

    id: str = field(default_factory=lambda: new_id("msg"))
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def item(self, status: str) -> Item:
        """As far as it has come."""
        begun = status != "in_progress"
        return answer_item(self.id, self.text if begun else None, status, self.logprobs)


@dataclass
class _Call:
    """A call that is being made."""

    call: str
    name: str
    id: str = field(default_factory=lambda: new_id("fc"))
    arguments: str = ""

    def item(self, status: str) -> Item:
        """As far as it has come."""
        return call_item(self.id, Call(self.call, self.name, self.arguments), status)


class OutputItems:
    """The items of one response.

    Args:
        reader: finds calls in what is said; None where there are no tools.
        ids: names calls, by which they are, from 0.

    Attributes:
        done: those that have ended.
    """

    def __init__(self, reader: CallParser | None, ids: Callable[[int], str]) -> None:
        self.done: list[Item] = []
        self._reader = reader
        self._ids = ids
        self._open: _Message | _Call | None = None
        self._known: list[dict[str, Any]] = []

    def add(self, text: str, known: Sequence[dict[str, Any]] = ()) -> list[Told]:
        """What more of the answer brings.

        Args:
            text: what comes next of it.
            known: what is told of its token, which goes with the next text of a message.
        """
        called = self._calling
        self._known += known
        parts: Sequence[Part] = [Said(text)] if text else []
        if self._reader is not None:
            parts = self._reader.add(text)
        told = self._told(parts)
        if called or self._calling:
            self._known.clear()  # nothing is told of the tokens of calls
        return told

    def end(self, status: str) -> list[Told]:
        """The answer is over: "completed" or "incomplete", and so is what is still open of it."""
        told: list[Told] = []
        if self._reader is not None:
            held = self._reader.held
            parts = self._reader.end(cut=status == "incomplete")
            if held and not any(isinstance(part, Said) for part in parts):
                self._known.clear()  # it was the beginning of a call
            told = self._told(parts)
        if self._open is None and not self.done:
            told += self._begin(_Message())  # an answer that says nothing
        if isinstance(self._open, _Message) and self._known:
            told.append(self._delta(""))
        # A call that is still open has no end, whatever has ended the answer.
        return told + self._close("incomplete" if isinstance(self._open, _Call) else status)

    @property
    def _calling(self) -> bool:
        return self._reader is not None and self._reader.calling

    def _told(self, parts: Sequence[Part]) -> list[Told]:
        return [told for part in parts for told in self._part(part)]

    def _part(self, part: Part) -> list[Told]:
        if isinstance(part, CallEnd):
            return self._close("completed")
        told: list[Told] = []
        if isinstance(part, CallStart):
            return self._begin(_Call(self._ids(part.call), part.name))
        if part.call is None and not isinstance(self._open, _Message):
            told = self._begin(_Message())
        return [*told, self._delta(part.text)]

    def _begin(self, item: _Message | _Call) -> list[Told]:
        """An item begins, and the one before it is over."""
        told = self._close("completed")
        self._open = item
        place = {"output_index": len(self.done)}
        told.append(("response.output_item.added", {**place, "item": item.item("in_progress")}))
        if isinstance(item, _Message):
            part = {**self._place(item), "part": answer_part("")}
            told.append(("response.content_part.added", part))
        return told

    def _delta(self, text: str) -> Told:
        """More of the item that is open."""
        item, known = self._open, self._known[:]
        self._known.clear()
        assert item is not None
        if isinstance(item, _Call):
            item.arguments += text
            return "response.function_call_arguments.delta", {**self._place(item), "delta": text}
        item.text += text
        item.logprobs += known
        said = {**self._place(item), "delta": text, "logprobs": known}
        return "response.output_text.delta", said

    def _close(self, status: str) -> list[Told]:
        """What is open is over."""
        item, self._open = self._open, None
        if item is None:
            return []
        told, place = item.item(status), self._place(item)
        over: Told = ("response.output_item.done", {"output_index": len(self.done), "item": told})
        self.done.append(told)
        if isinstance(item, _Call):
            own = {**place, "name": item.name, "arguments": item.arguments}
            return [("response.function_call_arguments.done", own), over]
        (part,) = told["content"]
        text = {**place, "text": part["text"], "logprobs": part["logprobs"]}
        return [
            ("response.output_text.done", text),
            ("response.content_part.done", {**place, "part": part}),
            over,
        ]

    def _place(self, item: _Message | _Call) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self.done)}
        return place if isinstance(item, _Call) else {**place, "content_index": 0}
