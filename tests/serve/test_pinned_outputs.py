"""Tool outputs can be pinned: they stay in the cache as long as the conversation lasts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from anything import TAKES_TOOLS, random_client
from servers import CHATML, make_client, make_tokenizer, serving, serving_nano
from test_drops import (
    CALL,
    HISTORY,
    SECRET,
    TOOL,
    USER,
    answer,
    ask,
    drop,
    held_text,
    items,
    memory,
    read_text,
    result,
    said,
)

PIN = "pinned(sink(2) | recent(48) | heavy(8), n={n}, header=4)"
WORDS = {"role": "user", "content": "w" * 150}
"""A message that is longer than the window and a chunk together."""


def start(n=600, template=TAKES_TOOLS, **given):
    return serving(make_client(template=template, policy=PIN.format(n=n), **given))


@pytest.fixture
def server():
    with start() as server:
        yield server


def pin(server, session: str, call="call_a/b", method="PUT") -> httpx.Response:
    return httpx.request(method, f"{server.url}/v1/sessions/{session}/pins/{call}")


def talk(server, history: list[dict], session: str, turns=2, **given) -> tuple[list[dict], dict]:
    """Add turns of many words, and return the history and the usage of the last answer."""
    for _ in range(turns):
        found = ask(server, history, session, **given).json()
        given.pop("weir", None)
        text = found["choices"][0]["message"]["content"]
        history = [*history, answer(text), WORDS]
    return history, found["usage"]


def places_held(server, session: str) -> set[int]:
    return {token["at"] for token in memory(server, session)["tokens"]}


@pytest.mark.parametrize("template", [TAKES_TOOLS, CHATML, None], ids=["told", "words", "none"])
def test_a_pinned_output_stays_while_others_leave(template):
    with start(template=template) as server:
        for name, given in (("pinned", {"weir": {"pin": ["call_a/b"]}}), ("plain", {})):
            other = [{"role": "user", "content": f"Read it, {name}."}, *HISTORY[1:]]
            _, usage = talk(server, other, name, turns=4, **given)
            assert usage["weir"]["seen"] > 4 * 150
            (item,) = items(server, name)
            own = set(range(item["start"], item["start"] + len(SECRET)))
            held = places_held(server, name)
            if name == "pinned":
                assert own <= held
                assert SECRET in held_text(server, name)
                assert usage["weir"]["pinned_outputs"] == len(SECRET)
                assert "noted" not in usage["weir"]
            else:
                assert SECRET not in held_text(server, name)
                assert "pinned_outputs" not in usage["weir"]
            assert item["pinned"] is (name == "pinned")


def test_an_output_in_the_window_is_pinned_without_reading_it_again(server):
    first = ask(server, HISTORY, "one")
    found = pin(server, "one").json()
    assert found == {
        "id": "call_a/b",
        "object": "session.item",
        "pinned": True,
        "tokens": len(SECRET),
        "again": False,
        "reread": False,
    }
    assert pin(server, "one").json()["again"] is True
    _, usage = talk(server, [*HISTORY, said(first), WORDS], "one", turns=3)
    assert SECRET in held_text(server, "one")
    assert "noted" not in usage["weir"]
    assert read_text(server, "one").count(SECRET) == 1


@pytest.mark.parametrize("template", [TAKES_TOOLS, CHATML, None], ids=["told", "words", "none"])
def test_an_output_that_has_left_is_read_again_once(template):
    with start(template=template) as server:
        history, _ = talk(server, HISTORY, "one")
        assert SECRET not in held_text(server, "one")
        assert pin(server, "one").json()["reread"] is True
        found = ask(server, history, "one")
        usage = found.json()["usage"]["weir"]
        assert SECRET in usage["noted"]
        assert usage["pinned_outputs"] == len(SECRET)
        history = [*history, said(found), WORDS]
        history, usage = talk(server, history, "one", turns=3)
        assert "noted" not in usage["weir"]
        assert "reread" not in usage["weir"]
        assert SECRET in held_text(server, "one")
        assert read_text(server, "one").count(SECRET) == 2
        assert pin(server, "one").json()["reread"] is False
        # Dropping the output also drops its repetition.
        assert drop(server, "one").status_code == 200
        assert SECRET not in held_text(server, "one")
        talk(server, history, "one", turns=1)
        assert SECRET not in held_text(server, "one")
        assert read_text(server, "one").count(SECRET) == 2


def test_what_is_unpinned_leaves_with_the_next_answers(server):
    history, _ = talk(server, HISTORY, "one", weir={"pin": ["call_a/b"]})
    found = pin(server, "one", method="DELETE")
    assert found.json() == {"id": "call_a/b", "object": "session.item", "pinned": False}
    assert items(server, "one")[0]["pinned"] is False
    _, usage = talk(server, history, "one", turns=3)
    assert SECRET not in held_text(server, "one")
    assert "pinned_outputs" not in usage["weir"]
    assert pin(server, "one", method="DELETE").status_code == 404


def test_the_pinned_one_of_two_outputs_of_an_id_is_unpinned(server):
    first = ask(server, HISTORY, "one", weir={"pin": ["call_a/b"]})
    again = [answer(tool_calls=[CALL]), result("another output")]
    ask(server, [*HISTORY, said(first), USER, *again], "one")
    assert [item["pinned"] for item in items(server, "one")] == [False, True]
    assert pin(server, "one", method="DELETE").status_code == 200
    assert [item["pinned"] for item in items(server, "one")] == [False, False]
    assert pin(server, "one", method="DELETE").status_code == 404


def test_it_stays_pinned_in_forks_and_after_a_restart(tmp_path):
    with start(data=tmp_path) as server:
        history, _ = talk(server, HISTORY, "one", weir={"pin": ["call_a/b"]})
        assert server.post("/v1/sessions/one/fork", {"id": "two"}).status_code == 200
        talk(server, history, "two")
        assert SECRET in held_text(server, "two")
    with start(data=tmp_path) as server:
        for name in ("one", "two"):
            _, usage = talk(server, history, name)
            assert usage["weir"]["pinned_outputs"] == len(SECRET)
            assert SECRET in held_text(server, name)


def test_it_stays_pinned_when_the_history_is_read_again():
    with start(most=2) as server:
        history, _ = talk(server, HISTORY, "one", weir={"pin": ["call_a/b"]})
        for name in ("x", "y", "z"):
            ask(server, [{"role": "user", "content": name}])  # these turns replace the saved ones
        found = ask(server, history, "two").json()
        usage = found["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["weir"]["beginning"]
        assert usage["weir"]["pinned_outputs"] == len(SECRET)
        assert SECRET in held_text(server, "two")
        assert read_text(server, "two").count(SECRET) == 1


def test_an_exported_session_has_its_pins(server):
    history, _ = talk(server, HISTORY, "one")
    assert pin(server, "one").json()["reread"] is True
    history, _ = talk(server, history, "one")
    data = httpx.get(f"{server.url}/v1/sessions/one/export").content
    httpx.delete(f"{server.url}/v1/sessions/one")
    with start() as other:
        head = {"content-type": "application/octet-stream"}
        url = f"{other.url}/v1/sessions/import"
        new = httpx.post(url, content=data, headers=head).json()["id"]
        assert items(other, new)[0]["pinned"] is True
        _, usage = talk(other, history, new)
        assert usage["weir"]["pinned_outputs"] == len(SECRET)
        assert SECRET in held_text(other, new)


def test_while_an_answer_is_made(server):
    first = ask(server, HISTORY, "one")
    body = {"model": "small", "messages": [*HISTORY, said(first), USER], "max_tokens": 400}
    body |= {"stream": True}
    url, head = f"{server.url}/v1/chat/completions", {"x-session-id": "one"}
    with httpx.stream("POST", url, json=body, headers=head, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        found = pin(server, "one").json()
        rest = "".join(lines)
    assert "[DONE]" in rest
    server.settled()
    # The output can leave the window before it is pinned. Then the response to the PUT says that it
    # will be read again.
    assert (SECRET in held_text(server, "one")) is not found["reread"]


def test_a_model_pins_an_output_itself():
    with serving(random_client(TAKES_TOOLS, policy=PIN.format(n=2000), chunk=4)) as server:
        name = {"type": "function", "function": {"name": "keep_tool_output"}}
        given = {"weir": {"tools": ["keep_tool_output"]}, "tool_choice": name, "max_tokens": 200}
        back = {str(make_tokenizer()("1")["input_ids"][0]): 50.0}
        found = ask(server, HISTORY, "one", logit_bias=back, **given).json()
        (use,) = found["usage"]["weir"]["tools"]
        assert use["name"] == "keep_tool_output"
        if json.loads(use["arguments"])["back"] == 1:
            assert use["result"].startswith(f"Kept: {len(SECRET)} tokens.")
            assert items(server, "one")[0]["pinned"] is True
        else:
            assert "only 1 output that could" in use["result"]


def test_without_room_it_is_refused_with_the_number_that_is_needed():
    with start(n=20) as server:
        for given in ({"weir": {"pin": ["call_a/b"]}}, {}):
            found = ask(server, HISTORY, "one", **given)
        assert found.status_code == 200
        for refused in (pin(server, "one"), ask(server, HISTORY, weir={"pin": ["call_a/b"]})):
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert "Start the server with --pin 256" in error["message"]
            assert error["code"] == "cannot_pin"
        assert items(server, "one")[0]["pinned"] is False


def test_pins_of_a_branch_that_do_not_fit_together_are_told():
    with start() as server:
        beginning = ask(server, HISTORY).json()["usage"]["weir"]["beginning"]
    with start(n=beginning + 45) as server:
        history, _ = talk(server, HISTORY, "one")
        # Each branch pins one output. The second branch contains both.
        made = [answer(tool_calls=[{**CALL, "id": "c2"}]), result("x" * 40, "c2")]
        found = ask(server, [*history, *made], "two", weir={"pin": ["c2"]})
        assert found.json()["usage"]["weir"]["pinned_outputs"] == 40
        assert pin(server, "one").status_code == 200
        found = ask(server, [*history, *made, said(found), USER], "two")
        assert "23 tokens of pinned outputs have no room" in found.headers["x-weir-warning"]
        assert "--pin 256" in found.headers["x-weir-warning"]
        assert found.json()["usage"]["weir"]["pinned_outputs"] == 40
        assert ask(server, history, "one").json()["usage"]["weir"]["pinned_outputs"] == len(SECRET)


@pytest.mark.parametrize(
    ("pins", "param"),
    [
        (["call_a/b", "c9"], "weir.pin[1]"),
        ([""], "weir.pin[0]"),
        ([7], "weir.pin[0]"),
        (["x"] * 200, "weir.pin"),
        ("call_a/b", "weir.pin"),
    ],
)
def test_wrong_pins_are_refused(server, pins, param):
    found = ask(server, HISTORY, weir={"pin": pins})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == param


def test_pinned_and_dropped_exclude_each_other(server):
    found = ask(server, HISTORY, weir={"pin": ["call_a/b"], "drop": ["call_a/b"]})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "weir.pin[0]")
    ask(server, HISTORY, "one", weir={"pin": ["call_a/b"]})
    assert drop(server, "one").status_code == 200
    refused = pin(server, "one")
    assert refused.status_code == 400
    assert "was dropped" in refused.json()["error"]["message"]
    refused = ask(server, HISTORY, weir={"pin": ["call_a/b"]})
    assert "was dropped" in refused.json()["error"]["message"]
    for call in ("nothing", "call_a", "%00", "../../x", "a" * 3000):
        for method in ("PUT", "DELETE"):
            assert pin(server, "one", call, method).status_code in (404, 405)


@pytest.mark.parametrize(
    ("policy", "why"),
    [("dense", "keeps every token"), ("beginning(16) | sink(4) | recent(12)", "--pin")],
)
def test_policies_that_cannot_pin_refuse_by_name(policy, why):
    with serving(make_client(template=TAKES_TOOLS, policy=policy)) as server:
        found = ask(server, HISTORY, weir={"pin": ["call_a/b"]})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "weir.pin")
        assert why in found.json()["error"]["message"]
        ask(server, HISTORY, "one")
        assert why in pin(server, "one").json()["error"]["message"]
        found = ask(server, HISTORY, weir={"tools": ["keep_tool_output"]})
        assert found.json()["error"]["param"] == "weir.tools[0]"


def test_responses_pin_by_the_ids_of_calls(server):
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": SECRET}
    given = {"model": "small", "max_output_tokens": 4}
    asked = [{"role": "user", "content": "R"}, call, output]
    body = {**given, "input": asked, "weir": {"pin": ["c1"]}}
    last = server.post("/v1/responses", body).json()
    for _ in range(3):
        server.settled()
        more = {**given, "input": "w" * 150, "previous_response_id": last["id"]}
        last = server.post("/v1/responses", more).json()
    assert last["usage"]["weir"]["pinned_outputs"] == len(SECRET)
    server.settled()
    session = server.store.find_turn("", last["id"].removeprefix("resp_")).session
    assert SECRET in held_text(server, session)
    wrong = {**more, "weir": {"pin": ["c2"]}}
    assert server.post("/v1/responses", wrong).json()["error"]["param"] == "weir.pin[0]"


def test_it_stays_pinned_where_the_tools_change(server):
    history, _ = talk(server, HISTORY, "one", weir={"pin": ["call_a/b"]})
    other = {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}
    found = ask(server, history, "one", tools=[TOOL, other]).json()
    assert found["usage"]["weir"]["reread"]["why"] == "tools"
    assert found["usage"]["weir"]["pinned_outputs"] == len(SECRET)


@pytest.mark.parametrize("field", ["pin", "drop"])
def test_an_output_is_named_in_a_conversation_whose_system_message_changes(field):
    """With --note-changes, the conversation goes on, and its outputs keep their earlier hashes."""
    with start(notes_changes=True) as server:
        system = {"role": "system", "content": "It is 10:40."}
        first = ask(server, [system, *HISTORY], "one")
        history = [{"role": "system", "content": "It is 10:41."}, *HISTORY, said(first), USER]
        second = ask(server, history, "one", weir={field: ["call_a/b"]})
        usage = second.json()["usage"]["weir"]
        assert "10:41" in usage["noted"]
        assert "reread" not in usage
        assert usage.get("pinned_outputs", 0) == (len(SECRET) if field == "pin" else 0)
        if field == "drop":
            assert SECRET not in held_text(server, "one")
        else:
            talk(server, [*history, said(second), WORDS], "one")
            assert SECRET in held_text(server, "one")


AGENTS = Path(__file__).parents[2] / "docs" / "agents.md"
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```$", AGENTS.read_text("utf-8"), re.S | re.M)


def test_the_example_of_the_page_keeps_a_fact_of_nano():
    """nano still holds the output's positions after several times its window."""
    with serving_nano(pinned=200) as server:
        space: dict = {}
        exec(EXAMPLE.replace("http://127.0.0.1:8000", server.url), space)
        first, history = space["answer"], space["history"]
        tokens = first.usage.weir["pinned_outputs"]
        assert tokens > 4
        session = server.store.list_sessions("")[-1].id
        (item,) = items(server, session)
        own = set(range(item["start"], item["start"] + item["tokens"]))
        for words in ("The army went on. " * 60, "It was cold. " * 60, "Nobody spoke. " * 60):
            text = space["answer"].choices[0].message.content
            history += [answer(text), {"role": "user", "content": words}]
            space["answer"] = space["client"].chat.completions.create(
                model="nano", messages=history, max_tokens=8
            )
        usage = space["answer"].usage.weir
        assert usage["seen"] > 2 * (256 + 200)
        assert usage["pinned_outputs"] == tokens
        server.settled()
        held = memory(server, session)
        by_pool = {one["at"]: one for one in held["tokens"] if one["at"] in own}
        assert by_pool.keys() == own
        read = "".join(by_pool[at]["text"] for at in sorted(own))
        assert read.strip() == "The regiment marches at dawn."
        # The tokens after it have left.
        assert not {item["start"] + item["tokens"] + n for n in range(60, 100)} & {
            one["at"] for one in held["tokens"]
        }
