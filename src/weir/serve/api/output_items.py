"""The output items of a response, built while its answer is generated, and the events about them.

Text is a message item. Thoughts and each call are separate items, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weir.serve.messages import Call
from weir.serve.sessions.items import (
    Item,
    answer_item,
    answer_part,
    call_item,
    new_id,
    thought_item,
    thought_part,
)
from weir.serve.thoughts import ThoughtParser
from weir.serve.tools.parser import AnswerPart, CallEnd, CallParser, CallStart, TextDelta

ItemEvent = tuple[str, dict[str, Any]]
"""An event: its type and its fields."""


class OutputItems:
    """The items of one response.

    Args:
        parser: finds tool calls in the answer; None if there are no tools.
        make_id: returns the id of a call, given its number in the answer.
        thoughts: finds thoughts in the answer; None if the model has none.

    Attributes:
        done: the items that have ended.
    """

    def __init__(
        self,
        parser: CallParser | None,
        make_id: Callable[[int], str],
        thoughts: ThoughtParser | None = None,
    ) -> None:
        self.done: list[Item] = []
        self._thoughts = thoughts
        self._parser = parser
        self._make_id = make_id
        self._open: Item | None = None
        self._logprobs: list[dict[str, Any]] = []

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[ItemEvent]:
        """Add text of the answer. The `logprobs` of its token are sent with the message's next
        text.
        """
        was_calling = self._in_call
        self._logprobs += logprobs
        thinking: list[ItemEvent] = []
        if self._thoughts is not None:
            thought, text = self._thoughts.feed(text)
            thinking = self._add_thought(thought)
            if not text:
                self._logprobs.clear()  # tokens of thoughts have none
        parts: Sequence[AnswerPart] = [TextDelta(text)] if text else []
        if self._parser is not None:
            parts = self._parser.feed(text)
        events = self._events_of(parts)
        if was_calling or self._in_call:
            self._logprobs.clear()  # tokens of calls have none
        return [*thinking, *events]

    def _add_thought(self, thought: str) -> list[ItemEvent]:
        """Add to the thoughts, which are a separate item."""
        if not thought:
            return []
        events: list[ItemEvent] = []
        if self._open is not None and self._open["type"] == "message":
            events = self._close("completed")
        if self._open is None:
            self._open = thought_item(new_id("rs"), None, "in_progress")
            added = {"output_index": len(self.done), "item": dict(self._open)}
            self._open["content"] = [thought_part("")]
            part = {**self._place(self._open), "part": thought_part("")}
            events += [
                ("response.output_item.added", added),
                ("response.content_part.added", part),
            ]
        (own,) = self._open["content"]
        own["text"] += thought
        fields = {**self._place(self._open), "delta": thought}
        return [*events, ("response.reasoning_text.delta", fields)]

    def next_round(self, *, opens_thoughts: bool) -> list[ItemEvent]:
        """End a part of the answer that called one of the server's tools.

        The message continues with the text of the next part, unless that part begins with thoughts:
        they end the message, and are a separate item.
        """
        events: list[ItemEvent] = []
        assert self._parser is not None
        if self._thoughts is not None:
            thought, text = self._thoughts.finish()
            events = self._add_thought(thought)
            events += self._events_of(self._parser.feed(text))
            self._thoughts = ThoughtParser(is_open=opens_thoughts)
        events += self._events_of(self._parser.next_round())
        if self._open is not None and self._open["type"] == "reasoning":
            events += self._close("completed")
        self._logprobs.clear()
        return events

    def finish(self, status: str) -> list[ItemEvent]:
        """End the answer and the item that is still open. `status`: "completed" or "incomplete"."""
        events: list[ItemEvent] = []
        rest: list[AnswerPart] = []
        if self._thoughts is not None:
            thought, text = self._thoughts.finish()
            events = self._add_thought(thought)
            if text:
                rest = [TextDelta(text)] if self._parser is None else self._parser.feed(text)
                events += self._events_of(rest)
        if self._parser is not None:
            undecided = self._parser.is_undecided
            parts = self._parser.finish(cut=status == "incomplete")
            if undecided and not any(isinstance(part, TextDelta) for part in parts):
                self._logprobs.clear()  # the text that was held back was the beginning of a call
            events += self._events_of(parts)
        if self._open is None and not self.done:
            events += self._begin_message()  # an empty answer is an empty message
        if self._open is not None and self._open["type"] != "message":
            status = "incomplete"  # a call or thoughts without an end, whatever ended the answer
        elif self._open is not None and self._logprobs:
            events.append(self._delta(self._open, ""))
        return events + self._close(status)

    @property
    def _in_call(self) -> bool:
        return self._parser is not None and self._parser.in_call

    def _events_of(self, parts: Sequence[AnswerPart]) -> list[ItemEvent]:
        return [event for part in parts for event in self._add_part(part)]

    def _add_part(self, part: AnswerPart) -> list[ItemEvent]:
        if isinstance(part, CallEnd):
            return self._close("completed")
        if isinstance(part, CallStart):
            call = Call(self._make_id(part.call), part.name, "")
            return self._begin(call_item(new_id("fc"), call, "in_progress"))
        events: list[ItemEvent] = []
        if self._open is None or (part.call is None and self._open["type"] != "message"):
            events = self._begin_message()
        assert self._open is not None
        return [*events, self._delta(self._open, part.text)]

    def _begin(self, item: Item) -> list[ItemEvent]:
        """Close the open item, and open another one."""
        events = self._close("completed")
        self._open = item
        added = {"output_index": len(self.done), "item": dict(item)}
        return [*events, ("response.output_item.added", added)]

    def _begin_message(self) -> list[ItemEvent]:
        item = answer_item(new_id("msg"), None, "in_progress")
        events = self._begin(item)
        item["content"] = [answer_part("")]
        part = {**self._place(item), "part": answer_part("")}
        return [*events, ("response.content_part.added", part)]

    def _delta(self, item: Item, text: str) -> ItemEvent:
        """Add text to the open item."""
        logprobs = self._logprobs[:]
        self._logprobs.clear()
        fields = {**self._place(item), "delta": text}
        if _is_call(item):
            item["arguments"] += text
            return "response.function_call_arguments.delta", fields
        (part,) = item["content"]
        part["text"] += text
        part["logprobs"] += logprobs
        return "response.output_text.delta", {**fields, "logprobs": logprobs}

    def _close(self, status: str) -> list[ItemEvent]:
        """Close the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"], place = status, self._place(item)
        last = ("response.output_item.done", {"output_index": len(self.done), "item": item})
        self.done.append(item)
        if _is_call(item):
            call = {**place, "name": item["name"], "arguments": item["arguments"]}
            return [("response.function_call_arguments.done", call), last]
        (part,) = item["content"]
        if item["type"] == "reasoning":
            return [
                ("response.reasoning_text.done", {**place, "text": part["text"]}),
                ("response.content_part.done", {**place, "part": part}),
                last,
            ]
        text = {**place, "text": part["text"], "logprobs": part["logprobs"]}
        return [
            ("response.output_text.done", text),
            ("response.content_part.done", {**place, "part": part}),
            last,
        ]

    def _place(self, item: Item) -> dict[str, Any]:
        place = {"item_id": item["id"], "output_index": len(self.done)}
        return place if _is_call(item) else {**place, "content_index": 0}


def _is_call(item: Item) -> bool:
    return bool(item["type"] == "function_call")
