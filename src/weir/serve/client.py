"""Where plans become turns, and whose they are: requests of many owners to one engine.

Between those who speak text and an engine that knows tokens. Knows nothing about HTTP.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.models import StopTokens, sink_of, transformers_model
from weir.serve.engine import (
    Busy,
    Constraint,
    Engine,
    FailureEvent,
    Notifier,
    OutputQueue,
    Sampler,
    SamplingParams,
    Sequence,
    Stage,
)
from weir.serve.limits import Limits
from weir.serve.messages import Message, call_id, chain
from weir.serve.output_processor import Answer, OutputProcessor
from weir.serve.prefix_match import Plan, PromptMatcher
from weir.serve.rendering import PromptRenderer
from weir.serve.sessions import (
    AcquireLease,
    ConversationLocks,
    ResponseStore,
    SessionManager,
    SessionStore,
    TurnRecord,
    pack_ids,
)
from weir.serve.tools import Tool, read_calls


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
        alone: whether an answer is made of calls and has no text.
    """

    choosings: list[SamplingParams]
    limit: int
    stops: list[str]
    ends: frozenset[int]
    constraint: Callable[[], Constraint] | None = None
    tools: tuple[Tool, ...] = ()
    alone: bool = False

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
    turns: list[Sequence]
    mailbox: OutputQueue
    open: set[int] = field(default_factory=set)


class EngineClient:
    """Takes requests of many owners to one engine.

    Args:
        engine: answers them; its thread is this desk's from `open` on.
        store: the engine's shelf.
        tokenizer: of its model.
        name: of the model, as clients call it.
        limits: of what they may ask.
        responses: keeps responses and conversations; in memory where none is given.
        hold: takes hold of sessions, where other servers may have them.

    Attributes:
        wording: how what is said becomes tokens.
        planner: makes plans of what is said.
        shares: whether other servers have the same sessions.
        sessions: what is done with those that stand.
        locks: who is at which conversation.
        failure: why the engine has ended, if it did so by itself.
    """

    def __init__(
        self,
        engine: Engine,
        store: SessionStore,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        limits: Limits,
        responses: ResponseStore | None = None,
        hold: AcquireLease | None = None,
    ) -> None:
        self.engine = engine
        self.store = store
        self.tokenizer = tokenizer
        self.name = name
        self.limits = limits
        self.responses = responses or ResponseStore(most=limits.texts)
        self.shares = hold is not None
        self.locks = ConversationLocks()
        self.sessions = SessionManager(engine, store, self.responses, limits)
        self.failure: Exception | None = None
        self.ends = frozenset(StopTokens.of(engine.model.generation_config).stops)
        sink = sink_of(transformers_model(engine.model).config)
        self.wording = PromptRenderer(tokenizer, self.ends, sink)
        self._bell = Notifier()
        engine.on_step = self._bell.ring
        self._open: Counter[str] = Counter()
        self._asked: set[Asked] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="weir-engine", daemon=True)
        # What is kept of one model and policy is of no use to another.
        kind = [name, str(engine.cache.policy), engine.cache.chunk, engine.cache.positions]
        root = hashlib.sha256(json.dumps(kind).encode()).hexdigest()
        self.planner = PromptMatcher(self.wording, store, limits, root, self.vocabulary, hold)

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
                each.mailbox.post(FailureEvent(answer, error))
        return asked

    # --- what is asked

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        return int(self.engine.model.config.get_text_config(decoder=True).vocab_size)

    def drop(self, plan: Plan) -> None:
        """A plan is not asked for, or is over."""
        if plan.hold is not None:
            plan.hold.release()

    # --- answers

    def ask(self, plan: Plan, wish: Wish, mailbox: OutputQueue) -> Asked:
        """Let the engine answer.

        Raises:
            Busy: too many wait.
            WeirError: the engine takes no more.
        """
        answers = range(len(wish.choosings))
        try:
            turns = [self._turn(plan, wish, answer, mailbox) for answer in answers]
        except BaseException:
            self.drop(plan)
            raise
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

    def _turn(self, plan: Plan, wish: Wish, answer: int, mailbox: OutputQueue) -> Sequence:
        def save(turn: Sequence, answer: Answer) -> None:
            if plan.session is not None:
                self._save(plan, wish, turn, answer)

        choosing = wish.choosings[answer]
        cache = self.engine.cache
        kept = self.wording.special.values() if wish.tools else ()
        relay = OutputProcessor(
            answer, cache, self.tokenizer, wish.stops, mailbox, self._bell, save, kept
        )
        relay.turn = Sequence(
            node=secrets.token_hex(16),
            start=None if plan.parent is None else plan.parent.node,
            ids=plan.ids,
            limit=wish.limit,
            stops=wish.ends,
            chooser=Sampler(
                choosing, tuple(plan.ids), wish.constraint() if wish.constraint else None
            ),
            listener=relay,
            client=plan.owner,
            beginning=plan.beginning,
            header=plan.header,
            keep=plan.session is not None,
        )
        return relay.turn

    def _save(self, plan: Plan, wish: Wish, turn: Sequence, whole: Answer) -> None:
        assert plan.session is not None
        standing, answer = whole.standing, Message("assistant", whole.text)
        if wish.tools:
            form, ids, cut = self.wording.form, partial(call_id, turn.node), whole.cut
            answer = read_calls(form, wish.tools, whole.text, ids, cut=cut, alone=wish.alone)
        (end,) = chain(plan.chain, [answer])
        record = TurnRecord(
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
            ids=pack_ids([*plan.ids, *turn.chosen]),
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

    def under_way(self, owner: str, session: str) -> Sequence | None:
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
