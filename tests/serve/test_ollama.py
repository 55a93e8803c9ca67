"""Ollama's API: raw requests, and Ollama's own client where it is installed."""

from __future__ import annotations

import json

import httpx
import pytest
from servers import make_client, serving
from test_anthropic import TOOL
from test_early_bytes import LONG, held, stream

from weir.models import stored_bytes
from weir.serve import Limits
from weir.serve.api.requests import LARGE

USER = {"role": "user", "content": "Weather?"}
FUNCTION = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": TOOL["input_schema"],
    },
}


@pytest.fixture(scope="module")
def server():
    with serving(make_client(limits=Limits(ping=0.1))) as server:
        yield server


def ask(*messages, **given):
    options = {"num_predict": 6, "temperature": 0}
    return {"model": "small", "messages": messages, "options": options, **given}


def lines(answer) -> list[dict]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_is_streamed_as_lines_unless_the_client_says_no(server):
    whole = server.post("/api/chat", ask(USER, stream=False)).json()
    assert len(whole["message"]["content"]) == 6
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "length", 6)
    found = lines(server.post("/api/chat", ask(USER)))
    assert "".join(one["message"]["content"] for one in found) == whole["message"]["content"]
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    said = {"role": "assistant", "content": whole["message"]["content"]}
    second = server.post("/api/chat", ask(USER, said, USER, stream=False)).json()
    assert second["cached_count"] == whole["prompt_eval_count"] + 6 - 1


def test_a_prompt_is_answered_as_a_chat_or_continued_as_it_is(server):
    options = {"num_predict": 5, "temperature": 0}
    body = {"model": "small:latest", "prompt": "Hello", "options": options, "stream": False}
    chat = server.post("/api/chat", ask({"role": "user", "content": "Hello"}, stream=False)).json()
    told = server.post("/api/generate", body).json()
    assert told["response"] == chat["message"]["content"][:5]
    raw = server.post("/api/generate", {**body, "raw": True}).json()
    text = {"model": "small", "prompt": "Hello", "max_tokens": 5, "temperature": 0}
    assert raw["response"] == server.post("/v1/completions", text).json()["choices"][0]["text"]
    assert raw["prompt_eval_count"] == 5
    with_system = server.post("/api/generate", {**body, "system": "Be kind."}).json()
    assert with_system["prompt_eval_count"] > told["prompt_eval_count"]


@pytest.mark.parametrize("large", [False, True])  # large bodies are parsed in the worker process
@pytest.mark.parametrize("path", ["chat", "generate"])
def test_a_request_without_a_prompt_loads_the_model(server, path, large):
    body = {"model": "small", "options": {"not_an_option": "a" * LARGE} if large else {}}
    for empty in ({}, {"messages": []} if path == "chat" else {"prompt": ""}):
        answer = server.post(f"/api/{path}", {**body, **empty, "keep_alive": "5m"}).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_is_sent_whole_and_its_result_goes_on_from_it(server, streams):
    bias = {}
    body = ask(USER, tools=[FUNCTION], stream=streams, **bias)
    body["options"] = {"num_predict": 200, "temperature": 0}
    # Ollama cannot force a call, so the history has one.
    made = {"function": {"name": "get_weather", "arguments": {"place": "Rome"}}}
    history = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [made, made]},
        {"role": "tool", "tool_name": "get_weather", "content": "Sunny"},
        {"role": "tool", "content": "Rain"},
    ]
    body["messages"], body["options"]["num_predict"] = history, 5
    answer = server.post("/api/chat", body)
    last = lines(answer)[-1] if streams else answer.json()
    assert last["done_reason"] == "length"
    stray = [*history, {"role": "tool", "content": "Snow"}]
    answer = server.post("/api/chat", {**body, "messages": stray})
    assert answer.status_code == 400


def test_a_format_holds_the_answer(server):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    body = ask(USER, format=schema, stream=False)
    body["options"] = {"num_predict": 50}
    assert json.loads(server.post("/api/chat", body).json()["message"]["content"]) == {"a": 1}


def test_lines_come_while_the_prompt_waits(server):
    body = ask({"role": "user", "content": LONG})
    with held(server), stream(server, "/api/chat", body) as answer:
        first = json.loads(next(answer.iter_lines()))
        assert (first["done"], first["message"]["content"]) == (False, "")
    server.settled()


def test_what_clients_ask_about_models(server):
    (model,) = httpx.get(f"{server.url}/api/tags").json()["models"]
    assert model["name"] == "small"
    served = server.engine_client.engine.model
    assert model["size"] == stored_bytes(served)
    details = model["details"]
    assert (details["format"], details["quantization_level"]) == ("safetensors", "FLOAT32")
    assert details["parameter_size"] == f"{served.num_parameters() / 1e6:.2f}M"
    assert httpx.get(f"{server.url}/api/ps").json()["models"][0]["name"] == "small"
    assert httpx.get(f"{server.url}/api/version").json()["version"].count(".") == 2
    shown = server.post("/api/show", {"model": "small:latest"}).json()
    assert "completion" in shown["capabilities"]
    kind = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{kind}.context_length"] >= 10**9


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/chat", {"model": "other", "messages": [USER]}, 404),
        ("/api/chat", {"model": "small", "messages": [{**USER, "images": ["x"]}]}, 400),
        ("/api/generate", {"model": "small", "prompt": "x", "context": [1]}, 400),
        ("/api/generate", {"model": "small", "prompt": "x", "suffix": "y"}, 400),
        ("/api/show", {"model": "other"}, 404),
        ("/api/embed", {"model": "small", "input": "x"}, 404),
    ],
)
def test_errors_are_a_text_that_clients_print(server, path, body, status):
    answer = server.post(path, body)
    assert answer.status_code == status
    assert isinstance(answer.json()["error"], str)


@pytest.mark.parametrize("page", [{}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}])
def test_a_body_is_json_without_its_type_unless_a_web_page_sends_it(server, page):
    """LiteLLM sends Ollama no type. curl -d, as in Ollama's documentation, sends a form's type."""
    body = json.dumps(ask(USER, stream=False)).encode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for path, headers in (("/api/chat", {}), ("/api/chat", form), ("/v1/chat/completions", {})):
        chat = {"model": "small", "messages": [USER], "max_tokens": 2}
        given = body if path == "/api/chat" else json.dumps(chat)
        answer = httpx.post(f"{server.url}{path}", content=given, headers={**headers, **page})
        assert answer.status_code == (415 if page else 200), (path, headers, answer.text)
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=form)
    assert answer.status_code == 415


def test_options_without_an_effect_are_named(server):
    body = ask(USER, stream=False, keep_alive="5m")
    body["options"]["num_ctx"] = 4096
    answer = server.post("/api/chat", body)
    assert answer.headers["x-weir-warning"] == "no effect here: keep_alive, options.num_ctx"


def test_a_wrong_option_has_the_name_that_the_client_gave_it(server):
    for options, words in (
        ({"num_predict": -5}, "Invalid 'options.num_predict': must be at least -2."),
        ({"repeat_penalty": 99}, "Invalid 'options.repeat_penalty': must be at most 10."),
        ({"stop": ["a", 5]}, "Invalid 'options.stop[1]': must be a text."),
        (5, "Invalid 'options': must be an object."),
    ):
        answer = server.post("/api/chat", {**ask(USER, stream=False), "options": options})
        assert (answer.status_code, answer.json()["error"]) == (400, words)
    answer = server.post("/api/chat", ask(USER, stream=False, think=5))
    words = "must be true or false, or 'low', 'medium' or 'high'"
    assert answer.json()["error"] == f"Invalid 'think': {words}."


def test_an_option_beside_the_field_of_its_name_is_named_as_skipped(server):
    chat = {"model": "small", "messages": [USER], "max_tokens": 2, "temperature": 0}
    answer = server.post("/v1/chat/completions", {**chat, "options": {"temperature": 1}})
    assert answer.headers["x-weir-warning"] == "no effect here: options.temperature"


def test_a_model_is_described_by_its_size_and_needs_a_name(server):
    described = server.post("/api/show", {"model": "small"}).json()
    count = described["model_info"]["general.parameter_count"]
    assert described["details"]["parameter_size"] == f"{count / 1e6:.2f}M"
    answer = server.post("/api/show", {})
    assert (answer.status_code, answer.json()["error"]) == (
        400,
        "Missing required parameter: 'model'.",
    )


def test_ollamas_own_client(server):
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    options = {"num_predict": 6, "temperature": 0}
    messages = [{"role": "user", "content": "Hello from the client"}]
    first = client.chat(model="small", messages=messages, options=options)
    parts = list(client.chat(model="small", messages=messages, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == first.message.content
    messages += [first.message, {"role": "user", "content": "And then?"}]
    second = client.chat(model="small", messages=messages, options=options)
    assert second.prompt_eval_count > first.prompt_eval_count + 6
    text = client.generate(model="small", prompt="Hello from the client", options=options)
    assert text.response == first.message.content
    assert [one.model for one in client.list().models] == ["small"]
    assert client.show("small").modelinfo
    with pytest.raises(ollama.ResponseError, match="--alias llama"):
        client.chat(model="llama", messages=messages)
