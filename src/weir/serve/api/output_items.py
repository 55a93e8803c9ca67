"""The output items of a response, built while its answer is made, and the events about them.

Text of the model is a message, and each of its calls is an item of its own, in their order. Knows
nothing about responses but their items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weir.serve.messages import Call
from weir.serve.sessions.items import Item, answer_item, answer_part, call_item, new_id
from weir.serve.tools.parser import AnswerPart, CallEnd, CallParser, CallStart, TextDelta

ItemEvent = tuple[str, dict[str, Any]]
"""An event: its type and its fields."""


@dataclass
class _Message:
    """A message under construction."""

    id: str = field(default_factory=lambda: new_id("msg"))
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def item(self, status: str) -> Item:
        """The item so far."""
        begun = status != "in_progress"
        return answer_item(self.id, self.text if begun else None, status, self.logprobs)


@dataclass
class _Call:
    """A call under construction."""

    call_id: str
    name: str
    id: str = field(default_factory=lambda: new_id("fc"))
    arguments: str = ""

    def item(self, status: str) -> Item:
        """The item so far."""
        return call_item(self.id, Call(self.call_id, self.name, self.arguments), status)


class OutputItems:
    """The items of one response."""

    def __init__(self, parser: CallParser | None, make_id: Callable[[int], str]) -> None:
        self.done: list[Item] = []
        self._parser = parser
        self._make_id = make_id
        self._open: _Message | _Call | None = None
        self._logprobs: list[dict[str, Any]] = []

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[ItemEvent]:
        """Add text of the answer; its token's `logprobs` go with the next text of a message."""
        was_calling = self._in_call
        self._logprobs += logprobs
        parts: Sequence[AnswerPart] = [TextDelta(text)] if text else []
        if self._parser is not None:
            parts = self._parser.feed(text)
        events = self._events_of(parts)
        if was_calling or self._in_call:
            self._logprobs.clear()  # tokens of calls have none
        return events

    def finish(self, status: str) -> list[ItemEvent]:
        """End the answer, and the item that is still open; `status`: "completed", "incomplete"."""
        events: list[ItemEvent] = []
        if self._parser is not None:
            undecided = self._parser.is_undecided
            parts = self._parser.finish(cut=status == "incomplete")
            if undecided and not any(isinstance(part, TextDelta) for part in parts):
                self._logprobs.clear()  # what was held back began a call
            events = self._events_of(parts)
        if self._open is None and not self.done:
            events += self._begin(_Message())  # an empty answer is an empty message
        if isinstance(self._open, _Message) and self._logprobs:
            events.append(self._delta(""))
        # A call that is still open is incomplete, whatever has ended the answer.
        return events + self._close("incomplete" if isinstance(self._open, _Call) else status)

    @property
    def _in_call(self) -> bool:
        return self._parser is not None and self._parser.in_call

    def _events_of(self, parts: Sequence[AnswerPart]) -> list[ItemEvent]:
        return [event for part in parts for event in self._add_part(part)]

    def _add_part(self, part: AnswerPart) -> list[ItemEvent]:
        if isinstance(part, CallEnd):
            return self._close("completed")
        events: list[ItemEvent] = []
        if isinstance(part, CallStart):
            return self._begin(_Call(self._make_id(part.call), part.name))
        if part.call is None and not isinstance(self._open, _Message):
            events = self._begin(_Message())
        return [*events, self._delta(part.text)]

    def _begin(self, item: _Message | _Call) -> list[ItemEvent]:
        """Close the open item, and open another one."""
        events = self._close("completed")
        self._open = item
        place = {"output_index": len(self.done)}
        events.append(("response.output_item.added", {**place, "item": item.item("in_progress")}))
        if isinstance(item, _Message):
            part = {**self._place(item), "part": answer_part("")}
            events.append(("response.content_part.added", part))
        return events

    def _delta(self, text: str) -> ItemEvent:
        """Add text to the open item."""
        item, logprobs = self._open, self._logprobs[:]
        self._logprobs.clear()
        assert item is not None
        if isinstance(item, _Call):
            item.arguments += text
            return "response.function_call_arguments.delta", {**self._place(item), "delta": text}
        item.text += text
        item.logprobs += logprobs
        fields = {**self._place(item), "delta": text, "logprobs": logprobs}
        return "response.output_text.delta", fields

    def _close(self, status: str) -> list[ItemEvent]:
        """Close the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        done, place = item.item(status), self._place(item)
        last: ItemEvent = (
            "response.output_item.done",
            {"output_index": len(self.done), "item": done},
        )
        self.done.append(done)
        if isinstance(item, _Call):
            call = {**place, "name": item.name, "arguments": item.arguments}
            return [("response.function_call_arguments.done", call), last]
        (part,) = done["content"]
        text = {**place, "text": part["text"], "logprobs": part["logprobs"]}
        return [
            ("response.output_text.done", text),
            ("response.content_part.done", {**place, "part": part}),
            last,
        ]

    def _place(self, item: _Message | _Call) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self.done)}
        return place if isinstance(item, _Call) else {**place, "content_index": 0}
