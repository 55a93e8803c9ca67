"""A desk between text and tokens."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest
from servers import make_client

from weir import StreamingCache
from weir.models import set_sink
from weir.pools import Marks
from weir.serve import (
    EngineClient,
    FinishEvent,
    Limits,
    Message,
    OutputQueue,
    Plan,
    SamplingParams,
    TurnRecord,
    Wish,
    chain,
)


def test_a_learned_sink_stands_in_front_of_what_is_read_first():
    plain = make_client()
    set_sink(plain.engine.model.config, "learnable", (7, 8))
    engine_client = EngineClient(plain.engine, plain.store, plain.tokenizer, "small", Limits())
    messages = [Message("user", "Hi")]
    chat, without = (one.matcher.match("", messages, None).ids for one in (engine_client, plain))
    assert chat == [7, 8, *without]
    begins = [one.matcher.match("", messages, None).beginning for one in (engine_client, plain)]
    assert begins[0] == begins[1] + 2
    assert engine_client.matcher.complete("", "Hi").ids == [7, 8, *plain.matcher.complete("", "Hi").ids]
    assert engine_client.matcher.complete("", [1, 2]).ids == [1, 2]  # who names tokens names them all


def ask(engine_client: EngineClient, *messages: Message) -> tuple[Plan, str, TurnRecord]:
    """How a history was planned, what was answered, and the record of that."""
    plan = engine_client.matcher.match("", messages, None)
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        mailbox = OutputQueue(loop, 1000)
        engine_client.ask(plan, Wish([SamplingParams()], 40, (), frozenset()), mailbox)
        while engine_client.engine.load().busy or engine_client.engine.load().waiting:
            engine_client.engine.step()
    answer = "".join(event.text for event in mailbox._events)
    end = mailbox._events[-1]
    assert isinstance(end, FinishEvent)
    record = engine_client.store.find_history("", chain(plan.chain, [Message("assistant", answer)])[0])
    assert record.usage["pinned"] == end.standing.pinned
    return plan, answer, record


def test_the_beginning_of_a_conversation_stays_and_so_does_the_header_of_its_turn():
    engine_client = make_client(policy="pinned(streaming_llm(24), n=60)")
    system, first = Message("system", "Say it all in letters."), Message("user", "Hello")
    plan, answer, record = ask(engine_client, system, first)
    start = "<|im_start|>system\nSay it all in letters.<|im_end|>\n<|im_start|>user\n"
    begins = len(engine_client.tokenizer(start, add_special_tokens=False)["input_ids"])
    header = "<|im_end|>\n<|im_start|>assistant\n"
    ends = len(engine_client.tokenizer(header, add_special_tokens=False)["input_ids"])
    assert (plan.beginning, plan.header) == (begins, ends)
    assert (record.usage["pinned"], record.usage["beginning"]) == (begins, begins)
    cache = engine_client.engine.cache
    assert cache.marks[0] == Marks(begins, len(plan.ids) - ends, ends)
    assert {*range(begins), *range(len(plan.ids) - ends, len(plan.ids))} <= places_of(cache)
    history = [system, first, Message("assistant", answer)]
    plan, _, record = ask(engine_client, *history, Message("user", "And then?" * 9))
    assert plan.beginning == 0  # of what is fed now
    assert record.usage["beginning"] == begins
    turn = record.seen - 40 - ends
    assert cache.marks[0] == Marks(begins, turn, ends)
    assert {*range(begins), *range(turn, turn + ends)} <= places_of(cache)


def test_of_a_long_beginning_the_first_tokens_stay_and_usage_says_so():
    engine_client = make_client(policy="pinned(window(24), n=10)")
    _, _, record = ask(engine_client, Message("system", "Say it all in letters."), Message("user", "Hello"))
    assert record.usage["pinned"] == 10
    assert record.usage["beginning"] > 30
    assert places_of(engine_client.engine.cache) >= {*range(10)}
    assert 11 not in places_of(engine_client.engine.cache)
    engine_client = make_client()
    _, _, record = ask(engine_client, Message("system", "Say it all in letters."), Message("user", "Hello"))
    assert record.usage["pinned"] == 0
    assert record.usage["beginning"] > 30


def places_of(cache: StreamingCache) -> set[int]:
    """The places that row 0 holds in every head."""
    heads = [set(head.tolist()) for head in cache.slots(0).position[0]]
    return set.intersection(*heads)


def test_a_plan_whose_turns_cannot_be_made_lets_go_of_its_session():
    engine_client, let_go = make_client(), []

    class Hold:
        def release(self) -> None:
            let_go.append(True)

    def broken() -> None:
        raise MemoryError("no memory")

    plan = replace(engine_client.matcher.match("", [Message("user", "Hi")], None), hold=Hold())
    wish = Wish([SamplingParams()], 4, (), frozenset(), constraint=broken)
    with contextlib.closing(asyncio.new_event_loop()) as loop, pytest.raises(MemoryError):
        engine_client.ask(plan, wish, OutputQueue(loop, 9))
    assert let_go == [True]
    assert not engine_client._asked
