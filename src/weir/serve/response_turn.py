"""From what a client of OpenAI's responses says to a turn: where it starts, and what it reads.

A response names the turn it goes on from, so that nothing is looked for and only what is new is
read. It is all read again where its instructions or tools are others than before, or where the
turn's state had to make room. Knows nothing about HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weir.errors import WeirError
from weir.serve.client import EngineClient
from weir.serve.messages import Message, NoCall, placed
from weir.serve.prefix_match import Plan
from weir.serve.sessions import Item, StoredResponse, TurnRecord, messages_of
from weir.serve.tools import Tool, written


class NoPrevious(WeirError):
    """There is no such response of the owner's."""


class NotKept(WeirError):
    """What would have to be read again is not kept any more."""


@dataclass(eq=False)
class ResponseTurn:
    """One response that is wanted.

    Attributes:
        desk: who answers.
        items: what the client says.
        instructions: a system message before all that was said; None for none.
        previous: the response it goes on from.
        conversation: the conversation it goes on with, which is locked meanwhile.
        session: the session its turn belongs to, where the client names one.
        kept: whether it can be gone on from and retrieved.
        tools: functions that the model is told of.
    """

    desk: EngineClient
    items: list[Item]
    instructions: str | None = None
    previous: str | None = None
    conversation: str | None = None
    session: str | None = None
    kept: bool = True
    tools: Sequence[Tool] = ()

    # What the plan has found.
    _after: str | None = None
    _read: list[Item] = field(default_factory=list)

    def plan(self, owner: str) -> Plan:
        """The turn that is asked for.

        Raises:
            NoPrevious: there is no response that it could go on from.
            NotKept: what would have to be read again is not kept any more.
            NoCall: a result is of no call that was made before it, or of one that has its result.
            TooLong: it would feed more tokens than it may.
            WeirError: there is nothing to answer, or the template refuses it.
        """
        self._after, self._read = None, self.items
        if self.conversation is not None:
            plan = self._in_conversation(owner, self.conversation)
        elif self.previous is not None:
            plan = self._after_previous(owner, self.previous)
        else:
            plan = self._whole(owner, [], self.items, self.session)
        return plan if self.kept else replace(plan, session=None)

    def keep(self, owner: str, session: str | None, body: dict[str, Any]) -> None:
        """Keep what the client is about to be told.

        Args:
            owner: whose it is.
            session: of its turn; None where that is not kept.
            body: the response.

        Raises:
            WeirError: it cannot be kept; then the turn is forgotten as well.
        """
        if session is None:
            return
        try:
            self.desk.responses.save_response(
                owner,
                StoredResponse(
                    body["id"], session, self._after, self.instructions, self._read, body
                ),
                self.conversation,
                [*self.items, *body["output"]],
            )
        except WeirError:
            self.desk.engine.forget(node_of(body["id"]))
            raise

    def _after_previous(self, owner: str, previous: str) -> Plan:
        found = self.desk.responses.get_response(owner, previous)
        record = self.desk.store.find_turn(owner, node_of(previous))
        if found is None and record is None:
            raise NoPrevious(f"Previous response with id '{previous[:80]}' not found.")
        self._after = previous
        if record is not None and self._same(found, record):
            plan = self._going_on(record, self.items, lambda: self._history(owner, previous))
            if plan is not None:
                return plan
        session = self.session or (None if record is None else record.session)
        return self._whole(owner, self._history(owner, previous), self.items, session)

    def _same(self, found: StoredResponse | None, record: TurnRecord) -> bool:
        """Whether a turn was answered under the same instructions, and with the same tools.

        One that was no response, or is known as a turn only, has no instructions but its first
        message, and is known by its hash to have had these tools; it is gone on from where nothing
        is said.
        """
        if found is not None:
            return self._fits(found)
        if self.instructions is None and not self.tools:
            return True
        path = self._turns_to(record)
        said = [message for each in path for message in each.messages]
        if (
            path[0].parent is not None
            or self.desk.planner.hashes(said, self.tools)[-1] != record.chain
        ):
            return False
        first = said[0]
        return self.instructions is None or (
            (first.role, first.content) == ("system", self.instructions)
        )

    def _fits(self, found: StoredResponse) -> bool:
        """Whether a response had the instructions and the tools that this one is to have."""
        same = written(self.tools) == written([_tool(told) for told in found.body["tools"]])
        return same and found.instructions == self.instructions

    def _turns_to(self, record: TurnRecord) -> list[TurnRecord]:
        """A turn and those that it goes on from, as far as they are kept, the oldest first."""
        found = [record]
        while (parent := found[-1].parent) is not None:
            before = self.desk.store.find_turn(record.owner, parent)
            if before is None:
                break
            found.append(before)
        return found[::-1]

    def _in_conversation(self, owner: str, name: str) -> Plan:
        book = self.desk.responses
        found = book.get_conversation(owner, name)
        if found is None:
            raise NoPrevious(f"Conversation with id '{name[:80]}' not found.")
        self._after = found.head
        self._read = [*book.list_items(owner, name, found.read), *self.items]
        head = None if found.head is None else book.get_response(owner, found.head)
        record = None if head is None else self.desk.store.find_turn(owner, node_of(head.id))
        if head is not None and record is not None and self._fits(head):
            plan = self._going_on(record, self._read, lambda: self._read_before(owner, name), name)
            if plan is not None:
                return plan
        if not found.whole:
            raise NotKept("the beginning of this conversation is not kept any more")
        return self._whole(owner, [], [*book.list_items(owner, name), *self.items], name)

    def _read_before(self, owner: str, conversation: str) -> list[Message]:
        """What a conversation's newest turn and those before it were told and said."""
        items = self.desk.responses.list_items(owner, conversation)
        return messages_of(items[: len(items) + len(self.items) - len(self._read)])

    def _going_on(
        self,
        record: TurnRecord,
        items: list[Item],
        before: Callable[[], list[Message]],
        session: str | None = None,
    ) -> Plan | None:
        """The turn that goes on from a record, if it can.

        Args:
            record: of a turn.
            items: what is said after it.
            before: all that was said up to the record's end, for results of calls that were made in
                an earlier turn; it is looked at for these alone.
            session: the session the turn belongs to.
        """
        said = messages_of(items)
        try:
            messages = placed(said, record.messages)
        except NoCall as error:
            try:
                messages = placed(said, before())
            except NotKept:
                raise error from None
        _check(messages)
        return self.desk.planner.after(record, messages, session or self.session, self.tools)

    def _whole(
        self, owner: str, before: list[Message], items: list[Item], session: str | None
    ) -> Plan:
        """A turn that begins with all that was said, or with as much of it as was saved."""
        system = [] if self.instructions is None else [Message("system", self.instructions)]
        messages = placed([*system, *before, *messages_of(items)])
        _check(messages)
        return self.desk.planner.chat(owner, messages, session, self.tools)

    def _history(self, owner: str, name: str) -> list[Message]:
        """All that was said up to the end of a response, without instructions.

        Raises:
            NotKept: a part of it is not kept any more.
        """
        parts: list[list[Message]] = []
        at: str | None = name
        while at is not None:
            found = self.desk.responses.get_response(owner, at)
            record = None if found else self.desk.store.find_turn(owner, node_of(at))
            if found is not None:
                parts.append(messages_of([*found.input, *found.body["output"]]))
                at = found.previous
            elif record is not None:
                said = list(record.messages)
                at = None if record.parent is None else f"resp_{record.parent}"
                if at is None and self.instructions is not None and said[0].role == "system":
                    said = said[1:]  # others stand in its place
                parts.append(said)
            else:
                raise NotKept("what led to the previous response is not kept any more")
        return [message for part in reversed(parts) for message in part]


def node_of(response: str) -> str:
    """The node that a response's turn has ended at."""
    return response.removeprefix("resp_")


def _tool(told: dict[str, Any]) -> Tool:
    """A function as a response tells of it."""
    return Tool(told["name"], told["description"], told["parameters"])


def _check(messages: list[Message]) -> None:
    if not messages:
        raise WeirError("there is nothing to answer: input is missing or empty")
    if messages[-1].role == "assistant":
        raise WeirError("the last item must be one to answer, not an assistant's")
