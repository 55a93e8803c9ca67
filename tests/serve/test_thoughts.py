"""Thoughts are separated from the answer, in the format of each API."""

from __future__ import annotations

import json

import pytest
from servers import CHATML, make_client, serving
from test_anthropic import events, joined

from weir.serve.messages import Message
from weir.serve.thoughts import ThoughtParser

OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
USER = {"role": "user", "content": "Hi"}


def parsed(*texts: str, is_open: bool = False) -> tuple[str, str]:
    parser = ThoughtParser(is_open=is_open)
    found = [*(parser.feed(text) for text in texts), parser.finish()]
    return "".join(one for one, _ in found), "".join(two for _, two in found)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nHm. 1 < 2\n</think>\n\nYes. </think>", False, ("Hm. 1 < 2\n", "Yes. </think>")),
        ("Hm.</think>\nYes", True, ("Hm.", "Yes")),
        (" \n<think>a</think>b", False, ("a", "b")),
        ("<think></think>b", False, ("", "b")),
        ("<think>cut", False, ("cut", "")),
        ("<think>cut </thi", False, ("cut </thi", "")),
        ("<thin", False, ("", "<thin")),
        ("  Yes, <think> is a tag", False, ("", "  Yes, <think> is a tag")),
        ("", False, ("", "")),
    ],
)
def test_however_a_text_is_cut_its_parts_are_the_same(text, is_open, expected):
    assert parsed(*text, is_open=is_open) == expected
    for at in range(len(text) + 1):
        assert parsed(text[:at], text[at:], is_open=is_open) == expected


def test_an_answer_counts_without_its_thoughts():
    plain = Message("assistant", "Yes").canonical()
    for said in ("<think>a</think>Yes", "<think>\n</think>\n\nYes", " <think>b</think> Yes "):
        assert Message("assistant", said).canonical() == plain
    assert Message("assistant", "<think>cut").canonical() == Message("assistant", "").canonical()


@pytest.fixture(scope="module")
def server():
    with serving(make_client(template=OPENS)) as server:
        yield server


def test_thoughts_that_the_prompt_opens_have_a_field_of_their_own(server):
    """The model generates only letters, so its thoughts never end."""
    how = {"model": "small", "max_tokens": 6, "temperature": 0}
    body = {**how, "messages": [USER]}
    answer = server.post("/v1/chat/completions", body).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], len(message["reasoning_content"])) == ("", 6)
    streamed = server.post("/v1/chat/completions", {**body, "stream": True}).text
    data = [line[6:] for line in streamed.split("\n") if line.startswith("data: {")]
    deltas = [json.loads(one)["choices"][0]["delta"] for one in data]
    said = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert said == message["reasoning_content"]
    # A history without the thoughts is recognized.
    history = [USER, {"role": "assistant", "content": ""}, USER]
    second = server.post("/v1/chat/completions", {**body, "messages": history}).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == answer["usage"]["total_tokens"] - 1

    message = server.post("/v1/messages", body).json()
    assert message["content"] == [{"type": "thinking", "thinking": said, "signature": ""}]
    assert (
        joined(events(server.post("/v1/messages", {**body, "stream": True})))
        == (message["content"])
    )
    asked = {"model": "small", "input": "Hi", "max_output_tokens": 6, "temperature": 0}
    made = server.post("/v1/responses", asked).json()
    (item,) = made["output"]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")
    assert item["content"] == [{"type": "reasoning_text", "text": said}]
    streamed = events(server.post("/v1/responses", {**asked, "stream": True}))
    deltas = [e["delta"] for e in streamed if e["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == said
    (whole,) = streamed[-1]["response"]["output"]
    assert whole["content"] == item["content"]
    # Thoughts that a client sends back, or that were stored, are not part of the history.
    sent = [{"role": "user", "content": "Hi"}, item, {"role": "user", "content": "Go on"}]
    after = {**asked, "input": "Go on", "previous_response_id": made["id"]}
    assert server.post("/v1/responses", {**asked, "input": sent}).status_code == 200
    used = server.post("/v1/responses", after).json()["usage"]
    assert used["input_tokens_details"]["cached_tokens"] == made["usage"]["total_tokens"] - 1
    chat = {"model": "small", "messages": [USER], "options": {"num_predict": 6, "temperature": 0}}
    lines = [json.loads(line) for line in server.post("/api/chat", chat).text.splitlines()]
    assert "".join(line["message"].get("thinking", "") for line in lines) == said
