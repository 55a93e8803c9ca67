"""Where requests become turns: a history is found again, and only what is new is rendered.

Between those who speak text and an engine that knows tokens. Knows nothing about HTTP.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError, shown
from weir.models import Endings, sink_of, transformers_model
from weir.serve.book import Book
from weir.serve.calls import Tool, read_calls, written
from weir.serve.choosing import Chooser, Choosing, Constraint
from weir.serve.engine import Busy, Engine
from weir.serve.holding import Hold, Holder
from weir.serve.limits import Limits
from weir.serve.locks import Locks
from weir.serve.mailbox import Bell, Failure, Mailbox, Standing
from weir.serve.messages import Message, call_id, chain
from weir.serve.records import Record, Store, packed
from weir.serve.relay import Relay
from weir.serve.sessions import Sessions
from weir.serve.turn import Stage, Turn
from weir.serve.wording import Wording


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
    parent: Record | None = None
    session: str | None = None
    chain: str = ""
    messages: tuple[Message, ...] = ()
    beginning: int = 0
    header: int = 0
    hold: Hold | None = None

    @property
    def cached(self) -> int:
        """Tokens that need not be read: all before, but the last, which no answer reads itself."""
        return 0 if self.parent is None else self.parent.seen - 1

    @property
    def prompt(self) -> int:
        """Tokens of everything before the answer."""
        return len(self.ids) + (0 if self.parent is None else self.parent.seen)


@dataclass(frozen=True)
class Wish:
    """How a request wants to be answered.

    Attributes:
        choosings: one for each answer.
        limit: tokens of an answer.
        stops: texts that end one.
        ends: tokens that end one.
        constraint: makes for each what it must look like; None where it may be anything.
        tools: functions whose calls are looked for.
    """

    choosings: Sequence[Choosing]
    limit: int
    stops: Sequence[str]
    ends: frozenset[int]
    constraint: Callable[[], Constraint] | None = None
    tools: Sequence[Tool] = ()

    def ending_with(self, stop: str) -> Wish:
        """The same, ended by one text more."""
        return replace(self, stops=[*self.stops, stop])


class Ending(WeirError):
    """The server ends before the turn does."""


@dataclass(eq=False)
class Asked:
    """A request under way.

    Attributes:
        plan: what it asks.
        turns: one for each answer.
        mailbox: where the answers come.
    """

    plan: Plan
    turns: list[Turn]
    mailbox: Mailbox
    open: set[int] = field(default_factory=set)


class Desk:
    """Takes requests of many owners to one engine.

    Args:
        engine: answers them; its thread is this desk's from `open` on.
        store: the engine's shelf.
        tokenizer: of its model.
        name: of the model, as clients call it.
        limits: of what they may ask.
        book: keeps responses and conversations; in memory where none is given.
        hold: takes hold of sessions, where other servers may have them.

    Attributes:
        wording: how what is said becomes tokens.
        sessions: what is done with those that stand.
        locks: who is at which conversation.
        failure: why the engine has ended, if it did so by itself.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        limits: Limits,
        book: Book | None = None,
        hold: Holder | None = None,
    ) -> None:
        self.engine = engine
        self.store = store
        self.tokenizer = tokenizer
        self.name = name
        self.limits = limits
        self.book = book or Book(most=limits.texts)
        self._hold = hold
        self.locks = Locks()
        self.sessions = Sessions(engine, store, self.book, limits)
        self.failure: Exception | None = None
        self.ends = frozenset(Endings.of(engine.model.generation_config).stops)
        sink = sink_of(transformers_model(engine.model).config)
        self.wording = Wording(tokenizer, self.ends, sink)
        self._bell = Bell()
        engine.on_step = self._bell.ring
        self._open: Counter[str] = Counter()
        self._asked: set[Asked] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="weir-engine", daemon=True)
        # What is kept of one model and policy is of no use to another.
        kind = [name, str(engine.cache.policy), engine.cache.chunk, engine.cache.positions]
        self._root = hashlib.sha256(json.dumps(kind).encode()).hexdigest()

    @property
    def shares(self) -> bool:
        """Whether other servers have the same sessions."""
        return self._hold is not None

    # --- its engine

    def open(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Take no more requests, and wait so long for those under way."""
        self.engine.stop()
        self._thread.join(seconds)

    def drain(self, seconds: float) -> None:
        """The same, and then give up the rest, who are told why."""
        self.close(seconds)
        if self._thread.is_alive():
            for each in self._fail(Ending("the server is ending")):
                self.cancel(each)

    def _run(self) -> None:
        try:
            self.engine.run()
        except Exception as error:
            # Not a turn's fault, and nothing is answered any more: nobody is to wait in vain.
            self.failure = error
            self._fail(error)

    def _fail(self, error: Exception) -> list[Asked]:
        """Tell all requests under way that they have failed."""
        with self._lock:
            asked = list(self._asked)
        for each in asked:
            for answer in range(len(each.turns)):
                each.mailbox.post(Failure(answer, error))
        return asked

    # --- what is asked

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        return int(self.engine.model.config.get_text_config(decoder=True).vocab_size)

    def plan_chat(
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
        root = self._root
        if tools:
            root = hashlib.sha256(f"{root}\n{written(tools)}".encode()).hexdigest()
        hashes = chain(root, messages)
        for at in range(len(messages) - 2, -1, -1):
            if messages[at].role != "assistant":
                continue
            parent = self.store.at(owner, hashes[at])
            if parent is None:
                continue
            if plan := self.plan_after(parent, messages[at + 1 :], session, tools):
                return plan
        worded = self.wording.whole(messages, tools)
        named = session or f"sess_{secrets.token_hex(16)}"
        new = tuple(messages)
        beginning, header = worded.beginning, worded.header
        return self._checked(
            Plan(owner, worded.ids, None, named, hashes[-1], new, beginning, header)
        )

    def plan_after(
        self,
        parent: Record,
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
        worded = self.wording.after(new, parent.last, tools)
        if worded is None:
            return None
        end, named = chain(parent.chain, new)[-1], session or parent.session
        header = worded.header
        return self._checked(Plan(parent.owner, worded.ids, parent, named, end, new, header=header))

    def plan_text(self, owner: str, prompt: str | Sequence[int]) -> Plan:
        """A turn that continues a text, or tokens, and is not kept.

        Raises:
            TooLong: it would feed more tokens than it may.
            WeirError: a token is out of range, or there are none.
        """
        if isinstance(prompt, str):
            ids = self.wording.text(prompt)
        else:
            ids = list(prompt)
            wrong = next((token for token in ids if not 0 <= token < self.vocabulary), None)
            if wrong is not None:
                last = self.vocabulary - 1
                raise WeirError(f"token {shown(wrong)} does not exist; ids are 0 to {last}")
        return self._checked(Plan(owner, ids))

    def _checked(self, plan: Plan) -> Plan:
        if not plan.ids:
            raise WeirError("that makes no tokens; say something")
        if len(plan.ids) > self.limits.prompt:
            raise TooLong(
                f"that is {len(plan.ids):,} tokens to read, and one request may have "
                f"{self.limits.prompt:,}; send the rest in further turns"
            )
        if plan.session is None or self._hold is None:
            return plan
        return replace(plan, hold=self._hold(plan.owner, plan.session))

    def drop(self, plan: Plan) -> None:
        """A plan is not asked for, or is over."""
        if plan.hold is not None:
            plan.hold.release()

    # --- answers

    def ask(self, plan: Plan, wish: Wish, mailbox: Mailbox) -> Asked:
        """Let the engine answer.

        Raises:
            Busy: too many wait.
            WeirError: the engine takes no more.
        """
        turns = [self._turn(plan, wish, answer, mailbox) for answer in range(len(wish.choosings))]
        turns[0].answers = turns[1:]
        asked = Asked(plan, turns, mailbox, set(range(len(turns))))
        with self._lock:
            self._asked.add(asked)
        try:
            if self.failure is not None:
                raise WeirError("the engine has failed, and nothing is answered any more")
            self.engine.submit(turns[0])
        except WeirError:
            self.done(asked)
            raise
        return asked

    def _turn(self, plan: Plan, wish: Wish, answer: int, mailbox: Mailbox) -> Turn:
        def save(turn: Turn, text: str, standing: Standing) -> None:
            if plan.session is not None:
                self._save(plan, wish, turn, text, standing)

        choosing = wish.choosings[answer]
        cache = self.engine.cache
        kept = self.wording.special.values() if wish.tools else ()
        relay = Relay(answer, cache, self.tokenizer, wish.stops, mailbox, self._bell, save, kept)
        relay.turn = Turn(
            node=secrets.token_hex(16),
            start=None if plan.parent is None else plan.parent.node,
            ids=plan.ids,
            limit=wish.limit,
            stops=wish.ends,
            chooser=Chooser(
                choosing, tuple(plan.ids), wish.constraint() if wish.constraint else None
            ),
            listener=relay,
            client=plan.owner,
            beginning=plan.beginning,
            header=plan.header,
            keep=plan.session is not None,
        )
        return relay.turn

    def _save(self, plan: Plan, wish: Wish, turn: Turn, text: str, standing: Standing) -> None:
        assert plan.session is not None
        answer = Message("assistant", text)
        if wish.tools:
            answer = read_calls(self.wording.form, wish.tools, text, partial(call_id, turn.node))
        (end,) = chain(plan.chain, [answer])
        record = Record(
            node=turn.node,
            owner=plan.owner,
            session=plan.session,
            parent=None if plan.parent is None else plan.parent.node,
            chain=end,
            messages=(*plan.messages, answer),
            last=turn.chosen[-1],
            seen=standing.seen,
            usage={
                "prompt_tokens": plan.prompt,
                "cached_tokens": plan.cached,
                "completion_tokens": len(turn.chosen),
                "held": standing.held,
                "bytes": standing.bytes,
                "folds": standing.folds,
                "pinned": standing.pinned,
                "beginning": standing.beginning,
            },
            ids=packed([*plan.ids, *turn.chosen]),
        )
        try:
            (plan.hold or self.store).add(record)
        except Exception:
            self.engine.forget(turn.node)
            raise
        if plan.parent is not None and plan.parent.session == plan.session:
            return
        self.sessions.trim(plan.owner)

    def cancel(self, asked: Asked) -> None:
        """Nobody wants a request's answers any more."""
        for turn in asked.turns:
            self.engine.cancel(turn)

    def done(self, asked: Asked) -> None:
        """A request is over; its answers that are not are cancelled."""
        with self._lock:
            self._asked.discard(asked)
        if asked.open:
            self.cancel(asked)
        self.drop(asked.plan)

    def under_way(self, owner: str, session: str) -> Turn | None:
        """A turn of a session that has a row now."""
        with self._lock:
            own = [
                turn
                for asked in self._asked
                if (asked.plan.owner, asked.plan.session) == (owner, session)
                for turn in asked.turns
            ]
        begun = (turn for turn in own if turn.stage in (Stage.READING, Stage.ANSWERING))
        return next(begun, None)

    def enter(self, owner: str) -> None:
        """A request of an owner's begins; nothing of it is read before.

        Raises:
            Busy: too many of theirs, or of all, are under way.
        """
        with self._lock:
            if self._open[owner] >= self.limits.requests:
                raise Busy("too many requests of this key are under way")
            if self._open.total() >= self.limits.open:
                raise Busy("too many requests are under way")
            self._open[owner] += 1

    def leave(self, owner: str) -> None:
        """A request that was let in is over."""
        with self._lock:
            self._open[owner] -= 1
            if not self._open[owner]:
                del self._open[owner]

    def open_of(self, owner: str) -> int:
        """Requests of an owner that are under way."""
        with self._lock:
            return self._open[owner]
