"""Requests that cannot be answered are refused by name, and keys keep their sessions apart."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket

import httpx
import pytest
from servers import fields_without_effect, make_client, make_tokenizer, raw, serving
from starlette.requests import Request

from weir.errors import WeirError
from weir.serve import Limits
from weir.serve.api import Keys, bind
from weir.serve.api.errors import APIError
from weir.serve.api.requests import read_chunks
from weir.serve.api.schemas.chat import CompletionBody

ALICE, BOB = "wk-alice-0123456789", "wk-bob-0123456789"
LIMITS = Limits(body=20_000, prompt=400, answer=100, requests=4, sessions=3)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture(scope="module")
def server():
    with serving(
        make_client(rows=2, limits=LIMITS), Keys([hash_of(ALICE), hash_of(BOB)])
    ) as server:
        yield server


def send(server, path, body, key=ALICE, **headers) -> httpx.Response:
    return server.post(path, body, Authorization=f"Bearer {key}", **headers)


def chat_of(content="Hi", **given) -> dict:
    messages = given.pop("messages", [{"role": "user", "content": content}])
    return {"model": "small", "messages": messages, "max_tokens": 2, "temperature": 0, **given}


SCHEMA = "response_format.json_schema.schema"


def schema_of(schema, **given) -> dict:
    named = {"name": "answer", "schema": schema, **given}
    return chat_of(response_format={"type": "json_schema", "json_schema": named})


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def tool_of(name, parameters=None) -> dict:
    more = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **more}}


def error_of(answer: httpx.Response) -> tuple[int, str | None, str]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"].startswith("req_")
    return answer.status_code, body["error"]["param"], body["error"]["message"]


# --- completions


def test_a_text_is_continued(server):
    client = server.client(ALICE)
    given = {"model": "small", "temperature": 0, "max_tokens": 5}
    answer = client.completions.create(prompt="Hello", **given)
    assert answer.object == "text_completion"
    assert (len(answer.choices[0].text), answer.choices[0].finish_reason) == (5, "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 5)
    ids = make_tokenizer()("Hello")["input_ids"]
    for prompt in (ids, [ids], ["Hello"]):
        assert client.completions.create(prompt=prompt, **given).choices == answer.choices
    chunks = list(client.completions.create(prompt="Hello", stream=True, **given))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    default = {"model": "small", "temperature": 0}
    assert len(client.completions.create(prompt="Hello", **default).choices[0].text) == 16


def test_logprobs_of_a_text_stand_beside_each_other(server):
    client = server.client(ALICE)
    given = {"model": "small", "temperature": 0, "max_tokens": 5, "logprobs": 2, "prompt": "Hello"}
    choice = client.completions.create(**given).choices[0]
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text
    assert told.text_offset == [0, 1, 2, 3, 4]
    for token, logprob, top in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())
        assert len(top) == 2
    chunks = client.completions.create(stream=True, **given)
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    assert [o for one in logprobs for o in one.text_offset] == told.text_offset
    # The token that was drawn is always listed, even if it is none of the likeliest.
    told = client.completions.create(**{**given, "logprobs": 0}).choices[0].logprobs
    assert [list(top) for top in told.top_logprobs] == [[token] for token in told.tokens]


# --- what is refused

BAD = {
    "no model": ({"messages": [{"role": "user", "content": "x"}]}, "model"),
    "no messages": ({"model": "small"}, "messages"),
    "none at all": (chat_of(messages=[]), "messages"),
    "no list": (chat_of(messages="Hi"), "messages"),
    "a wrong role": (chat_of(messages=[{"role": "king", "content": "x"}]), "messages[0].role"),
    "no role": (chat_of(messages=[{"content": "x"}]), "messages[0].role"),
    "a result of no call": (
        chat_of(messages=[{"role": "tool", "content": "x", "tool_call_id": "y"}]),
        "messages[0].tool_call_id",
    ),
    "two results of one call": (
        chat_of(
            messages=[
                {"role": "assistant", "tool_calls": [CALL]},
                *2 * [{"role": "tool", "content": "x", "tool_call_id": CALL["id"]}],
            ]
        ),
        "messages[2].tool_call_id",
    ),
    "a result of nothing": (chat_of(messages=[{"role": "tool", "content": "x"}]), "messages[0]"),
    "a user's call": (
        chat_of(messages=[{"role": "user", "tool_calls": [CALL]}]),
        "messages[0]",
    ),
    "no text": (chat_of(messages=[{"role": "user", "content": 7}]), "messages[0].content"),
    "a second message without content": (
        chat_of(messages=[{"role": "user", "content": "x"}, {"role": "user"}]),
        "messages[1].content",
    ),
    "a picture": (
        chat_of(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        "messages[0].content[0].type",
    ),
    "an answer last": (chat_of(messages=[{"role": "assistant", "content": "x"}]), "messages"),
    "an enormous prompt": (chat_of("x" * 401), "messages"),
    "a cold one": (chat_of(temperature=-1), "temperature"),
    "a hot one": (chat_of(temperature=2.5), "temperature"),
    "text for a number": (chat_of(temperature="0.5"), "temperature"),
    "truth for a number": (chat_of(max_tokens=True), "max_tokens"),
    "half a token": (chat_of(max_tokens=1.5), "max_tokens"),
    "no tokens": (chat_of(max_tokens=0), "max_tokens"),
    "fewer": (chat_of(max_tokens=-5), "max_tokens"),
    "fewer than none": (chat_of(max_tokens=-3), "max_tokens"),
    "absurdly many": (chat_of(max_completion_tokens=10**30), "max_completion_tokens"),
    "top_p": (chat_of(top_p=1.5), "top_p"),
    "top_k": (chat_of(top_k=-2), "top_k"),
    "min_p": (chat_of(min_p=-0.1), "min_p"),
    "a penalty": (chat_of(presence_penalty=3), "presence_penalty"),
    "no penalty": (chat_of(repetition_penalty=0), "repetition_penalty"),
    "no answers": (chat_of(n=0), "n"),
    "more answers than rows": (chat_of(n=3), "n"),
    "a thousand answers": (chat_of(n=1000), "n"),
    "a long seed": (chat_of(seed=2**63), "seed"),
    "five stops": (chat_of(stop=list("abcde")), "stop"),
    "an empty stop": (chat_of(stop=""), "stop"),
    "a bias on no token": (chat_of(logit_bias={"x": 1}), "logit_bias"),
    "a bias on none there is": (chat_of(logit_bias={"259": 1}), "logit_bias"),
    "a bias below": (chat_of(logit_bias={"-1": 1}), "logit_bias"),
    "a strong bias": (chat_of(logit_bias={"1": 101}), "logit_bias"),
    "likely ones of none": (chat_of(top_logprobs=2), "top_logprobs"),
    "too many likely ones": (chat_of(logprobs=True, top_logprobs=21), "top_logprobs"),
    "an unknown field": (chat_of(temprature=1), "temprature"),
    "a template": (chat_of(chat_template="{{ x }}"), "chat_template"),
    "no kind of format": (chat_of(response_format={"type": "yaml"}), "response_format.type"),
    "a format of no schema": (chat_of(response_format={"type": "json_schema"}), "response_format"),
    "a schema without a name": (
        chat_of(response_format={"type": "json_schema", "json_schema": {"schema": {}}}),
        "response_format.json_schema.name",
    ),
    "no schema": (schema_of({"type": "king"}), SCHEMA),
    "what no strict schema has": (schema_of({"not": {}}, strict=True), SCHEMA),
    "repetitions of repetitions": (schema_of({"pattern": "((a{99}){99}){99}"}), SCHEMA),
    "a tool of nothing": (chat_of(tools=[{"type": "function"}]), "tools[0].function"),
    "a tool without a name": (chat_of(tools=[tool_of("a b")]), "tools[0].function.name"),
    "another kind of tool": (chat_of(tools=[{"type": 5}]), "tools[0].type"),
    "two of one name": (chat_of(tools=[tool_of("f"), tool_of("f")]), "tools"),
    "parameters that are none": (
        chat_of(tools=[tool_of("f"), tool_of("g", {"type": "king"})]),
        "tools[1].function.parameters",
    ),
    "parameters that are no object": (
        chat_of(tools=[tool_of("f"), tool_of("g", {"type": "string"})]),
        "tools[1].function.parameters",
    ),
    "parameters that repeat": (
        chat_of(tools=[tool_of("f", {"pattern": "((a{99}){99}){99}"})]),
        "tools[0].function.parameters",
    ),
    "a choice among none": (chat_of(tool_choice="required"), "tool_choice"),
    "no choice": (chat_of(tools=[tool_of("f")], tool_choice="some"), "tool_choice"),
    "a tool that is not there": (
        chat_of(tools=[tool_of("f")], tool_choice=tool_of("g")),
        "tool_choice.function.name",
    ),
    "a call of nothing": (
        chat_of(messages=[{"role": "assistant", "tool_calls": [{"id": "1"}]}]),
        "messages[0].tool_calls[0].function",
    ),
    "arguments that are no object": (
        chat_of(
            messages=[
                {
                    "role": "assistant",
                    "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}],
                }
            ]
        ),
        "messages[0].tool_calls[0].function.arguments",
    ),
    "an older call": (
        chat_of(messages=[{"role": "assistant", "function_call": {"name": "f"}}]),
        "messages[0].function_call",
    ),
    "an unknown option": (
        chat_of(stream=True, stream_options={"include": True}),
        "stream_options.include",
    ),
    "options of no stream": (chat_of(stream_options={"include_usage": True}), "stream_options"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_where_it_is_wrong(server, name):
    body, param = BAD[name]
    status, told, message = error_of(send(server, CHAT, body))
    assert (status, told) == (400, param), message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("stop", ["a"] * 5, "has 5 entries, and at most 4 are allowed"),
        ("stop", [1], "must be a text"),
        ("stop", "x" * 1025, "must have at most 1024 characters"),
        ("stop", [], None),
        ("seed", 2**63, "must be less than 9223372036854775808"),
        ("seed", -(2**63) - 1, "must be at least -9223372036854775808"),
        ("seed", 1.5, "must be a whole number"),
        ("temperature", 2.5, "must be at most 2"),
        ("messages", [], "must have at least 1 entry, and has none"),
        ("stream", "yes", "must be true or false"),
        ("tool_choice", "some", "must be 'none', 'auto' or 'required'"),
        ("stop", {}, "must be a text or a list"),
        ("model", 5, "must be a text"),
        ("n_predict", 2, "is another name for max_tokens. Send only one of them"),
        ("options", 5, "must be an object"),
        ("options", {f"o{n}": 1 for n in range(65)}, "has 65 entries, and at most 64 are allowed"),
    ],
)
def test_what_is_wrong_is_told_in_words(server, field, value, words):
    answer = send(server, CHAT, chat_of(max_tokens=1, **{field: value}))
    if words is None:
        assert answer.status_code == 200
        return
    _, param, message = error_of(answer)
    assert message == f"Invalid '{param}': {words}." and param.startswith(field)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([259], "prompt"),
        ([-1], "prompt[0]"),
        (["a", "b"], "prompt"),
    ],
)
def test_a_bad_prompt_is_refused(server, prompt, param):
    assert error_of(send(server, TEXT, {"model": "small", "prompt": prompt}))[:2] == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b'"chat"',
        b'{"model": "small", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "small", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "small", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
        b"[" * 10_000,
    ],
)
def test_what_is_no_json_of_a_request_is_refused(server, body):
    headers = {"Authorization": f"Bearer {ALICE}", "Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}{CHAT}", content=body, headers=headers)
    assert error_of(answer)[0] == 400


def test_a_length_of_thousands_of_digits_is_too_large_and_no_failure():
    given = {b"content-type": b"application/json", b"content-length": b"9" * 5000}
    request = Request({"type": "http", "headers": list(given.items())})
    with pytest.raises(APIError) as refused:
        asyncio.run(anext(read_chunks(request, "application/json", 10, 1.0)))
    assert refused.value.status == 413


def test_bodies_are_bounded_and_json(server):
    assert error_of(send(server, CHAT, chat_of("x" * 20_000)))[0] == 413
    headers = {"Authorization": f"Bearer {ALICE}", "Content-Type": "application/json"}

    def endless():
        for _ in range(30):
            yield b" " * 1000

    answer = httpx.post(f"{server.url}{CHAT}", content=endless(), headers=headers)
    assert error_of(answer)[0] == 413
    answer = httpx.post(
        f"{server.url}{CHAT}",
        data={"a": "b"},
        headers=headers | {"Content-Type": "application/x-www-form-urlencoded"},
    )
    assert error_of(answer)[0] == 415


def test_what_is_ignored_is_taken_and_what_is_refused_may_ask_for_nothing(server):
    unserved, names = fields_without_effect(CompletionBody)
    assert len(unserved) == 8 and {"user", "client_metadata", "cache_prompt"} <= {*names}
    plain = send(server, CHAT, chat_of()).json()["choices"]
    ignored = dict.fromkeys(names, "x")
    assert send(server, CHAT, chat_of(**unserved, **ignored)).json()["choices"] == plain
    for name in unserved:
        status, param, message = error_of(send(server, CHAT, chat_of(**{name: {"a": "b"}})))
        assert (status, param) == (400, name)
        assert "not supported" in message


# --- keys


def test_every_route_but_health_needs_a_key(server):
    assert httpx.get(f"{server.url}/health").status_code == 200
    right = {"Authorization": f"Bearer {ALICE}"}
    for path in ("/v1/models", "/v1/models/small", "/v1/sessions", "/metrics"):
        assert error_of(httpx.get(f"{server.url}{path}"))[0] == 401
        assert httpx.get(f"{server.url}{path}", headers=right).status_code == 200
    assert error_of(httpx.get(f"{server.url}/openapi.json"))[0] == 401
    described = httpx.get(f"{server.url}/openapi.json", headers=right).json()["paths"]
    assert {"/health", "/metrics", CHAT, TEXT} <= set(described)
    for path in set(described) - {"/health"}:
        for method in described[path]:
            url = f"{server.url}{path.replace('{name}', 'small')}"
            refused = httpx.request(method, url)  # in the format of the route's API
            assert (refused.status_code, "error" in refused.json()) == (401, True)
    for path in (CHAT, TEXT):
        for key in ("x", "wrong", ALICE[:-1], ALICE + "x", hash_of(ALICE)):
            # The key is checked first, so an invalid body is not read.
            answer = send(server, path, {"nonsense": 1}, key)
            assert error_of(answer)[0] == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        basic = server.post(path, chat_of(), Authorization=f"Basic {ALICE}")
        assert basic.status_code == 401


def test_what_one_key_said_is_unknown_to_another(server):
    name = {"x-session-id": "diary"}
    messages = [{"role": "user", "content": "My secret"}]
    first = send(server, CHAT, chat_of(messages=messages), **name).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And?"}]
    messages[1] = {"role": "assistant", "content": messages[1]["content"]}
    theirs = send(server, CHAT, chat_of(messages=messages), BOB).json()
    assert theirs["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    mine = send(server, CHAT, chat_of(messages=messages)).json()
    assert mine["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert mine["choices"] == theirs["choices"]

    def bodies(key: str, session: str) -> list[dict]:
        url, headers = f"{server.url}/v1/sessions/{session}", {"Authorization": f"Bearer {key}"}
        answers = [httpx.get(url, headers=headers), httpx.delete(url, headers=headers)]
        assert {answer.status_code for answer in answers} == {404}
        return [answer.json() for answer in answers]

    assert bodies(BOB, "diary") == bodies(BOB, "unknown")
    # Bob's session of the same name is a different one.
    send(server, CHAT, chat_of(), BOB, **name)
    url = f"{server.url}/v1/sessions/diary"
    told = [httpx.get(url, headers={"Authorization": f"Bearer {k}"}).json() for k in (ALICE, BOB)]
    assert [one["turns"] for one in told] == [2, 1]


def test_sessions_of_a_key_are_bounded_and_the_oldest_goes(server):
    headers = {"Authorization": f"Bearer {BOB}"}
    for number in range(5):
        send(server, CHAT, chat_of(), BOB, **{"x-session-id": f"s{number}"})
    told = httpx.get(f"{server.url}/v1/sessions", headers=headers).json()["data"]
    assert [one["id"] for one in told] == ["s4", "s3", "s2"]


@pytest.mark.parametrize("name", ["", ".", "../x", "a b", "a" * 129, "a\u00e9", "a/b"])
def test_names_of_sessions_are_plain(server, name):
    answer = send(server, CHAT, chat_of(), **{"x-session-id": name.encode("latin-1")})
    assert error_of(answer)[:2] == (400, "x-session-id")


def test_keys_are_read_from_a_file_as_hashes(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# who\n{hash_of(ALICE)} alice\n\nsha256:{hash_of(BOB).upper()}  # bob\n")
    keys = Keys.read(path)
    assert len(keys) == 2
    assert keys.owner_of(ALICE) == hash_of(ALICE)
    assert keys.owner_of(BOB) == hash_of(BOB)
    assert keys.owner_of("") is keys.owner_of("\udcff") is None
    path.write_text(f"{ALICE}\n")
    with pytest.raises(WeirError, match=r"line 1 of .* is not the SHA-256 hash of a key") as error:
        Keys.read(path)
    assert ALICE not in str(error.value)
    path.write_text("# nobody\n")
    with pytest.raises(WeirError, match="contains no keys"):
        Keys.read(path)
    path.write_bytes(b"\xff")
    for name, reason in (("none", "No such file or directory"), ("keys", "it is not UTF-8 text")):
        with pytest.raises(WeirError) as error:
            Keys.read(tmp_path / name)
        assert str(error.value) == (
            f"cannot read the key file {tmp_path / name}: {reason}. Use --keys with a text file "
            "that has the SHA-256 hash of a key in each line."
        )


def test_without_keys_nobody_elsewhere_is_served():
    for host in ("0.0.0.0", "::"):
        with pytest.raises(WeirError, match="without keys anyone could use the server"):
            bind(host, 0, Keys())
    with pytest.raises(WeirError, match=r"cannot serve at no such host: [A-Z]"):
        bind("no such host", 0, Keys())
    bind("0.0.0.0", 0, Keys([hash_of(ALICE)])).close()
    with bind("127.0.0.1", 0, Keys()) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        for at, remedy in ((port, "Use another --port, or"), (0, "The --host must be an address")):
            host = "127.0.0.1" if at else "192.0.2.1"  # kept for documentation, so nobody has it
            with pytest.raises(WeirError, match=f"cannot serve at {host}:{at}: .*") as error:
                bind(host, at, Keys([hash_of(ALICE)]))
            assert str(error.value).partition(". ")[2].startswith(remedy)
            assert ("--host must" in str(error.value)) is (at == 0)
    with serving(make_client(rows=1)) as server:
        body = json.dumps(chat_of()).encode()
        for host, status in (("localhost", b"200"), ("evil.example", b"421")):
            with raw(server.port, CHAT, body, "Connection: close") as connection:
                first = connection.recv(100)
                assert first.split()[1] == b"200"
            answer = httpx.get(f"{server.url}/v1/models", headers={"Host": f"{host}:80"})
            assert str(answer.status_code).encode() == status


# --- the rest


def test_models_tell_of_a_window_without_end(server):
    client = server.client(ALICE)
    (one,) = client.models.list().data
    assert one.id == "small"
    told = client.models.retrieve("small").model_dump()
    for name in ("max_model_len", "context_length", "context_window", "max_context_length"):
        assert told[name] >= 10**9
    config = server.engine.model.config
    assert told["meta"] == {"n_ctx": 10**9, "n_ctx_train": config.max_position_embeddings}
    assert config.max_position_embeddings < 10**6
    policy = server.engine.cache.policy
    assert (told["weir"]["policy"], told["weir"]["pools"]) == (policy.brief, policy.stands_for)
    answer = httpx.get(
        f"{server.url}/v1/models/other/one", headers={"Authorization": f"Bearer {ALICE}"}
    )
    assert error_of(answer)[:2] == (404, "model")


def test_a_window_that_the_configuration_lacks_is_left_out(server, monkeypatch):
    monkeypatch.setattr(server.engine.model.config, "max_position_embeddings", 0)
    told = server.client(ALICE).models.retrieve("small").model_dump()
    assert told["meta"] == {"n_ctx": 10**9}


def test_what_is_not_there_is_an_error_of_the_same_form(server):
    assert error_of(httpx.get(f"{server.url}/v1/nothing"))[0] == 404
    wrong = httpx.get(f"{server.url}{CHAT}")
    assert error_of(wrong)[0] == 405
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert error_of(httpx.get(f"{server.url}/docs"))[0] == 404


def test_a_wrong_method_is_told_all_that_are_right(server):
    allowed = {
        "/v1/sessions/one": "DELETE, GET, HEAD",
        "/v1/conversations/one": "DELETE, GET, HEAD, POST",
        CHAT: "POST",
    }
    for path, methods in allowed.items():
        answer = httpx.put(f"{server.url}{path}", headers={"Authorization": f"Bearer {ALICE}"})
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)


@pytest.mark.parametrize("most", [2**31, 2**53 - 1, 1e15])
def test_a_limit_beyond_what_the_server_gives_is_as_many_as_it_gives(server, most):
    answer = send(server, CHAT, chat_of(max_tokens=most, stop=[" ", "e", "a", "o"]))
    assert answer.status_code == 200
    assert "max_tokens" in answer.headers["x-weir-warning"]


def test_an_unknown_model_is_answered_with_an_option_that_can_be_pasted(server):
    assert error_of(send(server, CHAT, chat_of(model="a b")))[2].endswith("--alias 'a b'.")
    assert "--alias" not in error_of(send(server, CHAT, chat_of(model="")))[2]


def test_half_a_request_hurts_nobody(server):
    for piece in (
        b"",
        b"POST",
        b"\x00\xff\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            connection.sendall(piece)
    with raw(server.port, CHAT, b"", f"Authorization: Bearer {ALICE}", length=50):
        pass
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert send(server, CHAT, chat_of()).status_code == 200


def test_a_whole_number_may_be_written_with_a_point(server):
    given = chat_of(max_tokens=2.0, n=1.0, seed=7.0, top_k=3.0)
    assert send(server, CHAT, given).json()["usage"]["completion_tokens"] == 2
    assert error_of(send(server, CHAT, chat_of(max_tokens=2.5)))[:2] == (400, "max_tokens")
