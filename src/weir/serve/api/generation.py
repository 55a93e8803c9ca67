"""From the body of a request to its answers, sent as one object or as events."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from weir.errors import NotFiniteError, WeirError, in_words
from weir.serve.api.dependencies import run_in_thread
from weir.serve.api.errors import (
    APIError,
    rate_limited,
    server_closing,
    server_error,
    storage_full,
)
from weir.serve.api.middleware import LOG, add_log_fields
from weir.serve.api.operations import Metrics
from weir.serve.api.requests import SESSION_HEADER, unknown_query, while_connected
from weir.serve.api.schemas.base import show_name
from weir.serve.api.schemas.chat import GenerationBody
from weir.serve.api.sse import EventStream, KeepAlive, encode_event
from weir.serve.client import EngineClient, Generation, GenerationRequest, ServerClosing
from weir.serve.engine.engine import Cancelled
from weir.serve.engine.output import AnswerEvent, FinishEvent, TokenEvent
from weir.serve.engine.scheduler import Busy
from weir.serve.pins import count_tokens, pin_for
from weir.serve.prompts import LOOKUPS, Prompt
from weir.serve.sessions.records import StorageFull, is_hidden
from weir.serve.structured import BadSchema

WARNING_HEADER = "x-weir-warning"
FORGOTTEN_HEADER = "x-weir-forgotten"
"""Header with the number of tokens of the conversation that were in no slot after the previous
answer.
"""
WARNINGS = 16
"""The most parts of a request that a warning names."""
ATTEMPTS = 2 + LOOKUPS
"""The most times that a request is started.

It is started again if the turn that it continues is deleted while it waits, or because the turn's
snapshot is damaged. It then continues an earlier turn, or no turn if no earlier one is left.
"""

FULL = "too many requests are waiting for a row. Try again later."
"""The error of a request for which the queue has no room."""

Events = AsyncIterator[list[AnswerEvent]]


class Renderer(ABC):
    """Writes the answers to one request in one API's format."""

    @abstractmethod
    async def whole(self, events: Events) -> dict[str, Any]:
        """Write all answers as one object."""

    @abstractmethod
    def stream(self, events: Events) -> AsyncIterator[bytes]:
        """Write answers in parts, while they are generated."""

    media_type = "text/event-stream"

    def keep_alive(self, generation: Generation) -> bytes:
        """Write something that clients ignore, for a stream to which nothing was added for a while.

        Proxies and clients close a connection on which nothing arrives for about a minute.
        """
        progress = generation.progress
        if progress.waiting:
            return b": waiting for a row\n\n"
        if progress.processed >= progress.total:
            return b": answering\n\n"
        read = f"{progress.processed:,} of {progress.total:,} tokens of the prompt have been read"
        return f": {read}\n\n".encode()

    def failure(self, error: APIError) -> bytes:
        """Write that an answer failed after the stream began."""
        return encode_event(error.body)


def make_request(
    client: EngineClient,
    body: GenerationBody,
    match: Callable[[], Prompt],
    limit: tuple[str, int | None],
    logprobs: int | None,
    default: int,
) -> GenerationRequest:
    """Make the request that a body asks for, without constraint and tools.

    Args:
        match: finds the prompt of the request.
        limit: the field with the maximum number of tokens of an answer, and its value.
        logprobs: number of most likely tokens to report with each; None for no log-probabilities.
        default: the maximum number of tokens of an answer if the body sets none; the server's limit
            applies if it is smaller.
    """
    limits, rows = client.limits, client.engine.load().rows
    name, tokens = limit
    if body.num_answers > rows:
        raise APIError(
            400,
            f"Invalid 'n': this server gives at most {in_words(rows, 'answer')} to a request.",
            param="n",
        )
    if tokens is not None and tokens > limits.answer:
        body.note(f"{name} above {limits.answer}")
    if tokens is not None and not 0 < tokens <= limits.answer:
        tokens = limits.answer
    for token in body.logit_bias or {}:
        if not (token.isascii() and token.isdecimal() and len(token) < 10) or not (
            int(token) < client.vocabulary
        ):
            raise APIError(
                400,
                "Invalid 'logit_bias': its keys must be token ids from 0 to "
                f"{client.vocabulary - 1}.",
                param="logit_bias",
            )
    try:
        sampling = body.sampling_params(logprobs, secrets.randbits(62), client.defaults)
    except WeirError as error:
        raise APIError(400, str(error)) from None
    for number, stop in enumerate(body.stop_token_ids or ()):
        if stop >= client.vocabulary:
            raise APIError(
                400,
                f"Invalid 'stop_token_ids[{number}]': there is no token {stop}. This model has "
                f"the tokens 0 to {client.vocabulary - 1}.",
                param=f"stop_token_ids[{number}]",
            )
    stop_ids = frozenset(body.stop_token_ids or ())
    return GenerationRequest(
        match,
        tuple(sampling),
        tokens or min(default, limits.answer),
        tuple(body.stops),
        stop_ids if body.ignore_eos else stop_ids | client.stop_ids,
        ignores_end=bool(body.ignore_eos),
    )


async def send_answers(
    http: Request,
    request: GenerationRequest,
    param: str,
    make_renderer: Callable[[Generation], Renderer],
    body: GenerationBody,
    *,
    always_named: bool = False,
) -> Response:
    """Submit a request to the engine, and send its answers.

    A stream begins at once, while its prompt waits or is being read. An error before the stream
    begins is sent as a status code, and a later error as an event.

    Args:
        param: the field that the prompt comes from, for errors.
        body: says whether the answers are streamed, and which parts the warning must name.
        always_named: whether the session header is sent even if there is no session.
    """
    client: EngineClient = http.app.state.client
    metrics: Metrics = http.app.state.metrics
    generation = await _submit(http, request, param)

    def close() -> None:
        _close(generation, metrics)

    try:
        renderer = make_renderer(generation)
    except BaseException:
        close()
        raise
    named = generation.prompt.session
    if named is not None and is_hidden(named):
        named = None
    if named is not None:
        add_log_fields(http.scope, session=named)
    headers = {} if named is None and not always_named else {SESSION_HEADER: named or ""}
    if (parent := generation.prompt.parent) is not None and parent.usage.get("forgotten"):
        headers[FORGOTTEN_HEADER] = str(parent.usage["forgotten"])
    headers |= warn(http, body.skipped, _warn_unpinned(http, client, generation.prompt))
    events = _events(http, generation, param)

    async def frames() -> AsyncIterator[bytes]:
        try:
            async for frame in renderer.stream(events):
                yield frame
        except APIError as error:
            add_log_fields(http.scope, failed=error.status)
            yield renderer.failure(error)

    if body.streams:
        pause = client.limits.report if body.wants_progress else client.limits.ping
        keep_alive = KeepAlive(pause, lambda: renderer.keep_alive(generation))
        return EventStream(
            frames(),
            generation.queue.overrun,
            client.limits.stall,
            close,
            headers,
            renderer.media_type,
            keep_alive,
        )
    try:
        whole = await while_connected(http, renderer.whole(events))
    finally:
        close()
    add_log_fields(http.scope, answered=generation.tokens)
    return JSONResponse(whole, headers=headers)


def _warn_unpinned(http: Request, client: EngineClient, prompt: Prompt) -> str:
    """Log that the beginning of a new conversation does not fit into the pinned slots, and return
    what to do about it. Returns an empty text if it fits. Later turns of the conversation are not
    warned again. Does the same for pinned outputs of tools, in every turn.
    """
    pinned = client.pinned
    if prompt.unkept:
        parent = prompt.parent
        beginning = prompt.beginning if parent is None else parent.usage.get("beginning", 0)
        needed = pin_for(beginning + count_tokens(prompt.kept) + prompt.unkept)
        add_log_fields(http.scope, unpinned=prompt.unkept, pin=needed)
        return (
            f"{in_words(prompt.unkept, 'token')} of pinned outputs "
            f"{'has' if prompt.unkept == 1 else 'have'} no "
            f"room, and can be evicted like others; start the server with --pin {needed}"
        )
    if prompt.parent is not None or pinned is None or prompt.beginning <= pinned:
        return ""
    needed = pin_for(prompt.beginning)
    add_log_fields(http.scope, unpinned=prompt.beginning - pinned, pin=needed)
    return (
        f"only the first {pinned} of the {in_words(prompt.beginning, 'token')} of the system "
        f"message and tools are never evicted; start the server with --pin {needed}"
    )


def warn(http: Request, skipped: Sequence[str], other: str = "") -> dict[str, str]:
    """Log the parts of a request that have no effect, and return the header that names them.

    Args:
        skipped: the names of these parts.
        other: another warning for the same header.
    """
    if not skipped:
        return {WARNING_HEADER: other} if other else {}
    shown = [
        *skipped[:WARNINGS],
        *([f"{len(skipped) - WARNINGS} more"] * (len(skipped) > WARNINGS)),
    ]
    add_log_fields(http.scope, skipped=shown)
    said = f"no effect here: {', '.join(shown)}"
    return {WARNING_HEADER: f"{said}; {other}" if other else said}


async def warn_query(request: Request, response: Response) -> None:
    """Add the warning header to a GET with query parameters that have no effect.

    All routes that need a key depend on this. Only the routes that depend on `check_query` refuse
    such parameters. The others do not, because clients send some on their own: Codex adds its
    version to `/v1/models`.
    """
    if request.method == "GET":
        response.headers.update(warn(request, [*map(show_name, unknown_query(request))]))


async def _submit(http: Request, request: GenerationRequest, param: str) -> Generation:
    """Find the prompt of a request, and submit it to the engine."""
    client: EngineClient = http.app.state.client
    prompt = await run_in_thread(client.match, request, param=param)
    try:
        return client.generate(request, prompt, asyncio.get_running_loop(), http.state.holder)
    except Busy:
        raise rate_limited(FULL) from None
    except WeirError:
        raise server_closing() from None


async def _events(http: Request, generation: Generation, param: str) -> Events:
    """Yield the events of a generation, and count them.

    If the turn that the prompt continues is deleted before the generation starts, another turn that
    the prompt can continue is looked up.
    """
    client: EngineClient = http.app.state.client
    metrics: Metrics = http.app.state.metrics
    loop = asyncio.get_running_loop()
    began = loop.time()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            error = await generation.start(client.limits.wait)
        except Busy as full:
            raise rate_limited(str(full)) from None
        if error is None:
            break
        prompt = generation.prompt
        parent = prompt.parent
        dropped = parent is not None and client.store.find_turn(prompt.owner, parent.node) is None
        if attempt == ATTEMPTS or not dropped:
            raise to_api_error(error)
        generation.close()
        found = await run_in_thread(client.match, generation.request, param=param)
        try:
            client.restart(generation, found)
        except Busy:
            raise rate_limited(FULL) from None
        except WeirError:
            raise server_closing() from None
    read, cached = generation.prompt.length - generation.cached, generation.cached
    metrics.tokens.labels("read").inc(read)
    metrics.tokens.labels("cached").inc(cached)
    metrics.first.observe(loop.time() - began)
    add_log_fields(http.scope, read=read, cached=cached)
    if (reread := generation.prompt.reread) is not None:
        # Without the detail, which quotes messages.
        add_log_fields(http.scope, reread=reread.why, reread_from=reread.start)
    if (recalled := generation.prompt.recalled) is not None:
        add_log_fields(http.scope, recalled=recalled.tokens)  # without the recalled text
    if generation.prompt.note:
        add_log_fields(http.scope, noted=len(generation.prompt.note))
    async for events in _observe(generation, metrics):
        yield events


async def _observe(generation: Generation, metrics: Metrics) -> Events:
    """Yield the events of a generation, and count them."""
    last: dict[int, float] = {}
    try:
        async for events in generation.events():
            for event in events:
                if isinstance(event, FinishEvent):
                    metrics.turns.labels(event.reason).inc()
                    metrics.tokens.labels("answered").inc(event.tokens)
                    continue
                if not isinstance(event, TokenEvent):
                    continue
                if event.answer in last:
                    metrics.between.observe(event.at - last[event.answer])
                last[event.answer] = event.at
            yield events
    except Exception as error:
        raise to_api_error(error) from None


def _close(generation: Generation, metrics: Metrics) -> None:
    if generation.running:
        metrics.turns.labels("given up").inc(len(generation.running))
    generation.close()


def progress_of(generation: Generation) -> dict[str, Any]:
    """Return how much of a prompt has been read, in the fields of llama.cpp's `return_progress`."""
    progress = generation.progress
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round((time.perf_counter() - generation.began) * 1000),
    }


def usage_of(generation: Generation, so_far: int | None = None) -> dict[str, Any]:
    """Return the token usage of a request: OpenAI's fields, and the state of its streams in `weir`.

    Only answers that have ended count, except that `so_far`, if given, is the number of tokens of
    all answers so far. If there are several answers, `bytes` and `folds` in `weir` are sums,
    `tools` lists the calls of all answers, `forgotten_turns` is the longest list of any answer, and
    the other numbers that can differ between answers are the largest of any answer.
    """
    prompt = generation.prompt
    answered = generation.tokens if so_far is None else so_far
    stats = [end.stats for end in generation.finished.values()]
    ends = [end for _, end in sorted(generation.finished.items())]
    lost = max((end.lost for end in ends), key=len, default=())
    used = [use for end in ends for use in end.used]
    outputs = max((one.pinned_outputs for one in stats), default=0)
    return {
        "prompt_tokens": prompt.length,
        "completion_tokens": answered,
        "total_tokens": prompt.length + answered,
        "prompt_tokens_details": {"cached_tokens": generation.cached},
        "weir": {
            "seen": max((one.seen for one in stats), default=0),
            "held": max((one.held for one in stats), default=0),
            "bytes": sum(one.bytes for one in stats),
            "folds": sum(one.folds for one in stats),
            "pinned": max((one.pinned for one in stats), default=0),
            "beginning": max((one.beginning for one in stats), default=0),
            "forgotten": max((one.forgotten for one in stats), default=0),
            **({"pinned_outputs": outputs} if outputs else {}),
            **({} if prompt.reread is None else {"reread": prompt.reread.to_json()}),
            **({"noted": prompt.note} if prompt.note else {}),
            **({"forgotten_turns": list(lost)} if lost else {}),
            **({} if prompt.recalled is None else {"recalled": prompt.recalled.to_json()}),
            **({"tools": [vars(use) for use in used]} if used else {}),
        },
    }


def to_api_error(error: Exception) -> APIError:
    """Convert a failure to an error for the client, without details of the server's folders and
    memory.
    """
    if isinstance(error, Cancelled):
        return rate_limited(
            "the client did not read the answer fast enough, so it was given up. Send the request "
            "again."
        )
    if isinstance(error, ServerClosing):
        return server_closing()
    if isinstance(error, BadSchema):
        return APIError(400, str(error), code="invalid_json_schema")
    LOG.error("turn failed", exc_info=error)
    if isinstance(error, StorageFull):
        return storage_full(str(error))
    if isinstance(error, NotFiniteError):
        return server_error(str(error))
    return server_error()
