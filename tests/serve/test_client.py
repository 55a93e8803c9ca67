"""The engine's client, which converts between text and tokens."""

from __future__ import annotations

import asyncio
import contextlib

from servers import make_client

from weir import StreamingCache
from weir.models import set_sink
from weir.pools import Marks
from weir.serve import EngineClient, Limits, SamplingParams, TurnRecord
from weir.serve.client import GenerationRequest
from weir.serve.engine.output import FinishEvent
from weir.serve.messages import Message, hash_prefixes
from weir.serve.prompts import Prompt


def test_a_learned_sink_stands_in_front_of_what_is_read_first():
    plain = make_client()
    set_sink(plain.engine.model.config, "learnable", (7, 8))
    client = EngineClient(plain.engine, plain.tokenizer, "small", Limits())
    messages = [Message("user", "Hi")]
    chat, without = (one.matcher.match("", messages, None).ids for one in (client, plain))
    assert chat == [7, 8, *without]
    begins = [one.matcher.match("", messages, None).beginning for one in (client, plain)]
    assert begins[0] == begins[1] + 2
    assert client.matcher.complete("", "Hi").ids == [
        7,
        8,
        *plain.matcher.complete("", "Hi").ids,
    ]
    assert client.matcher.complete("", [1, 2]).ids == [
        1,
        2,
    ]  # a prompt of token ids is used as it is


def ask(client: EngineClient, *messages: Message) -> tuple[Prompt, str, TurnRecord]:
    """Return the prompt of a history, the answer, and the record of the turn."""
    plan = client.matcher.match("", messages, None)
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        request = GenerationRequest(lambda: plan, (SamplingParams(),), 40)
        generation = client.generate(request, plan, loop)
        while client.engine.load().busy or client.engine.load().waiting:
            client.engine.step()
        loop.call_soon(loop.stop)
        loop.run_forever()
    answer = "".join(event.text for event in generation.queue._events)
    end = generation.queue._events[-1]
    assert isinstance(end, FinishEvent)
    (chain,) = hash_prefixes(plan.hash, [Message("assistant", answer)])
    record = client.store.find_history("", chain)
    assert record.usage["pinned"] == end.stats.pinned
    return plan, answer, record


def test_the_beginning_of_a_conversation_stays_and_so_does_the_header_of_its_turn():
    client = make_client(policy="pinned(streaming_llm(24), n=60)")
    system, first = Message("system", "Say it all in letters."), Message("user", "Hello")
    plan, answer, record = ask(client, system, first)
    start = "<|im_start|>system\nSay it all in letters.<|im_end|>\n<|im_start|>user\n"
    begins = len(client.tokenizer(start, add_special_tokens=False)["input_ids"])
    header = "<|im_end|>\n<|im_start|>assistant\n"
    ends = len(client.tokenizer(header, add_special_tokens=False)["input_ids"])
    assert (plan.beginning, plan.header) == (begins, ends)
    assert (record.usage["pinned"], record.usage["beginning"]) == (begins, begins)
    cache = client.engine.cache
    assert cache.marks[0] == Marks(begins, len(plan.ids) - ends, ends)
    assert {*range(begins), *range(len(plan.ids) - ends, len(plan.ids))} <= places_of(cache)
    history = [system, first, Message("assistant", answer)]
    plan, _, record = ask(client, *history, Message("user", "And then?" * 9))
    assert plan.beginning == 0  # none of the tokens fed in this turn
    assert record.usage["beginning"] == begins
    turn = record.seen - 40 - ends
    assert cache.marks[0] == Marks(begins, turn, ends)
    assert {*range(begins), *range(turn, turn + ends)} <= places_of(cache)


def test_of_a_long_beginning_the_first_tokens_stay_and_usage_says_so():
    client = make_client(policy="pinned(window(24), n=10)")
    _, _, record = ask(
        client, Message("system", "Say it all in letters."), Message("user", "Hello")
    )
    assert record.usage["pinned"] == 10
    assert record.usage["beginning"] > 30
    assert places_of(client.engine.cache) >= {*range(10)}
    assert 11 not in places_of(client.engine.cache)
    client = make_client()
    _, _, record = ask(
        client, Message("system", "Say it all in letters."), Message("user", "Hello")
    )
    assert record.usage["pinned"] == 0
    assert record.usage["beginning"] > 30


def places_of(cache: StreamingCache) -> set[int]:
    """Return the positions that row 0 holds in every head."""
    heads = [set(head.tolist()) for head in cache.slots(0).position[0]]
    return set.intersection(*heads)
