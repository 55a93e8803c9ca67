"""Clients are told how many tokens of a conversation the cache no longer holds, and their turns."""

from __future__ import annotations

import httpx
import pytest
from servers import make_client, serving
from test_reread import MORE, USER, ask, said

import weir

LONG = {"role": "user", "content": "x" * 100}


@pytest.fixture(scope="module")
def server():
    with serving(make_client()) as server:
        yield server


def test_the_count_is_that_of_a_snapshot(server):
    stream = weir.Stream(server.engine.model, server.engine.cache.policy, chunk=4)
    for length in (3, 9, 30, 61):
        stream.feed(list(range(60, 60 + length)))
        cache = stream.cache
        assert cache.count_held(0) == len(cache.holding(0).tokens())
    assert cache.count_held(0) < 40


def test_usage_a_header_and_the_memory_say_what_is_gone(server):
    first = ask(server, USER)
    history = [USER, said(first), LONG]
    second = ask(server, *history)
    used = second["usage"]["weir"]
    assert used["forgotten"] > 80
    # The last token was not fed yet. Of the others, each one that is not forgotten is held.
    assert used["seen"] - 1 - used["forgotten"] <= 3 * used["held"]
    history += [said(second), MORE]
    body = {"model": "small", "messages": history, "max_tokens": 5, "stream": True}
    third = server.post("/v1/chat/completions", body)
    assert third.headers["x-weir-forgotten"] == str(used["forgotten"])
    session = third.headers["x-session-id"]
    server.settled()
    memory = httpx.get(f"{server.url}/v1/sessions/{session}/memory").json()
    facts = httpx.get(f"{server.url}/v1/sessions/{session}").json()
    gone = memory["forgotten"]
    assert gone["tokens"] == memory["read"] - memory["held"] == facts["forgotten"]
    assert sum(turn["forgotten"] for turn in gone["turns"]) == gone["tokens"]
    turns = httpx.get(f"{server.url}/v1/sessions/{session}/turns").json()["data"]
    assert {turn["id"] for turn in gone["turns"]} <= {turn["id"] for turn in turns}
    most = max(gone["turns"], key=lambda turn: turn["forgotten"])
    assert most["id"] == turns[1]["id"]
    assert most["tokens"] >= most["forgotten"] > 80


def test_nothing_is_forgotten_at_first():
    with serving(make_client(policy="recent(200)")) as server:
        first = ask(server, USER)
        assert first["usage"]["weir"]["forgotten"] == 0
        history = [USER, said(first), MORE]
        body = {"model": "small", "messages": history, "max_tokens": 5}
        assert "x-weir-forgotten" not in server.post("/v1/chat/completions", body).headers


def test_the_newest_turns_that_lost_tokens_are_named(server):
    first = ask(server, USER)
    second = ask(server, USER, said(first), LONG)
    (latest, *older) = second["usage"]["weir"]["forgotten_turns"]
    assert latest["forgotten"] <= latest["tokens"]
    (message, answer) = latest["messages"]
    assert message["role"] == "user"
    assert message["text"] == f"{'x' * 57}..."
    assert answer["role"] == "assistant"
    assert older[0]["messages"][0]["text"] == USER["content"]
    assert sum(one["forgotten"] for one in [latest, *older]) <= second["usage"]["weir"]["forgotten"]
    # The list is bounded, however long the conversation is.
    history = [USER, said(first), LONG, said(second)]
    for _ in range(12):
        found = ask(server, *history, MORE)
        history += [MORE, said(found)]
    assert len(found["usage"]["weir"]["forgotten_turns"]) == 8


def test_the_model_reads_what_it_has_forgotten_if_the_request_asks_for_it(server):
    first = ask(server, USER)
    second = ask(server, USER, said(first), LONG)
    history = [USER, said(first), LONG, said(second), MORE]
    body = {"model": "small", "messages": history, "max_tokens": 5}
    plain = server.post("/v1/chat/completions", body).json()
    assert "noted" not in plain["usage"]["weir"]
    body["weir"] = {"tell_forgotten": True}
    told = server.post("/v1/chat/completions", body).json()
    note = told["usage"]["weir"]["noted"]
    assert note.startswith(f"{second['usage']['weir']['forgotten']} tokens")
    assert "xxxx" in note
    assert len(note) < 4000
    more = told["usage"]["prompt_tokens"] - plain["usage"]["prompt_tokens"]
    assert len(note) <= more <= len(note) + 40  # a byte is a token
    history += [said(told), MORE]
    again = ask(server, *history)
    assert "reread" not in again["usage"]["weir"]
