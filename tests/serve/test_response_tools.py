"""Tools in responses and conversations, with OpenAI's own client."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest
from anything import CITY, TAKES_TOOLS, random_client
from pydantic import BaseModel, Field
from servers import CHATML, make_tokenizer, serving

from weir.serve import SampledToken, Sampler


def tool_of(name: str, parameters: dict = CITY) -> dict:
    return {"type": "function", "name": name, "parameters": parameters}


TOOLS = [tool_of("get_weather"), tool_of("clock", {"type": "object", "maxProperties": 0})]
SCHEMAS = {tool["name"]: tool["parameters"] for tool in TOOLS}
NESTED = [
    {"type": "function", "function": {key: tool[key] for key in ("name", "parameters")}}
    for tool in TOOLS
]
WEATHER = {"type": "function", "name": "get_weather"}


@pytest.fixture(scope="module")
def server():
    with serving(random_client(TAKES_TOOLS)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def say(client, said="Weather?", **given):
    extra = {"seed": 1, **given.pop("extra_body", {})}
    given = {"model": "small", "max_output_tokens": 600, "tools": TOOLS, **given}
    return client.responses.create(input=said, extra_body=extra, **given)


def cached(response) -> int:
    return response.usage.input_tokens_details.cached_tokens


def calls_of(response) -> list:
    return [item for item in response.output if item.type == "function_call"]


def result(call, output="Sunny") -> dict:
    return {"type": "function_call_output", "call_id": call.call_id, "output": output}


def call_of(name: str) -> dict:
    return {"type": "function_call", "call_id": name, "name": "clock", "arguments": "{}"}


def result_of(name: str) -> dict:
    return {"type": "function_call_output", "call_id": name, "output": "Noon"}


def user(text) -> dict:
    return {"type": "message", "role": "user", "content": text}


def liking(text: str) -> dict:
    """Return request fields that make the first token of a text likely."""
    return {"logit_bias": {str(make_tokenizer()(text)["input_ids"][0]): 5}}


SHORT = liking("<|im_end|>")


@pytest.mark.slow
def test_a_call_that_is_required_comes_and_fits_its_function(client):
    for choice in ("required", WEATHER):
        told = say(client, tool_choice=choice, extra_body=SHORT)
        assert told.status == "completed" and told.output_text == ""
        assert [item.type for item in told.output] == ["function_call"] * len(told.output)
        for call in told.output:
            assert call.id.startswith("fc_") and call.call_id.startswith("call_")
            assert call.status == "completed"
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        assert client.responses.retrieve(told.id) == told
    assert [call.name for call in told.output] == ["get_weather"]
    assert (told.tool_choice.name, told.parallel_tool_calls) == ("get_weather", True)
    assert [tool.name for tool in told.tools] == ["get_weather", "clock"]
    assert told.tools[0].parameters == CITY and told.tools[0].description is None
    once = say(client, tool_choice="required", parallel_tool_calls=False)
    assert len(calls_of(once)) == 1 and not once.parallel_tool_calls


@pytest.mark.slow
def test_of_all_tools_those_that_are_allowed_are_called(client):
    (clock,) = ({"type": "function", "name": "clock"},)
    some = {"type": "allowed_tools", "mode": "required", "tools": [clock]}
    told = say(client, tool_choice=some, parallel_tool_calls=False)
    assert [call.name for call in calls_of(told)] == ["clock"]
    assert told.tool_choice.type == "allowed_tools"
    # The model is told of all tools, so a request with another choice uses the cached tokens.
    on = say(client, [result(told.output[0])], previous_response_id=told.id, tool_choice=WEATHER)
    assert cached(on) == told.usage.total_tokens - 1
    chat = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "Weather?"}],
        tools=NESTED,
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "clock"}}],
            },
        },
        parallel_tool_calls=False,
        max_tokens=200,
    )
    assert [c.function.name for c in chat.choices[0].message.tool_calls] == ["clock"]


@pytest.mark.slow
def test_a_stream_says_the_same_event_by_event(client):
    how = {"tool_choice": "required", "extra_body": {**SHORT, "seed": 3}}
    whole = say(client, **how)
    events = list(say(client, stream=True, **how))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == whole.status
    last = events[-1].response
    assert [(c.name, c.arguments) for c in last.output] == [
        (c.name, c.arguments) for c in whole.output
    ]
    for index, call in enumerate(last.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert [event.type for event in own] == [
            "response.output_item.added",
            *["response.function_call_arguments.delta"] * (len(own) - 3),
            "response.function_call_arguments.done",
            "response.output_item.done",
        ]
        added, *deltas, done, over = own
        assert (added.item.id, added.item.call_id, added.item.name) == (
            call.id,
            call.call_id,
            call.name,
        )
        assert (added.item.arguments, added.item.status) == ("", "in_progress")
        assert "".join(event.delta for event in deltas) == done.arguments == call.arguments
        assert {event.item_id for event in [*deltas, done]} == {call.id}
        assert over.item == call
    assert len(deltas) > 1
    assert client.responses.retrieve(last.id) == last
    with client.responses.stream(
        model="small", input="Weather?", tools=TOOLS, tool_choice=WEATHER, max_output_tokens=600
    ) as stream:
        names = [event.type for event in stream]
        assert "response.function_call_arguments.done" in names
        assert calls_of(stream.get_final_response())[0].name == "get_weather"


def test_what_is_said_before_a_call_is_a_message_of_its_own(server, monkeypatch):
    # Make the model say this: text, a call, text, and a call that is cut off.
    said = 'See. <tool_call>{"name": "clock", "arguments": {}}</tool_call> And <tool_call>{"name": '
    said += '"get_weather", "arguments": {"city": "Rome'
    told, events = spoken(server, monkeypatch, said)
    assert [(item["type"], item["status"]) for item in told["output"]] == [
        ("message", "completed"),
        ("function_call", "completed"),
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
    first, clock, second, cut = told["output"]
    assert first["content"][0]["text"] == "See."
    assert second["content"][0]["text"].strip() == "And"
    assert (clock["arguments"], cut["arguments"]) == ("{}", '{"city": "Rome')
    assert (told["status"], told["incomplete_details"]["reason"]) == (
        "incomplete",
        "max_output_tokens",
    )
    indices = [event["output_index"] for event in events if "output_index" in event]
    assert indices == sorted(indices) and set(indices) == {0, 1, 2, 3}
    opened = [event["item"]["id"] for event in events if event["type"].endswith("item.added")]
    closed = [event["item"]["id"] for event in events if event["type"].endswith("item.done")]
    assert opened == closed == [item["id"] for item in told["output"]]
    # Log-probabilities are listed with the text of their tokens, and not with calls.
    known = [[p["token"] for p in item["content"][0]["logprobs"]] for item in (first, second)]
    assert "".join(known[0]).startswith("See.") and "{" not in "".join(known[0])
    assert "".join(known[1]).startswith(" And")
    # When the client sends everything back, it matches as one answer.
    monkeypatch.undo()
    sent = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
        for item in (clock, cut)
    ]
    history = say(server.client(), [user("Weather?"), *told["output"], *sent], max_output_tokens=2)
    assert cached(history) == told["usage"]["total_tokens"] - 1


def test_what_is_cut_before_the_name_of_a_call_says_nothing(server, client, monkeypatch):
    for said, kinds in (
        ("<t", []),
        ('<tool_call>{"name": "get_wea', []),
        ('<tool_call>{"name": "get_weather", "arg', ["function_call"]),
        ('See. <tool_call>{"na', ["message"]),
    ):
        told, events = spoken(server, monkeypatch, said)
        assert told["status"] == "incomplete"
        saying = [item for item in told["output"] if item.get("content") != [NOTHING]]
        assert [item["type"] for item in saying] == kinds
        assert {item["status"] for item in told["output"]} == {"incomplete"}
        assert "arguments" not in told["output"][0] or told["output"][0]["arguments"] == ""
        assert "<" not in json.dumps(events[:-1] + told["output"])
        # When the client sends it back, it matches.
        monkeypatch.undo()
        back = [item for item in told["output"] if item["type"] == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
            for item in back
        ]
        on = [user("Weather?"), *told["output"], *results, user("And?")]
        again = say(client, on, max_output_tokens=1)
        assert cached(again) == told["usage"]["total_tokens"] - 1


def test_a_call_that_a_stop_ends_is_incomplete(client):
    told = say(client, tool_choice=WEATHER, extra_body={"stop": "city"})
    (call,) = told.output
    assert (told.status, call.status) == ("completed", "incomplete")
    assert (call.name, call.arguments.replace(" ", "")) == ("get_weather", '{"')
    (message,) = say(client, tool_choice=WEATHER, extra_body={"stop": "call>"}).output
    assert message.content[0].text == ""


NOTHING = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def spoken(server, monkeypatch, said: str) -> tuple[dict, list[dict]]:
    """Make the model say this text, and return the response and its events."""
    ids = server.engine_client.tokenizer(said)["input_ids"]

    left = iter(ids)

    def chosen(self, token, logits, changed):
        return SampledToken(next(left), -1.0)

    monkeypatch.setattr(Sampler, "accept", chosen)
    body = {
        "model": "small",
        "input": "Weather?",
        "tools": TOOLS,
        "max_output_tokens": len(ids),
        "top_logprobs": 1,
        "stream": True,
    }
    text = server.post("/v1/responses", body).text
    events = [
        json.loads(line[6:]) for line in text.splitlines() if line.startswith('data: {"type"')
    ]
    return events[-1]["response"], events


def test_without_need_the_model_may_say_anything_and_with_none_it_calls_nothing(client):
    for choice in ("auto", "none"):
        told = say(client, tool_choice=choice, max_output_tokens=40)
        assert [item.type for item in told.output] == ["message"]
        assert told.output_text and told.tool_choice == choice
    silent = say(client, tools=[], extra_body={"logit_bias": {"258": 100}})
    assert [item.type for item in silent.output] == ["message"]


def test_a_form_and_tools_together_allow_either(client):
    form = {"type": "json_schema", "name": "x", "schema": {"const": {"a": 1}}}
    for begins, kind in (("{", "message"), ("<", "function_call")):
        told = say(
            client,
            text={"format": form},
            parallel_tool_calls=False,
            extra_body=liking(begins),
        )
        assert [item.type for item in told.output] == [kind]
        if kind == "message":
            assert json.loads(told.output_text) == {"a": 1}


@pytest.mark.parametrize("template", [TAKES_TOOLS, CHATML, None], ids=["told", "words", "none"])
@pytest.mark.thinned(3)
def test_a_result_goes_on_from_the_call_and_reads_only_what_is_new(template):
    with serving(random_client(template, rows=1)) as server:
        go_on(server, server.client())


def go_on(server, client) -> None:
    first = say(client, tool_choice=WEATHER)
    (call,) = first.output
    short = {"tool_choice": "none", "max_output_tokens": 5, "temperature": 0}
    on = {"previous_response_id": first.id, **short}
    second = say(client, [result(call)], **on)
    assert cached(second) == first.usage.total_tokens - 1
    assert second.usage.input_tokens - cached(second) < 150  # the tools are not read again
    parts = [{"type": "input_text", "text": "Sunny"}]
    assert say(client, [result(call, parts)], **on).output_text == second.output_text
    # The whole history has the same result, also if the client chooses the ids of calls.
    history = [user("Weather?"), call.model_dump(exclude_none=True), result(call)]
    by_history = say(client, history, **short)
    assert (cached(by_history), by_history.output_text) == (cached(second), second.output_text)
    own = {"type": "function_call", "call_id": "mine", "name": "get_weather"}
    own["arguments"] = json.dumps(json.loads(call.arguments), indent=2)
    history = [user("Weather?"), own, {**result(call), "call_id": "mine"}]
    assert cached(say(client, history, **short)) == cached(second)
    # So does a chat with the same messages.
    chat_call = {
        "id": "mine",
        "type": "function",
        "function": {"name": "get_weather", "arguments": call.arguments},
    }
    chat = client.chat.completions.create(
        model="small",
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "tool_calls": [chat_call]},
            {"role": "tool", "tool_call_id": "mine", "content": "Sunny"},
        ],
        tools=NESTED,
        tool_choice="none",
        max_tokens=5,
        temperature=0,
    )
    assert chat.choices[0].message.content == second.output_text
    assert chat.usage.prompt_tokens_details.cached_tokens == cached(second)
    # If saved states are gone, the turns are read again from their items, also calls and results.
    third = say(client, "And then?", previous_response_id=second.id, **short)
    for told in (first, second):
        server.engine.forget(told.id.removeprefix("resp_"))
    again = say(client, "And then?", previous_response_id=second.id, **short)
    assert again.usage.input_tokens == third.usage.input_tokens


def test_other_tools_make_the_whole_history_be_read_again(client):
    first = say(client, tool_choice=WEATHER)
    told = [result(first.output[0])]
    on = {"previous_response_id": first.id, "max_output_tokens": 5, "tool_choice": "none"}
    same = say(client, told, **on)
    assert cached(same) == first.usage.total_tokens - 1
    strict = [{**tool, "strict": True} for tool in TOOLS[:1]] + TOOLS[1:]
    # The model is told the same.
    assert cached(say(client, told, **on | {"tools": strict})) == cached(same)
    assert cached(say(client, told, **on | {"tools": TOOLS[::-1]})) == cached(same)
    for tools in (TOOLS[:1], [{**TOOLS[0], "description": "x"}, TOOLS[1]], []):
        other = say(client, told, **on | {"tools": tools})
        assert cached(other) in (0, other.usage.weir["beginning"])
        assert [tool.name for tool in other.tools] == [tool["name"] for tool in tools]
        again = say(client, "On", **on | {"tools": tools, "previous_response_id": other.id})
        assert cached(again) == other.usage.total_tokens - 1


def test_a_turn_of_a_chat_goes_on_with_the_tools_it_was_told_of(server, client):
    chat = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "Chat"}],
        tools=NESTED,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=600,
        seed=1,
        extra_headers={"x-session-id": "chat-with-tools"},
    )
    head = server.store.get_session("", "chat-with-tools").head
    (call,) = chat.choices[0].message.tool_calls
    sent = [{"type": "function_call_output", "call_id": call.id, "output": "Sunny"}]
    on = {"previous_response_id": f"resp_{head}", "max_output_tokens": 5}
    assert cached(say(client, sent, **on)) == chat.usage.total_tokens - 1
    other = say(client, sent, tools=TOOLS[:1], **on)
    # The beginning, which conversations share.
    assert cached(other) in (0, other.usage.weir["beginning"])
    assert cached(say(client, sent, tools=[], **on)) == chat.usage.total_tokens - 1


def test_a_conversation_has_calls_and_results_as_items(client):
    made = client.conversations.create()
    first = say(client, tool_choice=WEATHER, conversation=made.id)
    (call,) = first.output
    with pytest.raises(openai.BadRequestError, match="there is no call 'other'"):
        say(client, [{**result(call), "call_id": "other"}], conversation=made.id)
    short = {"tool_choice": "none", "max_output_tokens": 5, "conversation": made.id}
    second = say(client, [result(call)], **short)
    assert cached(second) == first.usage.total_tokens - 1
    other = say(client, "And then?", tools=TOOLS[:1], **short)
    assert cached(other) in (0, other.usage.weir["beginning"])
    kinds = [item.type for item in client.conversations.items.list(made.id, order="asc")]
    wanted = ["message", "function_call", "function_call_output", "message", "message", "message"]
    assert kinds == wanted
    found = client.conversations.items.list(made.id, order="asc", limit=2).data[1]
    assert (found.id, found.arguments) == (call.id, call.arguments)
    # Items that a client adds are read like those of responses.
    items = [
        user("Weather?"),
        {"type": "function_call", "call_id": "a", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "Noon"},
    ]
    own = client.conversations.create(items=items[:2])
    client.conversations.items.create(own.id, items=items[2:])
    told = say(client, [], **short | {"conversation": own.id})
    plain = say(client, items, tool_choice="none", max_output_tokens=5)
    assert told.usage.input_tokens == plain.usage.input_tokens


def refused(ask, *args, **given) -> tuple[str | None, str | None]:
    """Return what the error of a refused request says: the wrong parameter, and the code."""
    with pytest.raises(openai.BadRequestError) as error:
        ask(*args, **given)
    return error.value.param, error.value.code


def test_no_conversation_is_made_that_nothing_could_read_any_more(client):
    wrong = ("items[1].call_id", "invalid_value")
    create, items = client.conversations.create, client.conversations.items
    assert refused(create, items=[user("x"), result_of("zz")]) == wrong
    asked = [user("What time is it?"), call_of("a"), call_of("b"), result_of("b")]
    made = create(items=asked).id
    for bad in ("zz", "b"):
        assert refused(items.create, made, items=[user("x"), result_of(bad)]) == wrong
    items.create(made, items=[result_of("a")])
    newest = list(items.list(made, order="desc"))
    for item in newest:
        if item.type == "function_call":
            told = refused(items.delete, item.id, conversation_id=made)
            assert told == (None, "has_result")
    short = {"tool_choice": "none", "max_output_tokens": 5, "conversation": made}
    say(client, "hi", **short)
    # Deleting a result and then its call leaves nothing behind.
    for item in newest:
        items.delete(item.id, conversation_id=made)
    say(client, "hi", **short)


def test_a_result_may_come_later_and_only_once(client):
    made = client.conversations.create().id
    short = {"tool_choice": "none", "max_output_tokens": 5}
    items = [user("Weather?"), call_of("a"), call_of("b"), result_of("b"), user("?")]
    first = say(client, items, conversation=made, **short)
    for after in ({"conversation": made}, {"previous_response_id": first.id}):
        twice = [result_of("a"), result_of("a")]
        wrong = [refused(say, client, bad, **after, **short) for bad in (twice, [result_of("b")])]
        assert wrong == [(f"input[{at}].call_id", "invalid_value") for at in (1, 0)]
    second = say(client, "hi", conversation=made, **short)
    # The turn before has no calls. They are found in an earlier turn.
    late = {"previous_response_id": second.id}, {"conversation": made}
    told = [say(client, [result_of("a")], **after, **short) for after in late]
    assert [cached(each) for each in told] == [second.usage.total_tokens - 1] * 2
    wrong = refused(say, client, [result_of("a")], conversation=made, **short)
    assert wrong == ("input[0].call_id", "invalid_value")


def test_a_type_of_the_clients_own_is_a_tool(client):
    class Ask(BaseModel):
        city: str = Field(max_length=5)
        days: list[int] = Field(max_length=2)

    told = client.responses.parse(
        model="small",
        input="Weather?",
        tools=[openai.pydantic_function_tool(Ask)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=800,
        extra_body={"seed": 4},
    )
    assert isinstance(told.output[0].parsed_arguments, Ask)


BAD = {
    "a tool of theirs": ({"tools": [{"type": None, "name": "x"}]}, "tools[0].type"),
    "a tool of chats": (
        {"tools": [{"type": "function", "function": {"name": "x"}}]},
        "tools[0].name",
    ),
    "a tool without a name": ({"tools": [tool_of("a b")]}, "tools[0].name"),
    "two of a name": ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    "parameters that are none": (
        {"tools": [TOOLS[1], tool_of("x", {"type": "king"})]},
        "tools[1].parameters",
    ),
    "parameters that are no object": (
        {"tools": [TOOLS[1], tool_of("x", {"type": "string"})]},
        "tools[1].parameters",
    ),
    "arguments that are no object": (
        {"input": [user("x"), {**call_of("a"), "arguments": '"x"'}, result_of("a")]},
        "input[1].arguments",
    ),
    "a choice of none": ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    "a choice that is no tool": (
        {"tool_choice": {"type": "function", "name": "other"}},
        "tool_choice.name",
    ),
    "allowed ones that are no tools": (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "other"}],
            }
        },
        "tool_choice.tools",
    ),
    "a choice of theirs": ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    "a call without an id": (
        {"input": [{"type": "function_call", "name": "x", "arguments": ""}]},
        "input[0].call_id",
    ),
    "a call last": (
        {"input": [{"type": "function_call", "call_id": "a", "name": "x", "arguments": "{}"}]},
        "input",
    ),
    "a result of no call": (
        {"input": [user("x"), {"type": "function_call_output", "call_id": "a", "output": "x"}]},
        "input[1].call_id",
    ),
    "two results of one call": (
        {"input": [user("x"), call_of("a"), result_of("a"), result_of("a"), user("x")]},
        "input[3].call_id",
    ),
    "a picture as a result": (
        {
            "input": [
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [{"type": "input_image"}],
                }
            ]
        },
        "input[0].output[0].type",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_where_it_is_wrong(server, name):
    body, param = BAD[name]
    answer = server.post("/v1/responses", {"model": "small", "input": "Hi", "tools": TOOLS} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
