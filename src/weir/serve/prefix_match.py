"""Where requests become plans: a history is found again, and only what is new is rendered.

Between what is said and what is asked of an engine. Knows nothing about engines, rows or HTTP.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weir.errors import WeirError, quote
from weir.serve.limits import Limits
from weir.serve.messages import Message, chain
from weir.serve.rendering import PromptRenderer
from weir.serve.sessions import AcquireLease, SessionLease, SessionStore, TurnRecord
from weir.serve.tools import Tool, written


class TooLong(WeirError):
    """More tokens than one request may feed."""


@dataclass(frozen=True)
class Plan:
    """What a request asks the model.

    Attributes:
        owner: whose it is.
        ids: tokens to be fed.
        parent: the turn it goes on from; None from the beginning.
        session: the session its end belongs to; None where the end is not kept.
        chain: the hash of all messages.
        messages: those that are new since `parent`.
        beginning: how many of `ids` are the stream's beginning, which is to stay; of a plan without
            a parent.
        header: how many of the last of `ids` the template puts in front of the answer.
        hold: of its session, where other servers may have it.
    """

    owner: str
    ids: list[int]
    parent: TurnRecord | None = None
    session: str | None = None
    chain: str = ""
    messages: tuple[Message, ...] = ()
    beginning: int = 0
    header: int = 0
    hold: SessionLease | None = None

    @property
    def cached(self) -> int:
        """Tokens that need not be read: all before, but the last, which no answer reads itself."""
        return 0 if self.parent is None else self.parent.seen - 1

    @property
    def prompt(self) -> int:
        """Tokens of everything before the answer."""
        return len(self.ids) + (0 if self.parent is None else self.parent.seen)


class PromptMatcher:
    """Makes plans of what is said to one model.

    Args:
        wording: how it becomes tokens.
        store: where the ends of earlier turns are.
        limits: of what may be asked.
        root: what sets the histories of this model apart from those of others.
        vocabulary: how many tokens the model knows.
        hold: takes hold of sessions, where other servers may have them.
    """

    def __init__(
        self,
        wording: PromptRenderer,
        store: SessionStore,
        limits: Limits,
        root: str,
        vocabulary: int,
        hold: AcquireLease | None = None,
    ) -> None:
        self._wording = wording
        self._store = store
        self._limits = limits
        self._root = root
        self._vocabulary = vocabulary
        self._hold = hold

    def chat(
        self,
        owner: str,
        messages: Sequence[Message],
        session: str | None,
        tools: Sequence[Tool] = (),
    ) -> Plan:
        """The turn that a history asks for, from the longest beginning of it that was saved.

        Args:
            owner: whose it is; only what is saved for them is looked at.
            messages: the whole history, the last of which is to be answered.
            session: the session its end belongs to, where the client names one.
            tools: functions that the model is told of; a history with others is another one.

        Raises:
            TooLong: it would feed more tokens than it may.
            WeirError: the template refuses the messages, or they make no tokens.
        """
        hashes = self.hashes(messages, tools)
        for at in range(len(messages) - 2, -1, -1):
            if messages[at].role != "assistant":
                continue
            parent = self._store.find_history(owner, hashes[at])
            if parent is None:
                continue
            if plan := self.after(parent, messages[at + 1 :], session, tools):
                return plan
        worded = self._wording.whole(messages, tools)
        named = session or f"sess_{secrets.token_hex(16)}"
        new = tuple(messages)
        beginning, header = worded.beginning, worded.header
        return self._checked(
            Plan(owner, worded.ids, None, named, hashes[-1], new, beginning, header)
        )

    def hashes(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[str]:
        """By which each beginning of a history is known that was told of these tools."""
        root = self._root
        if tools:
            root = hashlib.sha256(f"{root}\n{written(tools)}".encode()).hexdigest()
        return chain(root, messages)

    def after(
        self,
        parent: TurnRecord,
        messages: Sequence[Message],
        session: str | None = None,
        tools: Sequence[Tool] = (),
    ) -> Plan | None:
        """The turn that goes on from another.

        Args:
            parent: the other turn.
            messages: what is said after it.
            session: the session its end belongs to, where it is not the parent's.
            tools: functions that the model was told of.

        Returns:
            None where the model's template does not tell these messages without those before.

        Raises:
            TooLong: it would feed more tokens than it may.
        """
        new = tuple(messages)
        worded = self._wording.after(new, parent.last, tools)
        if worded is None:
            return None
        end, named = chain(parent.chain, new)[-1], session or parent.session
        header = worded.header
        return self._checked(Plan(parent.owner, worded.ids, parent, named, end, new, header=header))

    def text(self, owner: str, prompt: str | Sequence[int]) -> Plan:
        """A turn that continues a text, or tokens, and is not kept.

        Raises:
            TooLong: it would feed more tokens than it may.
            WeirError: a token is out of range, or there are none.
        """
        if isinstance(prompt, str):
            ids = self._wording.text(prompt)
        else:
            ids = list(prompt)
            wrong = next((token for token in ids if not 0 <= token < self._vocabulary), None)
            if wrong is not None:
                last = self._vocabulary - 1
                raise WeirError(f"token {quote(wrong)} does not exist; ids are 0 to {last}")
        return self._checked(Plan(owner, ids))

    def _checked(self, plan: Plan) -> Plan:
        if not plan.ids:
            raise WeirError("that makes no tokens; say something")
        if len(plan.ids) > self._limits.prompt:
            raise TooLong(
                f"that is {len(plan.ids):,} tokens to read, and one request may have "
                f"{self._limits.prompt:,}; send the rest in further turns"
            )
        if plan.session is None or self._hold is None:
            return plan
        return replace(plan, hold=self._hold(plan.owner, plan.session))
