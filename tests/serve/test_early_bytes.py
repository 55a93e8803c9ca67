"""A stream sends headers and comments before its prompt has been read."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace

import httpx
import pytest
from servers import make_client, serving

from weir.serve import Limits

LONG = "Tell me of the war, and of the peace that came after it. " * 60
PAUSE = 0.1
SYSTEM = {"role": "system", "content": "You are a clerk of few words. " * 12}


def serve(**given):
    return serving(make_client(limits=Limits(ping=PAUSE, report=PAUSE), **given))


@pytest.fixture(scope="module")
def server():
    with serve() as server:
        yield server


@contextlib.contextmanager
def held(server):
    """Stop the engine before its next step, as if a step took very long."""
    step, engine = server.engine.step, server.engine

    def wait() -> None:
        while engine.step is wait:
            time.sleep(0.01)
        step()

    engine.step = wait
    try:
        yield
    finally:
        engine.step = step


def ask(text: str, **given):
    messages = [SYSTEM, {"role": "user", "content": text}]
    return {"model": "small", "messages": messages, "max_tokens": 6, "temperature": 0, **given}


def to_responses(text: str, **given):
    return {"model": "small", "input": text, "max_output_tokens": 6, "temperature": 0, **given}


def stream(server, path, body):
    return httpx.stream("POST", f"{server.url}{path}", json={**body, "stream": True}, timeout=60)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", ask(LONG)),
        ("/v1/responses", to_responses(LONG)),
        ("/v1/completions", {"model": "small", "prompt": LONG, "max_tokens": 6}),
    ],
)
def test_headers_and_comments_come_before_the_prompt_is_read(server, path, body):
    with contextlib.ExitStack() as until:
        until.enter_context(held(server))
        answer = until.enter_context(stream(server, path, body))  # the headers have arrived
        assert answer.status_code == 200
        lines = answer.iter_lines()
        comments = []
        while len(comments) < 3:
            line = next(lines)
            if line.startswith(":"):
                comments.append((time.monotonic(), line))
        assert all("waiting for a row" in text or "tokens of the" in text for _, text in comments)
        assert comments[2][0] - comments[1][0] >= PAUSE / 2
    server.settled()


def test_comments_say_how_much_of_the_prompt_is_read_and_the_answer_is_the_same(server):
    whole = server.post("/v1/chat/completions", ask(LONG)).json()
    text, progress = "", []
    with stream(
        server, "/v1/chat/completions", ask(f"{LONG} Now.", return_progress=True)
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                text += chunk["choices"][0]["delta"].get("content") or ""
                if "prompt_progress" in chunk:
                    progress.append(chunk["prompt_progress"])
    again = server.post("/v1/chat/completions", ask(f"{LONG} Now.")).json()
    assert text == again["choices"][0]["message"]["content"]
    total = again["usage"]["prompt_tokens"]
    assert total > whole["usage"]["prompt_tokens"]
    assert progress
    assert all(one["total"] == total for one in progress)
    done = [one["processed"] for one in progress]
    assert done == sorted(done)
    assert done[-1] > done[0] >= progress[0]["cache"]


def test_who_does_not_ask_for_progress_gets_comments_only(server):
    with stream(server, "/v1/chat/completions", ask(f"{LONG} Again.")) as answer:
        lines = list(answer.iter_lines())
    assert any(line.startswith(":") for line in lines)
    assert not any("prompt_progress" in line for line in lines)


def test_responses_repeat_an_event_that_clients_know(server):
    with stream(server, "/v1/responses", to_responses(LONG, return_progress=True)) as answer:
        data = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert [one["sequence_number"] for one in data] == list(range(len(data)))
    kinds = [one["type"] for one in data]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert kinds.count("response.in_progress") > 1
    assert any("prompt_progress" in one for one in data)
    assert len({one["response"]["id"] for one in data if "response" in one}) == 1


def test_what_was_read_before_a_hang_up_is_not_read_again():
    with serve(rows=1) as server:
        body = ask(LONG)
        with stream(server, "/v1/chat/completions", body) as answer:
            for line in answer.iter_lines():
                if "tokens of the prompt" in line and not line.startswith(": 0"):
                    break
        server.settled()
        again = server.post("/v1/chat/completions", body).json()
    with serve(rows=1) as fresh:
        expected = fresh.post("/v1/chat/completions", body).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    assert expected["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"][0]["message"] == expected["choices"][0]["message"]


def test_a_client_whose_time_limit_is_too_short_succeeds_in_the_end():
    with serve(rows=1) as server:
        failed = 0
        while failed < 200:
            try:
                limit = httpx.Timeout(60, read=0.3)
                answer = httpx.post(
                    f"{server.url}/v1/chat/completions", json=ask(LONG), timeout=limit
                )
                break
            except httpx.ReadTimeout:
                failed += 1
                server.settled()
        assert failed > 0
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_second_conversation_does_not_read_the_system_message_again(server):
    first = server.post("/v1/chat/completions", ask("One")).json()["usage"]
    second = server.post("/v1/chat/completions", ask("Two")).json()["usage"]
    beginning = first["weir"]["beginning"]
    assert beginning > 128
    assert second["prompt_tokens_details"]["cached_tokens"] == beginning
    turns = server.store.list_sessions("")
    assert turns[-1].usage["cached_tokens"] == beginning
    text = {"model": "small", "prompt": LONG[:600], "max_tokens": 1}
    for _ in range(2):  # plain completions save nothing
        usage = server.post("/v1/completions", text).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def fail_calls(server, monkeypatch) -> None:
    def fail(*given):
        raise RuntimeError("broken")

    monkeypatch.setattr(server.engine.runner, "run", fail)


@pytest.mark.filterwarnings("ignore")
def test_an_error_after_the_headers_is_an_event_in_the_form_of_the_api(server, monkeypatch):
    fail_calls(server, monkeypatch)
    body = {**ask("Hi"), "stream": True}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200
    last = answer.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_error"
    assert "[DONE]" not in answer.text
    answer = server.post("/v1/responses", {**to_responses("Hi"), "stream": True})
    last = answer.text.strip().split("\n\n")[-1]
    assert last.startswith("event: response.failed\n")
    assert server.post("/v1/chat/completions", ask("Hi")).status_code == 500


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "other"}, 404),
        ({"max_tokens": 0.5}, 400),
        ({"messages": []}, 400),
        ({"messages": [{"role": "tool", "tool_call_id": "a", "content": "b"}]}, 400),
    ],
)
def test_what_can_be_refused_before_is_a_status(server, change, status):
    body = {**ask("Hi"), "stream": True, **change}
    assert server.post("/v1/chat/completions", body).status_code == status


def test_a_prompt_that_is_too_long_is_a_status():
    client = make_client(limits=replace(Limits(), prompt=50))
    with serving(client) as server:
        answer = server.post("/v1/chat/completions", {**ask(LONG), "stream": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "prompt_too_long")
