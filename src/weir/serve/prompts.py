"""From messages to a prompt: the saved turn that they continue, and the tokens after it.

This file does not use engines, rows or HTTP.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError, quote
from weir.models import ModelSink
from weir.pools import MOST_RANGES
from weir.serve.changes import ChangedPrefixes, Outline, describe_change
from weir.serve.messages import DROPPED, Message, ResultPlace, hash_prefixes
from weir.serve.pins import (
    PinnedPlaces,
    PinRoom,
    count_tokens,
    find_pinned,
    has_no_place,
    introduce,
    was_dropped,
)
from weir.serve.reread import Reread, explain_reread, find_nearest, same_results
from weir.serve.roles import SystemPlaces
from weir.serve.sessions.records import TurnRecord, is_hidden
from weir.serve.sessions.store import SessionStore
from weir.serve.thoughts import CLOSE, OPEN
from weir.serve.tools.formats import (
    CallFormat,
    Tool,
    describe_tools,
    format_of,
    template_variables,
)
from weir.serve.worker import Handle, Worker
from weir.stream import (
    ChatTemplate,
    PromptEncoder,
    PromptTooLong,
    TextPlace,
    mark_text,
    render_chat,
)
from weir.stream.archive import Excerpt, write_quotes

LONG = 65_536
"""Number of characters from which a history is processed apart from short ones."""
LOOKUPS = 256
"""Number of newest answers of a history that are looked up among saved turns."""
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
"""No further variables for a chat template."""
Tell = Callable[[TurnRecord], str]
"""Writes a note for the model about the turn that a prompt continues."""
BESIDE = 64
"""Number of characters that a message counts for, besides its text."""


@dataclass(frozen=True)
class RecalledText:
    """Text that has left the cache, quoted before a user's message.

    Attributes:
        text: the quotations as they are fed.
        excerpts: the quoted excerpts, the best first.
        tokens: number of tokens of the text.
    """

    text: str
    excerpts: tuple[Excerpt, ...]
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return the value of `usage.weir.recalled` for it."""
        told = [
            {
                "role": one.role,
                **({"name": one.name} if one.name else {}),
                "at": round(one.time),
                "text": one.text,
                "score": one.score,
            }
            for one in self.excerpts
        ]
        return {"tokens": self.tokens, "excerpts": told}


@dataclass(frozen=True)
class Prompt:
    """The tokens that a request feeds to the model, and the turn that they continue.

    Attributes:
        ids: the tokens to feed, at least one.
        owner: hash of the client's key; empty if the server needs none.
        parent: the saved turn that they continue; None at the beginning of a stream.
        session: the session of the new turn; None if it is not saved.
        hash: hash of the history up to the answer; empty for a prompt of text or tokens.
        messages: the messages that are new since `parent`.
        beginning: how many of `ids` are the stream's beginning (system message and tools), which a
            policy can pin; 0 if there is a `parent`.
        header: how many at the end of `ids` are the header of the answer.
        prefill: the beginning of the answer, which the client has written.
        reread: the part of the history that is read again, and the reason; None if none is.
        note: a text before the new messages. It says how the system messages have changed and what
            has left the cache, and repeats pinned results. Empty if there is nothing to say.
        systems: the system messages before the first answer.
        outline: hash of the history without `systems`; empty if it is not needed.
        places: where results of tools are in `ids`, each with the number that marked it.
        dropped: places in the stream of results that were read and then dropped.
        recalled: text that was recalled for the last message; None if there is none.
        kept: the places of pinned results in the stream, including those of this prompt.
        unkept: how many tokens of pinned results are not kept, most often because they do not fit.
    """

    ids: list[int]
    owner: str = ""
    parent: TurnRecord | None = None
    session: str | None = None
    hash: str = ""
    messages: tuple[Message, ...] = ()
    beginning: int = 0
    header: int = 0
    prefill: str = ""
    reread: Reread | None = None
    note: str = ""
    systems: tuple[str, ...] = ()
    outline: str = ""
    places: tuple[TextPlace, ...] = ()
    dropped: tuple[tuple[int, int], ...] = ()
    recalled: RecalledText | None = None
    kept: tuple[ResultPlace, ...] = ()
    unkept: int = 0

    @property
    def cached(self) -> int:
        """Number of tokens that do not have to be fed: all earlier ones, except the last token
        of the saved answer, which the model has not read yet.
        """
        return 0 if self.parent is None else self.parent.seen - 1

    @property
    def length(self) -> int:
        """Number of tokens of everything before the answer."""
        return len(self.ids) + (0 if self.parent is None else self.parent.seen)


class UnknownOutput(WeirError):
    """A history has no output of a call that a request drops or pins.

    Attributes:
        number: the index of the call among those that are named.
        field: the field that names it.
    """

    def __init__(self, number: int, call: str, field: str) -> None:
        super().__init__(
            f"there is no output of the call {quote(call)} in this history. Use the id of a call "
            "whose output was sent."
        )
        self.number, self.field = number, field


class PromptRenderer:
    """Renders messages for one model, to at most `most` tokens. Can be called from any thread.

    Raises WeirError if the model's chat template fails, or does not finish.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: frozenset[int],
        sink: ModelSink,
        most: int | None = None,
    ) -> None:
        self._made_of = tokenizer, stop_ids, sink, most
        self._tokenizer = tokenizer
        self._most = most
        self._encoder = PromptEncoder(tokenizer, most)
        self._template = ChatTemplate(tokenizer, stop_ids, encoder=self._encoder)
        self._sink = sink
        try:
            self._call_format: CallFormat | WeirError = format_of(tokenizer)
        except WeirError as error:
            self._call_format = error
        # A tokenizer prints its warning about padding in its first call, so make this call before
        # any thread does.
        tokenizer("x")
        self._template.header([])  # find a broken template as early as possible
        self.variables = template_variables(tokenizer)
        self._places = SystemPlaces()
        if self._template.templated:
            self._places = SystemPlaces.of(lambda turns: render_chat(tokenizer, turns))

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process create its own renderer with the same settings."""
        return PromptRenderer, self._made_of

    @property
    def is_line_based(self) -> bool:
        """Whether each message is one line, because the model has no chat template."""
        return not self._template.templated

    @property
    def call_format(self) -> CallFormat:
        """Return the format in which the model writes tool calls. Raises WeirError if it is not
        known.
        """
        if isinstance(self._call_format, WeirError):
            raise WeirError(str(self._call_format))
        return self._call_format

    @cached_property
    def can_answer_calls(self) -> bool:
        """Return whether the template can render the result of a call alone.

        If so, an answer can continue with the result.
        """
        tool, result = Tool("x"), Message("tool", "x", "x", result="call_x", place=0)
        try:
            return self.render_next([result], 0, [tool]) is not None
        except WeirError:
            return False

    @property
    def call_tokens(self) -> dict[str, int]:
        """Return the texts around a call that are special tokens, with their ids."""
        known = self._tokenizer.added_tokens_decoder.items()
        special = {token.content: number for number, token in known if token.special}
        form = self.call_format
        around = (form.trigger, form.between, form.close)
        return {text: special[text] for text in around if text in special}

    def render_text(self, text: str) -> list[int]:
        """Tokenize a text without a template."""
        return self._sink.first(self._encoder.encode(text, special=True))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> Prompt:
        """Render a conversation from its beginning. Raises WeirError if the template refuses it.

        Raises PromptTooLong without rendering if there are more messages than the prompt may have
        tokens, because every template makes at least one token from a message.
        """
        if self._most is not None and len(messages) > self._most:
            raise PromptTooLong(self._most)
        messages = self._places.place(_with_marks(messages), at_start=True)
        rendered, described = self._for_template(messages, tools)
        template = self._template.with_tools(described, variables)
        places: list[TextPlace] = []
        ids = template.whole(rendered, places)
        beginning, header = template.beginning(rendered, ids), template.header(ids)
        with_sink = self._sink.first(ids)
        more = len(with_sink) - len(ids)
        moved = tuple(TextPlace(one.name, one.start + more, one.stop + more) for one in places)
        return Prompt(with_sink, beginning=beginning + more, header=header, places=moved)

    def render_next(
        self,
        messages: Sequence[Message],
        last: int,
        tools: Sequence[Tool],
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> Prompt | None:
        """Render the messages after an answer that ends with the token `last`.

        Returns None if the template cannot render these messages without the earlier ones.
        """
        # If a system message describes the tools, it is at the beginning and was already read.
        in_template = isinstance(self._call_format, CallFormat) and self._call_format.in_template
        messages = self._places.place(_with_marks(messages), at_start=False)
        places: list[TextPlace] = []
        rendered, described = self._for_template(messages, tools if in_template else ())
        template = self._template.with_tools(described, variables)
        try:
            ids = template.after(rendered, last, places)
            if not ids:
                return None
            return Prompt(ids, header=template.header(ids), places=tuple(places))
        except PromptTooLong:
            raise
        except WeirError:
            return None  # the template needs more of the history

    def begin_answer(self, prompt: Prompt, text: str) -> Prompt:
        """Add the beginning of the answer to a prompt."""
        ids = self._encoder.encode(self._encoder.mark(text, trusted=True))
        header = prompt.header + len(ids) if prompt.header else 0
        return replace(prompt, ids=[*prompt.ids, *ids], header=header, prefill=text)

    def quote(self, excerpts: Sequence[Excerpt], most: int) -> RecalledText | None:
        """Write excerpts as quotations of at most this many tokens. None if none fits."""
        text, used = write_quotes(excerpts, most, self._count_quoted)
        return RecalledText(text, tuple(used), self._count_quoted(text)) if used else None

    def _count_quoted(self, text: str) -> int:
        """Count the tokens of a text that may not contain control tokens."""
        return len(self._encoder.encode(self._encoder.mark(text)))

    @property
    def thinks(self) -> bool:
        """Whether the model's chat template supports thoughts before answers."""
        return self._template.templated and OPEN in str(self._tokenizer.chat_template)

    def opens_thoughts(self, prompt: Prompt) -> bool:
        """Return whether the end of a prompt opens the thoughts, so that the answer begins inside
        them.
        """
        if not self.thinks:
            return False
        return self._end_of(prompt).endswith(OPEN)

    def may_think(self, prompt: Prompt) -> bool:
        """Return whether an answer to a prompt may begin with thoughts, or continue them.

        It may not if the prompt has ended the thoughts, or has begun the answer.
        """
        if not self.thinks or (prompt.prefill and not self.opens_thoughts(prompt)):
            return False
        return not self._end_of(prompt).endswith(CLOSE)

    def _end_of(self, prompt: Prompt) -> str:
        """Return the end of a prompt, without white space after it."""
        return str(self._tokenizer.decode(prompt.ids[-len(CLOSE) - 2 :])).rstrip()

    def check(self, prompt: Prompt) -> Prompt:
        """Refuse a prompt without tokens, or with too many."""
        if not prompt.ids:
            raise WeirError("the prompt contains no tokens. Send some text.")
        if self._most is not None and len(prompt.ids) > self._most:
            raise PromptTooLong(self._most)
        return prompt

    def _for_template(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return messages and tools in the format of the template."""
        if isinstance(self._call_format, WeirError):
            return [message.for_template() for message in messages], []
        return self._call_format.for_template(messages, tools)


class PromptMatcher:
    """Makes prompts from histories, for one model.

    Args:
        root: hash that distinguishes histories of this model and policy from others.
        worker: works on long histories, opened with the renderer. Short ones do not wait for it.
        changes: turns that a history continues even if its system messages have changed; None if
            such a history is read again.
        room: the slots for pinned results; None if there are none.

    Its methods raise PromptTooLong for more tokens than a request may feed, and WeirError for no
    tokens or if the template refuses the messages.
    """

    def __init__(
        self,
        renderer: PromptRenderer,
        store: SessionStore,
        root: str,
        vocabulary: int,
        worker: Worker,
        changes: ChangedPrefixes | None = None,
        room: PinRoom | None = None,
    ) -> None:
        self._room = room or PinRoom(None, 0)
        self._changes = changes
        self._store = store
        self._root = root
        self._vocabulary = vocabulary
        self._long, self._short = worker, Worker()
        self._short.open(renderer)
        self._quote = renderer.quote

    def hold(self, messages: Sequence[Message]) -> Handle:
        """Hold a history to be processed.

        If many threads hashed and rendered at once, the engine's thread would wait for the
        interpreter after each of them. So short histories are processed one at a time. They wait
        neither for long histories, which `worker` processes, nor for a template that is slow or
        does not finish (`Worker`).
        """
        size = sum(len(message.content) for message in messages) + BESIDE * len(messages)
        return (self._short if size < LONG else self._long).hold(messages)

    def match(
        self,
        owner: str,
        messages: Sequence[Message] | Handle,
        session: str | None,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = NO_VARIABLES,
        drops: Sequence[str] = (),
        tell: Tell | None = None,
        recall: int = 0,
        pins: Sequence[str] = (),
    ) -> Prompt:
        """Make a prompt that starts at the longest saved prefix of a history.

        Only prefixes that end with one of the newest `LOOKUPS` answers count. The same messages
        with other tools are a different history.

        `drops` are the ids of calls whose outputs are dropped before anything is read. `pins` are
        the ids of calls whose outputs are kept (CannotPin if that is not possible). If the history
        has no output of one of these calls, raises UnknownOutput. `tell` writes a note for the
        model about the turn that the prompt continues; the note may be empty. `recall` is the most
        tokens of forgotten text to quote.
        """
        held = messages if isinstance(messages, Handle) else self.hold(messages)
        root = self._root_of(tools)
        chains: dict[str, str] = {}
        if drops or pins:
            chains = held.call(_hash_results, root, (*drops, *pins))
        self._drop_all(owner, drops, chains)
        pinned = self._find_pins(owner, pins, chains)
        prefixes: list[tuple[int, str]] = held.call(_hash_answers, root)
        refused, nearest = False, None
        outline = None if self._changes is None else held.call(_outline, root)
        for number, (known, chain) in enumerate(prefixes):
            if number == 1 and not refused:
                nearest = self._look_back(owner, held, root, session)
            parent, note = self._store.find_history(owner, chain), ""
            if parent is None and outline is not None:
                parent, note = self._find_changed(owner, outline, known)
                if parent is not None:
                    pinned = self._as_read(parent, drops, pinned)
            if parent is None:
                continue
            if tell is not None:
                note = join_notes(note, tell(parent))
            how = (session, tools, variables, recall, pinned)
            prompt = self._extend(parent, held, known, *how, chain=chain, note=note)
            if prompt is not None:
                prompt = _with_outline(prompt, outline)
                if number == 0:
                    return prompt
                return self._explained(prompt, held, known, prefixes, nearest, refused=refused)
            refused = True
        if len(prefixes) == 1 and not refused:
            nearest = self._look_back(owner, held, root, session)
        known, chain = prefixes[0] if prefixes else (0, root)
        dropped = self._store.dropped_chains(owner)
        how_read = (tools, dict(variables), root, dropped)
        prompt = held.call(_render_all, known, chain, *how_read)
        prompt = _with_outline(replace(prompt, owner=owner), outline)
        prompt = self._keep(prompt, PinnedPlaces(), (), pinned, prompt.beginning)
        prompt = self._explained(prompt, held, 0, prefixes, nearest, refused=refused)
        return replace(
            _with_shared_ids(prompt),
            owner=owner,
            session=session or f"sess_{secrets.token_hex(16)}",
        )

    def _drop_all(self, owner: str, drops: Sequence[str], chains: Mapping[str, str]) -> None:
        """Drop the outputs of some calls, given the hashes of the histories that end with them."""
        for number, call in enumerate(drops):
            if call not in chains:
                raise UnknownOutput(number, call, "drop")
        for call in drops:
            self._store.drop_result(owner, chains[call])

    def _find_pins(
        self, owner: str, pins: Sequence[str], chains: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the calls to pin, each by the hash of the history that ends with its output.

        Raises UnknownOutput, or CannotPin for an output that was dropped.
        """
        dropped = self._store.dropped_chains(owner) if pins else ()
        for number, call in enumerate(pins):
            if call not in chains:
                raise UnknownOutput(number, call, "pin")
            if chains[call] in dropped:
                raise was_dropped(call)
        return {chains[call]: call for call in pins}

    def _as_read(
        self, parent: TurnRecord, drops: Sequence[str], pins: Mapping[str, str]
    ) -> dict[str, str]:
        """Drop the outputs of some calls under the hashes with which they were read, and return
        the calls to pin by such hashes.

        This is needed because a history whose system messages have changed has other hashes.
        """

        def hash_of(call: str) -> str | None:
            found = self._store.list_results(parent.owner, parent.node, call, 1)
            return found[0][1].chain if found else None

        for call in drops:
            if (chain := hash_of(call)) is not None:
                self._store.drop_result(parent.owner, chain)
        return {hash_of(call) or chain: call for chain, call in pins.items()}

    def _keep(
        self,
        prompt: Prompt,
        found: PinnedPlaces,
        lost: Sequence[ResultPlace],
        pins: Mapping[str, str],
        beginning: int,
    ) -> Prompt:
        """Keep the pinned results of a prompt, as far as they fit.

        Args:
            found: the results that were read before this prompt.
            lost: those of `found` that have left the cache and cannot be read again, because they
                do not fit or their text is gone.
            pins: the hashes of the results that this request pins, and their calls; CannotPin if
                one does not fit.
            beginning: number of tokens of the stream's beginning.
        """
        wanted = self._store.pinned_chains(prompt.owner) | pins.keys()
        if not wanted:
            return prompt
        read = [one.where for one in prompt.messages if one.where]
        new = [one for one in read if one.chain in wanted and one.start < one.stop]
        places = (*found.held, *prompt.kept, *new)
        missing = [call for chain, call in pins.items() if chain not in {p.chain for p in places}]
        if pins:
            self._room.check(count_tokens(places) + count_tokens(lost), beginning)
        if missing:
            raise has_no_place(missing[0])
        left = self._room.left(beginning)
        kept: list[ResultPlace] = []
        for place in places:
            if count_tokens([*kept, place]) <= left and len(kept) < MOST_RANGES:
                kept.append(place)
        for chain in pins:
            self._store.pin_result(prompt.owner, chain)
        unkept = count_tokens(places) + count_tokens(lost) - count_tokens(kept)
        return replace(prompt, kept=tuple(sorted(kept)), unkept=unkept)

    def _find_changed(
        self, owner: str, outline: Outline, known: int
    ) -> tuple[TurnRecord | None, str]:
        """Find a turn that ends the same history with other system messages.

        Also makes the note that says how they differ.
        """
        assert self._changes is not None
        found = self._changes.find(owner, outline.hashes[known])
        if found is None:
            return None, ""
        node, systems = found
        note = describe_change(systems, outline.systems)
        return (None, "") if note is None else (self._store.find_turn(owner, node), note)

    def _look_back(self, owner: str, held: Handle, root: str, session: str | None) -> list[Message]:
        """Find the saved conversation that is most like a history which must be read again.

        Results that were dropped or pinned there are also dropped or pinned in this history.
        """
        messages: list[Message] = held.get()
        nearest = find_nearest(self._store, owner, messages, session)
        dropped, pinned = self._store.dropped_chains(owner), self._store.pinned_chains(owner)
        if not (dropped or pinned):
            return nearest
        before = same_results(nearest, messages)
        hashes: list[str] = held.call(_hash_all, root) if before else []
        for at, chain in before.items():
            if chain in dropped:
                self._store.drop_result(owner, hashes[at])
            elif chain in pinned:
                self._store.pin_result(owner, hashes[at])
        return nearest

    def _explained(
        self,
        prompt: Prompt,
        held: Handle,
        known: int,
        prefixes: list[tuple[int, str]],
        nearest: Sequence[Message] | None,
        *,
        refused: bool,
    ) -> Prompt:
        """Add to a prompt the reason why answers after `known` messages are read again."""
        answered = prefixes[0][0] if prefixes else 0
        if known >= answered:
            return prompt
        how = (known, answered, self._store.dropped_chains(prompt.owner))
        found = explain_reread(nearest or (), held.get(), *how, refused=refused)
        return replace(prompt, reread=found)

    def find_saved(
        self, owner: str, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[TurnRecord, int] | None:
        """Find the longest saved prefix of a history, which may be all of it.

        Returns its last turn and its number of messages.
        """
        held = self.hold([*messages, Message("user", "")])
        for known, chain in held.call(_hash_answers, self._root_of(tools)):
            if (found := self._store.find_history(owner, chain)) is not None:
                return found, known
        return None

    def hash_prefixes(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[str]:
        """Return the hash of each prefix of a history with these tools."""
        hashes: list[str] = self.hold(messages).call(_hash_all, self._root_of(tools))
        return hashes

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
        variables: Mapping[str, Any] = NO_VARIABLES,
        drops: Sequence[str] = (),
        tell: Tell | None = None,
        recall: int = 0,
        pins: Sequence[str] = (),
    ) -> Prompt | None:
        """Make a prompt that continues a saved turn, in its session if no other is named. If the
        session of the turn is hidden, the prompt gets a new one.

        `drops`, `tell`, `recall` and `pins` are as for `match`. Returns None if the template cannot
        render the messages without the earlier ones.
        """
        held = self.hold(messages)
        chains: dict[str, str] = {}
        if drops or pins:
            chains = held.call(_hash_results, parent.chain, (*drops, *pins))
            for call in (*drops, *pins):
                for _, place in self._store.list_results(parent.owner, parent.node, call, 1):
                    chains.setdefault(call, place.chain)
        self._drop_all(parent.owner, drops, chains)
        pinned = self._find_pins(parent.owner, pins, chains)
        note = "" if tell is None else tell(parent)
        return self._extend(parent, held, 0, session, tools, variables, recall, pinned, note=note)

    def _extend(
        self,
        parent: TurnRecord,
        held: Handle,
        known: int,
        session: str | None,
        tools: Sequence[Tool],
        variables: Mapping[str, Any],
        recall: int,
        pins: Mapping[str, str],
        *,
        chain: str | None = None,
        note: str = "",
    ) -> Prompt | None:
        """Make a prompt of the messages after the first `known` ones of a history.

        `chain` is the hash of these first messages. The prompt has a note in front, and at most
        `recall` tokens of recalled text. Pinned results that have left the cache are read again in
        the note.
        """
        chain = parent.chain if chain is None else chain
        dropped = self._store.dropped_chains(parent.owner)
        before = (known, chain, parent.last, parent.seen, dropped)
        recalled = self._recall(parent, held, known, recall)
        quoted = "" if recalled is None else recalled.text
        found, repeated, lost = PinnedPlaces(), list[Message](), list[ResultPlace]()
        beginning = parent.usage.get("beginning", 0)
        if pinned := self._store.pinned_chains(parent.owner) | pins.keys():
            found = find_pinned(self._store, parent, pinned, self._room.window)
            repeated, lost = self._repeat(parent, found, beginning)
        more = (note, quoted, tuple(repeated))
        prompt = held.call(_render_rest, *before, tools, dict(variables), *more)
        if prompt is None:
            return None
        prompt = self._keep(replace(prompt, owner=parent.owner), found, lost, pins, beginning)
        if dropped:
            gone = self._store.dropped_places(parent.owner, parent.node)
            prompt = replace(prompt, dropped=tuple(gone))
        return replace(
            _with_shared_ids(prompt),
            owner=parent.owner,
            parent=parent,
            session=session or _visible(parent.session),
            recalled=recalled,
        )

    def _repeat(
        self, parent: TurnRecord, found: PinnedPlaces, beginning: int
    ) -> tuple[list[Message], list[ResultPlace]]:
        """Return the messages of pinned results that have left the cache, as far as they fit.

        Also returns the places of the others, which do not fit or whose text is gone.
        """
        left = self._room.left(beginning) - count_tokens(found.held)
        repeated: list[Message] = []
        missing: list[ResultPlace] = []
        for place in found.lost:
            message = self._store.read_result(parent.owner, parent.node, place.chain)
            left -= place.stop - place.start
            if message is None or left < 0:
                missing.append(place)
            else:
                repeated.append(message)
        return repeated, missing

    def _recall(
        self, parent: TurnRecord, held: Handle, known: int, most: int
    ) -> RecalledText | None:
        """Find forgotten text that the last of some messages asks for."""
        if most < 1 or self._store.archive is None:
            return None
        asked: str = held.call(_asked_in, known)
        found = self._store.search_archive(parent.owner, parent.node, asked)
        return self._quote(found, most) if found else None

    def complete(self, owner: str, text: str | Sequence[int] | Handle) -> Prompt:
        """Make a prompt of a text or of tokens. Its turn is not saved."""
        if not isinstance(text, Handle):
            text = (self._short if len(text) < LONG else self._long).hold(text)
        return replace(_with_shared_ids(text.call(_read_text, self._vocabulary)), owner=owner)


def join_notes(*notes: str) -> str:
    """Join notes, some of which may be empty."""
    return "\n\n".join(filter(None, notes))


def _with_marks(messages: Sequence[Message]) -> list[Message]:
    """Mark the results of tools, so that their tokens are found."""
    return [
        replace(message, content=mark_text(message.content, number))
        if message.result is not None
        else message
        for number, message in enumerate(messages)
    ]


def _with_outline(prompt: Prompt, outline: Outline | None) -> Prompt:
    if outline is None:
        return prompt
    return replace(prompt, systems=outline.systems, outline=outline.hashes[-1])


def _visible(session: str) -> str:
    """Return the name of a session, or a new name if the session is hidden."""
    return f"sess_{secrets.token_hex(16)}" if is_hidden(session) else session


# Functions that a worker runs. The first argument is the renderer that it was opened with.


def _hash_answers(
    renderer: PromptRenderer, messages: Sequence[Message], root: str
) -> list[tuple[int, str]]:
    """Return the prefixes that end with the newest answers, the longest first.

    Each is a number of messages, and the hash of these messages.
    """
    answers = [at for at, message in enumerate(messages[:-1]) if message.role == "assistant"]
    hashes = hash_prefixes(root, messages[: answers[-1] + 1]) if answers else []
    return [(at + 1, hashes[at]) for at in reversed(answers[-LOOKUPS:])]


def _hash_results(
    renderer: PromptRenderer, messages: Sequence[Message], root: str, calls: Sequence[str]
) -> dict[str, str]:
    """Return, for each of some calls that has a result, the hash of the history up to its newest
    result.
    """
    hashes = hash_prefixes(root, messages)
    pairs = zip(messages, hashes, strict=True)
    return {one.result: hashed for one, hashed in pairs if one.result and one.result in calls}


def _hash_all(renderer: PromptRenderer, messages: Sequence[Message], root: str) -> list[str]:
    return hash_prefixes(root, messages)


def _outline(renderer: PromptRenderer, messages: Sequence[Message], root: str) -> Outline:
    return Outline.of(root, _split_prefill(messages)[0])


def _render_all(
    renderer: PromptRenderer,
    messages: Sequence[Message],
    known: int,
    chain: str,
    tools: Sequence[Tool],
    variables: Mapping[str, Any],
    root: str,
    dropped: Collection[str],
) -> Prompt:
    """Make the prompt of a whole history.

    Args:
        known: number of first messages whose hash is `chain`.
        root: the hash before all messages.
        dropped: hashes of histories that end with a result that is not read.
    """
    messages, prefill = _split_prefill(messages)
    shown = messages
    has_results = any(message.result is not None for message in messages)
    if dropped and has_results:
        shown = _without_dropped(messages, hash_prefixes(root, messages), dropped)
    plain = renderer.render(shown, tools, variables)
    rendered = renderer.begin_answer(plain, prefill)
    # A prompt that is too long has been refused by now.
    hashes = hash_prefixes(root, messages) if has_results else []
    hashed = hashes[-1] if hashes else hash_prefixes(chain, messages[known:])[-1]
    placed = _with_places(messages, hashes, plain, 0, dropped) if hashes else tuple(messages)
    return renderer.check(replace(rendered, hash=hashed, messages=placed))


def _without_dropped(
    messages: Sequence[Message], hashes: Sequence[str], dropped: Collection[str]
) -> list[Message]:
    """Return messages with the text `DROPPED` in place of dropped results."""
    return [
        replace(message, content=DROPPED)
        if message.result is not None and hashed in dropped
        else message
        for message, hashed in zip(messages, hashes, strict=True)
    ]


def _with_places(
    messages: Sequence[Message],
    hashes: Sequence[str],
    prompt: Prompt,
    start: int,
    dropped: Collection[str],
    skipped: int = 0,
) -> tuple[Message, ...]:
    """Return messages whose results have their place in the stream.

    Args:
        prompt: the rendered prompt, which has `skipped` other messages before these.
        start: the place in the stream of the prompt's first token.
    """
    found = list(messages)
    for place in prompt.places:
        number = place.name - skipped
        if number >= len(hashes):
            continue  # it is read again, as a part of a note
        # A dropped result has no tokens, but its hash must be known.
        stop = place.start if hashes[number] in dropped else place.stop
        where = ResultPlace(start + place.start, start + stop, hashes[number])
        found[number] = replace(found[number], where=where)
    return tuple(found)


def _render_rest(
    renderer: PromptRenderer,
    messages: Sequence[Message],
    known: int,
    chain: str,
    last: int,
    parent_seen: int,
    dropped: Collection[str],
    tools: Sequence[Tool],
    variables: Mapping[str, Any],
    note: str = "",
    quoted: str = "",
    repeated: Sequence[Message] = (),
) -> Prompt | None:
    """Make the prompt of the messages after the first `known` ones. The answer before them ended
    with the token `last`.

    Returns None if the template cannot render these messages without the earlier ones.

    A note in front has the text of `repeated` results, which are kept.
    """
    rest, prefill = _split_prefill(messages[known:])
    hashes = hash_prefixes(chain, rest)
    shown = _without_dropped(rest, hashes, dropped)
    if quoted:
        # Only the fed prompt has the quotations. The history that the client sends back does not.
        shown = [*shown[:-1], replace(shown[-1], content=quoted + shown[-1].content)]
    first = len(shown) + 1  # results that are repeated are marked by the numbers from here on
    quotes = [introduce(one) + mark_text(one.content, first + n) for n, one in enumerate(repeated)]
    marked = join_notes(note, *quotes)
    note = join_notes(note, *(introduce(one) + one.content for one in repeated))
    noted = [Message("system", marked), *shown] if note else shown
    rendered = renderer.render_next(noted, last, tools, variables)
    if rendered is None:
        return None
    start = parent_seen
    kept = []
    for place in rendered.places:
        where = repeated[place.name - first].where if repeated and place.name >= first else None
        if where is not None:
            kept.append(ResultPlace(start + place.start, start + place.stop, where.chain))
    messages = _with_places(rest, hashes, rendered, start, dropped, len(noted) - len(rest))
    rendered = renderer.begin_answer(rendered, prefill)
    rendered = replace(rendered, hash=hashes[-1], messages=messages, note=note, kept=tuple(kept))
    return renderer.check(rendered)


def _asked_in(renderer: PromptRenderer, messages: Sequence[Message], known: int) -> str:
    """Return the user's message to answer. Empty if the last message is not the user's."""
    last = _split_prefill(messages[known:])[0][-1:]
    return last[0].content if last and last[0].role == "user" else ""


def _split_prefill(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """Return the messages to answer, and the beginning of the answer (a last assistant message)."""
    if messages[-1].role != "assistant":
        return messages, ""
    return messages[:-1], messages[-1].content


def _read_text(renderer: PromptRenderer, text: str | Sequence[int], vocabulary: int) -> Prompt:
    """Make the prompt of a text or of tokens."""
    if isinstance(text, str):
        return renderer.check(Prompt(renderer.render_text(text)))
    wrong = next((token for token in text if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise WeirError(
            f"token {quote(wrong)} does not exist. Token ids must be 0 to {vocabulary - 1}."
        )
    return renderer.check(Prompt(list(text)))


def _with_shared_ids(prompt: Prompt) -> Prompt:
    """Let equal ids be one object. Ids from another process take 40 bytes each instead of 8."""
    same: dict[int, int] = {}
    return replace(prompt, ids=list(map(same.setdefault, prompt.ids, prompt.ids)))
