"""Tool outputs can be dropped from the cache, and are not read again afterwards."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from anything import TAKES_TOOLS, random_client
from servers import CHATML, make_client, make_tokenizer, serving

from weir.serve.api import Keys
from weir.serve.messages import DROPPED
from weir.serve.sessions.records import unpack_ids

USER = {"role": "user", "content": "Read it."}
SECRET = "the ink is violet today"
TOOL = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "maxProperties": 0}},
}
CALL = {"id": "call_a/b", "type": "function", "function": {"name": "read", "arguments": "{}"}}
ROOMY = "sink(2) | recent(6) | heavy(600)"


def answer(content="", **more) -> dict:
    return {"role": "assistant", "content": content, **more}


def result(content=SECRET, call="call_a/b") -> dict:
    return {"role": "tool", "tool_call_id": call, "content": content}


HISTORY = [USER, answer(tool_calls=[CALL]), result()]


def ask(server, messages, session=None, **given):
    headers = {} if session is None else {"x-session-id": session}
    body = {"model": "small", "messages": messages, "max_tokens": 4, "tools": [TOOL], "seed": 1}
    found = server.post("/v1/chat/completions", {**body, "tool_choice": "none", **given}, **headers)
    server.settled()
    return found


def said(found) -> dict:
    return answer(found.json()["choices"][0]["message"]["content"])


def read_text(server, session: str) -> str:
    """Return the text of all tokens that a session has read."""
    (*_, last) = server.store.list_turns("", session)
    ids = [i for turn in server.store.ancestry("", last.node) for i in unpack_ids(turn.ids)]
    return server.engine_client.tokenizer.decode(ids)


def memory(server, session: str) -> dict:
    return httpx.get(f"{server.url}/v1/sessions/{session}/memory?latest=0&most=8192").json()


def held_text(server, session: str) -> str:
    return "".join(token["text"] for token in memory(server, session)["tokens"])


def items(server, session: str) -> list[dict]:
    return httpx.get(f"{server.url}/v1/sessions/{session}/items").json()["data"]


def drop(server, session: str, call="call_a/b", **headers) -> httpx.Response:
    return httpx.delete(f"{server.url}/v1/sessions/{session}/items/{call}", headers=headers)


@contextmanager
def answering(server, history: list[dict[str, Any]]) -> Iterator[Iterator[str]]:
    """The lines of a long answer in the session "one", after its first ones."""
    body = {"model": "small", "messages": history, "max_tokens": 400, "stream": True}
    body |= {"tools": [TOOL], "tool_choice": "none"}
    url, head = f"{server.url}/v1/chat/completions", {"x-session-id": "one"}
    with httpx.stream("POST", url, json=body, headers=head, timeout=60) as stream:
        lines = stream.iter_lines()
        for _ in range(8):
            next(lines)
        yield lines


@pytest.fixture(params=[TAKES_TOOLS, CHATML, None], ids=["told", "words", "none"])
def template(request):
    return request.param


@pytest.fixture
def server():
    with serving(make_client(template=TAKES_TOOLS, policy=ROOMY)) as server:
        yield server


@pytest.mark.thinned(2)
def test_an_output_leaves_the_cache_and_is_not_read_again(template):
    with serving(make_client(template=template, policy=ROOMY, most=2)) as server:
        first = ask(server, HISTORY, "one")
        (item,) = items(server, "one")
        assert item["id"] == "call_a/b"
        assert item["tokens"] == len(SECRET)  # a token is a byte
        assert SECRET in held_text(server, "one")
        before = memory(server, "one")
        dropped = drop(server, "one")
        assert dropped.status_code == 200
        assert (dropped.json()["tokens"], dropped.json()["again"]) == (len(SECRET), False)
        after = memory(server, "one")
        assert before["held"] - after["held"] == len(SECRET)
        assert SECRET not in held_text(server, "one")
        assert items(server, "one") == []
        # The client sends the whole history again. It matches, and only new tokens are read.
        history = [*HISTORY, said(first), USER]
        second = ask(server, history, "one")
        usage = second.json()["usage"]
        assert "reread" not in usage["weir"]
        assert (
            usage["prompt_tokens_details"]["cached_tokens"]
            == first.json()["usage"]["weir"]["seen"] - 1
        )
        assert SECRET not in held_text(server, "one")
        assert memory(server, "one")["forgotten"]["tokens"] >= len(SECRET)
        # When the conversation is read again from its beginning, the output stays dropped.
        for name in ("x", "y", "z"):
            ask(server, [{"role": "user", "content": name}])  # these turns replace the saved ones
        third = ask(server, [*history, said(second), USER], "two")
        usage = third.json()["usage"]
        # Only the beginning, which conversations share, is cached.
        assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["weir"]["beginning"]
        assert SECRET not in read_text(server, "two")
        assert DROPPED in read_text(server, "two")
        # This history matches in the next turn.
        again = ask(server, [*history, said(second), USER, said(third), USER], "two").json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        # The output is not dropped from another history that contains it.
        other = ask(server, [{"role": "user", "content": "!"}, *HISTORY[1:]], "three")
        assert other.status_code == 200
        assert SECRET in read_text(server, "three")


def test_forks_and_earlier_turns_lose_it_too(server):
    first = ask(server, HISTORY, "one")
    body = {"id": "two"}
    assert server.post("/v1/sessions/one/fork", body).status_code == 200
    assert drop(server, "one").json()["tokens"] == len(SECRET)
    assert SECRET not in held_text(server, "two")
    ask(server, [*HISTORY, said(first), {"role": "user", "content": "Else?"}], "two")
    assert SECRET not in held_text(server, "two")
    assert DROPPED not in read_text(server, "two")


def test_what_stays_keeps_its_place(server):
    first = ask(server, HISTORY, "one")
    before = {t["at"]: t["text"] for t in memory(server, "one")["tokens"]}
    (item,) = items(server, "one")
    drop(server, "one")
    ask(server, [*HISTORY, said(first), USER], "one")
    after = {t["at"]: t["text"] for t in memory(server, "one")["tokens"]}
    gone = set(range(item["start"], item["start"] + item["tokens"]))
    assert {at for at in before if at not in after} == gone
    assert all(after[at] == text for at, text in before.items() if at not in gone)


def test_after_a_restart_it_stays_dropped(tmp_path):
    def start():
        return serving(make_client(template=TAKES_TOOLS, policy=ROOMY, data=tmp_path))

    with start() as server:
        first = ask(server, HISTORY, "one")
        assert drop(server, "one").status_code == 200
    with start() as server:
        assert items(server, "one") == []
        assert SECRET not in held_text(server, "one")
        second = ask(server, [*HISTORY, said(first), USER], "one")
        assert SECRET not in held_text(server, "one")
        assert drop(server, "one").json()["again"] is True
        httpx.delete(f"{server.url}/v1/sessions/one")
        third = [*HISTORY, said(first), USER, said(second), USER]
        ask(server, third, "two")
        assert SECRET not in read_text(server, "two")


def test_a_request_drops_by_the_ids_of_calls(server):
    ask(server, HISTORY)
    history = [*HISTORY, answer("x"), USER]
    found = ask(server, history, "one", weir={"drop": ["call_a/b"]})
    assert found.status_code == 200
    assert SECRET not in held_text(server, "one")
    wrong = ask(server, history, weir={"drop": ["call_a/b", "call_c"]})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "weir.drop[1]"
    # The same holds for responses, stored or not.
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": SECRET}
    given = {"model": "small", "max_output_tokens": 4}
    asked = [{"role": "user", "content": "R"}, call, output]
    first = server.post("/v1/responses", {**given, "input": asked, "store": False}).json()
    server.settled()
    whole = [*asked, *first["output"], {"role": "user", "content": "?"}]
    body = {**given, "input": whole, "store": False, "weir": {"drop": ["c1"]}}
    second = server.post("/v1/responses", body).json()
    server.settled()
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > len(SECRET)
    whole += [*second["output"], {"role": "user", "content": "?"}]
    kept = server.post("/v1/responses", {**given, "input": whole}).json()
    server.settled()
    session = server.store.find_turn("", kept["id"].removeprefix("resp_")).session
    assert SECRET not in held_text(server, session)
    more = {**given, "input": "?", "previous_response_id": kept["id"], "weir": {"drop": ["c1"]}}
    assert server.post("/v1/responses", more).status_code == 200
    more["weir"] = {"drop": ["c2"]}
    assert server.post("/v1/responses", more).json()["error"]["param"] == "weir.drop[0]"


@pytest.mark.parametrize("field", ["drop", "pin"])
def test_an_unknown_call_is_named_in_the_format_of_each_api(field):
    words = (
        "there is no output of the call 'x' in this history. Use the id of a call whose output was "
        "sent."
    )
    policy = "pinned(sink(2) | recent(600), n=600, header=4)"
    with serving(make_client(template=TAKES_TOOLS, policy=policy)) as server:
        given = {"model": "small", "messages": HISTORY[:1], "weir": {field: ["x"]}}
        for path, more in (
            ("/v1/chat/completions", given),
            ("/v1/responses", {"model": "small", "input": "a", "weir": given["weir"]}),
        ):
            error = server.post(path, more).json()["error"]
            assert (error["message"], error["param"]) == (words, f"weir.{field}[0]")
        # The other two APIs have no `param`, so the message says the place.
        error = server.post("/v1/messages", {**given, "max_tokens": 4}).json()["error"]
        assert error["message"] == f"weir.{field}[0]: {words}"
        assert server.post("/api/chat", given).json()["error"] == f"weir.{field}[0]: {words}"
        raw = {"model": "small", "prompt": "a", "raw": True, "weir": given["weir"]}
        error = server.post("/api/generate", raw).json()["error"]
        assert (
            error == f"a text prompt has no tool outputs. Leave out weir.{field}, or send a chat."
        )


@pytest.mark.parametrize("field", ["drop", "pin"])
def test_a_count_drops_and_pins_nothing(field):
    """The requests are refused, because their answers would have other counts."""
    policy = "pinned(sink(2) | recent(600), n=600, header=4)"
    with serving(make_client(template=TAKES_TOOLS, policy=policy)) as server:
        ask(server, HISTORY, "one")
        before = memory(server, "one"), items(server, "one")
        use = {"type": "tool_use", "id": "call_a/b", "name": "read", "input": {}}
        done = {"type": "tool_result", "tool_use_id": "call_a/b", "content": SECRET}
        call = {"type": "function_call", "call_id": "call_a/b", "name": "read", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "call_a/b", "output": SECRET}
        blocks = [
            {"role": "user", "content": HISTORY[0]["content"]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [done]},
        ]
        for path, given in (
            ("/v1/messages/count_tokens", {"messages": blocks}),
            ("/v1/responses/input_tokens", {"input": [blocks[0], call, output]}),
        ):
            body = {"model": "small", **given}
            assert server.post(path, body).status_code == 200
            refused = server.post(path, {**body, "weir": {field: ["call_a/b"]}})
            assert refused.status_code == 400
            assert f"a count changes no cache. Send weir.{field} with the" in refused.text
        marks = server.store.dropped_chains(""), server.store.pinned_chains("")
        assert marks == (frozenset(), frozenset())
        assert (memory(server, "one"), items(server, "one")) == before


def test_while_an_answer_is_made(server):
    first = ask(server, HISTORY, "one")
    history = [*HISTORY, said(first), USER]
    with answering(server, history) as lines:
        assert drop(server, "one").status_code == 200
        rest = "".join(lines)
    assert "[DONE]" in rest
    server.settled()
    assert SECRET not in held_text(server, "one")
    (*_, turn) = server.store.list_turns("", "one")
    state = server.store.load(turn.node).state
    # The saved state has no tokens of the output either.
    (place,) = [m.where for m in server.store.list_turns("", "one")[0].messages if m.where]
    position = state.tensors["0.position"]
    gone = (position >= place.start) & (position < place.stop)
    assert not gone.any()


def test_while_an_answer_is_made_the_newest_output_of_a_call_is_found(server):
    """A later call can have the same id, so an id can have several outputs."""
    newer = "a newer and much longer output"
    again = [answer(tool_calls=[CALL]), result(newer)]
    with answering(server, [*HISTORY, *again]):
        dropped = [drop(server, "one").json() for _ in range(3)]
    server.settled()
    told = [(one["tokens"], one["again"]) for one in dropped]
    # When all outputs are dropped, another request does nothing, and describes the newest.
    assert told == [(len(newer), False), (len(SECRET), False), (len(newer), True)]


def test_a_model_drops_an_output_itself():
    with serving(random_client(TAKES_TOOLS)) as server:
        name = {"type": "function", "function": {"name": "drop_tool_output"}}
        given = {"weir": {"tools": ["drop_tool_output"]}, "tool_choice": name, "max_tokens": 200}
        back = {str(make_tokenizer()("1")["input_ids"][0]): 50.0}
        found = ask(server, HISTORY, "one", logit_bias=back, **given).json()
        (use,) = found["usage"]["weir"]["tools"]
        assert use["name"] == "drop_tool_output"
        back_by = json.loads(use["arguments"])["back"]
        if back_by == 1:
            assert use["result"] == f"Dropped: {len(SECRET)} tokens."
            assert SECRET not in held_text(server, "one")
            assert items(server, "one") == []
        else:
            assert "only 1 output that could" in use["result"]
            assert len(items(server, "one")) == 1


def test_hostile_names_and_others_sessions():
    with serving(make_client(template=TAKES_TOOLS, policy=ROOMY)) as server:
        ask(server, HISTORY, "one")
        for call in ("nothing", "call_a", "call_a%2Fb%2Fc", "../../x", "%00", "a" * 3000, "'; --"):
            found = drop(server, "one", call)
            assert found.status_code in (404, 405), (call, found.text)
        assert drop(server, "none").status_code == 404
        assert drop(server, "~hidden").status_code == 404
        assert drop(server, "one", "call_a%2Fb").status_code == 200
        assert drop(server, "one").json()["again"] is True
        assert drop(server, "one", "call_a/b?x=1").status_code == 400


def test_the_sessions_of_another_key_are_not_there():
    hashes = [hashlib.sha256(key).hexdigest() for key in (b"alice", b"bob")]
    with serving(make_client(template=TAKES_TOOLS, policy=ROOMY), Keys(hashes)) as server:
        alice, bob = ({"Authorization": f"Bearer {key}"} for key in ("alice", "bob"))
        body = {"model": "small", "messages": HISTORY, "max_tokens": 4, "tool_choice": "none"}
        body["tools"] = [TOOL]
        server.post("/v1/chat/completions", body, **alice, **{"x-session-id": "one"})
        assert drop(server, "one", **bob).status_code == 404
        assert drop(server, "one").status_code == 401
        listed = f"{server.url}/v1/sessions/one/items"
        assert httpx.get(listed, headers=bob).status_code == 404
        # Bob drops the same output from the same history. This affects only his own conversation.
        asked = {**body, "weir": {"drop": ["call_a/b"]}}
        assert server.post("/v1/chat/completions", asked, **bob).status_code == 200
        assert len(httpx.get(listed, headers=alice).json()["data"]) == 1
        assert drop(server, "one", **alice).json()["again"] is False


def test_what_has_left_the_cache_is_dropped_for_later_readings():
    with serving(make_client(template=TAKES_TOOLS)) as server:  # 12 slots
        first = ask(server, HISTORY, "one")
        later = [*HISTORY, said(first), {"role": "user", "content": "z" * 80}]
        second = ask(server, later, "one")
        assert drop(server, "one").status_code == 200
        httpx.delete(f"{server.url}/v1/sessions/one")
        ask(server, [*later, said(second), USER], "two")
        assert SECRET not in read_text(server, "two")


def test_policies_that_cannot_drop_refuse_by_name():
    policy = "recent(8) | subgen(8, clusters=4, per_cluster=2)"
    with serving(make_client(template=TAKES_TOOLS, policy=policy)) as server:
        ask(server, HISTORY, "one")
        found = drop(server, "one")
        assert found.status_code == 400
        assert "subgen" in found.json()["error"]["message"]
        found = ask(server, HISTORY, weir={"drop": ["call_a/b"]})
        assert found.json()["error"]["param"] == "weir.drop"
        found = ask(server, HISTORY, weir={"tools": ["drop_tool_output"]})
        assert found.json()["error"]["param"] == "weir.tools[0]"


def test_many_drops_at_once_do_no_harm(server):
    calls = [{**CALL, "id": f"c{n}"} for n in range(6)]
    results = [result(f"{n} {SECRET}", f"c{n}") for n in range(6)]
    ask(server, [USER, answer(tool_calls=calls), *results], "one")
    assert [item["id"] for item in items(server, "one")] == [f"c{n}" for n in reversed(range(6))]
    threads = [threading.Thread(target=drop, args=(server, "one", f"c{n % 6}")) for n in range(18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert items(server, "one") == []
    assert "violet" not in held_text(server, "one")


def test_exported_sessions_know_their_outputs(server):
    ask(server, HISTORY, "one")
    data = httpx.get(f"{server.url}/v1/sessions/one/export").content
    head = {"content-type": "application/octet-stream"}
    new = httpx.post(f"{server.url}/v1/sessions/import", content=data, headers=head).json()["id"]
    assert [item["id"] for item in items(server, new)] == ["call_a/b"]
    assert drop(server, new).status_code == 200
    assert SECRET not in held_text(server, new)


OTHER = {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("change", ["tools", "clock"])
def test_it_stays_dropped_where_the_tools_or_the_system_message_change(server, change):
    system = {"role": "system", "content": "It is 10:40."}
    first = ask(server, [system, *HISTORY], "one")
    assert drop(server, "one").status_code == 200
    later = {"role": "system", "content": "It is 10:41."} if change == "clock" else system
    history = [later, *HISTORY, said(first), USER]
    tools = [TOOL, OTHER] if change == "tools" else [TOOL]
    second = ask(server, history, "one", tools=tools)
    reread = second.json()["usage"]["weir"]["reread"]
    assert reread["why"] == ("tools" if change == "tools" else "changed")
    assert SECRET not in second.text
    turn = server.store.list_turns("", "one")[-1]
    ids = [i for part in server.store.ancestry("", turn.node) for i in unpack_ids(part.ids)]
    text = server.engine_client.tokenizer.decode(ids)
    assert SECRET not in text
    assert DROPPED in text
    # It also stays dropped in a history that continues from there, whose turns never read it.
    tools = [TOOL] if change == "tools" else tools
    third = ask(server, [system, *HISTORY, said(first), USER, said(second), USER], tools=tools)
    assert SECRET not in third.text
    fourth = [{"role": "system", "content": "x"}, *HISTORY, said(first), USER, said(second), USER]
    ask(server, fourth, "four", tools=tools)
    assert SECRET not in read_text(server, "four")
    assert items(server, "four") == []
    assert drop(server, "four").json() == {
        "id": "call_a/b",
        "object": "session.item",
        "deleted": True,
        "tokens": 0,
        "again": True,
    }


def test_what_is_told_of_turns_does_not_quote_it():
    with serving(make_client(template=TAKES_TOOLS)) as server:  # 12 slots
        first = ask(server, HISTORY, "one")
        assert drop(server, "one").status_code == 200
        history = [*HISTORY, said(first), {"role": "user", "content": "z" * 80}]
        second = ask(server, history, "one", weir={"tell_forgotten": True})
        usage = second.json()["usage"]["weir"]
        told = json.dumps(usage["forgotten_turns"])
        assert DROPPED in told
        assert DROPPED in usage["noted"]
        assert SECRET not in second.text
        assert SECRET not in json.dumps(memory(server, "one")["forgotten"])
        # The same history with another output.
        changed = [*HISTORY[:2], result(f"{SECRET}!"), said(first), USER]
        third = ask(server, changed, "one")
        assert "the dropped output" in third.json()["usage"]["weir"]["reread"]["detail"]
        assert SECRET not in third.json()["usage"]["weir"]["reread"]["detail"]
