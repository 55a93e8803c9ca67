"""The turn of a response: find the saved turn that it continues, and the input to feed.

A response names the turn it continues, so no search is needed and only new input is fed. If the
instructions or tools have changed, or if the turn's checkpoint was deleted to make room, the
longest saved prefix of the whole history is searched for, and everything after it is fed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weir.errors import WeirError
from weir.serve.client import EngineClient
from weir.serve.messages import Message, StrayResult, link_results
from weir.serve.prompts import Prompt, Tell
from weir.serve.sessions.items import Item, messages_of
from weir.serve.sessions.records import HIDDEN, TurnRecord, is_hidden
from weir.serve.sessions.responses import StoredResponse
from weir.serve.tools.formats import Tool, describe_tools

NO_INPUT = "input is missing, or is a list without items that the model reads"
"""The reason that errors about a request without input give. An empty text counts as input: it is
an empty message.
"""


class PreviousNotFound(WeirError):
    """The owner has no such response or conversation."""


class HistoryNotKept(WeirError):
    """The history that would have to be fed again is no longer kept."""


@dataclass(eq=False)
class ResponseTurn:
    """The turn of one response.

    Attributes:
        client: has the engine and the stores.
        owner: the owner of the response, as in `TurnRecord`.
        items: the items of the input, without those up to its last compaction.
        places: for each item, the index of the request's item that it was made from, for errors.
        instructions: a system message before the history; None for none.
        previous: the id of the response that is continued; None for none.
        conversation: the conversation that is continued; None for none. It is locked while a
            response is being created in it.
        session: the session of the turn, if the HTTP client names one.
        is_stored: whether the response can be continued and retrieved.
        tools: all tools that are described to the model.
        variables: further variables of the chat template.
        drops: ids of calls whose outputs are dropped.
        pins: ids of calls whose outputs stay in the cache permanently.
        tells_forgotten: whether the model reads a note about what has left its cache.
        recall: the most tokens of forgotten text that the model may read again.
        compacted: number of items of the request up to and including its last compaction; 0 if
            there is no compaction. If there is one, `previous` is the response that it stands for,
            which may be a response that is not stored.
    """

    client: EngineClient
    owner: str
    items: list[Item]
    places: Sequence[int]
    instructions: str | None = None
    previous: str | None = None
    conversation: str | None = None
    session: str | None = None
    is_stored: bool = True
    tools: Sequence[Tool] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    compacted: int = 0
    drops: Sequence[str] = ()
    tells_forgotten: bool = False
    recall: int = 0
    pins: Sequence[str] = ()

    # Set by `match`: the response before this one, and the items that are new since then.
    _after: str | None = None
    _new: list[Item] = field(default_factory=list)

    def match(self) -> Prompt:
        """Find the prompt.

        Raises WeirErrors of this file and of `PromptMatcher`, StrayResult, or StorageFull if the
        response could not be stored.
        """
        self._after, self._new = None, self.items
        if self.is_stored:
            self.client.responses.check_room()
        if self.conversation is not None:
            prompt = self._in_conversation(self.conversation)
        elif self.previous is not None:
            prompt = self._after_previous(self.previous)
        else:
            prompt = self._from_start([], self.items, self.session)
        return prompt if self.is_stored else self._hidden(prompt)

    @property
    def _tell(self) -> Tell | None:
        return self.client.tell_forgotten if self.tells_forgotten else None

    def find_saved(self) -> tuple[TurnRecord | None, list[Item]]:
        """Return the newest saved turn of the history, and the items after it.

        The history is that of the previous response, and the input. If no turn of it is saved,
        returns None and all items.

        Raises StrayResult for a result without a call, PreviousNotFound if the previous response
        does not exist, HistoryNotKept if earlier messages are needed that are no longer kept, and
        WeirError if there is no history.
        """
        if self.previous is None and not self.items:
            raise WeirError(
                f"there is nothing to compact: {NO_INPUT}. Send the history as input, or name its "
                "last response as previous_response_id."
            )
        start: TurnRecord | None = None
        items, before = self.items, list[Message]()
        if self.previous is not None:
            self._find_previous(self.previous)
            start, earlier = self._items_since_saved(self.previous)
            items = [*earlier, *items]
            if not any(item.get("role") == "assistant" for item in self.items):
                return start, items
            before = [] if start is None else self._history(f"resp_{start.node}")
        system = [] if self.instructions is None else [Message("system", self.instructions)]
        whole = messages_of(items)
        messages = link_results([*system, *before, *whole])
        # The prefix that is found can be the whole history, because nothing has to be answered.
        prefixes = self.client.matcher.find_saved(self.owner, messages, self.tools)
        if prefixes is None:
            return start, items
        record, known = prefixes
        known -= len(system) + len(before)
        if known <= 0:
            return start, items  # the turn that was found is not newer than `start`
        for at in range(len(items), -1, -1):
            if messages_of(items[:at]) == whole[:known]:
                return record, items[at:]
        return start, items

    def _items_since_saved(self, name: str) -> tuple[TurnRecord | None, list[Item]]:
        """Return the newest saved turn in the history of a response, which may be its own turn, and
        the items of the stored responses after that turn.

        If no turn is saved, returns None and all items of the history.
        """
        parts: list[list[Item]] = []
        at: str | None = name
        record: TurnRecord | None = None
        while at is not None:
            record = self.client.store.find_turn(self.owner, node_of(at))
            if record is not None:
                break
            found = self.client.responses.get_response(self.owner, at)
            if found is None:
                raise _history_not_kept()
            parts.append([*found.input, *found.body["output"]])
            at = found.previous
        return record, [item for part in reversed(parts) for item in part]

    def _hidden(self, prompt: Prompt) -> Prompt:
        """Put the turn of a prompt into a hidden session.

        A later request with the same history finds the turn, but a request with its id does not. If
        the client names a session, the turn stays in that session.
        """
        if self.session is not None:
            return prompt
        before = prompt.parent and prompt.parent.session
        if before and is_hidden(before):
            return replace(prompt, session=before)
        return replace(prompt, session=f"{HIDDEN}{secrets.token_hex(16)}")

    def store(self, session: str | None, body: dict[str, Any]) -> None:
        """Store the response, before the client is told of it. Does nothing if `is_stored` is false
        or the turn is not saved in a session.

        If it cannot be stored, forgets the turn, too, and raises WeirError.
        """
        if session is None or not self.is_stored:
            return
        response = StoredResponse(
            body["id"], session, self._after, self.instructions, self._new, body
        )
        items = [*self.items, *body["output"]]
        try:
            self.client.responses.save_response(self.owner, response, self.conversation, items)
        except WeirError:
            self.client.engine.forget(node_of(body["id"]))
            raise

    def _after_previous(self, previous: str) -> Prompt:
        found, record = self._find_previous(previous)
        _check(messages_of(self.items))  # the history may be read again, and ends with an answer
        self._after = previous
        if record is not None and self._has_same_setup(found, record):
            prompt = self._extend(record, self.items, lambda: self._history(previous))
            if prompt is not None:
                return prompt
        session = self.session or (None if record is None else record.session)
        return self._from_start(self._history(previous), self.items, session)

    def _find_previous(self, previous: str) -> tuple[StoredResponse | None, TurnRecord | None]:
        """Return the stored response with an id, and its turn. One of them can be None.

        Raises PreviousNotFound if there is neither, or if the response was not to be stored and is
        named by its id rather than by a compaction.
        """
        found = self.client.responses.get_response(self.owner, previous)
        record = self.client.store.find_turn(self.owner, node_of(previous))
        if found is None and (record is None or (is_hidden(record.session) and not self.compacted)):
            raise PreviousNotFound(f"Previous response with id '{previous[:80]}' not found.")
        return found, record

    def _has_same_setup(self, found: StoredResponse | None, record: TurnRecord) -> bool:
        """Return whether a turn was answered with the same instructions and tools.

        If a turn has no stored response, such as a turn of a chat, the first message of its history
        is compared with the instructions, and the hash of the turn shows whether it had these
        tools. For a request with neither instructions nor tools, they count as the same.
        """
        if found is not None:
            return self._matches(found)
        if self.instructions is None and not self.tools:
            return True
        path = self._path_to(record)
        messages = [message for turn in path for message in turn.messages]
        if (
            path[0].parent is not None
            or self.client.matcher.hash_prefixes(messages, self.tools)[-1] != record.chain
        ):
            return False
        first = messages[0]
        return self.instructions is None or (
            (first.role, first.content) == ("system", self.instructions)
        )

    def _matches(self, found: StoredResponse) -> bool:
        """Return whether a stored response had the instructions and tools of this one."""
        theirs = [
            Tool(tool["name"], tool["description"], tool["parameters"])
            for tool in found.body["tools"]
        ]
        own = [self.client.own_tools.get(name) for name in found.own_tools]
        if None in own:
            return False  # a tool that this server no longer has
        theirs += [each.tool for each in own if each is not None]
        same_tools = describe_tools(self.tools) == describe_tools(theirs)
        return same_tools and found.instructions == self.instructions

    def _path_to(self, record: TurnRecord) -> list[TurnRecord]:
        """Return the turns that lead to one, including itself, as far back as they are kept."""
        path = [record]
        while (parent := path[-1].parent) is not None:
            before = self.client.store.find_turn(record.owner, parent)
            if before is None:
                break
            path.append(before)
        return path[::-1]

    def _in_conversation(self, name: str) -> Prompt:
        responses = self.client.responses
        found = responses.get_conversation(self.owner, name)
        if found is None:
            raise PreviousNotFound(f"Conversation with id '{name[:80]}' not found.")
        self._after = found.head
        self._new = [*responses.list_items(self.owner, name, found.read), *self.items]
        head = None if found.head is None else responses.get_response(self.owner, found.head)
        record = None if head is None else self.client.store.find_turn(self.owner, node_of(head.id))
        if head is not None and record is not None and self._matches(head):
            prompt = self._extend(record, self._new, lambda: self._read_before(name), name)
            if prompt is not None:
                return prompt
        if not found.whole:
            raise HistoryNotKept(
                "the beginning of this conversation is no longer kept. Start a new conversation."
            )
        items = [*responses.list_items(self.owner, name), *self.items]
        return self._from_start([], items, name)

    def _read_before(self, conversation: str) -> list[Message]:
        """Return the messages of a conversation up to its newest turn."""
        items = self.client.responses.list_items(self.owner, conversation)
        return messages_of(items[: len(items) + len(self.items) - len(self._new)])

    def _extend(
        self,
        record: TurnRecord,
        items: list[Item],
        history: Callable[[], list[Message]],
        session: str | None = None,
    ) -> Prompt | None:
        """Make the prompt that continues a saved turn, if the template can render it.

        Args:
            history: returns all messages up to the turn's end; called only if a tool result belongs
                to a call of an earlier turn.
        """
        new = messages_of(items)
        try:
            messages = link_results(new, record.messages)
        except StrayResult as error:
            try:
                messages = link_results(new, history())
            except HistoryNotKept:
                raise error from None
        _check(messages)
        session = session or self.session
        how = (session, self.tools, self.variables, self.drops, self._tell)
        return self.client.matcher.extend(record, messages, *how, self.recall, self.pins)

    def _from_start(self, before: list[Message], items: list[Item], session: str | None) -> Prompt:
        """Make the prompt of a whole history, from its longest saved prefix."""
        system = [] if self.instructions is None else [Message("system", self.instructions)]
        messages = link_results([*system, *before, *messages_of(items)])
        _check(messages)
        how = (session, self.tools, self.variables, self.drops, self._tell)
        return self.client.matcher.match(self.owner, messages, *how, self.recall, self.pins)

    def _history(self, name: str) -> list[Message]:
        """Return all messages up to the end of a response, without instructions."""
        parts: list[list[Message]] = []
        at: str | None = name
        while at is not None:
            found = self.client.responses.get_response(self.owner, at)
            record = None if found else self.client.store.find_turn(self.owner, node_of(at))
            if found is not None:
                parts.append(messages_of([*found.input, *found.body["output"]]))
                at = found.previous
            elif record is not None:
                messages = list(record.messages)
                at = None if record.parent is None else f"resp_{record.parent}"
                if at is None and self.instructions is not None and messages[0].role == "system":
                    messages = messages[1:]  # the new instructions replace it
                parts.append(messages)
            else:
                raise _history_not_kept()
        return [message for part in reversed(parts) for message in part]


def _history_not_kept() -> HistoryNotKept:
    return HistoryNotKept(
        "the history before the previous response is no longer kept. Send the whole history as "
        "input."
    )


def node_of(response: str) -> str:
    """Return the id of the turn of a response."""
    return response.removeprefix("resp_")


def _check(messages: list[Message]) -> None:
    if not messages:
        raise WeirError(
            f"there is nothing to answer: {NO_INPUT}. Send a text, or a list with a message."
        )
    if messages[-1].role == "assistant":
        raise WeirError(
            "the last item is an assistant's message, which cannot be answered. Add another item "
            "after it."
        )
