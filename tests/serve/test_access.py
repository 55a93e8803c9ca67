"""Who can use a server: allowed hosts, allowed web pages, keys in either header, model names."""

from __future__ import annotations

import hashlib
import socket

import anthropic
import httpx
import pytest
from servers import make_client, make_model, make_tokenizer, serving
from transformers import GenerationConfig

from weir.errors import WeirError
from weir.serve.api import Access, Keys
from weir.serve.engine.sampler import read_defaults

BODY = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
PAGE = "http://localhost:3000"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
    "access-control-request-private-network": "true",
}


@pytest.fixture(scope="module")
def server():
    client = make_client(aliases=["gpt-5", "claude-sonnet"])
    with serving(client, hosts=["host.docker.internal", "[FE80::1]"], origins=[PAGE]) as server:
        yield server


@pytest.fixture(scope="module")
def plain():
    with serving(make_client()) as server:
        yield server


def message(answer: httpx.Response) -> str:
    return answer.json()["error"]["message"]


def test_a_further_host_is_answered_and_the_refusal_of_another_names_the_option(server, plain):
    for host in (
        "host.docker.internal",
        "Host.Docker.Internal:8000",
        "[FE80::1]:8000",
        "localhost",
    ):
        assert server.post("/v1/chat/completions", BODY, host=host).status_code == 200
    for one, host in ((server, "evil.example"), (plain, "host.docker.internal")):
        answer = one.post("/v1/chat/completions", BODY, host=f"{host}:80")
        assert (answer.status_code, answer.json()["error"]["code"]) == (421, "wrong_host")
        assert f"--allow-host {host}, or" in message(answer)
        assert "--keys" in message(answer)


def test_a_page_that_is_allowed_gets_the_headers_that_browsers_want(server):
    url = f"{server.url}/v1/chat/completions"
    asked = httpx.options(url, headers={"origin": PAGE, **PREFLIGHT})
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    assert asked.headers["access-control-allow-private-network"] == "true"
    for body, status in ((BODY, 200), ({**BODY, "model": "none"}, 404)):
        answer = server.post("/v1/chat/completions", body, origin=PAGE)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-session-id", "x-weir-warning", "x-weir-forgotten"} <= {*exposed}
    streamed = server.post("/v1/chat/completions", {**BODY, "stream": True}, origin=PAGE)
    assert streamed.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize("origin", ["http://localhost:3001", "https://localhost:3000", "null"])
def test_another_page_is_refused_with_the_option_that_would_allow_it(server, plain, origin):
    for one in (server, plain):
        url = f"{one.url}/v1/chat/completions"
        answer = httpx.options(url, headers={"origin": origin, **PREFLIGHT})
        assert answer.status_code == 403
        assert f"--allow-origin {origin}." in message(answer)
        answer = one.post("/v1/chat/completions", BODY, origin=origin)
        assert "access-control-allow-origin" not in answer.headers


def test_a_key_is_taken_in_either_header():
    keys = Keys([hashlib.sha256(b"secret").hexdigest()])
    with serving(make_client(), keys, origins=["*"]) as server:
        for headers in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            answer = server.post("/v1/chat/completions", BODY, **headers)
            assert answer.status_code == 200
        wrong = (
            {"x-api-key": "other"},
            {"x-api-key": ""},
            {},
            {"authorization": "Bearer other", "x-api-key": "secret"},
            {"authorization": "secret"},
        )
        for headers in wrong:
            answer = server.post("/v1/chat/completions", BODY, **headers)
            assert answer.status_code == 401
            assert "x-api-key: KEY" in message(answer)
            assert "--keys" in message(answer)
        # Without a key, a browser can ask whether it may send one, and a page can read the refusal.
        headers = {"origin": "https://anywhere.example", **PREFLIGHT}
        assert httpx.options(f"{server.url}/v1/models", headers=headers).status_code == 200
        answer = server.post("/v1/chat/completions", BODY, origin="https://anywhere.example")
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("hosts", "origins", "says"),
    [
        (["a.b:80"], [], "--allow-host"),
        (["*"], [], "--allow-host"),
        (["http://a"], [], "--allow-host"),
        ([], ["*"], "--keys FILE"),
        ([], ["localhost:3000"], "--allow-origin"),
        ([], ["http://localhost:3000/"], "--allow-origin"),
    ],
)
def test_what_is_no_host_or_origin_is_refused(hosts, origins, says):
    with pytest.raises(WeirError, match=says):
        Access(hosts, origins)


def test_a_model_has_further_names(server, plain):
    for name in ("small", "gpt-5", "claude-sonnet"):
        answer = server.post("/v1/chat/completions", {**BODY, "model": name})
        assert answer.json()["model"] == "small"
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["small", "claude-sonnet", "gpt-5"]
    assert httpx.get(f"{server.url}/v1/models/gpt-5").json()["id"] == "gpt-5"
    for one in (server, plain):
        answer = one.post("/v1/chat/completions", {**BODY, "model": "gpt-4"})
        assert answer.status_code == 404
        assert "--alias gpt-4" in message(answer)
        assert "'small'" in message(answer)


def test_names_come_in_pages_for_anthropics_clients(server):
    client = anthropic.Anthropic(base_url=server.url, api_key="none")
    names = ["small", "claude-sonnet", "gpt-5"]
    assert [one.id for one in client.models.list(limit=2)] == names
    page = client.models.list(limit=2)
    assert ([one.id for one in page.data], page.has_more) == (names[:2], True)
    assert (page.first_id, page.last_id) == (names[0], names[1])
    page = client.models.list(limit=1, before_id="gpt-5")
    assert ([one.id for one in page.data], page.has_more) == (names[1:2], True)
    page = client.models.list(after_id="gpt-5")
    assert (page.data, page.has_more, page.first_id) == ([], False, None)
    for wrong, status in (("after_id=nobody", 404), ("limit=0", 400), ("limit=many", 400)):
        assert httpx.get(f"{server.url}/v1/models?{wrong}").status_code == status


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/small", "/api/tags", "/api/ps"])
def test_a_parameter_without_effect_is_named(server, path):
    """Such parameters are not refused, because Codex sends its version in one."""
    answer = httpx.get(f"{server.url}{path}?client_version=1&%C3%BC=2")
    assert answer.status_code == 200
    assert answer.headers["x-weir-warning"] == r"no effect here: client_version, \u00fc"
    assert "x-weir-warning" not in httpx.get(f"{server.url}{path}").headers


def test_any_name_may_be_allowed():
    with serving(make_client(aliases=["*"])) as server:
        body = {"model": "o9", "input": "Hi", "max_output_tokens": 4}
        assert server.post("/v1/responses", body).status_code == 200
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [one["id"] for one in listed] == ["small"]


def test_a_models_own_sampling_is_the_default():
    config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1, min_p=0.1
    )
    found, unused = read_defaults(config)
    assert vars(found.sampling) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    assert (found.repetition, unused) == (1.1, [])
    for plain in (None, GenerationConfig(), GenerationConfig(max_new_tokens=8)):
        found, unused = read_defaults(plain)
        expected = {"temperature": 1.0, "top_k": None, "top_p": None, "min_p": None}
        assert vars(found.sampling) == expected
        assert (found.repetition, unused) == (1.0, [])


def test_options_that_are_not_used_are_named():
    config = GenerationConfig(do_sample=True, no_repeat_ngram_size=3, typical_p=0.9)
    assert read_defaults(config)[1] == ["no_repeat_ngram_size", "typical_p"]
    broken = GenerationConfig(do_sample=True)
    broken.top_p = 7
    found, unused = read_defaults(broken)
    assert (found.sampling.temperature, found.sampling.top_p, unused) == (1.0, None, ["top_p"])


def test_a_request_changes_some_of_the_defaults(monkeypatch):
    model = make_model(make_tokenizer())
    model.generation_config.do_sample = True
    model.generation_config.temperature = 1e-6
    monkeypatch.setattr("servers.make_model", lambda tokenizer: model)
    with serving(make_client()) as server:
        cold = {**BODY, "max_tokens": 12}
        texts = {
            server.post("/v1/chat/completions", cold).json()["choices"][0]["message"]["content"]
            for _ in range(3)
        }
        assert len(texts) == 1
        hot = {**cold, "temperature": 2, "seed": 1}
        answer = server.post("/v1/chat/completions", hot).json()
        assert answer["choices"][0]["message"]["content"] not in texts
        short = {"model": "small", "input": "Hi", "max_output_tokens": 4}
        echoed = server.post("/v1/responses", short).json()
        assert echoed["temperature"] == pytest.approx(1e-6)


def test_a_model_has_its_policy_under_the_name_that_it_was_given():
    name = "weir(budget=64)"
    with serving(make_client(rows=1, policy=name)) as server:
        weir = httpx.get(f"{server.url}/v1/models").json()["data"][0]["weir"]
    assert weir["policy"] == name
    assert weir["pools"] != name


def test_an_address_as_clients_of_proxies_send_it_is_its_path(plain):
    for target in ("http://127.0.0.1/health", "http://other.example/health?x=1"):
        with socket.create_connection(("127.0.0.1", plain.port), 60) as connection:
            head = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode())
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 200"), answer


def test_what_is_not_offered_is_named(plain):
    answer = plain.post("/v1/embeddings", {"input": "a"})
    assert answer.status_code == 404
    assert message(answer) == "/v1/embeddings: this server does not offer embeddings"
    for path in ("/v1/models/", "/v1/sessions/", "/api/tags/", "/health/"):
        answer = httpx.get(f"{plain.url}{path}")
        assert answer.status_code == 404
        assert f'"unknown path: GET {path}. Leave out the slash at the end."' in answer.text
    answer = httpx.get(f"{plain.url}/v1/modelz/")
    assert (answer.status_code, message(answer)) == (404, "unknown path: GET /v1/modelz/")
    answer = httpx.delete(f"{plain.url}/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert message(answer) == "/v1/chat/completions does not accept DELETE. Use POST."
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]}),
        ("/v1/messages", {"max_tokens": 3, "messages": [{"role": "user", "content": [image]}]}),
    ):
        answer = plain.post(path, {"model": "small", **body})
        assert answer.status_code == 400
        assert "This server reads text only" in answer.json()["error"]["message"]
