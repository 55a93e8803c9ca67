"""From messages to a prompt: the saved turn that they continue, and the tokens after it.

Knows nothing about engines, rows or HTTP.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError, quote
from weir.models import ModelSink
from weir.serve.limits import Limits
from weir.serve.messages import Message, hash_prefixes
from weir.serve.sessions.records import TurnRecord
from weir.serve.sessions.store import SessionStore
from weir.serve.tools.formats import CallFormat, Tool, describe_tools, format_of
from weir.stream import ChatTemplate, PromptEncoder, PromptTooLong
from weir.stream.template_bounds import make_way

LONG = 262_144
"""Characters of a history that is worked on apart from short ones."""
LOOKUPS = 256
"""Answers of a history, from the newest on, that are looked up among saved turns."""
BESIDE = 64
"""Characters that a message counts for beside its own."""


@dataclass(frozen=True)
class Prompt:
    """The tokens that a request feeds to the model, and the turn that they continue.

    Attributes:
        ids: what is fed, one token or more.
        owner: hash of the client's key; empty where the server needs none.
        parent: the saved turn that they continue; None at the beginning of a stream.
        session: the session that the new turn belongs to; None if it is not saved.
        messages: those that are new since `parent`.
        beginning: how many of `ids` are the stream's beginning, which stays; without `parent` only.
        header: how many at the end of `ids` are the header of the answer.
    """

    ids: list[int]
    owner: str = ""
    parent: TurnRecord | None = None
    session: str | None = None
    hash: str = ""
    messages: tuple[Message, ...] = ()
    beginning: int = 0
    header: int = 0

    @property
    def cached(self) -> int:
        """Tokens that need not be fed: all before but the last, which is still pending."""
        return 0 if self.parent is None else self.parent.seen - 1

    @property
    def length(self) -> int:
        """Tokens of everything before the answer."""
        return len(self.ids) + (0 if self.parent is None else self.parent.seen)


class PromptRenderer:
    """Renders messages for one model, to `most` tokens. Called from any thread.

    WeirError if the model's chat template fails, or does not come to an end.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: frozenset[int],
        sink: ModelSink,
        most: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._most = most
        self._encoder = PromptEncoder(tokenizer, most)
        self._template = ChatTemplate(tokenizer, stop_ids, encoder=self._encoder)
        self._sink = sink
        try:
            self._call_format: CallFormat | WeirError = format_of(tokenizer)
        except WeirError as error:
            self._call_format = error
        # A tokenizer prints its warning about padding in the first call: now, before any thread.
        tokenizer("x")
        self._template.header([])  # a template that is broken is better known now

    @property
    def is_line_based(self) -> bool:
        """Whether a message is a line of its own: the model has no chat template."""
        return not self._template.templated

    @property
    def call_format(self) -> CallFormat:
        """The format in which the model writes tool calls; WeirError if it is not known."""
        if isinstance(self._call_format, WeirError):
            raise WeirError(str(self._call_format))
        return self._call_format

    @property
    def call_tokens(self) -> dict[str, int]:
        """The texts around a call that are special tokens, with their ids."""
        known = self._tokenizer.added_tokens_decoder.items()
        special = {token.content: number for number, token in known if token.special}
        form = self.call_format
        around = (form.trigger, form.between, form.close)
        return {text: special[text] for text in around if text in special}

    def render_text(self, text: str) -> list[int]:
        """Tokenize a text as it is."""
        return self._sink.first(self._encoder.encode(text, special=True))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Prompt:
        """Render a conversation from its beginning; WeirError if the template refuses it.

        PromptTooLong without rendering it where there are more messages than tokens: every template
        makes a token of a message.
        """
        if self._most is not None and len(messages) > self._most:
            raise PromptTooLong(self._most)
        rendered, described = self._for_template(messages, tools)
        template = self._template.with_tools(described)
        ids = template.whole(rendered)
        beginning, header = template.beginning(rendered, ids), self._template.header(ids)
        with_sink = self._sink.first(ids)
        beginning += len(with_sink) - len(ids)
        return Prompt(with_sink, beginning=beginning, header=header)

    def render_next(
        self, messages: Sequence[Message], last: int, tools: Sequence[Tool]
    ) -> Prompt | None:
        """Render what follows an answer that ends with the token `last`; None if the template
        cannot render these messages without those before.
        """
        # Where a system message describes the tools, that was said at the beginning.
        in_template = isinstance(self._call_format, CallFormat) and self._call_format.in_template
        rendered, described = self._for_template(messages, tools if in_template else ())
        try:
            ids = self._template.with_tools(described).after(rendered, last)
            return Prompt(ids, header=self._template.header(ids)) if ids else None
        except PromptTooLong:
            raise
        except WeirError:
            return None  # the template looks at more of the history than is here

    def _for_template(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Messages and tools as the template takes them."""
        if isinstance(self._call_format, WeirError):
            return [message.for_template() for message in messages], []
        return self._call_format.for_template(messages, tools)


class PromptMatcher:
    """Makes prompts of histories, for one model.

    Args:
        root: hash that sets histories of this model and policy apart from others.

    Its methods raise PromptTooLong for more tokens than a request may feed, and a WeirError for
    none, or where the template refuses the messages.
    """

    def __init__(
        self,
        renderer: PromptRenderer,
        store: SessionStore,
        limits: Limits,
        root: str,
        vocabulary: int,
    ) -> None:
        self._renderer = renderer
        self._store = store
        self._limits = limits
        self._root = root
        self._vocabulary = vocabulary
        self._short, self._long = threading.Lock(), threading.Lock()
        self._slow = threading.Lock()

    @contextmanager
    def turn(self, messages: Sequence[Message]) -> Iterator[None]:
        """Wait until a history may be worked on.

        Were all threads to hash and render at once, the engine's would wait for the interpreter
        behind each of them. So one works on a long history, another on a short one, and a third on
        one whose template turns out to be slow, or to have no end.
        """
        size = sum(len(message.content) for message in messages) + BESIDE * len(messages)
        held = self._short if size < LONG else self._long

        def give_way() -> None:
            nonlocal held
            if held is not self._slow:
                held.release()
                held = self._slow
                held.acquire()

        held.acquire()
        token = make_way.set(give_way)
        try:
            yield
        finally:
            make_way.reset(token)
            held.release()

    def match(
        self,
        owner: str,
        messages: Sequence[Message],
        session: str | None,
        tools: Sequence[Tool] = (),
    ) -> Prompt:
        """Make a prompt that starts at the longest saved prefix of a history, of those that end
        with one of the newest `LOOKUPS` answers in it.

        With other tools described to the model, a history is another one.
        """
        answers = [at for at, message in enumerate(messages[:-1]) if message.role == "assistant"]
        known = answers[-1] + 1 if answers else 0
        with self.turn(messages):
            hashes = self.hash_prefixes(messages[:known], tools)
        for at in reversed(answers[-LOOKUPS:]):
            parent = self._store.find_history(owner, hashes[at])
            if parent is None:
                continue
            if prompt := self.extend(parent, messages[at + 1 :], session, tools):
                return prompt
        with self.turn(messages):
            rendered = self._renderer.render(messages, tools)
            root = hashes[-1] if hashes else self._root_of(tools)
            hashed = hash_prefixes(root, messages[known:])[-1]  # what is too long is refused by now
        return self._check(
            replace(
                rendered,
                owner=owner,
                session=session or f"sess_{secrets.token_hex(16)}",
                hash=hashed,
                messages=tuple(messages),
            )
        )

    def hash_prefixes(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[str]:
        """The hash of each prefix of a history in which these tools were described."""
        return hash_prefixes(self._root_of(tools), messages)

    def _root_of(self, tools: Sequence[Tool]) -> str:
        if not tools:
            return self._root
        return hashlib.sha256(f"{self._root}\n{describe_tools(tools)}".encode()).hexdigest()

    def extend(
        self,
        parent: TurnRecord,
        messages: Sequence[Message],
        session: str | None = None,
        tools: Sequence[Tool] = (),
    ) -> Prompt | None:
        """Make a prompt that continues a saved turn, in its session if no other is named; None if
        the template cannot render these messages without those before.
        """
        with self.turn(messages):
            rendered = self._renderer.render_next(messages, parent.last, tools)
            if rendered is None:
                return None
            hashed = hash_prefixes(parent.chain, messages)[-1]
        return self._check(
            replace(
                rendered,
                owner=parent.owner,
                parent=parent,
                session=session or parent.session,
                hash=hashed,
                messages=tuple(messages),
            )
        )

    def complete(self, owner: str, text: str | Sequence[int]) -> Prompt:
        """Make a prompt of a text, or of tokens; its turn is not saved."""
        if isinstance(text, str):
            return self._check(Prompt(self._renderer.render_text(text), owner))
        wrong = next((token for token in text if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            last = self._vocabulary - 1
            raise WeirError(f"token {quote(wrong)} does not exist; ids are 0 to {last}")
        return self._check(Prompt(list(text), owner))

    def _check(self, prompt: Prompt) -> Prompt:
        """Refuse a prompt without tokens or with too many."""
        if not prompt.ids:
            raise WeirError("that makes no tokens; say something")
        if len(prompt.ids) > self._limits.prompt:
            raise PromptTooLong(self._limits.prompt)
        return prompt
