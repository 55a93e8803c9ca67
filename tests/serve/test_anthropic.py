"""Anthropic's Messages API: raw requests, and Anthropic's own client where it is installed."""

from __future__ import annotations

import hashlib
import json

import pytest
from servers import CHATML, make_client, serving
from test_early_bytes import LONG, held, stream

from weir.serve import Limits
from weir.serve.api import Keys

TOOL = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"enum": ["Rome", "Oslo"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}
USER = {"role": "user", "content": "Weather?"}
PATH = "/v1/messages"
THINKS = CHATML.replace("assistant\n", "assistant\n{# <think> #}")


@pytest.fixture(scope="module")
def server():
    with serving(make_client(limits=Limits(ping=0.1))) as server:
        yield server


def ask(*messages, **given):
    return {"model": "small", "messages": messages, "max_tokens": 6, "temperature": 0, **given}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def blocks(*given: dict) -> dict:
    return {"role": "user", "content": list(given)}


def events(answer) -> list[dict]:
    """Parse the events of a stream, and check that each is named after its type."""
    found = []
    for block in answer.text.strip().split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if lines and lines != ["data: [DONE]"]:  # "[DONE]" ends streams of OpenAI's API
            name, data = lines
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def joined(found: list[dict]) -> list[dict]:
    """Put the content blocks together from the events of a stream."""
    blocks = []
    for one in found:
        if one["type"] == "content_block_start":
            assert one["index"] == len(blocks)
            blocks.append({**one["content_block"]})
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = ""
        elif one["type"] == "content_block_delta":
            assert one["index"] == len(blocks) - 1
            delta = one["delta"]
            field = {
                "text_delta": "text",
                "input_json_delta": "input",
                "thinking_delta": "thinking",
            }[delta["type"]]
            name = "partial_json" if field == "input" else field
            blocks[-1][field] += delta[name]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    return blocks


def test_an_answer_has_what_the_api_says_and_a_second_turn_reads_only_what_is_new(server):
    first = server.post(PATH, ask(USER, system="Be brief.")).json()
    assert (first["type"], first["role"], first["model"]) == ("message", "assistant", "small")
    assert (first["stop_reason"], first["stop_sequence"]) == ("max_tokens", None)
    (block,) = first["content"]
    assert (block["type"], len(block["text"])) == ("text", 6)
    usage = first["usage"]
    assert (usage["output_tokens"], usage["cache_read_input_tokens"]) == (6, 0)
    cached = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = {"role": "assistant", "content": first["content"]}
    second = server.post(PATH, ask(USER, answer, USER, system=cached))
    read = second.json()["usage"]
    assert read["cache_read_input_tokens"] == usage["input_tokens"] + 6 - 1
    assert "x-weir-warning" not in second.headers
    # The same history is also recognized when it is sent in OpenAI's format.
    said = {"role": "assistant", "content": block["text"]}
    chat = {**ask({"role": "system", "content": "Be brief."}, USER, said, USER)}
    told = server.post("/v1/chat/completions", chat).json()["usage"]
    assert told["prompt_tokens_details"]["cached_tokens"] == read["cache_read_input_tokens"]


def test_a_stream_says_the_same(server):
    whole = server.post(PATH, ask(USER)).json()
    found = events(server.post(f"{PATH}?beta=true", ask(USER, stream=True)))
    kinds = [one["type"] for one in found if one["type"] not in ("content_block_delta", "ping")]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert found[0]["message"]["content"] == []
    assert "weir" not in found[0]["message"]["usage"]
    assert joined(found) == whole["content"]
    ended = next(one for one in found if one["type"] == "message_delta")
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"]["output_tokens"] == 6
    assert ended["usage"]["weir"]["seen"] == whole["usage"]["weir"]["seen"] > 0


def test_pings_come_while_the_prompt_waits(server):
    body = ask({"role": "user", "content": LONG})
    with held(server), stream(server, PATH, body) as answer:
        lines = answer.iter_lines()
        assert answer.status_code == 200
        assert any(line == "event: ping" for line in lines)
    server.settled()


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_is_a_block_and_its_result_goes_on_from_it(server, streams):
    choice = {"type": "tool", "name": "get_weather"}
    given = {"tools": [TOOL], "max_tokens": 200, "stream": streams}
    answer = server.post(PATH, ask(USER, tool_choice=choice, **given))
    if streams:
        found = events(answer)
        content, reason = joined(found), found[-2]["delta"]["stop_reason"]
        total = sum(found[-2]["usage"][f] for f in ("input_tokens", "output_tokens"))
        total += found[-2]["usage"]["cache_read_input_tokens"]
    else:
        body = answer.json()
        content, reason = body["content"], body["stop_reason"]
        total = sum(body["usage"][f] for f in ("input_tokens", "output_tokens"))
        total += body["usage"]["cache_read_input_tokens"]
    (call,) = content
    assert (call["type"], call["name"], reason) == ("tool_use", "get_weather", "tool_use")
    assert call["input"]["place"] in ("Rome", "Oslo")
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": [{"type": "text", "text": "Sunny"}],
    }
    note = {"type": "text", "text": "And then?"}
    messages = [USER, {"role": "assistant", "content": content}]
    messages.append({"role": "user", "content": [result, note]})
    after = server.post(PATH, ask(*messages, tools=[TOOL], tool_choice={"type": "none"})).json()
    assert after["usage"]["cache_read_input_tokens"] == total - 1


def test_a_call_that_is_cut_off_is_the_last_block_and_the_stream_has_its_beginning(server):
    """Anthropic documents this: clients look at `stop_reason` and at the last block."""
    asked = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}

    def pieces(limit: int) -> tuple[str, str]:
        found = events(server.post(PATH, ask(USER, **asked, max_tokens=limit, stream=True)))
        deltas = [one["delta"] for one in found if one["type"] == "content_block_delta"]
        text = "".join(delta["partial_json"] for delta in deltas)
        return text, found[-2]["delta"]["stop_reason"]

    limit = len('<tool_call>{"name": "get_weather", "arguments": {"pla')
    answer = server.post(PATH, ask(USER, **asked, max_tokens=limit)).json()
    call = answer["content"][-1]
    told = (call["type"], call["name"], call["input"], answer["stop_reason"])
    assert told == ("tool_use", "get_weather", {}, "max_tokens")
    whole, begun = pieces(200), pieces(limit)
    assert begun[0] and whole[0].startswith(begun[0]) and whole[0] != begun[0]
    assert (whole[1], begun[1]) == ("tool_use", "max_tokens")


def test_a_body_of_claude_code_is_answered(server):
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
    ]
    body = ask(
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>x"},
                {"type": "text", "text": "Hi"},
            ],
        },
        {"role": "system", "content": "Be careful."},
        system=system,
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        thinking={"type": "adaptive"},
        metadata={"user_id": "x"},
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        output_config={"effort": "medium"},
        stream=True,
    )
    answer = server.post(f"{PATH}?beta=true", body)
    assert answer.status_code == 200
    skipped = answer.headers["x-weir-warning"]
    for what in ("system (the billing header)", "tools[1] (web_search_20250305)", "metadata"):
        assert what in skipped
    assert "thinking" in skipped and "output_config.effort" in skipped
    counted = server.post(
        f"{PATH}/count_tokens",
        {k: v for k, v in body.items() if k not in ("metadata", "stream", "max_tokens")},
    )
    ended = next(one for one in events(answer) if one["type"] == "message_delta")["usage"]
    total = ended["input_tokens"] + ended["cache_read_input_tokens"]
    assert counted.json()["input_tokens"] == total
    # The line that differs in each request does not start another conversation.
    system[0]["text"] = "x-anthropic-billing-header: cc_version=2; cch=2;"
    again = server.post(
        f"{PATH}/count_tokens",
        {"model": "small", "messages": body["messages"], "system": system, "tools": body["tools"]},
    )
    assert again.json()["input_tokens"] == total


def test_thoughts_are_a_block_and_are_skipped_in_a_history(server):
    block = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    said = {"type": "text", "text": "Sunny"}
    counts = set()
    for content in ([block, said], [said], "Sunny"):
        body = {
            "model": "small",
            "messages": [USER, {"role": "assistant", "content": content}, USER],
        }
        answer = server.post(f"{PATH}/count_tokens", body)
        counts.add(answer.json()["input_tokens"])
        named = "messages[1].content[0] (thinking)" in answer.headers.get("x-weir-warning", "")
        assert named == (content == [block, said])
    assert len(counts) == 1


def test_stop_sequences_end_an_answer(server):
    whole = server.post(PATH, ask(USER, max_tokens=20)).json()["content"][0]["text"]
    stop = whole[5:7]
    answer = server.post(PATH, ask(USER, max_tokens=20, stop_sequences=[stop])).json()
    assert answer["content"][0]["text"] == whole[: whole.index(stop)]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
        ({"nonsense": 1}, 400, "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
        ),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}
                ]
            },
            400,
            "invalid_request_error",
        ),
    ],
)
def test_errors_have_the_form_of_the_api(server, change, status, kind):
    answer = server.post(PATH, {**ask(USER), **change})
    assert answer.status_code == status
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["error"]["message"] and body["error"]["details"]["error_code"]


def test_a_degree_of_thinking_is_named_as_the_request_has_it(server):
    answer = server.post(PATH, ask(USER, output_config={"effort": "high"}))
    assert answer.headers["x-weir-warning"] == "no effect here: output_config.effort"


def test_a_thread_is_refused_with_the_code_on_which_the_sdk_sends_everything(server):
    for path in (PATH, f"{PATH}/count_tokens"):
        body = {**ask(USER), "thread": {"type": "create"}}
        if path != PATH:
            del body["max_tokens"], body["temperature"]
        answer = server.post(path, body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["details"] == {"error_code": "thread_unsupported_request"}
        assert error["message"].startswith("Invalid 'thread': threads are not supported.")
    assert server.post(PATH, ask(USER, thread=None)).status_code == 200


def test_wrong_keys_and_hosts_are_refused_in_this_form():
    keys = Keys([hashlib.sha256(b"secret").hexdigest()])
    with serving(make_client(), keys) as server:
        assert server.post(PATH, ask(USER), **{"x-api-key": "secret"}).status_code == 200
        answer = server.post(PATH, ask(USER), **{"x-api-key": "wrong"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


def test_an_error_in_a_stream_is_an_event_of_this_api(server, monkeypatch):
    def fail(*given):
        raise RuntimeError("broken")

    monkeypatch.setattr(server.engine.runner, "run", fail)
    found = events(server.post(PATH, ask(USER, stream=True)))
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "api_error"


def test_anthropics_own_client(server):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "Hello from the client"}]
    how = {"model": "small", "max_tokens": 200, "extra_body": {"temperature": 0}}
    forced = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}
    with client.messages.stream(messages=messages, **how, **forced) as streamed:
        kinds = {event.type for event in streamed}
        first = streamed.get_final_message()
    assert {"message_start", "input_json", "content_block_stop", "message_stop"} <= kinds
    (call,) = first.content
    assert (call.type, first.stop_reason) == ("tool_use", "tool_use")
    assert call.input["place"] in ("Rome", "Oslo")
    messages += [
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"}],
        },
    ]
    how["max_tokens"] = 5
    counted = client.messages.count_tokens(model="small", messages=messages, tools=[TOOL])
    second = client.messages.create(
        messages=messages, tools=[TOOL], tool_choice={"type": "none"}, **how
    )
    usage = second.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert usage.cache_read_input_tokens > first.usage.output_tokens
    assert usage.input_tokens < 100
    with client.messages.stream(
        messages=messages, tools=[TOOL], tool_choice={"type": "none"}, **how
    ) as text:
        assert "".join(text.text_stream) == second.content[0].text
    with pytest.raises(anthropic.NotFoundError, match="--alias claude"):
        client.messages.create(messages=messages, **{**how, "model": "claude"})
    assert [one.id for one in client.models.list()] == ["small"]


def test_the_tool_runner_of_anthropics_client_works_as_it_is(server):
    anthropic = pytest.importorskip("anthropic")
    places = []

    @anthropic.beta_tool
    def get_weather(place: str) -> str:
        """Return the weather of a place."""
        places.append(place)
        return "Sunny"

    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    runner = client.beta.messages.tool_runner(
        model="small", max_tokens=40, messages=[USER], tools=[get_weather], max_iterations=2
    )
    answers = list(runner)
    assert answers and answers[0].usage.input_tokens > 0
