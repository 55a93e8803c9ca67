"""Histories are compared by meaning. Usage says what was read again, and why."""

from __future__ import annotations

import hashlib
import json
import logging
from copy import deepcopy

import pytest
from servers import CHATML, logged, make_client, serving

from weir.serve import messages as messages_module
from weir.serve.messages import Call, Message, hash_prefixes, same_value
from weir.serve.tools.formats import Tool, describe_tools

SYSTEM = {"role": "system", "content": "It is 10:40 on Monday. You are a clerk of few words."}
USER = {"role": "user", "content": "Hello there"}
MORE = {"role": "user", "content": "And then?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 10}},
                "additionalProperties": False,
            },
        },
    }
    for name in ("first", "second")
]


@pytest.fixture(scope="module")
def server():
    with serving(make_client()) as server:
        yield server


def ask(server, *messages, **given):
    body = {"model": "small", "messages": messages, "max_tokens": 5, "temperature": 0, **given}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(answer) -> dict:
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def cached(answer) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def reread(answer) -> dict | None:
    return answer["usage"]["weir"].get("reread")


def turned_around(value):
    """Return the same JSON, with keys in reverse order and whole numbers written with a point."""
    if isinstance(value, dict):
        return {name: turned_around(value[name]) for name in reversed(value)}
    if isinstance(value, list):
        return [turned_around(each) for each in value]
    return float(value) if type(value) is int else value


def test_a_history_is_the_same_in_other_words_of_json(server):
    first = ask(server, SYSTEM, USER, tools=TOOLS)
    known = first["usage"]["total_tokens"] - 1
    history = [SYSTEM, USER, said(first), MORE]
    for tools in (TOOLS, TOOLS[::-1], turned_around(deepcopy(TOOLS))):
        again = ask(server, *history, tools=tools)
        assert (cached(again), reread(again)) == (known, None)
    for changed in (
        {**said(first), "name": "clerk"},
        {**said(first), "content": f"\n {said(first)['content']}  "},
        {**said(first), "content": f"<think>Hm.</think>\n\n{said(first)['content']}"},
        {**said(first), "reasoning_content": "Hm."},
    ):
        assert cached(ask(server, SYSTEM, USER, changed, MORE, tools=TOOLS)) == known
    spaced = {**USER, "content": f"{USER['content']}\r\n"}
    assert cached(ask(server, SYSTEM, spaced, said(first), MORE, tools=TOOLS)) == known


def test_values_that_are_equal_are_the_same_and_large_numbers_stay_exact():
    assert json.dumps(same_value({"a": [1.0, 1e2, 0.5, True, None, 2**60 + 1]})) == (
        json.dumps({"a": [1, 100, 0.5, True, None, 2**60 + 1]})
    )
    big = [Tool("f", None, {"const": 2**53 + n}) for n in (0, 1)]
    assert describe_tools(big[:1]) != describe_tools(big[1:])

    def calling(text: str) -> str:
        return Message("assistant", "", calls=(Call("a", "f", text),)).canonical()

    assert calling('{"n": 1}') == calling('{"n":1.0}') != calling('{"n": 2}')
    assert Message("user", "a", "x").canonical() != Message("user", "a", "y").canonical()


@pytest.mark.parametrize("role", ["user", "assistant", "tool", 'odd"'])
def test_a_long_content_is_hashed_in_parts_as_if_it_were_whole(role, monkeypatch):
    monkeypatch.setattr(messages_module, "PART", 3)
    content = 'a"b\\\n\u00e9\U0001f30a\ud83cd" [["u", "x"]'
    message = Message(role, f" {content}\r\n", "n", result="x", place=3)
    name = None if role == "assistant" else "n"
    assert message.canonical() == json.dumps([role, content, name, 3])
    assert message.canonical() == "".join(message.canonical_parts())
    whole = hashlib.sha256(f"root\n{message.canonical()}".encode()).hexdigest()
    assert hash_prefixes("root", [message]) == [whole]


@pytest.mark.parametrize("held", [{"const": 2**53 + 1}, {"enum": [1, -(2**60)]}])
def test_a_number_that_would_be_rounded_is_refused(server, held):
    schema = {"type": "object", "properties": {"n": held}, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": "small", "messages": [USER], "response_format": form}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "Write it as a string" in answer.json()["error"]["message"]


def test_a_clock_in_the_system_message_is_named(server, caplog):
    caplog.set_level(logging.INFO, "weir.serve")
    first = ask(server, SYSTEM, USER)
    later = {**SYSTEM, "content": SYSTEM["content"].replace("10:40", "10:41")}
    again = ask(server, later, USER, said(first), MORE)
    found = reread(again)
    assert (found["from_message"], found["messages"], found["why"]) == (0, 3, "changed")
    assert "messages[0] (system) differs from character 10 on" in found["detail"]
    assert "was '0 on Monday" in found["detail"] and "is '1 on Monday" in found["detail"]
    lines = logged(caplog, "reread")
    assert [(line["reread"], line["reread_from"]) for line in lines] == [("changed", 0)]
    assert "Monday" not in str(lines)


def test_the_log_line_of_a_request_has_its_session(server, caplog):
    caplog.set_level(logging.INFO, "weir.serve")
    body = {"model": "small", "messages": [USER], "max_tokens": 2}
    answer = server.post("/v1/chat/completions", body, **{"x-session-id": "mine"})
    assert answer.headers["x-session-id"] == "mine"
    (line,) = logged(caplog, "session")
    assert (line["session"], line["id"]) == ("mine", answer.headers["x-request-id"])


def test_an_edited_answer_is_named_and_what_comes_before_is_not_read_again(server):
    first = ask(server, USER)
    second = ask(server, USER, said(first), MORE)
    edited = {"role": "assistant", "content": "Something else"}
    third = ask(server, USER, said(first), MORE, edited, MORE)
    assert cached(third) == first["usage"]["total_tokens"] - 1
    found = reread(third)
    assert (found["from_message"], found["messages"], found["why"]) == (2, 2, "changed")
    assert "messages[3] (assistant)" in found["detail"]
    # A new message in place of the last one is not reported as read again.
    assert reread(ask(server, USER, said(first), {**MORE, "content": "Or?"})) is None
    assert reread(second) is None


def test_other_tools_and_a_history_of_nobody_are_told_apart():
    with serving(make_client()) as server:
        unknown = ask(server, USER, {"role": "assistant", "content": "a"}, MORE)
        assert reread(unknown)["why"] == "unknown"
        first = ask(server, SYSTEM, USER, tools=TOOLS)
        again = ask(server, SYSTEM, USER, said(first), MORE, tools=TOOLS[:1])
        assert reread(again)["why"] == "tools"
        # The messages are the same, and the last one was also answered before.
        more = ask(server, USER, tools=TOOLS)
        ask(server, USER, said(more), MORE, tools=TOOLS)
        assert reread(ask(server, USER, said(more), MORE))["why"] == "tools"


def test_an_answer_from_elsewhere_is_not_blamed_on_tools(server):
    first = ask(server, {"role": "user", "content": "Elsewhere?"})
    history = [{"role": "user", "content": "Elsewhere?"}, said(first)]
    foreign = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Foreign."}]
    found = reread(ask(server, *history, *foreign, MORE))
    assert (found["why"], found["from_message"]) == ("unknown", 2)
    assert found["detail"] == "no conversation of this key goes on with messages[2] (user)"


def test_a_template_that_cannot_continue_is_named():
    template = "{{ messages | length }}" + CHATML.replace(
        "{{ m.content }}", "{% if loop.last or loop.first %}{{ m.content }}{% endif %}"
    )
    with serving(make_client(template=template)) as server:
        first = ask(server, USER)
        second = ask(server, USER, said(first), MORE)
        assert cached(second) == 0
        assert reread(second)["why"] == "template"


def response(items, **given):
    return {"model": "small", "input": items, "max_output_tokens": 5, "temperature": 0, **given}


def test_what_is_not_stored_is_not_read_again(server):
    """Codex does this: it sends the whole input in each request, with `store: false`."""
    client = server.client()
    items = [{"role": "user", "content": "Fix the fault in main.py"}]
    how = {"instructions": "You are Codex.", "store": False}
    totals, reads = [], []
    for _ in range(3):
        made = client.responses.create(**response(items, **how))
        usage = made.usage
        totals.append(usage.total_tokens)
        reads.append(usage.input_tokens - usage.input_tokens_details.cached_tokens)
        items += [one.model_dump(exclude_none=True) for one in made.output]
        items.append({"role": "user", "content": "More"})
    new = totals[1] - totals[0] - 5 + 1
    assert reads[1:] == [new, new]
    # A request with `store: true` goes on from there, in a session that is listed.
    stored = server.post("/v1/responses", response(items, **{**how, "store": True}))
    assert stored.json()["usage"]["input_tokens_details"]["cached_tokens"] == totals[2] - 1
    assert stored.headers["x-session-id"].startswith("sess_")


def test_sessions_are_known_under_another_name_of_the_model(tmp_path):
    with serving(make_client(data=tmp_path)) as server:
        first = ask(server, USER)
    client = make_client(data=tmp_path)
    client.name = "other"
    with serving(client) as server:
        assert cached(ask(server, USER, said(first), MORE, model="other")) == (
            first["usage"]["total_tokens"] - 1
        )


def test_the_root_of_histories_does_not_depend_on_the_name():
    from weir.serve import EngineClient, Limits

    one = make_client()
    other = EngineClient(one.engine, one.tokenizer, "another name", Limits())
    messages = [Message("user", "Hi")]
    assert one.matcher.hash_prefixes(messages) == other.matcher.hash_prefixes(messages)
