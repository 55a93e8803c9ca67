"""The client of the engine: turn requests into sequences, and save their answers.

This file connects the HTTP API, which works with text, to the engine, which works with tokens. It
does not use HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.cache import holding_in
from weir.errors import WeirError, in_words, quote
from weir.models import StopTokens, sink_of, transformers_model
from weir.policies import pinned_slots
from weir.serve.after_thoughts import AfterThoughts, ThoughtTokens
from weir.serve.changes import ChangedPrefixes
from weir.serve.engine.engine import Continuation, Engine
from weir.serve.engine.output import (
    AnswerEvent,
    EventSender,
    FailureEvent,
    FinishEvent,
    OutputEvent,
    OutputProcessor,
    OutputQueue,
    ToolUse,
)
from weir.serve.engine.sampler import Sampler, SamplingParams, read_defaults
from weir.serve.engine.scheduler import Busy
from weir.serve.engine.sequence import Stage, TokenSequence
from weir.serve.forgotten import describe_forgotten, tell_forgotten
from weir.serve.limits import Limits
from weir.serve.messages import Message, ResultPlace, call_id, hash_prefixes
from weir.serve.pins import (
    CannotPin,
    PinnedPlaces,
    PinRoom,
    count_tokens,
    find_pinned,
    was_dropped,
)
from weir.serve.prompts import Prompt, PromptMatcher, PromptRenderer
from weir.serve.sessions.manager import SessionManager, UnknownSession
from weir.serve.sessions.records import (
    StorageFull,
    TurnRecord,
    is_hidden,
    pack_ids,
    unpack_ids,
)
from weir.serve.sessions.responses import ResponseStore
from weir.serve.thoughts import OPEN, ThoughtParser
from weir.serve.tools.formats import Tool
from weir.serve.tools.own import (
    DROP_TOOL_OUTPUT,
    KEEP_TOOL_OUTPUT,
    MAX_CALLS,
    OwnTool,
    OwnTools,
    ToolContext,
    clip_result,
)
from weir.serve.tools.parser import AnswerPart, CallParser, join_parts
from weir.serve.tools.recalling import make_recall_tool
from weir.serve.worker import Worker
from weir.stream import RECALL_SHARE, Detokenizer, PromptEncoder, held_ranges
from weir.stream.archive import find_quotes

if TYPE_CHECKING:
    from weir.serve.structured import GrammarConstraint

LOG = logging.getLogger("weir.serve")
TOOL_THREADS = 2
"""Calls of the server's tools that are executed at once."""
PIN_SECONDS = 60.0
"""Seconds to wait for the step of the engine that pins an output."""


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one or more answers to a prompt.

    Attributes:
        match: finds the prompt. It is called in a thread, and again if the saved turn that the
            prompt continues is deleted before the request starts.
        sampling: the sampling parameters of each answer.
        max_tokens: the most tokens of an answer.
        stops: texts that end an answer.
        stop_ids: tokens that end an answer.
        constraint: makes the format that each answer must follow; None for any text.
        tools: the client's functions that the model may call.
        calls_only: whether an answer must consist of calls and have no text.
        own: the server's tools that the model may call; None if there are none.
        ignores_end: whether an answer goes on past the model's own end of a turn (`ignore_eos`).
    """

    match: Callable[[], Prompt]
    sampling: tuple[SamplingParams, ...]
    max_tokens: int
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    constraint: Callable[[], GrammarConstraint] | None = None
    tools: tuple[Tool, ...] = ()
    calls_only: bool = False
    own: OwnTools | None = None
    ignores_end: bool = False


class ServerClosing(WeirError):
    """The server shuts down before the answer is complete."""


class NoOutput(WeirError):
    """A session has no output of a call that could be dropped or pinned."""

    def __init__(self, call: str, kind: str = "") -> None:
        super().__init__(
            f"there is no {kind}output of the call {quote(call)} among the turns of this session "
            "that are kept"
        )


class CannotDrop(WeirError):
    """Outputs cannot be dropped with this policy, or by this server."""


@dataclass(frozen=True)
class ToolOutput:
    """An output of a tool that a stream has read: the id of the call, and the place of the
    output's tokens.
    """

    call: str
    place: ResultPlace


@dataclass(frozen=True)
class DroppedOutput:
    """An output of a tool that was dropped.

    Attributes:
        call: the id of the call.
        tokens: how many tokens it has; fewer may have been in the cache.
        again: whether it had been dropped before.
    """

    call: str
    tokens: int
    again: bool


@dataclass(frozen=True)
class PinnedOutput:
    """An output of a tool that was pinned.

    Attributes:
        call: the id of the call.
        tokens: how many tokens it has.
        again: whether it had been pinned before.
        reread: whether some of its tokens have left the cache, or may have. If they have, the next
            answer reads the whole output again.
    """

    call: str
    tokens: int
    again: bool
    reread: bool


@dataclass(frozen=True)
class PromptProgress:
    """The progress of reading a prompt.

    Attributes:
        total: tokens of everything before the answer.
        cached: how many of them are not read for this request.
        processed: how many have been read, including `cached`.
        waiting: whether the request waits for a row.
    """

    total: int
    cached: int
    processed: int
    waiting: bool


@dataclass(eq=False)
class Generation:
    """The answers to a request while they are generated."""

    request: GenerationRequest
    prompt: Prompt
    sequences: list[TokenSequence]
    queue: OutputQueue
    _client: EngineClient
    running: set[int] = field(default_factory=set)
    finished: dict[int, FinishEvent] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)
    _first: list[OutputEvent] = field(default_factory=list)

    async def start(self, seconds: float) -> Exception | None:
        """Wait for the first events. Returns the error if the first event is a failure.

        Raises Busy if no row becomes free within this many seconds.
        """
        taking = asyncio.ensure_future(self.queue.take())
        try:
            done, _ = await asyncio.wait({taking}, timeout=seconds)
            if not done and self.sequences[0].stage is Stage.WAITING:
                raise Busy("no row became free in time. Try again later.")
            self._first = await taking
        finally:
            taking.cancel()
        first = self._first[0]
        return first.error if isinstance(first, FailureEvent) else None

    async def events(self) -> AsyncIterator[list[AnswerEvent]]:
        """Yield events until all answers have ended. Raises the error of an answer that failed."""
        events = self._first
        while True:
            good: list[AnswerEvent] = []
            for event in events:
                if event.answer in self.finished:
                    continue  # a failure of the whole server came after the end of this answer
                if isinstance(event, FailureEvent):
                    self.running.discard(event.answer)
                    raise event.error
                if isinstance(event, FinishEvent):
                    self.running.discard(event.answer)
                    self.finished[event.answer] = event
                good.append(event)
            if good:
                yield good
            if not self.running:
                return
            events = await self.queue.take()

    def close(self) -> None:
        """Cancel the answers that have not ended."""
        self._client.close_generation(self)

    def call_id(self, answer: int) -> Callable[[int], str]:
        """Return the function that gives the calls of an answer their ids, by index."""
        return partial(call_id, self.sequences[answer].id)

    @property
    def cached(self) -> int:
        """Number of tokens before the answer that were not read for it, known once the prompt is
        read.
        """
        return self.prompt.cached + self.sequences[0].reused

    @property
    def progress(self) -> PromptProgress:
        """Return how much of the prompt has been read. Can be called from any thread."""
        first = self.sequences[0]
        total, cached = self.prompt.length, self.cached
        if first.stage is Stage.WAITING:
            return PromptProgress(total, cached, cached, waiting=True)
        done = not first.unread or first.stage in (Stage.DECODE, Stage.FINISHED)
        read = total if done else self.prompt.cached + first.num_read
        return PromptProgress(total, cached, min(read, total), waiting=False)

    @property
    def tokens(self) -> int:
        """Tokens of the answers that have ended."""
        return sum(end.tokens for end in self.finished.values())


class EngineClient:
    """Submits requests of many owners to one engine.

    Args:
        engine: the engine, whose thread this client runs from `open` on.
        worker: works on large requests; by default in threads.
        is_replica: whether other servers have the same sessions.
        aliases: further names of the model; "*" if requests can use any name.
        notes_changes: whether a conversation whose system messages have changed continues with a
            note about the change, instead of being read again.
        recall: the most tokens of forgotten text to put before a message that asks for such text,
            if the store has an archive. A request can ask for another number.

    Attributes:
        defaults: the sampling parameters of requests that set none.
        unused_defaults: names of the options in the model's generation configuration that the
            server does not use.
        own_tools: the tools that the server runs itself, by name.
        locked: conversations that requests are using, by owner; only the event loop changes it.
        failure: the reason why the engine stopped unexpectedly, if it did.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        limits: Limits,
        responses: ResponseStore | None = None,
        *,
        worker: Worker | None = None,
        is_replica: bool = False,
        aliases: Iterable[str] = (),
        notes_changes: bool = False,
        recall: int = 0,
    ) -> None:
        self.aliases = frozenset(aliases)
        self.recall = recall
        if (archive := engine.store.archive) is not None:
            plans = engine.cache.plans
            archive.find_held = lambda state: held_ranges(holding_in(plans, state))
            archive.encode = PromptEncoder(tokenizer).encode_message
        self.defaults, self.unused_defaults = read_defaults(engine.model.generation_config)
        self.engine = engine
        self.store = engine.store
        self.tokenizer = tokenizer
        self.name = name
        self.limits = limits
        self.responses = responses or ResponseStore(most=limits.texts)
        self.locked: set[tuple[str, str]] = set()
        self.is_replica = is_replica
        self.stop_ids = frozenset(StopTokens.of(engine.model.generation_config).stops)
        self.failure: Exception | None = None
        self.own_tools: dict[str, OwnTool] = {}
        if not is_replica and engine.cache.why_not_drop() is None:
            self._add_tool(OwnTool(DROP_TOOL_OUTPUT, self._drop_tool_output))
        self._room = PinRoom(engine.cache.slots_to_keep, engine.cache.window)
        if not is_replica and self._room.slots is not None:
            self._add_tool(OwnTool(KEEP_TOOL_OUTPUT, self._keep_tool_output))
        if engine.store.archive is not None:
            tool = make_recall_tool()
            self.own_tools[tool.tool.name] = tool
        self._tool_threads = ThreadPoolExecutor(TOOL_THREADS, "weir-tools")
        sink = sink_of(transformers_model(engine.model).config)
        self.renderer = PromptRenderer(tokenizer, self.stop_ids, sink, limits.prompt)
        # Turns saved with one model and policy cannot be used with another. This hash does not need
        # the model, because the store compares the model's weights.
        kind = [str(engine.cache.policy), engine.cache.chunk, engine.cache.positions]
        root = hashlib.sha256(json.dumps(kind).encode()).hexdigest()
        self.worker = worker or Worker()
        try:
            self.worker.open(self.renderer)
        except Exception as error:  # code that came with a model may not be found in a new process
            LOG.warning(
                "large requests are processed in threads, because no worker process starts: %s",
                error,
            )
            self.worker = Worker()
            self.worker.open(self.renderer)
        self._changes = ChangedPrefixes() if notes_changes else None
        how = (self.vocabulary, self.worker, self._changes, self._room)
        self.matcher = PromptMatcher(self.renderer, self.store, root, *how)
        self.sessions = SessionManager(engine, self.responses, limits, self.worker)
        self._thought_tokens = ThoughtTokens(tokenizer, self.stop_ids, self.vocabulary)
        self._sender = EventSender()
        engine.on_step = self._sender.send
        self._requests: Counter[str] = Counter()
        self._generations: set[Generation] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="weir-engine", daemon=True)

    def recall_of(self, asked: int | None) -> int:
        """Return the number of tokens of recalled text that a request may get.

        This is the number that it asks for, or the server's if it asks for none, but at most a
        quarter of the slots of any layer.
        """
        slots = [n for n in self.engine.cache.slots_by_layer if n is not None]
        most = self.recall if asked is None else asked
        return min(most, *(n // RECALL_SHARE for n in slots)) if slots else most

    @property
    def pinned(self) -> int | None:
        """Number of tokens of a conversation's beginning that are never evicted.

        None if there is no limit or nothing is pinned.
        """
        found = (pinned_slots(plan.spec.pipe.pools) for plan in self.engine.cache.plans)
        return min((slots for slots in found if slots is not None), default=None)

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return int(self.engine.model.config.get_text_config(decoder=True).vocab_size)

    # --- the engine's thread

    def open(self) -> None:
        """Start the engine."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Accept no more requests, and wait up to this many seconds for running ones."""
        self.engine.stop()
        self._thread.join(seconds)
        self._tool_threads.shutdown(wait=False)

    def drain(self, seconds: float) -> None:
        """Close, then fail and cancel the requests that are still running."""
        self.close(seconds)
        if self._thread.is_alive():
            for generation in self._fail_all(ServerClosing("the server is shutting down")):
                self._cancel(generation)

    def _run(self) -> None:
        try:
            self.engine.run()
        except Exception as error:
            # The engine has failed, not only one sequence. No request will be answered any more, so
            # all of them end now.
            self.failure = error
            self._fail_all(error)

    def _fail_all(self, error: Exception) -> list[Generation]:
        """Tell all requests in progress that their answers have failed."""
        with self._lock:
            generations = list(self._generations)
        for generation in generations:
            for answer in range(len(generation.sequences)):
                self._sender.send_now(generation.queue, FailureEvent(answer, error))
        return generations

    # --- answers

    def match(self, request: GenerationRequest) -> Prompt:
        """Find the prompt of a request, and check that there is room for its turns. Called in a
        thread.

        Raises StorageFull if the turns can neither be saved nor stay in memory. Turns of a hidden
        session are then not saved, and nothing is raised.
        """
        prompt = request.match()
        if prompt.session is None:
            return prompt
        with self._lock:
            saving = [(request, prompt, len(request.sampling))]
            saving += [(g.request, g.prompt, len(g.running)) for g in self._generations]
        needed = sum(
            turns * self.store.place.turn_bytes(prompt.length + request.max_tokens)
            for request, prompt, turns in saving
            if prompt.session is not None
        )
        try:
            self.store.check_room(needed)
        except StorageFull:
            if not is_hidden(prompt.session):
                raise
            # The turn is answered without being saved, and read again next time.
            return replace(prompt, session=None)
        return prompt

    def generate(
        self,
        request: GenerationRequest,
        prompt: Prompt,
        loop: asyncio.AbstractEventLoop,
        holder: str = "",
    ) -> Generation:
        """Submit a request with its prompt to the engine.

        `holder` is the client whose share of the rows the request uses (`TokenSequence.holder`).
        """
        answers = range(len(request.sampling))
        queue = OutputQueue(loop, self.limits.unread * len(answers))
        sequences = [
            self._sequence(request, prompt, answer, queue, holder, secrets.token_hex(16))
            for answer in answers
        ]
        generation = Generation(request, prompt, sequences, queue, self, set(answers))
        self._submit(generation)
        if prompt.parent is not None and self.store.dropped_chains(prompt.owner):
            # Some outputs may have been dropped after the prompt was found.
            gone = self.store.dropped_places(prompt.owner, prompt.parent.node)
            for place in set(gone) - set(prompt.dropped):
                for sequence in sequences:
                    self.engine.drop(sequence, place)
        return generation

    def restart(self, generation: Generation, prompt: Prompt) -> None:
        """Submit a request again with another prompt, after it failed before its first token.

        Its answers keep their ids, and the turn is saved in the session that the client was told.
        """
        old = generation.queue
        queue = OutputQueue(old.loop, old.size, old.overrun)
        session = generation.prompt.session
        if session is not None:
            prompt = replace(prompt, session=session)
        generation.sequences = [
            self._sequence(generation.request, prompt, answer, queue, one.holder, one.id)
            for answer, one in enumerate(generation.sequences)
        ]
        generation.prompt, generation.queue = prompt, queue
        self._submit(generation)

    def _submit(self, generation: Generation) -> None:
        first = generation.sequences[0]
        first.forks = generation.sequences[1:]
        with self._lock:
            self._generations.add(generation)
        try:
            if self.failure is not None:
                raise WeirError(
                    "the engine has failed, and the server answers no more requests. The reason "
                    "is in its log. Restart the server."
                )
            self.engine.submit(first)
        except WeirError:
            generation.close()
            raise

    def _sequence(
        self,
        request: GenerationRequest,
        prompt: Prompt,
        answer: int,
        queue: OutputQueue,
        holder: str,
        name: str,
    ) -> TokenSequence:
        """Make the sequence of one of the answers, with its output processor."""
        has_calls = request.tools or request.own
        special = self.renderer.call_tokens.values() if has_calls else ()
        parent = None if prompt.parent is None else prompt.parent.node
        processor = OutputProcessor(
            answer,
            self.engine.cache,
            partial(Detokenizer, self.tokenizer, request.stops, special),
            queue,
            self._sender,
            partial(self._trim, prompt),
            partial(self._describe_lost, prompt, name),
        )
        constraint: GrammarConstraint | AfterThoughts | None = None
        if request.constraint:
            constraint = self._constrain(request.constraint(), prompt)
        processor.sequence = TokenSequence(
            id=name,
            parent=parent,
            prompt_ids=prompt.ids,
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            sampler=Sampler(request.sampling[answer], tuple(prompt.ids), constraint),
            listener=processor,
            holder=holder,
            owner=None if prompt.session is None else prompt.owner,
            may_be_lost=prompt.session is not None and is_hidden(prompt.session),
            beginning=prompt.beginning,
            header=prompt.header,
            dropped=prompt.dropped,
            kept=prompt.kept,
            record=None if prompt.session is None else partial(self._record, request, prompt),
            on_stop=partial(self._on_stop, request, prompt, processor) if request.own else None,
        )
        return processor.sequence

    def _on_stop(
        self, request: GenerationRequest, prompt: Prompt, processor: OutputProcessor
    ) -> str | None:
        """If a part of an answer ended with a call of one of the server's tools, and the answer may
        have more tokens, have the call executed, and return None. Otherwise, return the reason why
        the answer ends (`TokenSequence.on_stop`).
        """
        sequence, text = processor.sequence, processor.finish()
        parser = self.make_parser(request)
        assert parser is not None
        if self.renderer.thinks:
            is_open = processor.opens_thoughts
            thoughts = ThoughtParser(
                is_open=self.renderer.opens_thoughts(prompt) if is_open is None else is_open
            )
            text = thoughts.feed(text)[1] + thoughts.finish()[1]
        parser.feed(text)
        if not parser.own_calls or parser.num_complete:
            return "stop"
        if sequence.num_sampled >= sequence.max_tokens:
            return "length"
        name, arguments = parser.own_calls[0]
        self._tool_threads.submit(self._execute, request, prompt, processor, name, arguments)
        return None

    def _execute(
        self,
        request: GenerationRequest,
        prompt: Prompt,
        processor: OutputProcessor,
        name: str,
        arguments: str,
    ) -> None:
        """Run a call of one of the server's tools, and continue the answer with the result."""
        assert request.own is not None
        sequence = processor.sequence
        try:
            context = ToolContext(self.engine, self.tokenizer, prompt, sequence)
            result = clip_result(_call_tool(request.own.tools[name], context, arguments))
            called = call_id(sequence.id, -1 - len(processor.used))
            message = Message("tool", result, name, result=called, place=0)
            own = request.own
            rendered = self.renderer.render_next(
                [message], sequence.output_ids[-1], own.described, own.variables
            )
            if rendered is None:
                raise WeirError("the chat template cannot render the result of a call")
            use = ToolUse(name, arguments, result, len(rendered.ids))
            is_last = len(processor.used) + 1 >= MAX_CALLS
            constraint = self._constrain((own.last if is_last else own.again)(), rendered)
            opens = self.renderer.opens_thoughts(rendered)
            processor.next_round(use, opens_thoughts=opens)
            found = Continuation(rendered.ids, rendered.header, constraint)
            self.engine.resume(sequence, found)
        except Exception as error:
            self.engine.resume(sequence, error)

    def _constrain(
        self, constraint: GrammarConstraint, prompt: Prompt
    ) -> GrammarConstraint | AfterThoughts:
        """Make the format of an answer to a prompt. It applies after the thoughts, if there are
        any.
        """
        if not self.renderer.may_think(prompt):
            return constraint
        is_open = self.renderer.opens_thoughts(prompt)
        return AfterThoughts(constraint, self._thought_tokens, is_open=is_open)

    def _record(
        self, request: GenerationRequest, prompt: Prompt, sequence: TokenSequence, reason: str
    ) -> TurnRecord:
        """Make the record of a turn that has ended."""
        assert prompt.session is not None
        assert isinstance(sequence.listener, OutputProcessor)
        rounds, stats = sequence.listener.all_rounds(), sequence.listener.stats
        before = OPEN if self.renderer.opens_thoughts(prompt) else prompt.prefill
        answer = Message("assistant", before + rounds[-1].text)
        if parser := self.make_parser(request):
            parts: list[AnswerPart] = []
            for number, one in enumerate(rounds):
                text, is_first = one.text, number == 0
                # A text in the thoughts that looks like a call is not a call.
                if self.renderer.thinks:
                    is_open = before == OPEN if is_first else bool(one.opens_thoughts)
                    thoughts = ThoughtParser(is_open=is_open)
                    said = thoughts.feed(text)[1] + thoughts.finish()[1]
                    before += text[: len(text) - len(said)] if is_first else ""
                    text = said
                is_last = number == len(rounds) - 1
                parts += parser.feed(text)
                parts += parser.finish(cut=reason == "length") if is_last else parser.next_round()
            # Calls and results of the server's tools are part of the stream, but not of the history
            # that the client sends back.
            answer = join_parts(parts, partial(call_id, sequence.id))
            answer = replace(answer, content=before + answer.content)
        if self._changes is not None and prompt.outline:
            outline = hash_prefixes(prompt.outline, [answer])[0]
            self._changes.add(prompt.owner, outline, sequence.id, prompt.systems)
        return TurnRecord(
            node=sequence.id,
            owner=prompt.owner,
            session=prompt.session,
            parent=sequence.parent,
            chain=hash_prefixes(prompt.hash, [answer])[0],
            messages=(*prompt.messages, answer),
            last=sequence.output_ids[-1],
            seen=stats.seen,
            usage={
                "prompt_tokens": prompt.length,
                "cached_tokens": prompt.cached + sequence.reused,
                "completion_tokens": sequence.num_sampled,
                **({"tool_tokens": sequence.num_brought} if sequence.num_brought else {}),
                **{name: value for name, value in vars(stats).items() if name != "seen"},
                **({} if prompt.recalled is None else {"recalled": prompt.recalled.tokens}),
            },
            ids=pack_ids([*prompt.ids, *sequence.output_ids]),
            kept=sequence.kept,
        )

    def make_parser(self, request: GenerationRequest) -> CallParser | None:
        """Make a parser of the calls in one answer. None if there are no tools to call."""
        own = set(request.own.tools) if request.own else set()
        names = {tool.name for tool in request.tools} | own
        if not names:
            return None
        return CallParser(self.renderer.call_format, names, request.calls_only, own)

    def _trim(self, prompt: Prompt) -> None:
        """Delete the owner's least recently used session if a saved turn has begun a session and
        the owner now has too many.
        """
        begins = prompt.parent is None or prompt.parent.session != prompt.session
        if prompt.session is not None and begins:
            self.sessions.trim(prompt.owner)

    def close_generation(self, generation: Generation) -> None:
        """Cancel the answers that have not ended (`Generation.close`)."""
        with self._lock:
            self._generations.discard(generation)
        if generation.running:
            self._cancel(generation)

    def _cancel(self, generation: Generation) -> None:
        for sequence in generation.sequences:
            self.engine.cancel(sequence)

    def recalled_in(self, record: TurnRecord) -> str | None:
        """Return what was recalled in a saved turn, with who said it; None if nothing was."""
        if not record.usage.get("recalled"):
            return None
        return find_quotes(str(self.tokenizer.decode(unpack_ids(record.ids).tolist())))

    def running_prompt(self, owner: str, session: str) -> Prompt | None:
        """Return the prompt of a session that is being read or answered now."""
        with self._lock:
            prompts = [generation.prompt for generation in self._generations]
        return next((one for one in prompts if (one.owner, one.session) == (owner, session)), None)

    def running_sequence(self, owner: str, session: str) -> TokenSequence | None:
        """Return a sequence of a session that has a row now."""
        with self._lock:
            sequences = [
                sequence
                for generation in self._generations
                if (generation.prompt.owner, generation.prompt.session) == (owner, session)
                for sequence in generation.sequences
            ]
        return next((sequence for sequence in sequences if sequence.is_running), None)

    # --- outputs of tools

    def _add_tool(self, tool: OwnTool) -> None:
        self.own_tools[tool.tool.name] = tool

    def drop_output(self, owner: str, session: str, call: str) -> DroppedOutput:
        """Drop the output of a tool from a session, and from all of the owner's histories in which
        the same messages lead to the output.

        The output is not read again in later turns. Dropping it a second time does nothing.

        Raises:
            UnknownSession: the owner has no such session.
            NoOutput: the session has no such output, or the place of its tokens is not known.
            CannotDrop: this server cannot drop outputs.
            WeirError: the owner has dropped too many outputs.
        """
        outputs, sequence = self.list_outputs(owner, session)
        found = next((one for one in outputs if one.call == call), None)
        if found is not None:
            self._drop_output(owner, found)
            return DroppedOutput(call, found.place.stop - found.place.start, again=False)
        place = self._find_output(owner, session, call, sequence)
        if place is None:
            raise NoOutput(call)
        # The output was dropped already, or it is older than the outputs that were listed.
        again = place.chain in self.store.dropped_chains(owner)
        self._drop_output(owner, ToolOutput(call, place))
        return DroppedOutput(call, place.stop - place.start, again=again)

    def _find_output(
        self, owner: str, session: str, call: str, sequence: TokenSequence | None
    ) -> ResultPlace | None:
        """Find the place of the newest output of a call in a session, even if it was dropped.

        `sequence` is the running sequence of the session; None if there is none.
        """
        if sequence is not None:
            prompt = self.prompt_of(sequence)
            read = reversed(prompt.messages)
            own = [one.where for one in read if one.result == call and one.where]
            node = None if prompt.parent is None else prompt.parent.node
        else:
            summary, own = self.store.get_session(owner, session), []
            node = None if summary is None else summary.head
        places = own or [p for _, p in self.store.list_results(owner, node or "", call, 1)]
        return places[0] if places else None

    def check_drops(self) -> None:
        """Raise CannotDrop if this server cannot drop outputs."""
        if self.is_replica:
            raise CannotDrop("servers of a cluster cannot drop outputs yet. Leave weir.drop out.")
        if (why := self.engine.cache.why_not_drop()) is not None:
            raise CannotDrop(
                f"this server cannot drop outputs: {why}. Start it with another --policy, such as "
                "weir."
            )

    def list_outputs(
        self, owner: str, session: str
    ) -> tuple[list[ToolOutput], TokenSequence | None]:
        """List the outputs of tools that a session has read and not dropped, the newest first.

        Also returns the running sequence of the session, or None. Raises UnknownSession if the
        session is neither saved nor running.
        """
        sequence = self.running_sequence(owner, session)
        if sequence is not None:
            return self._outputs_of(self.prompt_of(sequence)), sequence
        found = self.store.get_session(owner, session)
        if found is None:
            raise UnknownSession
        return self._known_outputs(owner, found.head), None

    def _outputs_of(self, prompt: Prompt) -> list[ToolOutput]:
        """Return the outputs before an answer, the newest first."""
        dropped = self.store.dropped_chains(prompt.owner)
        own = [(one.result or "", one.where) for one in reversed(prompt.messages) if one.where]
        new = [ToolOutput(call, place) for call, place in own if place.chain not in dropped]
        node = None if prompt.parent is None else prompt.parent.node
        return new if node is None else [*new, *self._known_outputs(prompt.owner, node)]

    def _known_outputs(self, owner: str, node: str) -> list[ToolOutput]:
        dropped = self.store.dropped_chains(owner)
        found = self.store.list_results(owner, node)
        return [ToolOutput(call, place) for call, place in found if place.chain not in dropped]

    def _drop_output(self, owner: str, output: ToolOutput) -> None:
        """Drop an output now, also from the rows of all running answers that have read it."""
        self.check_drops()
        place = output.place
        self.store.drop_result(owner, place.chain)
        for sequence in self._readers(owner, output):
            # A pinned output may have been read again at another place.
            for one in {place, *(kept for kept in sequence.kept if kept.chain == place.chain)}:
                self.engine.drop(sequence, (one.start, one.stop))

    def _readers(self, owner: str, output: ToolOutput) -> list[TokenSequence]:
        """Return the running sequences that have read an output, or will read it."""
        with self._lock:
            generations = [one for one in self._generations if one.prompt.owner == owner]
        found: list[TokenSequence] = []
        for generation in generations:
            prompt = generation.prompt
            read = [one.where for one in prompt.messages]
            if prompt.parent is not None:
                node = prompt.parent.node
                read += [place for _, place in self.store.list_results(owner, node, output.call)]
            found += generation.sequences if output.place in read else ()
        return found

    def check_pins(self) -> None:
        """Raise CannotPin if this server cannot pin outputs."""
        if self.is_replica:
            raise CannotPin("servers of a cluster cannot pin outputs yet. Leave weir.pin out.")
        if self._room.slots is None:
            every = any(slots is None for slots in self.engine.cache.slots_by_layer)
            raise CannotPin(
                "this server's policy keeps every token, so no output has to be pinned."
                if every
                else "this server has no slots for outputs that are pinned. Start it with --pin "
                "and a policy whose text does not contain the pool 'beginning'."
            )

    def pin_output(self, owner: str, session: str, call: str) -> PinnedOutput:
        """Keep the output of a tool permanently in the cache of a session, and of all of the
        owner's histories in which the same messages lead to the output.

        If some of the output's tokens have left the cache, the next answer reads the output again.
        Pinning an output a second time does nothing.

        Raises:
            UnknownSession: the owner has no such session.
            NoOutput: the session has no such output, or the place of its tokens is not known.
            CannotPin: the output was dropped, there is no room, or outputs cannot be pinned here.
            WeirError: the owner has pinned too many outputs.
        """
        self.check_pins()
        outputs, sequence = self.list_outputs(owner, session)
        found = next((one for one in outputs if one.call == call), None)
        if found is not None:
            return self._pin_output(owner, found, self._end_of(owner, session, sequence))
        if self._find_output(owner, session, call, sequence) is None:
            raise NoOutput(call)
        raise was_dropped(call)

    def unpin_output(self, owner: str, session: str, call: str) -> None:
        """Let the output of a tool leave the cache again, from the next answer on.

        Raises:
            UnknownSession: the owner has no such session.
            NoOutput: the session has no such output, or it is not pinned.
        """
        outputs, _ = self.list_outputs(owner, session)
        pinned = self.store.pinned_chains(owner)
        own = (one for one in outputs if one.call == call and one.place.chain in pinned)
        found = next(own, None)
        if found is None:
            raise NoOutput(call, "pinned ")
        self.store.unpin_result(owner, found.place.chain)

    def _end_of(
        self, owner: str, session: str, sequence: TokenSequence | None
    ) -> TurnRecord | None:
        """Return the newest saved turn of a session, or the one that its running sequence
        continues.
        """
        if sequence is not None:
            return self.prompt_of(sequence).parent
        summary = self.store.get_session(owner, session)
        return None if summary is None else self.store.find_turn(owner, summary.head)

    def _pin_output(self, owner: str, output: ToolOutput, end: TurnRecord | None) -> PinnedOutput:
        """Pin an output now, also in the rows of all running answers that have read it.

        Args:
            end: the newest saved turn of the stream. Its history is searched for other pinned
                outputs. None for the turn that a running answer continues.
        """
        place, pinned = output.place, self.store.pinned_chains(owner)
        tokens = place.stop - place.start
        readers = [one for one in self._readers(owner, output) if one.is_running]
        before = end or (self.prompt_of(readers[0]).parent if readers else None)
        others = pinned - {place.chain}
        known = PinnedPlaces()
        if before is not None:
            known = find_pinned(self.store, before, others, self._room.window)
        new = [one for one in (readers[0].kept if readers else ()) if one.chain in others]
        used = {one.chain: one for one in (*known.held, *known.lost, *new)}
        if before is not None:
            beginning = before.usage.get("beginning", 0)
        else:
            beginning = self.prompt_of(readers[0]).beginning if readers else 0
        self._room.check(tokens + count_tokens(used.values()), beginning)
        self.store.pin_result(owner, place.chain)
        futures = [self.engine.keep(sequence, place) for sequence in readers]
        if futures:
            done = wait(futures, PIN_SECONDS).done
            reread = len(done) < len(futures) or not all(future.result() for future in done)
        else:
            chains = {place.chain}
            reread = before is None or bool(
                find_pinned(self.store, before, chains, self._room.window).lost
            )
        return PinnedOutput(output.call, tokens, place.chain in pinned, reread)

    def _keep_tool_output(self, context: ToolContext, arguments: Mapping[str, Any]) -> str:
        """Execute a call of `KEEP_TOOL_OUTPUT`."""
        found = self._output_back(context, arguments["back"], "kept")
        pinned = self._pin_output(context.prompt.owner, found, context.prompt.parent)
        more = " It will be read again with the next message." if pinned.reread else ""
        return f"Kept: {in_words(pinned.tokens, 'token')}.{more}"

    def _output_back(self, context: ToolContext, back: int, done: str) -> ToolOutput:
        """Return the output that a model names by counting back from the newest, which is 1."""
        outputs = self._outputs_of(context.prompt)
        if len(outputs) < back:
            are = "is" if len(outputs) == 1 else "are"
            many = in_words(len(outputs), "output")
            raise WeirError(f"there {are} only {many} that could be {done}")
        return outputs[back - 1]

    def _drop_tool_output(self, context: ToolContext, arguments: Mapping[str, Any]) -> str:
        """Execute a call of `DROP_TOOL_OUTPUT`."""
        found = self._output_back(context, arguments["back"], "dropped")
        self._drop_output(context.prompt.owner, found)
        return f"Dropped: {in_words(found.place.stop - found.place.start, 'token')}."

    def _describe_lost(
        self, prompt: Prompt, name: str, held: Tensor, read: int
    ) -> list[dict[str, Any]]:
        """Describe the turns that had lost tokens when an answer ended.

        Args:
            name: the id of the answer's turn. If the turn is not saved, only the turns before it
                are described.
            held: the tokens of the stream that were still in the cache.
            read: number of tokens that the row had read.
        """
        node: str | None = name
        if prompt.session is None:
            node = None if prompt.parent is None else prompt.parent.node
        return describe_forgotten(self.store, prompt.owner, node, held, read)

    def tell_forgotten(self, record: TurnRecord) -> str:
        """Write a note for the model about the tokens that had left the cache when a turn ended.

        Empty if none had, or if the turn's state is not kept.
        """
        if not record.usage.get("forgotten"):
            return ""
        try:
            holding = holding_in(self.engine.cache.plans, self.store.load(record.node).state)
        except WeirError:
            return ""
        held = holding.token.unique()
        turns = describe_forgotten(self.store, record.owner, record.node, held, holding.seen)
        return tell_forgotten(turns, holding.seen - len(held))

    def prompt_of(self, sequence: TokenSequence) -> Prompt:
        """Return the prompt of a running sequence."""
        with self._lock:
            generations = list(self._generations)
        return next(one.prompt for one in generations if sequence in one.sequences)

    # --- limits of owners

    def begin_request(self, owner: str) -> None:
        """Count a request of an owner, before any of it is read.

        Raises:
            Busy: the owner has too many requests, or all owners together have.
        """
        with self._lock:
            if self._requests[owner] >= self.limits.requests:
                raise Busy(
                    "too many requests of this key or address are in progress. Wait for one to "
                    "finish."
                )
            if self._requests.total() >= self.limits.open:
                raise Busy("too many requests are in progress. Try again later.")
            self._requests[owner] += 1

    def end_request(self, owner: str) -> None:
        """Stop counting a request of an owner."""
        with self._lock:
            self._requests[owner] -= 1
            if not self._requests[owner]:
                del self._requests[owner]

    def open_requests(self, owner: str) -> int:
        """Return the number of requests of an owner that have begun and not ended."""
        with self._lock:
            return self._requests[owner]


def _call_tool(tool: OwnTool, context: ToolContext, arguments: str) -> str:
    """Return the result of a call of one of the server's tools, or a text that says why it
    failed.
    """
    try:
        given = json.loads(arguments)
    except ValueError:
        return "Error: the arguments are not JSON"
    try:
        return tool.run(context, given)
    except WeirError as error:
        return f"Error: {error}"
    except Exception:
        LOG.exception("the tool %s has failed", tool.tool.name)
        return "Error: the tool has failed"
