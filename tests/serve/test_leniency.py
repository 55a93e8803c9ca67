"""What is honored, what is skipped with a warning, and what is refused (docs/requests.md)."""

from __future__ import annotations

import json
import logging

import openai
import pytest
from servers import CHATML, logged, make_client, serving

from weir.serve import Limits
from weir.serve.messages import Message
from weir.serve.roles import SystemPlaces
from weir.serve.sessions.records import unpack_ids

USER = {"role": "user", "content": "Hello there"}
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message comes first') }}{% endif %}" + CHATML[22:]
)
THINKING = CHATML.replace(
    "{% endif %}",
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}",
)
FUNCTION = {"type": "function", "name": "shell", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def server():
    with serving(make_client(limits=Limits(answer=50), template=STRICT)) as server:
        yield server


@pytest.fixture(scope="module")
def thinking():
    with serving(make_client(template=THINKING)) as server:
        yield server


def chat(*messages, **given):
    return {"model": "small", "messages": messages, "max_tokens": 4, "temperature": 0, **given}


def response(items, **given):
    return {"model": "small", "input": items, "max_output_tokens": 4, "temperature": 0, **given}


def warning(answer) -> str:
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-weir-warning", "")


def text(kind: str, words: str):
    return {"type": kind, "text": words}


def as_codex_sends_it(**given):
    """Return a body of Codex CLI, shortened."""
    environment = text("input_text", "<environment_context>cwd</environment_context>")
    return response(
        [
            {"type": "message", "role": "developer", "content": [text("input_text", "Be brief.")]},
            {"type": "message", "role": "user", "content": [environment]},
            {"type": "message", "role": "user", "content": [text("input_text", "Fix it.")]},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
            {
                "type": "custom_tool_call",
                "call_id": "call_1",
                "name": "apply_patch",
                "input": "*** Begin Patch",
            },
            {"type": "custom_tool_call_output", "call_id": "call_1", "output": "Done"},
            {
                "type": "local_shell_call",
                "call_id": "call_2",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"]},
            },
            {"type": "local_shell_call_output", "call_id": "call_2", "output": "a.py"},
            {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
        ],
        instructions="You are Codex.",
        tools=[
            FUNCTION,
            {"type": "namespace", "name": "mcp__x", "tools": [FUNCTION]},
            {"type": "web_search", "external_web_access": False},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
            {"type": "local_shell"},
            {"type": "mcp", "server_label": "x"},
        ],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="0199",
        text={"verbosity": "low"},
        client_metadata={"x-codex-installation-id": "1"},
        **{"store": False, **given},
    )


def test_of_two_limits_the_newer_name_counts_and_the_other_is_named(server):
    body = {"model": "small", "messages": [USER], "max_completion_tokens": 3}
    for old, said in ((5, "no effect here: max_tokens"), (3, "")):
        answer = server.post("/v1/chat/completions", {**body, "max_tokens": old})
        assert warning(answer) == said
        assert answer.json()["usage"]["completion_tokens"] == 3


def test_a_body_of_codex_is_answered_and_what_is_skipped_is_named_and_logged(server, caplog):
    caplog.set_level(logging.INFO, "weir.serve")
    answer = server.post("/v1/responses", as_codex_sends_it())
    skipped = warning(answer)
    for what in (
        "client_metadata",
        "input[3] (reasoning)",
        "input[8] (web_search_call)",
        *("tools[1] (namespace)", "tools[2] (web_search)", "tools[3] (custom)"),
        *("tools[4] (local_shell)", "tools[5] (mcp)"),
        "include (reasoning.encrypted_content)",
        "text.verbosity",
        "reasoning.effort",
        "reasoning.summary",
    ):
        assert what in skipped
    assert [tool["name"] for tool in answer.json()["tools"]] == ["shell"]
    lines = logged(caplog, "skipped")
    assert len(lines) == 1
    assert "tools[1] (namespace)" in lines[0]["skipped"]
    streamed = server.post("/v1/responses", as_codex_sends_it(stream=True))
    assert warning(streamed) == skipped


def test_calls_of_other_tools_are_told_as_calls_of_functions(server):
    answer = server.post("/v1/responses", as_codex_sends_it(store=True))
    session = answer.headers["x-session-id"]
    (record,) = server.store.list_turns("", session)
    calls = [call for message in record.messages[:-1] for call in message.calls]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("apply_patch", {"input": "*** Begin Patch"}),
        ("local_shell", {"type": "exec", "command": ["ls"]}),
    ]
    results = [m.content for m in record.messages if m.role == "tool"]
    assert results == ["Done", "a.py"]


def test_what_would_change_the_meaning_is_refused(server):
    refused = {
        "input": [{"type": "compaction", "encrypted_content": "gAAAA"}],
        "tool_choice": {"type": "web_search"},
        "guided_regex": "[0-9]+",
        "background": True,
    }
    for name, value in refused.items():
        answer = server.post("/v1/responses", {**response("Hi"), name: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(name)


def test_a_field_that_asks_for_nothing_is_passed_over(server):
    for nothing in (None, False, [], {}):
        for body in (chat(USER, unheard_of=nothing), response("Hi", unheard_of=nothing)):
            path = "/v1/responses" if "input" in body else "/v1/chat/completions"
            assert warning(server.post(path, body)) == ""
    assert server.post("/v1/chat/completions", chat(USER, unheard_of=0)).status_code == 400


def test_options_of_other_servers_mean_the_same_here(server):
    def said(**given):
        body = {k: v for k, v in chat(USER, **given).items() if v is not ...}
        answer = server.post("/v1/chat/completions", body)
        return answer.json()["choices"][0]["message"]["content"], warning(answer)

    assert len(said(max_tokens=..., n_predict=3)[0]) == 3
    options = {"num_predict": 2, "num_ctx": 4096, "temperature": 0}
    words, skipped = said(max_tokens=..., options=options)
    # The temperature of the request itself takes precedence over the one in `options`.
    assert (len(words), skipped) == (2, "no effect here: options.num_ctx, options.temperature")
    assert said(cache_prompt=True, mirostat=0, samplers=["x"])[1] == (
        "no effect here: cache_prompt, samplers"
    )
    penalized = said(repeat_penalty=2.0, max_tokens=20)[0]
    assert penalized == said(repetition_penalty=2.0, max_tokens=20)[0]
    assert penalized != said(max_tokens=20)[0]


@pytest.mark.parametrize("tokens", [-1, -2, 51, 10**6])
def test_a_limit_that_is_none_or_too_high_is_the_servers(server, tokens):
    bias = {str(server.engine_client.tokenizer.convert_tokens_to_ids("<|im_end|>")): -100}
    body = chat(USER, max_tokens=tokens, logit_bias=bias)
    answer = server.post("/v1/chat/completions", body)
    assert answer.json()["usage"]["completion_tokens"] == 50
    assert ("max_tokens above 50" in warning(answer)) == (tokens > 0)
    answer = server.post("/v1/responses", response("Hi", max_output_tokens=tokens))
    assert answer.status_code == 200
    assert server.post("/v1/chat/completions", chat(USER, max_tokens=0)).status_code == 400


def test_parts_are_joined_as_they_are_and_refusals_are_text(server):
    split = [text("text", "Hel"), text("input_text", "lo there")]
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can't."}]}
    old = {"role": "assistant", "content": None, "refusal": "I can't."}
    counts = set()
    for first, answer in (
        ({"role": "user", "content": split}, refusal),
        (USER, old),
        (USER, {"role": "assistant", "content": "I can't."}),
    ):
        got = server.post("/v1/chat/completions", chat(first, answer, USER)).json()
        counts.add(got["usage"]["prompt_tokens"])
    assert len(counts) == 1
    items = [
        {"role": "user", "content": [text("input_text", "Hel"), text("input_text", "lo there")]}
    ]
    counted = server.post("/v1/responses/input_tokens", response(items)).json()
    assert counted == server.post("/v1/responses/input_tokens", response("Hello there")).json()


def test_usage_comes_with_every_chunk_where_it_is_asked_for(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = server.client().chat.completions.create(
        **chat(USER, stream=True, stream_options=options)
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_an_answer_goes_on_from_its_beginning(server):
    whole = server.post("/v1/chat/completions", chat(USER, max_tokens=8)).json()
    said = whole["choices"][0]["message"]["content"]
    begun = {"role": "assistant", "content": said[:3]}
    rest = server.post("/v1/chat/completions", chat(USER, begun, max_tokens=5)).json()
    assert rest["choices"][0]["message"]["content"] == said[3:]
    answer = {"role": "assistant", "content": said}
    after = server.post("/v1/chat/completions", chat(USER, answer, USER)).json()["usage"]
    assert after["prompt_tokens_details"]["cached_tokens"] == whole["usage"]["total_tokens"] - 1
    # The beginning of an answer can also follow a turn that is known.
    more = server.post("/v1/chat/completions", chat(USER, answer, USER, begun)).json()
    assert more["usage"]["prompt_tokens"] == after["prompt_tokens"] + 3
    for wrong in ([answer], [USER, answer, answer]):
        assert server.post("/v1/chat/completions", chat(*wrong)).status_code == 400


def test_system_messages_in_any_place_are_read_by_a_strict_template(server):
    system = {"role": "system", "content": "Note"}
    for messages in (
        [system, {"role": "developer", "content": "More"}, USER],
        [USER, system],
        [system, USER, system],
        [USER, {"role": "assistant", "content": "a"}, system, USER],
    ):
        answer = server.post("/v1/chat/completions", chat(*messages))
        assert answer.status_code == 200, answer.text
    # The same holds where a turn is continued.
    first = server.post("/v1/chat/completions", chat(system, USER)).json()
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    second = server.post("/v1/chat/completions", chat(system, USER, said, system, USER)).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == first["usage"]["total_tokens"] - 1


def placed(places: SystemPlaces, spec: str, *, at_start: bool = True) -> str:
    """Return where messages are placed: `s1 u2 a3` are messages of system, user and assistant."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [Message(roles[one[0]], one[1:]) for one in spec.split()]
    found = places.place(messages, at_start=at_start)
    return " ".join(one.role[0] + one.content.replace("\n\n", "+") for one in found)


def test_the_rule_for_system_messages():
    first = SystemPlaces(first=True, several=False, later=False)
    assert placed(first, "s1 u2 a3 u4") == "s1 u2 a3 u4"
    assert placed(first, "s1 s2 s3 u4") == "s1+2+3 u4"
    assert placed(first, "s1 u2 s3") == "s1+3 u2"  # before the first answer: moved to the beginning
    assert placed(first, "s1 u2 a3 u4 s5") == "s1 u2 a3 u4+5"
    assert placed(first, "s1 u2 a3 s4 u5") == "s1 u2 a3 u4+5"
    assert placed(first, "s1 u2 a3 s4 s5 u6") == "s1 u2 a3 u4+5+6"
    assert placed(first, "u1 a2 s3") == "u1 a2 u3"
    assert placed(first, "u1 a2 t3 s4 a5 u6") == "u1 a2 t3 u4 a5 u6"
    assert placed(first, "s1 s2 u3", at_start=False) == "u1+2+3"
    nowhere = SystemPlaces(first=False, several=False, later=False)
    assert placed(nowhere, "s1 s2 u3 a4 u5") == "u1+2+3 a4 u5"
    several = SystemPlaces(first=True, several=True, later=False)
    assert placed(several, "s1 s2 u3 s4 a5") == "s1 s2 s4 u3 a5"
    assert placed(several, "s1 s2 u3 a4 u5 s6") == "s1 s2 u3 a4 u5+6"
    assert placed(SystemPlaces(), "s1 u2 s3 a4 s5") == "s1 s3 u2 a4 s5"
    assert placed(SystemPlaces(), "s1 u2 s3 a4 s5", at_start=False) == "s1 u2 s3 a4 s5"


def test_where_a_template_takes_system_messages_is_found_by_rendering():
    from weir.errors import WeirError

    def forgetful(turns) -> str:
        if turns[0]["role"] == "system":
            return turns[0]["content"] + str([t["content"] for t in turns if t["role"] != "system"])
        return str([t["content"] for t in turns if t["role"] != "system"])

    def refusing(turns) -> str:
        if any(turn["role"] == "system" for turn in turns):
            raise WeirError("no system role")
        return ""

    one = SystemPlaces(first=True, several=False, later=False)
    # It accepts other system messages, but leaves them out.
    assert SystemPlaces.of(forgetful) == one
    assert SystemPlaces.of(refusing) == SystemPlaces(first=False, several=False, later=False)
    assert SystemPlaces.of(lambda turns: str(turns)) == SystemPlaces()


def test_thoughts_are_switched_off_where_the_template_can(thinking, server):
    plain = thinking.post("/v1/chat/completions", chat(USER)).json()["usage"]["prompt_tokens"]
    off = len("<think>\n\n</think>\n\n")
    for how in (
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        answer = thinking.post("/v1/chat/completions", chat(USER, **how))
        assert (answer.json()["usage"]["prompt_tokens"], warning(answer)) == (plain + off, "")
    answer = thinking.post("/v1/responses", response("Hello there", reasoning={"effort": "none"}))
    assert answer.json()["usage"]["input_tokens"] == plain + off
    assert answer.json()["reasoning"]["effort"] == "none"
    answer = thinking.post("/v1/chat/completions", chat(USER, reasoning_effort="high"))
    assert answer.json()["usage"]["prompt_tokens"] == plain
    assert warning(answer) == "no effect here: the degree of reasoning_effort"
    for how in ({"enable_thinking": True}, {"chat_template_kwargs": {"enable_thinking": True}}):
        answer = server.post("/v1/chat/completions", chat(USER, **how))
        assert answer.status_code == 400
        assert "enable_thinking" in answer.json()["error"]["message"]
    answer = server.post("/v1/chat/completions", chat(USER, reasoning_effort="high"))
    assert warning(answer) == "no effect here: reasoning_effort"
    assert warning(server.post("/v1/chat/completions", chat(USER, reasoning_effort="none"))) == ""


@pytest.mark.parametrize(
    "name", ["chat_template", "messages", "tools", "add_generation_prompt", "bos_token", "other"]
)
def test_a_template_gets_no_other_variables_from_clients(thinking, name):
    body = chat(USER, chat_template_kwargs={name: "x"})
    answer = thinking.post("/v1/chat/completions", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, f"chat_template_kwargs.{name}")
    assert error["message"].endswith("that the template uses: enable_thinking.")


def test_an_item_is_found_by_its_id(server):
    client = server.client()
    first = client.responses.create(**response("Hello"))
    reference = {"type": "item_reference", "id": first.output[0].id}
    items = [{"role": "user", "content": "Hello"}, reference, {"role": "user", "content": "More"}]
    second = client.responses.create(**response(items))
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
    (given, answered, _) = client.responses.input_items.list(second.id, order="asc").data
    assert given.content[0].text == "Hello"
    assert answered.id == first.output[0].id
    again = [{"type": "item_reference", "id": given.id}]
    assert client.responses.create(**response(again)).usage.input_tokens > 0
    missing = {"type": "item_reference", "id": "msg_none"}
    with pytest.raises(openai.NotFoundError, match="Item with id 'msg_none' not found"):
        client.responses.create(**response([missing]))


CALL = {"type": "mcp_call", "id": "m", "name": "roll", "arguments": "{}", "output": "x"}
SKIPPED = {"type": "reasoning", "summary": []}
STRAY = {"type": "function_call_output", "call_id": "c", "output": "x"}
MISSING = {"type": "item_reference", "id": "msg_none"}


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([SKIPPED, STRAY], "input[1].call_id"),
        ([CALL, STRAY], "input[1].call_id"),
        ([SKIPPED, MISSING], "input[1].id"),
        ([CALL, MISSING], "input[1].id"),
        (["a compaction", SKIPPED, STRAY], "input[2].call_id"),
        ([SKIPPED, "none", USER], "input[1].encrypted_content"),
    ],
)
def test_an_error_names_the_place_that_an_item_has_in_the_request(server, items, param):
    first = server.post("/v1/responses", response("Hello")).json()["id"].removeprefix("resp_")
    turns = {"a compaction": first, "none": "none"}
    given = [
        {"type": "compaction", "encrypted_content": f"weir:{turns[item]}"}
        if isinstance(item, str)
        else item
        for item in items
    ]
    assert server.post("/v1/responses", response(given)).json()["error"]["param"] == param


def test_an_error_names_the_place_that_an_item_has_in_a_conversation(server):
    answer = server.post("/v1/conversations", {"items": [CALL, STRAY]})
    assert answer.json()["error"]["param"] == "items[1].call_id"
    made = server.post("/v1/conversations", {}).json()["id"]
    answer = server.post(f"/v1/conversations/{made}/items", {"items": [CALL, STRAY]})
    assert answer.json()["error"]["param"] == "items[1].call_id"


@pytest.mark.parametrize("parameters", [{"type": "array"}, {"properties": {"a": {"type": "king"}}}])
def test_an_error_names_the_place_that_a_tool_has_in_the_request(server, parameters):
    skipped, function = {"type": "web_search"}, {"name": "f", "parameters": parameters}
    body = response("x", tools=[skipped, {"type": "function", **function}])
    error = server.post("/v1/responses", body).json()["error"]
    assert error["param"] == "tools[1].parameters", error
    body = chat(USER, tools=[skipped, {"type": "function", "function": function}])
    error = server.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "tools[1].function.parameters", error


def test_tokens_are_counted_without_an_answer(server):
    client = server.client()
    first = client.responses.create(**response("Hello"))
    turns = len(server.store.list_sessions(""))
    counted = client.responses.input_tokens.count(model="small", input="Hello")
    assert counted.input_tokens == first.usage.input_tokens
    after = client.responses.input_tokens.count(
        model="small", input="More", previous_response_id=first.id
    )
    second = client.responses.create(**response("More", previous_response_id=first.id))
    assert after.input_tokens == second.usage.input_tokens
    assert len(server.store.list_sessions("")) == turns


@pytest.mark.parametrize("store", [True, False])
def test_a_compaction_stands_for_the_turn_before_it(server, store):
    client = server.client()
    history = [{"role": "user", "content": f"Hello {store}"}]
    how = {"instructions": "Be brief."}
    first = client.responses.create(**response(history, **how))
    history += [one.model_dump() for one in first.output]
    rest = {"role": "user", "content": "And then?"}
    compacted = client.responses.compact(model="small", input=[*history, rest], **how)
    assert [item.type for item in compacted.output] == ["compaction", "message"]
    items = [item.model_dump(exclude_none=True) for item in compacted.output]
    second = client.responses.create(**response(items, store=store, **how))
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
    named = client.responses.create(**response([rest], previous_response_id=first.id, **how))
    assert named.output_text == second.output_text
    with pytest.raises(openai.BadRequestError, match="Send either the compaction"):
        client.responses.create(**response(items, previous_response_id=first.id))
    # Nothing is left out of a history that has no answer yet.
    unknown = client.responses.compact(model="small", input="Who are you?")
    assert [item.type for item in unknown.output] == ["message"]
    gone = [{"type": "compaction", "encrypted_content": "weir:none"}, rest]
    answer = server.post("/v1/responses", response(gone))
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "input[0].encrypted_content"
    again = {"type": "item_reference", "id": first.output[0].id}
    assert server.post("/v1/responses", response([again, *items], **how)).status_code == 200
    stray = {"type": "function_call_output", "call_id": "c", "output": "x"}
    refused = server.post("/v1/responses", response([*items, stray])).json()["error"]
    assert refused["param"] == f"input[{len(items)}].call_id"


MEANING = [
    (
        [
            {
                "type": "mcp_call",
                "id": "mcp_1",
                "server_label": "x",
                "name": "roll",
                "arguments": '{"dice": "2d4"}',
                "output": "it rolled 7",
            }
        ],
        "it rolled 7",
    ),
    (
        [
            {
                "type": "mcp_call",
                "id": "mcp_1",
                "server_label": "x",
                "name": "roll",
                "arguments": "{}",
                "output": None,
                "error": {"code": -1, "message": "no dice"},
            }
        ],
        "no dice",
    ),
    (
        [
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
            {
                "type": "shell_call_output",
                "call_id": "c",
                "output": [{"stdout": "a.py", "stderr": "", "outcome": {"type": "exit"}}],
            },
        ],
        "a.py",
    ),
    (
        [
            {
                "type": "apply_patch_call",
                "call_id": "c",
                "operation": {"type": "create_file", "path": "b.py", "diff": "+x"},
            },
            {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
        ],
        "failed",
    ),
    (
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x"},
            {
                "type": "custom_tool_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "patched"}],
            },
        ],
        "patched",
    ),
]


@pytest.mark.parametrize(("items", "words"), MEANING)
def test_items_that_carry_an_output_are_read(server, items, words):
    start = {"type": "message", "role": "user", "content": "Do it."}
    body = {"model": "small", "input": [start, *items], "max_output_tokens": 3}
    found = server.post("/v1/responses", body)
    assert found.status_code == 200, found.text
    assert "x-weir-warning" not in found.headers
    server.settled()
    (turn,) = server.store.ancestry("", found.json()["id"].removeprefix("resp_"))
    assert words in server.engine_client.tokenizer.decode(list(unpack_ids(turn.ids)))
    again = server.post("/v1/conversations", {"items": [start, *items]})
    assert again.status_code == 200, again.text


@pytest.mark.parametrize(
    "item",
    [
        {"type": "mcp_call", "id": "m", "name": "roll", "arguments": "[1]", "output": "x"},
        {"type": "mcp_approval_request", "id": "m", "name": "roll", "arguments": "{}"},
        {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True},
        {"type": "computer_call", "call_id": "c", "action": {"type": "click"}},
        {"type": "custom_tool_call", "call_id": "c", "input": "x"},
        {"type": "something_new", "output": "it matters"},
    ],
)
def test_items_that_carry_meaning_and_are_not_known_are_refused_by_their_place(server, item):
    start = {"type": "message", "role": "user", "content": "Do it."}
    body = {"model": "small", "input": [start, item], "max_output_tokens": 3}
    error = server.post("/v1/responses", body).json()["error"]
    assert error["param"].startswith("input[1]"), error
