"""Requests to OpenAI's API and Ollama's, as the source of Open WebUI 0.12.4 sends them.

Its server forwards chats with the options that users set, adds headers about the user, and asks the
same model for titles, tags and follow-up questions.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from servers import Server, make_client, serving

from weir.serve import Limits

ORIGIN = "http://localhost:3000"
HEADERS = {
    "Authorization": "Bearer none",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ann%20Lee",
    "X-OpenWebUI-User-Id": "0f0b",
    "X-OpenWebUI-User-Email": "ann@example.org",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "5f6c1d30-0000-4000-8000-000000000000",
    "X-OpenWebUI-Auth-Type": "jwt",
}
TASK = (
    "### Task:\nGenerate a concise, 3-5 word title.\n"
    "### Chat History:\n<chat_history>\n{}\n</chat_history>"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_current_timestamp",
        "description": "Get the current Unix timestamp in seconds.",
        "parameters": {"properties": {}, "type": "object"},
    },
}
OPTIONS = {
    "temperature": 0.0,
    "seed": 1,
    "num_ctx": 4096,
    "num_batch": 512,
    "num_keep": 24,
    "num_predict": 6,
    "repeat_last_n": 64,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.0,
    "repeat_penalty": 1.1,
    "mirostat": 0,
    "stop": ["</s>"],
    "num_gpu": 1,
    "use_mmap": True,
    "use_mlock": False,
    "num_thread": 4,
}


@pytest.fixture(scope="module")
def server():
    with serving(make_client(limits=Limits(answer=50)), origins=[ORIGIN]) as server:
        yield server


def ask(server: Server, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    method = "GET" if body is None else "POST"
    answer = httpx.request(method, f"{server.url}{path}", json=body, headers=HEADERS, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def user(words: str) -> dict[str, str]:
    return {"role": "user", "content": words}


def test_it_lists_the_models_of_both_apis(server: Server) -> None:
    (model,) = ask(server, "/v1/models").json()["data"]
    assert model["id"] == "small"
    assert model.get("name", "x") is not None  # it would show null as the model's name
    (card,) = ask(server, "/api/tags").json()["models"]
    assert (card["name"], card["model"]) == ("small", "small")
    assert {"digest", "size", "modified_at", "details"} <= card.keys()
    assert ask(server, "/api/ps").json()["models"][0]["model"] == "small"
    # It compares the version numbers of all its servers, part by part.
    version = ask(server, "/api/version").json()["version"]
    assert all(part.isdigit() for part in version.split("."))


def test_a_chat_of_openais_api_with_its_tasks(server: Server) -> None:
    def say(messages: list[Any], **given: Any) -> tuple[str, dict[str, Any], str]:
        body = {"model": "small", "messages": messages, "stream": True, "max_tokens": 6, **given}
        body |= {"stream_options": {"include_usage": True}, "temperature": 0.0}
        answer = ask(server, "/v1/chat/completions", body)
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line) for line in lines]
        texts = (one["choices"][0]["delta"].get("content") for one in chunks if one["choices"])
        warned = answer.headers.get("x-weir-warning", "")
        return "".join(text or "" for text in texts), chunks[-1]["usage"], warned

    history: list[Any] = [{"role": "system", "content": "Be brief."}, user("Hello there")]
    text, before, warned = say(history, tools=[TOOL])
    assert warned == ""
    for _ in range(2):
        # A task with the same history comes between two turns.
        quoted = TASK.format(json.dumps(history))
        body = {"model": "small", "messages": [user(quoted)], "stream": False, "max_tokens": 1000}
        title = ask(server, "/v1/chat/completions", body)
        assert title.headers["x-weir-warning"] == "no effect here: max_tokens above 50"
        history += [{"role": "assistant", "content": text}, user("And then?")]
        text, after, _ = say(history, tools=[TOOL])
        assert after["prompt_tokens_details"]["cached_tokens"] == before["total_tokens"] - 1
        before = after
    history += [{"role": "assistant", "content": text, "reasoning_content": "Hm."}, user("More")]
    assert say(history, tools=[TOOL])[2] == "no effect here: messages[6].reasoning_content"


def test_an_answer_is_continued_as_its_button_asks(server: Server) -> None:
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    body = {"model": "small", "temperature": 0, "max_tokens": 4, "stream": False}
    begun = [user("Hello there"), {"role": "assistant", "content": "Yes, "}]
    path = "/v1/chat/completions"
    plain = ask(server, path, {**body, "messages": begun}).json()
    continued = ask(server, path, {**body, **flags, "messages": begun}).json()
    assert continued["choices"] == plain["choices"]
    for wrong in (
        {**flags, "messages": begun[:1]},
        {"continue_final_message": False, "messages": begun},
        {"add_generation_prompt": True, "messages": begun},
    ):
        answer = server.post(path, {**body, **wrong})
        assert answer.status_code == 400
        assert "does not match the messages" in answer.json()["error"]["message"]


def test_a_chat_of_ollamas_api_with_all_its_options(server: Server) -> None:
    def say(messages: list[Any]) -> tuple[dict[str, Any], str]:
        body = {"model": "small", "messages": messages, "stream": True, "tools": [TOOL]}
        answer = ask(server, "/api/chat", {**body, "options": OPTIONS, "keep_alive": "5m"})
        lines = [json.loads(line) for line in answer.text.splitlines()]
        text = "".join(line["message"]["content"] for line in lines)
        return {**lines[-1], "text": text}, answer.headers["x-weir-warning"]

    history: list[Any] = [user("Good day")]
    before, warned = say(history)
    for name in ("keep_alive", "options.num_ctx", "options.num_gpu", "options.repeat_last_n"):
        assert name in warned
    assert "temperature" not in warned
    for _ in range(2):
        thought = {"role": "assistant", "content": before["text"], "thinking": "Hm."}
        history += [thought, user("And then?")]
        after, warned = say(history)
        assert after["cached_count"] >= before["prompt_eval_count"] + before["eval_count"] - 1
        assert "messages[1].thinking" in warned
        before = after


def test_a_result_goes_to_the_call_with_its_id(server: Server) -> None:
    """Open WebUI sends ids of calls, and results in any order."""

    def call(name: str, place: str) -> dict[str, Any]:
        return {"index": 0, "id": name, "function": {"name": "f", "arguments": {"place": place}}}

    def result(name: str, text: str) -> dict[str, str]:
        return {"role": "tool", "content": text, "tool_call_id": name}

    calls = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("a", "Rome"), call("b", "Ulm")],
    }
    body = {"model": "small", "stream": False, "options": {"num_predict": 1}}

    def told(*results: dict[str, str]) -> list[tuple[str, str | None]]:
        messages = [user("Weather?"), calls, *results]
        answer = ask(server, "/api/chat", {**body, "messages": messages})
        session = answer.headers["x-session-id"]
        (record,) = server.store.list_turns("", session)
        return [(one.content, one.result) for one in record.messages if one.role == "tool"]

    assert told(result("b", "Rain"), result("a", "Sun")) == [("Rain", "b"), ("Sun", "a")]
    stray = [user("Weather?"), calls, result("c", "Snow")]
    assert server.post("/api/chat", {**body, "messages": stray}).status_code == 400
    twice = {**calls, "tool_calls": [call("a", "Rome"), call("a", "Ulm")]}
    assert server.post("/api/chat", {**body, "messages": [user("x"), twice]}).status_code == 400


def test_unloading_is_said_to_have_no_effect(server: Server) -> None:
    answer = ask(server, "/api/generate", {"model": "small", "keep_alive": 0, "prompt": ""})
    assert answer.headers["x-weir-warning"] == "no effect here: keep_alive"


def test_a_browser_connects_directly_where_its_page_is_allowed(server: Server) -> None:
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    url = f"{server.url}/v1/chat/completions"
    allowed = httpx.options(url, headers=asked)
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    refused = httpx.options(url, headers={**asked, "Origin": "http://elsewhere"})
    assert refused.status_code == 403
    assert "--allow-origin http://elsewhere" in refused.text
