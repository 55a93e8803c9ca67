"""Chat completions, called with OpenAI's own client over a real socket."""

from __future__ import annotations

import json
import math

import httpx
import openai
import pytest
from servers import CHATML, make_client, make_tokenizer, serving, serving_nano

USER = {"role": "user", "content": "Hello there"}


@pytest.fixture(scope="module")
def server():
    with serving(make_client()) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def ask(client, messages, **given):
    given = {"model": "small", "max_tokens": 8, "temperature": 0, **given}
    return client.chat.completions.create(messages=messages, **given)


def assistant(answer) -> dict:
    return {"role": "assistant", "content": answer.choices[0].message.content}


def length(messages) -> int:
    """Count the tokens of a whole conversation."""
    text = make_tokenizer(CHATML).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return len(make_tokenizer()(text, add_special_tokens=False)["input_ids"])


def test_an_answer_has_all_that_the_client_reads(client):
    answer = ask(client, [USER])
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "small"
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert len(choice.message.content) == 8
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens == length([USER])
    assert answer.usage.total_tokens == length([USER]) + 8


def test_a_stream_says_the_same_and_ends_as_openais_do(server, client):
    whole = ask(client, [USER])
    stream = ask(client, [USER], stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    body = {"model": "small", "messages": [USER], "max_tokens": 3, "stream": True}
    answer = server.post("/v1/chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(line.removeprefix("data: ")) for line in lines[:-1])


def test_several_answers_differ_and_the_first_is_the_one_there_would_be_alone(client):
    how = {"temperature": 1.5, "seed": 3}
    alone = ask(client, [USER], **how)
    several = ask(client, [USER], n=3, **how)
    texts = [choice.message.content for choice in several.choices]
    assert texts[0] == alone.choices[0].message.content
    assert len(set(texts)) == 3
    assert several.usage.completion_tokens == 24
    chunks = list(ask(client, [USER], n=3, stream=True, **how))
    for index, text in enumerate(texts):
        pieces = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(piece.delta.content or "" for piece in pieces) == text


def test_a_seed_makes_an_answer_that_comes_again_and_none_makes_a_new_one(client):
    texts = [
        ask(client, [USER], temperature=1.5, max_tokens=20, **seed).choices[0].message.content
        for seed in ({"seed": 5}, {"seed": 5}, {"seed": -6}, {}, {})
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4


def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(client):
    text = ask(client, [USER], max_tokens=30, temperature=1, seed=1).choices[0].message.content
    stop = text[10:12]
    for stops in (stop, ["@@", stop]):
        answer = ask(client, [USER], max_tokens=30, temperature=1, seed=1, stop=stops).choices[0]
        assert answer.message.content == text[: text.index(stop)]
        assert answer.finish_reason == "stop"
    token = make_tokenizer()(text[10])["input_ids"][0]
    given = {"extra_body": {"stop_token_ids": [token]}}
    answer = ask(client, [USER], max_tokens=30, temperature=1, seed=1, **given).choices[0]
    assert answer.message.content == text[: text.index(text[10])]


def test_an_end_token_ends_an_answer_unless_it_is_to_be_ignored(server, client):
    (end,) = server.engine_client.stop_ids
    given = {"logit_bias": {str(end): 100}}
    answer = ask(client, [USER], logprobs=True, **given)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.choices[0].logprobs.content == []
    assert answer.usage.completion_tokens == 1
    more = [USER, assistant(answer), USER]
    # The model has already read the end token, so the next turn does not feed it again.
    cached = ask(client, more).usage.prompt_tokens_details.cached_tokens
    assert ask(client, more).usage.prompt_tokens == length(more)
    assert cached == length([USER])
    given["extra_body"] = {"ignore_eos": True}
    assert ask(client, [USER], **given).usage.completion_tokens == 8


def test_a_new_line_ends_an_answer_of_a_model_without_chat_template_unless_ends_are_ignored():
    with serving_nano() as nano:
        (newline,) = nano.engine_client.tokenizer("\n", add_special_tokens=False)["input_ids"]
        given = {"model": "nano", "logit_bias": {str(newline): 100}}
        assert ask(nano.client(), [USER], **given).choices[0].finish_reason == "stop"
        answer = ask(nano.client(), [USER], **given, extra_body={"ignore_eos": True})
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 8


def test_logprobs_are_those_of_the_tokens(client):
    answer = ask(client, [USER], logprobs=True, top_logprobs=3).choices[0]
    assert "".join(one.token for one in answer.logprobs.content) == answer.message.content
    for one in answer.logprobs.content:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].token == one.token
        assert one.top_logprobs[0].logprob == one.logprob
        assert bytes(one.bytes).decode() == one.token
        assert sum(math.exp(top.logprob) for top in one.top_logprobs) <= 1 + 1e-6
    streamed = ask(client, [USER], logprobs=True, top_logprobs=3, stream=True)
    found = [
        one
        for chunk in streamed
        if chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    assert found == answer.logprobs.content
    plain = ask(client, [USER], logprobs=True).choices[0].logprobs.content
    assert [one.top_logprobs for one in plain] == [[]] * 8


def test_a_bias_and_penalties_change_what_is_said(client):
    z = make_tokenizer()("z")["input_ids"][0]
    assert ask(client, [USER], logit_bias={str(z): 100}).choices[0].message.content == "z" * 8
    given = {"logit_bias": {str(z): 100}, "frequency_penalty": 2.0, "max_tokens": 60}
    other = ask(client, [USER], **given, presence_penalty=2.0).choices[0].message.content
    assert other != "z" * 60
    for more in ({"top_k": 1}, {"min_p": 1.0}):
        given = {"temperature": 2, "extra_body": more}
        assert ask(client, [USER], **given).choices == ask(client, [USER]).choices
    penalized = ask(client, [USER], extra_body={"repetition_penalty": 10.0}, max_tokens=20)
    text = penalized.choices[0].message.content
    assert text != ask(client, [USER], max_tokens=20).choices[0].message.content


# --- sessions


def test_of_a_history_only_what_is_new_is_read(client):
    messages = [{"role": "system", "content": "Be kind."}, USER]
    first = ask(client, messages)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    messages += [assistant(first), {"role": "user", "content": "Go on"}]
    read = []
    for _ in range(3):
        answer = ask(client, messages)
        read.append(answer.usage.prompt_tokens - answer.usage.prompt_tokens_details.cached_tokens)
        assert answer.usage.prompt_tokens == length(messages)
        messages += [assistant(answer), {"role": "user", "content": "Go on"}]
    # The answer's last token, its end token, the user's message, and the header of the next answer.
    added = length(messages) - length(messages[:-2]) - 8
    assert read == [1 + added] * 3


def test_a_session_goes_on_as_a_stream_that_was_fed_the_same(server, client):
    messages = [{"role": "user", "content": "A long way round " * 5}]
    first = ask(client, messages)
    messages += [assistant(first), {"role": "user", "content": "And?"}]
    second = ask(client, messages)
    import weir

    tokenizer = server.engine_client.tokenizer
    stream = weir.Stream(server.engine.model, server.engine.cache.policy, chunk=4)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    stream.feed(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(list(stream.generate(8, stop=[]))) == assistant(second)["content"]


def test_usage_says_where_the_stream_stands(server, client):
    answer = ask(client, [{"role": "user", "content": "x" * 100}])
    told = answer.usage.weir
    assert told["seen"] == answer.usage.total_tokens
    assert told["held"] <= 2 + 6 + 4 + 4
    assert told["folds"] == (told["seen"] - 1) // 4
    assert told["bytes"] == server.engine.cache.nbytes // 3
    start = server.engine_client.tokenizer("<|im_start|>user\n", add_special_tokens=False)[
        "input_ids"
    ]
    assert (told["pinned"], told["beginning"]) == (0, len(start))


def test_an_edited_history_branches_from_what_it_shares(client):
    messages = [{"role": "user", "content": "One"}]
    for word in ("Two", "Three"):
        messages += [assistant(ask(client, messages)), {"role": "user", "content": word}]
    last = ask(client, messages)
    edited = [*messages[:-1], {"role": "user", "content": "Four"}]
    other = ask(client, edited)
    assert other.usage.prompt_tokens_details.cached_tokens == (
        last.usage.prompt_tokens_details.cached_tokens
    )
    earlier = [*messages[:2], {"role": "user", "content": "No, five"}, *messages[3:]]
    branch = ask(client, earlier)
    # Only the first answer is shared. The answer after the edit must be read again.
    assert branch.usage.prompt_tokens_details.cached_tokens == length(messages[:1]) + 8 - 1
    assert branch.usage.prompt_tokens == length(earlier)
    anew = ask(client, [{"role": "user", "content": "Zero"}, *messages[1:]])
    assert anew.usage.prompt_tokens_details.cached_tokens == 0
    again = ask(client, messages)
    assert again.choices == last.choices


@pytest.mark.parametrize(
    "change",
    [
        lambda text: f"  {text}\n",
        lambda text: f"<think>\nHm.\n</think>\n\n{text}",
        lambda text: [{"type": "text", "text": text}],
    ],
)
def test_what_clients_make_of_an_answer_does_not_matter(client, change):
    given = {"temperature": 1, "seed": 9}
    messages = [{"role": "user", "content": "What clients do"}]
    answer = assistant(ask(client, messages, **given))
    answer["content"] = change(answer["content"])
    second = ask(client, [*messages, answer, USER])
    assert second.usage.prompt_tokens_details.cached_tokens > 0


def test_a_session_has_a_name_that_the_client_may_choose(server, client):
    raw = client.chat.completions.with_raw_response
    given = {"model": "small", "max_tokens": 4}
    messages = [{"role": "user", "content": "Names"}]
    first = raw.create(messages=messages, **given)
    name = first.headers["x-session-id"]
    assert name.startswith("sess_")
    more = [*messages, assistant(first.parse()), USER]
    assert raw.create(messages=more, **given).headers["x-session-id"] == name
    mine = {"x-session-id": "my-session"}
    assert raw.create(messages=more, extra_headers=mine, **given).headers["x-session-id"] == (
        "my-session"
    )
    told = httpx.get(f"{server.url}/v1/sessions/{name}").json()
    assert told["turns"] == 2
    assert told["seen"] > 30
    names = [one["id"] for one in httpx.get(f"{server.url}/v1/sessions").json()["data"]]
    assert names[:2] == ["my-session", name]
    assert httpx.delete(f"{server.url}/v1/sessions/{name}").json()["deleted"]
    unknown = httpx.get(f"{server.url}/v1/sessions/{name}")
    assert unknown.status_code == httpx.delete(unknown.url).status_code == 404
    # What was said in the other session is still known.
    again = client.chat.completions.create(messages=more, **given)
    assert again.usage.prompt_tokens_details.cached_tokens == 0


# --- without a template


def test_a_model_without_a_template_continues_the_text_to_the_end_of_its_line():
    with serving(make_client(template=None)) as server:
        client = server.client()
        newline = make_tokenizer()("\n")["input_ids"][0]
        first = ask(client, [{"role": "user", "content": "Prince Andrew,"}])
        assert first.usage.prompt_tokens == len("Prince Andrew,")
        said = assistant(first)
        given = {"logit_bias": {str(newline): 100}}
        messages = [{"role": "user", "content": "Prince Andrew,"}, said, USER]
        second = ask(client, messages, **given)
        assert second.choices[0].finish_reason == "stop"
        assert second.choices[0].message.content == ""
        read = second.usage.prompt_tokens - second.usage.prompt_tokens_details.cached_tokens
        assert read == 1 + len("\nHello there")
        messages += [assistant(second), {"role": "user", "content": "And"}]
        third = ask(client, messages)
        read = third.usage.prompt_tokens - third.usage.prompt_tokens_details.cached_tokens
        assert read == 1 + len("And")


def test_the_client_raises_what_openai_would(client):
    with pytest.raises(openai.NotFoundError) as error:
        ask(client, [USER], model="gpt-9")
    assert error.value.code == "model_not_found"
    assert error.value.param == "model"
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, [USER], functions=[{"name": "f"}])
    assert error.value.param == "functions"
    assert "not supported by this server. Use tools" in str(error.value)
