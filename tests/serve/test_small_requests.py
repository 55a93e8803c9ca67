"""HEAD requests, invalid token ids, sessions of responses that are not stored, topics."""

from __future__ import annotations

import httpx
import pytest
from anything import TAKES_TOOLS
from servers import make_client, serving
from test_drops import HISTORY, USER, answer, ask, result, said

VARY = {"date", "x-request-id"}


@pytest.fixture(scope="module")
def server():
    with serving(make_client(template=TAKES_TOOLS)) as server:
        ask(server, [USER], "one")
        yield server


def routes(app) -> list[str]:
    """Return the paths of all GET routes, with `one` as the session."""
    while not hasattr(app, "state"):
        app = app._app
    given = {"name": "one", "name:path": "small", "number": "1", "call:path": "x"}
    paths = [route.path for route in app.state.ways if "GET" in (route.methods or ())]
    return [
        "/".join(given.get(part.strip("{}"), part) for part in path.split("/")) for path in paths
    ]


def test_head_is_answered_as_get_without_a_body(server):
    paths = routes(server.server.config.app)
    assert {"/", "/v1/models", "/v1/models/small", "/v1/sessions/one/export"} <= set(paths)
    for path in [*paths, "/nothing", "/v1/sessions/none"]:
        with httpx.Client(base_url=server.url) as client:
            whole, head = client.get(path), client.head(path)
            assert head.status_code == whole.status_code, path
            assert head.content == b""
            for name in (
                set(whole.headers) - VARY - ({"content-length"} if path == "/metrics" else set())
            ):
                assert head.headers.get(name) == whole.headers[name], (path, name)
            # The connection can be used for the next request.
            assert client.get("/v1/models").json()["data"]


def test_where_there_is_no_get_there_is_no_head(server):
    found = httpx.head(f"{server.url}/v1/chat/completions")
    assert (found.status_code, found.headers["allow"], found.content) == (405, "POST", b"")
    found = httpx.delete(f"{server.url}/v1/models")
    assert (found.status_code, found.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_stop_tokens_that_do_not_exist_are_refused_by_name(server, path):
    size = server.engine_client.vocabulary
    body = {"model": "small", "max_tokens": 2}
    body |= {"prompt": "x"} if path == "/v1/completions" else {"messages": [USER]}
    assert server.post(path, {**body, "stop_token_ids": [0, size - 1]}).status_code == 200
    found = server.post(path, {**body, "stop_token_ids": [0, size]})
    assert found.status_code == 400
    error = found.json()["error"]
    assert error["param"] == "stop_token_ids[1]"
    assert (
        f"there is no token {size}. This model has the tokens 0 to {size - 1}" in error["message"]
    )


def test_a_response_that_is_not_stored_is_in_the_session_that_is_named(server):
    body = {"model": "small", "input": "Hello", "store": False, "max_output_tokens": 3}
    found = server.post("/v1/responses", body, **{"x-session-id": "mine"})
    assert found.headers["x-session-id"] == "mine"
    server.settled()
    assert httpx.get(f"{server.url}/v1/sessions/mine").json()["turns"] == 1
    named = found.json()["id"]
    assert httpx.get(f"{server.url}/v1/responses/{named}").status_code == 404
    # Without a name, the response is in no session.
    other = server.post("/v1/responses", body)
    server.settled()
    assert "x-session-id" not in other.headers or not other.headers["x-session-id"]
    known = [one["id"] for one in httpx.get(f"{server.url}/v1/sessions").json()["data"]]
    assert not any(name.startswith("~") for name in known)
    again = {**body, "input": "?", "previous_response_id": other.json()["id"]}
    assert server.post("/v1/responses", again).status_code == 404


def test_a_session_has_a_topic_while_an_agent_works(server):
    first = ask(server, HISTORY, "agent")
    call = {"id": "c2", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    more = [*HISTORY, said(first), {"role": "user", "content": "Go on."}]
    second = ask(server, more, "agent")
    assert second.status_code == 200
    made = [*more, answer(tool_calls=[call]), result("x", "c2")]
    third = [*more, said(second), {"role": "user", "content": "   "}]
    for history in (made, third):
        ask(server, history, "agent")
        topic = httpx.get(f"{server.url}/v1/sessions/agent").json()["topic"]
        assert topic in ("Go on.", "Read it.")
