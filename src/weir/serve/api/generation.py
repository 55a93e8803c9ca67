"""From a body to events of its answers, for as long as the client is there."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from weir.errors import NotFiniteError, WeirError
from weir.serve.api.errors import Refused, failed, locked, overloaded
from weir.serve.api.logs import LOG
from weir.serve.api.metrics import Metrics
from weir.serve.api.middleware import note
from weir.serve.api.requests import Gone
from weir.serve.api.schemas.chat import Asking
from weir.serve.client import Asked, Ending, EngineClient, Wish
from weir.serve.engine import (
    Busy,
    Cancelled,
    Event,
    FailureEvent,
    FinishEvent,
    OutputQueue,
    Stage,
    TokenEvent,
)
from weir.serve.prefix_match import Plan, TooLong
from weir.serve.sessions import AnsweredElsewhere, LeaseLost
from weir.serve.structured import BadSchema

T = TypeVar("T")
TRIES = 3
"""How often a turn is begun whose beginning was dropped while it waited."""


@dataclass
class Answers:
    """Answers to one request, as they come.

    Attributes:
        desk: who is asked.
        asked: the request under way.
        began: events that have come already.
        ends: by answer, how it ended.
    """

    desk: EngineClient
    metrics: Metrics
    asked: Asked
    began: Sequence[Event]
    ends: dict[int, FinishEvent] = field(default_factory=dict)
    _last: dict[int, float] = field(default_factory=dict)

    async def events(self) -> AsyncIterator[list[TokenEvent | FinishEvent]]:
        """Events until all answers have ended.

        Raises:
            Refused: one of them failed; then all are given up.
        """
        events = self.began
        while True:
            good: list[TokenEvent | FinishEvent] = []
            for event in events:
                if event.answer in self.ends:
                    continue  # it was given up at the moment it ended
                if isinstance(event, FailureEvent):
                    self.asked.open.discard(event.answer)
                    raise why(event.error)
                self._count(event)
                good.append(event)
            if good:
                yield good
            if not self.asked.open:
                return
            events = await self.asked.mailbox.take()

    def _count(self, event: TokenEvent | FinishEvent) -> None:
        if isinstance(event, TokenEvent):
            before = self._last.get(event.answer)
            if before is not None:
                self.metrics.between.observe(event.at - before)
            self._last[event.answer] = event.at
            return
        self.ends[event.answer] = event
        self.asked.open.discard(event.answer)
        self.metrics.turns.labels(event.reason).inc()
        self.metrics.tokens.labels("answered").inc(event.tokens)

    def close(self) -> None:
        """Nobody wants what is still to come."""
        if self.asked.open:
            self.metrics.turns.labels("given up").inc(len(self.asked.open))
        self.desk.done(self.asked)

    @property
    def answered(self) -> int:
        """Tokens of all answers that have ended."""
        return sum(end.tokens for end in self.ends.values())

    def usage(self) -> dict[str, Any]:
        """What the request took, as OpenAI tells it, and in `weir` where its streams stand.

        Of several answers `bytes` and `folds` are those of all, the others the largest.
        """
        plan, answered = self.asked.plan, self.answered
        standings = [end.standing for end in self.ends.values()]
        return {
            "prompt_tokens": plan.prompt,
            "completion_tokens": answered,
            "total_tokens": plan.prompt + answered,
            "prompt_tokens_details": {"cached_tokens": plan.cached},
            "weir": {
                "seen": max((standing.seen for standing in standings), default=0),
                "held": max((standing.held for standing in standings), default=0),
                "bytes": sum(standing.bytes for standing in standings),
                "folds": sum(standing.folds for standing in standings),
                "pinned": max((standing.pinned for standing in standings), default=0),
                "beginning": max((standing.beginning for standing in standings), default=0),
            },
        }


def wish_of(
    desk: EngineClient,
    body: Asking,
    limit: tuple[str, int | None],
    logprobs: int | None,
    default: int,
) -> Wish:
    """How a body wants to be answered.

    Args:
        desk: who answers.
        body: of the request.
        limit: which field says how many tokens an answer has, and what it says.
        logprobs: so many of the likeliest tokens are told with each; None for none at all.
        default: tokens of an answer where nothing is said.

    Raises:
        Refused: it asks for what the model does not have, or for too much.
    """
    limits, rows = desk.limits, desk.engine.load().rows
    name, most = limit
    if body.answers > rows:
        raise Refused(400, f"Invalid 'n': this server gives {rows} at most.", param="n")
    if most is not None and most > limits.answer:
        raise Refused(
            400, f"Invalid '{name}': an answer has {limits.answer:,} at most.", param=name
        )
    for token in body.logit_bias or {}:
        if not (token.isascii() and token.isdecimal() and len(token) < 10) or not (
            int(token) < desk.vocabulary
        ):
            raise Refused(
                400,
                f"Invalid 'logit_bias': its keys are tokens from 0 to {desk.vocabulary - 1}.",
                param="logit_bias",
            )
    try:
        choosings = body.choosings(logprobs, secrets.randbits(62))
    except WeirError as error:
        raise Refused(400, str(error)) from None
    ends = frozenset(body.stop_token_ids or ())
    ends = ends if body.ignore_eos else ends | desk.ends
    return Wish(choosings, most or min(default, limits.answer), body.stops, ends)


async def begin(
    request: Request, plan: Callable[[str], Plan], wish: Wish, owner: str, param: str
) -> Answers:
    """Let a request be answered, and wait until the first token has come.

    Args:
        request: of the client, who may leave meanwhile.
        plan: makes its plan, in a thread; called again where what it begins from was dropped.
        wish: how it wants to be answered.
        owner: whose it is.
        param: what the plan is made of, for errors.

    Raises:
        Refused: it is not answered.
        Gone: nobody waits for an answer.
    """
    desk: EngineClient = request.app.state.desk
    metrics: Metrics = request.app.state.metrics
    loop = asyncio.get_running_loop()
    began = loop.time()
    for again in range(TRIES):
        try:
            made = await _made(desk, plan, owner)
        except TooLong as error:
            raise Refused(400, str(error), param=param, code="prompt_too_long") from None
        except AnsweredElsewhere as error:
            raise locked(str(error), error.seconds) from None
        except WeirError as error:
            raise Refused(400, str(error), param=param, code="invalid_value") from None
        mailbox = OutputQueue(loop, desk.limits.unread * len(wish.choosings))
        try:
            asked = desk.ask(made, wish, mailbox)
        except Busy:
            raise overloaded("too many requests wait for a row") from None
        except WeirError:
            raise closing() from None
        answers = Answers(desk, metrics, asked, ())
        try:
            answers.began = await while_there(request, _first(asked, desk))
        except BaseException:
            answers.close()
            raise
        first = answers.began[0]
        if isinstance(first, FailureEvent) and again + 1 < TRIES and _dropped(desk, made):
            answers.asked.open.clear()
            answers.close()
            continue
        if isinstance(first, FailureEvent):
            answers.close()
            raise why(first.error)
        break
    metrics.tokens.labels("read").inc(made.prompt - made.cached)
    metrics.tokens.labels("cached").inc(made.cached)
    metrics.first.observe(loop.time() - began)
    note(request.scope, read=made.prompt - made.cached, cached=made.cached)
    return answers


async def _made(desk: EngineClient, plan: Callable[[str], Plan], owner: str) -> Plan:
    """A plan, made in a thread; one that is made when nobody waits any more is dropped."""
    making = asyncio.ensure_future(asyncio.to_thread(plan, owner))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(
            lambda done: None if done.cancelled() or done.exception() else desk.drop(done.result())
        )
        raise


async def _first(asked: Asked, desk: EngineClient) -> Sequence[Event]:
    """The first events of a request; it is given up if it waits too long for a row."""
    waiting = asyncio.ensure_future(asked.mailbox.take())
    try:
        done, _ = await asyncio.wait({waiting}, timeout=desk.limits.wait)
        if not done and asked.turns[0].stage is Stage.WAITING:
            raise overloaded("no row has become free in time")
        return await waiting
    finally:
        waiting.cancel()


def _dropped(desk: EngineClient, plan: Plan) -> bool:
    """Whether the turn that a plan goes on from is not kept any more."""
    parent = plan.parent
    return parent is not None and desk.store.find_turn(plan.owner, parent.node) is None


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, unless the client hangs up before.

    Raises:
        Gone: it did; the work is cancelled.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(hung_up(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def hung_up(receive: Callable[[], Any]) -> None:
    """Returns when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def why(error: Exception) -> Refused:
    """What a client is told of a turn that failed: nothing of the server's folders and memory."""
    if isinstance(error, Cancelled):
        return overloaded("the answer was not read in time, and was given up")
    if isinstance(error, Ending):
        return closing()
    if isinstance(error, BadSchema):
        return Refused(400, str(error), code="invalid_json_schema")
    if isinstance(error, LeaseLost):
        return locked(str(error), 1.0)
    LOG.error("turn failed", exc_info=error)
    if isinstance(error, NotFiniteError):
        return failed(str(error))
    return failed()


def closing() -> Refused:
    """The server is ending."""
    return Refused(
        503,
        "the server is ending; ask again in a moment",
        code="server_closing",
        kind="server_error",
        headers={"Retry-After": "5"},
    )
