"""The memory of a session is what its row holds, with the text of the stream."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from servers import POLICY, Server, make_client, serving

from weir.cache import Holding, StreamingCache
from weir.serve import Engine
from weir.serve.api import Keys
from weir.serve.api import memory as route

CHAT = "/v1/chat/completions"
TEXT = "Grüße, 世界! 🙂 and so on, far past the window"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(make_client(rows=2, most=8)) as server:
        yield server


def talk(server: Server, session: str, turns: int, **given: Any) -> list[dict[str, str]]:
    """Run this many turns, and return the whole history."""
    messages: list[dict[str, str]] = []
    for number in range(turns):
        messages.append({"role": "user", "content": f"{number} {TEXT}"})
        body = {"model": "small", "messages": messages, "max_tokens": 5, "temperature": 0, **given}
        answer = server.post(CHAT, body, **{"x-session-id": session}).json()
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )
    return messages


def memory(server: Server, session: str, **asked: int) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/v1/sessions/{session}/memory", params=asked, timeout=600)
    assert answer.status_code == 200, answer.text
    return answer.json()


def head_holding(server: Server, session: str) -> Holding:
    """Return what the row at a session's end holds, according to a cache that it is put into."""
    engine_client = server.engine_client
    found = engine_client.store.get_session("", session)
    assert found is not None
    cache = StreamingCache(engine_client.engine.model, POLICY, chunk=4)
    cache.put_row(0, engine_client.store.load(found.head).state)
    return cache.holding()


def test_tokens_are_told_with_their_text_and_with_who_holds_them(server):
    messages = talk(server, "told", 3)
    found = memory(server, "told", latest=8192)
    holding = head_holding(server, "told")
    tokens = found["tokens"]
    assert [token["at"] for token in tokens] == list(range(found["seen"]))
    assert (found["read"], found["seen"]) == (holding.seen, holding.seen + 1)
    by_place = {held.token: held.pools for held in holding.tokens()}
    names = [pool["name"] for pool in found["pools"]]
    assert names == ["sink", "recent", "heavy", "new"]
    for token in tokens:
        held = {name: n for name, n in zip(names, token["pools"], strict=True) if n}
        assert held == by_place.get(token["at"], {})
    text = "".join(token["text"] for token in tokens)
    # No answer has an end token, so the template's end token is at the start of the next turn.
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    assert text == "".join(turns).removesuffix("<|im_end|>\n")
    special = [token["text"] for token in tokens if token.get("special")]
    assert set(special) == {"<|im_start|>", "<|im_end|>"}
    assert found["held"] == len(by_place)
    assert found["doing"] is None
    assert found["bytes"] == server.engine.cache.nbytes // 2
    slots = {pool["name"]: pool["slots"] for pool in found["pools"]}
    assert (slots["sink"], slots["recent"], slots["heavy"]) == (2, 6, 4)
    assert found["folds"] == (holding.seen - slots["new"]) // 4
    heads = server.engine.cache.plans[0].heads
    each = heads.kv_heads * (heads.key_dim + heads.value_dim) * 4
    assert found["bytes_of_all"] == holding.seen * each


def test_of_a_long_stream_only_what_is_held_and_its_end_are_told(server):
    talk(server, "long", 4)
    holding = head_holding(server, "long")
    held = {token.token for token in holding.tokens()}
    whole = {token["at"]: token for token in memory(server, "long", latest=8192)["tokens"]}
    few = memory(server, "long", latest=9, most=3)
    late = set(range(few["seen"] - 9, few["seen"]))
    places = [token["at"] for token in few["tokens"]]
    # The newest of the tokens that most heads hold, which are held by every head. Sinks are older.
    full = [token.token for token in holding.tokens() if token.pairs == holding.pairs]
    assert places == sorted({*full[-3:], *late})
    usual = memory(server, "long", latest=0)
    assert {token["at"] for token in usual["tokens"]} == held
    assert min(held) == 0 and len(held) < len(whole) / 4
    # A token has the same description in a short list as in the whole list.
    assert all(token == whole[token["at"]] for one in (few, usual) for token in one["tokens"])


def test_all_held_tokens_are_listed_if_there_are_fewer_than_asked_for(server):
    talk(server, "few", 2)
    held = [token.token for token in head_holding(server, "few").tokens()]
    for most in (len(held), len(held) + 1, 2 * len(held) - 1, 2 * len(held)):
        found = memory(server, "few", latest=0, most=most)
        assert [token["at"] for token in found["tokens"]] == held


def test_a_turn_under_way_is_looked_at_while_it_answers(server):
    talk(server, "live", 1)
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": "Go"}],
        "max_tokens": 60_000,
        "temperature": 0,
        "stream": True,
    }
    headers = {"x-session-id": "live2"}
    with httpx.stream("POST", f"{server.url}{CHAT}", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        said = "".join(next(lines) for _ in range(40))
        first, second = memory(server, "live2"), memory(server, "live2")
        assert first["doing"] == second["doing"] == "answering"
        assert 20 < first["seen"] < second["seen"]
        assert first["read"] == first["seen"] - 1
        assert first["tokens"][0]["text"] == "<|im_start|>"
        assert said
    server.settled()
    # The turn was not saved.
    assert httpx.get(f"{server.url}/v1/sessions/live2/memory").status_code == 404


@pytest.mark.slow
def test_what_was_dropped_is_held_without_its_text(server):
    talk(server, "old", 12)  # the server keeps eight saved turns
    found = server.store.get_session("", "old")
    begins = server.store.ancestry("", found.head)[0].start
    tokens = memory(server, "old")["tokens"]
    assert all((token["text"] is None) == (token["at"] < begins) for token in tokens)
    assert [token["pools"][0] > 0 for token in tokens[:3]] == [True, True, False]
    assert begins > 2


def test_memory_is_the_owners_alone_and_asked_for_in_numbers(server):
    talk(server, "mine", 1)
    for query in ("most=-1", "latest=9000", "most=x", "latest=1e3"):
        answer = httpx.get(f"{server.url}/v1/sessions/mine/memory?{query}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == query.partition("=")[0]
    assert httpx.get(f"{server.url}/v1/sessions/nobody/memory").status_code == 404
    hashes = [hashlib.sha256(key).hexdigest() for key in (b"alice", b"bob")]
    with serving(make_client(rows=1), Keys(hashes)) as other:
        alice, bob = ({"Authorization": f"Bearer {key}"} for key in ("alice", "bob"))
        body = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        other.post(CHAT, body, **alice, **{"x-session-id": "s"})
        url = f"{other.url}/v1/sessions/s/memory"
        statuses = [httpx.get(url, headers=who).status_code for who in (alice, bob, {})]
        assert statuses == [200, 404, 401]


def test_who_looks_at_a_turn_without_a_row_waits_for_nothing():
    from test_engine import engine, turn

    made: Engine = engine(rows=1)
    first, second = turn("a", [1, 2, 3], limit=50), turn("b", [4, 5])
    made.submit(first)
    made.submit(second)
    made.step()
    looks = [made.inspect(first), made.inspect(first), made.inspect(second)]
    assert looks[0] is looks[1]
    made.step()
    glance = looks[0].result(0)
    assert glance is not None
    assert glance.holding.seen == 3 + len(glance.output_ids) - 1
    assert not looks[2].done()  # one inspection in each step
    made.step()
    assert looks[2].result(0) is None
    made.cancel(first)
    made.cancel(second)
    made.step()
    after = made.inspect(first)
    made.stop()
    # Without sequences, it still completes the inspections that were requested, and ends.
    made.run()
    assert after.result(0) is None


def test_while_a_step_takes_long_the_last_inspection_is_told() -> None:
    """A client that looks again during a step gets the last inspection at once."""
    sequence: Any = Server  # any object that can identify a row
    found: Any = object()
    looks: list[Future[Any]] = [Future(), Future()]
    looks[0].set_result(found)
    client: Any = SimpleNamespace(engine=SimpleNamespace(inspect=lambda sequence: looks.pop(0)))
    known = route.Inspections()

    async def look() -> Any:
        return await asyncio.wait_for(route.inspect(client, sequence, known), route.PATIENCE / 2)

    assert asyncio.run(look()) is found
    assert asyncio.run(look()) is found  # the second inspection never completes
    assert looks == []
