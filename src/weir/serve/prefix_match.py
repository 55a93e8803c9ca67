"""Prefix match: finds the saved turn that a history continues, so that only new messages are fed.

Knows nothing about engines, rows or HTTP.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weir.errors import WeirError, quote
from weir.serve.limits import Limits
from weir.serve.messages import Message, hash_prefixes
from weir.serve.rendering import PromptRenderer
from weir.serve.sessions import AcquireLease, SessionLease, SessionStore, TurnRecord
from weir.serve.tools import Tool, describe_tools
from weir.stream import PromptTooLong


@dataclass(frozen=True)
class Prompt:
    """The tokens that a request feeds to the model, and the turn that they continue.

    Attributes:
        owner: hash of the client's key; empty where the server needs none.
        parent: the saved turn that they continue; None at the beginning of a stream.
        session: the session that the new turn belongs to; None if it is not saved.
        messages: those that are new since `parent`.
        beginning: how many of `ids` are the stream's beginning, which stays; without `parent` only.
        header: how many at the end of `ids` are the header of the answer.
    """

    owner: str
    ids: list[int]
    parent: TurnRecord | None = None
    session: str | None = None
    hash: str = ""
    messages: tuple[Message, ...] = ()
    beginning: int = 0
    header: int = 0
    lease: SessionLease | None = None

    @property
    def cached(self) -> int:
        """Tokens that need not be fed: all before but the last, which is still pending."""
        return 0 if self.parent is None else self.parent.seen - 1

    @property
    def length(self) -> int:
        """Tokens of everything before the answer."""
        return len(self.ids) + (0 if self.parent is None else self.parent.seen)


class PromptMatcher:
    """Makes prompts of histories, for one model.

    Args:
        root: hash that sets histories of this model and policy apart from others.
    """

    def __init__(
        self,
        renderer: PromptRenderer,
        store: SessionStore,
        limits: Limits,
        root: str,
        vocabulary: int,
        acquire_lease: AcquireLease | None = None,
    ) -> None:
        self._renderer = renderer
        self._store = store
        self._limits = limits
        self._root = root
        self._vocabulary = vocabulary
        self._acquire_lease = acquire_lease

    def match(
        self,
        owner: str,
        messages: Sequence[Message],
        session: str | None,
        tools: Sequence[Tool] = (),
    ) -> Prompt:
        """Make a prompt that starts at the longest saved prefix of a history.

        Args:
            tools: functions described to the model; with others, a history is another one.

        Raises:
            PromptTooLong: it has more tokens than a request may feed.
            WeirError: the template refuses the messages, or they make no tokens.
        """
        hashes = self.hash_prefixes(messages, tools)
        for at in range(len(messages) - 2, -1, -1):
            if messages[at].role != "assistant":
                continue
            parent = self._store.find_history(owner, hashes[at])
            if parent is None:
                continue
            if prompt := self.extend(parent, messages[at + 1 :], session, tools):
                return prompt
        rendered = self._renderer.render(messages, tools)
        return self._check(
            Prompt(
                owner,
                rendered.ids,
                session=session or f"sess_{secrets.token_hex(16)}",
                hash=hashes[-1],
                messages=tuple(messages),
                beginning=rendered.beginning,
                header=rendered.header,
            )
        )

    def hash_prefixes(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[str]:
        """The hash of each prefix of a history in which these tools were described."""
        root = self._root
        if tools:
            root = hashlib.sha256(f"{root}\n{describe_tools(tools)}".encode()).hexdigest()
        return hash_prefixes(root, messages)

    def extend(
        self,
        parent: TurnRecord,
        messages: Sequence[Message],
        session: str | None = None,
        tools: Sequence[Tool] = (),
    ) -> Prompt | None:
        """Make a prompt that continues a saved turn.

        Args:
            session: the session that the new turn belongs to, if not the parent's.

        Returns:
            None if the template cannot render these messages without those before.

        Raises:
            PromptTooLong: it has more tokens than a request may feed.
        """
        rendered = self._renderer.render_next(messages, parent.last, tools)
        if rendered is None:
            return None
        return self._check(
            Prompt(
                parent.owner,
                rendered.ids,
                parent=parent,
                session=session or parent.session,
                hash=hash_prefixes(parent.chain, messages)[-1],
                messages=tuple(messages),
                header=rendered.header,
            )
        )

    def complete(self, owner: str, text: str | Sequence[int]) -> Prompt:
        """Make a prompt of a text, or of tokens; its turn is not saved.

        Raises:
            PromptTooLong: it has more tokens than a request may feed.
            WeirError: a token is out of range, or there are none.
        """
        if isinstance(text, str):
            return self._check(Prompt(owner, self._renderer.render_text(text)))
        wrong = next((token for token in text if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            last = self._vocabulary - 1
            raise WeirError(f"token {quote(wrong)} does not exist; ids are 0 to {last}")
        return self._check(Prompt(owner, list(text)))

    def _check(self, prompt: Prompt) -> Prompt:
        """Refuse a prompt without tokens or with too many; take the lease on its session."""
        if not prompt.ids:
            raise WeirError("that makes no tokens; say something")
        if len(prompt.ids) > self._limits.prompt:
            raise PromptTooLong(self._limits.prompt)
        if prompt.session is None or self._acquire_lease is None:
            return prompt
        return replace(prompt, lease=self._acquire_lease(prompt.owner, prompt.session))
