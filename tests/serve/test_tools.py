"""Tools, with OpenAI's own client and a model of random weights."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest
from anything import CITY, TAKES_ARGS, TAKES_TOOLS, random_client
from pydantic import BaseModel, Field
from servers import CHATML, make_tokenizer, serving

from weir.serve import SampledToken, Sampler

USER = {"role": "user", "content": "Weather?"}


def tool_of(name: str, parameters: dict | None = None) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters or CITY}}


TOOLS = [tool_of("get_weather"), tool_of("clock", {"type": "object", "maxProperties": 0})]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
WEATHER = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def client():
    with serving(random_client(TAKES_TOOLS)) as server:
        yield server.client()


def ask(client, messages=(USER,), **given):
    given = {"model": "small", "max_tokens": 600, "seed": 1, "tools": TOOLS, **given}
    return client.chat.completions.create(messages=list(messages), **given)


def check(call) -> None:
    assert call.id.startswith("call_")
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_call_that_is_required_comes_and_fits_its_function(client):
    for answer in (ask(client, tool_choice="required"), ask(client, tool_choice=WEATHER)):
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        for call in choice.message.tool_calls:
            check(call)
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    once = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0].message
    assert len(once.tool_calls) == 1


@pytest.mark.slow
def test_a_stream_says_the_same_piece_by_piece(client):
    how = {"tool_choice": WEATHER, "n": 2}
    whole = ask(client, **how)
    chunks = list(ask(client, stream=True, **how))
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        deltas = [d for c in own for d in c.delta.tool_calls or ()]
        assert [(deltas[0].index, deltas[0].type) for _ in deltas[:1]] == [(0, "function")]
        assert deltas[0].function.name == "get_weather"
        assert {d.id for d in deltas[1:]} == {None}
        assert "".join(d.function.arguments for d in deltas) == (
            choice.message.tool_calls[0].function.arguments
        )
        assert len(deltas) > 5
        assert own[-1].finish_reason == "tool_calls"
        assert not any(c.delta.content for c in own)
    assert len({choice.message.tool_calls[0].id for choice in whole.choices}) == 2


def test_without_need_the_model_may_say_anything_and_with_none_it_calls_nothing(client):
    for choice in ("auto", "none"):
        answer = ask(client, tool_choice=choice, max_tokens=40).choices[0]
        assert answer.message.tool_calls is None
        assert answer.message.content


def test_what_an_answer_may_be_where_text_and_calls_are_both_allowed(client):
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": 1}}}}
    first = {"logit_bias": {}}
    for begins, reason in (("{", "stop"), ("<", "tool_calls")):
        first["logit_bias"] = {str(make_tokenizer()(begins)["input_ids"][0]): 5}
        how = {"response_format": given, "parallel_tool_calls": False, **first}
        answer = ask(client, **how).choices[0]
        assert answer.finish_reason == reason
        if reason == "stop":
            assert json.loads(answer.message.content) == {"a": 1}
        else:
            check(answer.message.tool_calls[0])


@pytest.mark.parametrize(
    "template", [TAKES_TOOLS, TAKES_ARGS, CHATML, None], ids=["told", "args", "words", "none"]
)
@pytest.mark.thinned(2)
def test_a_result_goes_on_from_the_call_and_reads_only_what_is_new(template):
    with serving(random_client(template, rows=1)) as server:
        go_on(server.client())


def beginning_of(answer) -> int:
    """Return how many tokens the system message and the tools have, which conversations share."""
    return answer.usage.weir["beginning"]


def go_on(client) -> None:
    first = ask(client, tool_choice=WEATHER)
    message = first.choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
    check(call)
    second = ask(client, [USER, message, result], tool_choice="none", max_tokens=5)
    told = second.usage.prompt_tokens_details.cached_tokens
    assert told == first.usage.total_tokens - 1
    read = second.usage.prompt_tokens - told
    assert read < 150  # the result, without reading the tools again if they are in a system turn
    # A history in which the client wrote the arguments differently, with other ids, also matches.
    written = message.model_dump(exclude_none=True)
    again = {"id": "mine", "type": "function"}
    arguments = json.dumps(json.loads(call.function.arguments), indent=2)
    again["function"] = {"name": "get_weather", "arguments": arguments}
    written["tool_calls"] = [again]
    other = ask(client, [USER, written, {**result, "tool_call_id": "mine"}], max_tokens=5)
    assert other.usage.prompt_tokens_details.cached_tokens == told
    # Other tools start another conversation, and so do other arguments.
    third = ask(client, [USER, message, result], tools=TOOLS[:1], max_tokens=5)
    assert third.usage.prompt_tokens_details.cached_tokens in (0, beginning_of(third))
    again["function"] = {"name": "get_weather", "arguments": "{}"}
    fourth = ask(client, [USER, written, {**result, "tool_call_id": "mine"}], max_tokens=5)
    assert fourth.usage.prompt_tokens_details.cached_tokens in (0, beginning_of(fourth))


@pytest.mark.parametrize(
    ("said", "text"),
    [("See. <tool_call>{", "See."), ("See. <tool", "See."), ("See. <b", "See. <b")],
)
def test_where_text_and_calls_may_come_what_is_cut_is_told_so_too(client, monkeypatch, said, text):
    ids = make_tokenizer()(said)["input_ids"]
    left = iter(ids)
    monkeypatch.setattr(Sampler, "accept", lambda *_: SampledToken(next(left), -1.0))
    answer = ask(client, max_tokens=len(ids)).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("length", text)


@pytest.mark.slow
def test_a_call_that_has_no_room_ends_by_its_length(client):
    whole = ask(client, tool_choice=WEATHER).choices[0].message.tool_calls[0].function
    named = len('<tool_call>{"name": "get_weather"')
    for limit in (2, 5, named - 1, named + 1, 60):  # after the trigger, a line can end
        answer = ask(client, tool_choice=WEATHER, max_tokens=limit).choices[0]
        assert answer.finish_reason == "length"
        assert not answer.message.content
        assert bool(answer.message.tool_calls) == (limit >= named)
        for call in answer.message.tool_calls or ():
            assert call.function.name == "get_weather"
            assert whole.arguments.startswith(call.function.arguments)
        chunks = list(ask(client, tool_choice=WEATHER, max_tokens=limit, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert not any(delta.content for delta in deltas)
        assert chunks[-1].choices[0].finish_reason == "length"
        own = [call.function for delta in deltas for call in delta.tool_calls or ()]
        assert "".join(function.arguments or "" for function in own) == (
            answer.message.tool_calls[0].function.arguments if limit >= named else ""
        )
        assert [function.name for function in own if function.name] == (
            ["get_weather"] if limit >= named else []
        )


@pytest.mark.slow
def test_a_type_of_the_clients_own_is_a_tool():
    class Ask(BaseModel):
        city: str = Field(max_length=5)
        days: list[int] = Field(max_length=2)

    with serving(random_client(TAKES_TOOLS, rows=1)) as server:
        client = server.client()
        given = {"model": "small", "messages": [USER], "max_tokens": 800, "seed": 4}
        message = (
            client.chat.completions.parse(
                tools=[openai.pydantic_function_tool(Ask)], tool_choice="required", **given
            )
            .choices[0]
            .message
        )
        assert isinstance(message.tool_calls[0].function.parsed_arguments, Ask)


def test_log_probabilities_are_told_with_calls(client):
    answer = ask(client, tool_choice=WEATHER, logprobs=True, top_logprobs=1).choices[0]
    told = answer.logprobs.content
    assert '"get_weather"' in "".join(one.token for one in told)
    chunks = ask(client, tool_choice=WEATHER, logprobs=True, top_logprobs=1, stream=True)
    streamed = [
        one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content
    ]
    assert streamed == told


def test_tools_of_a_model_whose_calls_are_not_known_are_refused():
    template = CHATML + "{% if tools %}<|call|>{% endif %}"
    with serving(random_client(template, rows=1)) as server:
        client = server.client()
        with pytest.raises(openai.BadRequestError) as error:
            ask(client)
        assert error.value.param == "tools"
        assert ask(client, tools=[], max_tokens=3).choices[0].message.content
