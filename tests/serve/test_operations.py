"""Clients that hang up, that do not read or that are too many, and servers that are shut down."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from servers import Server, make_client, raw, serving

from weir.cli.app import run
from weir.cli.serve import compile_or_say
from weir.errors import WeirError
from weir.models import ASSETS
from weir.serve import Limits
from weir.serve.api import Keys
from weir.serve.api.middleware import JSONFormatter
from weir.serve.engine.scheduler import Busy

USER = {"role": "user", "content": "Hello there"}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = Limits(queue=1, wait=0.5, stall=1.0, unread=200, requests=3)
    with serving(make_client(rows=1, limits=limits, most=3)) as server:
        yield server


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    """Yield a server that waits long enough for a test to ask twice, even on a busy machine."""
    limits = Limits(queue=1, wait=3.0, stall=4.0, requests=3)
    with serving(make_client(rows=1, limits=limits, most=3)) as server:
        yield server


def body_of(**given) -> dict:
    return {"model": "small", "messages": [USER], "temperature": 0, **given}


def count(server: Server, name: str) -> float:
    """Return the value of a metric."""
    text = httpx.get(f"{server.url}/metrics").text
    found = [line.split()[-1] for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(found[0]) if found else 0.0


def busy(server: Server) -> None:
    """Wait until the only row is busy."""
    for _ in range(1000):
        if server.engine.load().busy:
            return
        time.sleep(0.005)
    raise AssertionError("no row became busy")


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_gives_the_row_back(server, stream):
    seen = server.engine.load().seen
    body = json.dumps(body_of(max_tokens=60_000, stream=stream)).encode()
    with raw(server.port, CHAT, body) as connection:
        busy(server)
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    server.settled()
    assert server.engine.load().seen - seen < 30_000
    assert server.post(CHAT, body_of(max_tokens=2)).status_code == 200


@pytest.mark.parametrize("limits", [Limits(stall=0.5), Limits(stall=60, unread=20)])
@pytest.mark.thinned(2)
def test_who_does_not_read_is_cut_off(limits):
    with serving(make_client(rows=1, limits=limits)) as server:
        read_nothing(server)


def read_nothing(server: Server) -> None:
    body = json.dumps(body_of(max_tokens=60_000, stream=True, logprobs=True, top_logprobs=20))
    given_up = count(server, 'weir_turns_total{ended="given up"}')
    with raw(server.port, CHAT, body.encode()) as connection:
        busy(server)
        server.settled()
        assert count(server, 'weir_turns_total{ended="given up"}') == given_up + 1
        assert server.engine.load().seen < 1000
        read = b""
        try:
            while more := connection.recv(1 << 16):
                read += more
        except OSError:
            pass
        assert read.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in read
    assert server.post(CHAT, body_of(max_tokens=2)).status_code == 200


def test_who_comes_when_all_is_full_is_to_come_again(patient):
    # An answer that is not streamed holds the row: it goes on although its client does not read.
    holding = raw(patient.port, CHAT, json.dumps(body_of(max_tokens=60_000)).encode())
    busy(patient)
    waited = []

    def wait() -> None:
        began = time.perf_counter()
        answer = patient.post(CHAT, body_of(max_tokens=2))
        waited.append((answer, time.perf_counter() - began))

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not patient.engine.load().waiting:
        time.sleep(0.005)
    with pytest.raises(openai.RateLimitError) as error:
        patient.client().chat.completions.create(**body_of())
    assert error.value.response.headers["retry-after"] == "1"
    assert error.value.code == "rate_limit_exceeded"
    assert "waiting for a row" in str(error.value)
    waiting.join()
    ((answer, seconds),) = waited
    assert answer.status_code == 429
    assert "no row became free in time" in answer.json()["error"]["message"]
    assert seconds >= 3.0
    holding.close()
    patient.settled()


def test_requests_of_one_key_are_bounded_also_while_they_are_being_sent(patient):
    half = [raw(patient.port, CHAT, b"", "X: y", length=50) for _ in range(3)]
    while patient.engine_client.open_requests("127.0.0.1") < 3:
        time.sleep(0.005)
    answer = patient.post(CHAT, body_of(max_tokens=2))
    assert answer.status_code == 429
    assert "of this key" in answer.json()["error"]["message"]
    half.pop().close()
    while patient.engine_client.open_requests("127.0.0.1") == 3:
        time.sleep(0.005)
    assert patient.post(CHAT, body_of(max_tokens=2)).status_code == 200
    # A client that does not send the rest is told so after a while, and no longer counts.
    assert half[0].recv(1000).startswith(b"HTTP/1.1 408")
    patient.settled()
    for each in half:
        each.close()


def test_requests_of_all_are_bounded():
    engine_client = make_client(limits=Limits(requests=2, open=3))
    for owner in "aab":
        engine_client.begin_request(owner)
    for owner in "ac":
        with pytest.raises(Busy, match="too many requests"):
            engine_client.begin_request(owner)
    engine_client.end_request("a")
    engine_client.begin_request("c")


@pytest.mark.slow  # a busy machine can take so long that the half body is dropped
def test_one_key_leaves_rows_and_room_for_bodies_to_another():
    limits = Limits(body=2_000_000, bodies=3_000_000, wait=0.5)
    first, second = "wk-first", "wk-second"
    keys = Keys(hashlib.sha256(key.encode()).hexdigest() for key in (first, second))
    with serving(make_client(rows=2, limits=limits, shared=True), keys) as server:

        def post(key: str, **more: Any) -> httpx.Response:
            return server.post(CHAT, body_of(**more), Authorization=f"Bearer {key}")

        greedy = server.client(key=first)
        stream = greedy.chat.completions.create(**body_of(max_tokens=60_000), stream=True)
        next(iter(stream))
        refused = post(first)  # a key does not get the second row, too
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert post(second, max_tokens=2).status_code == 200
        head = f"Authorization: Bearer {first}"
        half = raw(server.port, CHAT, b" " * 1_900_000, head, length=1_900_001)
        large = "x" * 1_000_000
        until = time.monotonic() + limits.stall
        while (refused := post(first, user=large)).status_code != 429 or (
            "too large" not in refused.text
        ):
            assert time.monotonic() < until  # until all of the half body has arrived
        assert "of this key" in refused.json()["error"]["message"]
        assert post(second, max_tokens=2, user=large).status_code == 200
        half.close()
        stream.close()


def test_addresses_take_turns_where_there_are_no_keys():
    with serving(make_client(rows=1)) as server:
        stream = server.client().chat.completions.create(**body_of(max_tokens=60_000), stream=True)
        next(iter(stream))
        order: list[str] = []

        def ask(address: str) -> None:
            with httpx.Client(transport=httpx.HTTPTransport(local_address=address)) as client:
                answer = client.post(server.url + CHAT, json=body_of(max_tokens=2), timeout=600)
                assert answer.status_code == 200
                order.append(address)

        asking = []
        for number, address in enumerate(["127.0.0.1"] * 3 + ["127.0.0.2"], 1):
            asking.append(threading.Thread(target=ask, args=(address,)))
            asking[-1].start()
            while server.engine.load().waiting < number:
                time.sleep(0.005)
        stream.close()
        for thread in asking:
            thread.join()
        assert order[0] == "127.0.0.2"


def test_a_turn_whose_beginning_was_dropped_while_it_waited_is_read_anew(server, monkeypatch):
    first = server.post(CHAT, body_of(max_tokens=4)).json()
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    messages = [USER, said, {"role": "user", "content": "Go on"}]
    submit = server.engine.submit

    def drop_before(turn):
        monkeypatch.undo()
        server.engine.forget(turn.parent)
        submit(turn)

    kept = server.post(CHAT, body_of(messages=messages, max_tokens=4)).json()
    assert kept["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    monkeypatch.setattr(server.engine, "submit", drop_before)
    anew = server.post(CHAT, body_of(messages=messages, max_tokens=4)).json()
    assert anew["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert anew["choices"] == kept["choices"]


def test_ends_of_turns_are_kept_so_many_and_no_more(server):
    for number in range(6):
        messages = [{"role": "user", "content": f"Number {number}"}]
        server.post(CHAT, body_of(messages=messages, max_tokens=2))
    told = httpx.get(f"{server.url}/v1/sessions").json()["data"]
    assert len(told) == 3


def test_a_turn_that_cannot_be_saved_fails_and_nobody_hears_of_an_end(server, monkeypatch):
    def full(checkpoint, record, done):
        raise WeirError("the disk of /srv/weir is full")

    monkeypatch.setattr(server.store, "save", full)
    answer = server.post(CHAT, body_of(max_tokens=2))
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "/srv" not in answer.text
    text = server.post(CHAT, body_of(max_tokens=2, stream=True)).text
    assert '"server_error"' in text
    assert "[DONE]" not in text
    assert '"finish_reason":"length"' not in text
    monkeypatch.undo()
    assert server.post(CHAT, body_of(max_tokens=2)).status_code == 200


def test_health_can_be_asked_for_without_a_body(server):
    found = httpx.head(f"{server.url}/health")
    assert (found.status_code, found.content) == (200, b"")
    assert found.headers["content-length"] == str(len(httpx.get(f"{server.url}/health").content))


def test_what_happens_is_counted(server):
    folds, read = count(server, "weir_folds_total"), count(server, 'weir_tokens_total{kind="read"}')
    used = server.post(CHAT, body_of(max_tokens=20)).json()["usage"]
    assert count(server, 'weir_tokens_total{kind="read"}') == read + used["prompt_tokens"]
    # The one call for the prompt counts as one fold. The answer folds once in four tokens.
    assert used["weir"]["folds"] == used["weir"]["seen"] // 4
    assert count(server, "weir_folds_total") == folds + 1 + 20 // 4
    assert count(server, "weir_fold_seconds_total") > 0
    assert count(server, 'weir_rows{state="resting"}') == 1
    assert count(server, 'weir_turns_total{ended="length"}') > 0
    assert count(server, "weir_between_tokens_seconds_count") >= 19
    assert count(server, "weir_cache_bytes") == server.engine.cache.nbytes


def test_the_log_says_what_was_asked_and_never_what_was_said(server, caplog):
    caplog.set_level(logging.DEBUG)
    secret = {"role": "user", "content": "my-secret"}
    answer = server.post(CHAT, body_of(messages=[secret], max_tokens=30))
    httpx.get(f"{server.url}/v1/a%1b[31m%0a%7f%c2%9b")
    # A line is logged after its response. Lines of clients that hung up before can also come now.
    told: list[dict[str, Any]] = []
    for _ in range(1000):
        if any("\x1b" in one.get("path", "") for one in told):
            break
        time.sleep(0.01)
        records = [record for record in caplog.records if record.name == "weir.serve"]
        lines = [JSONFormatter().format(record) for record in records]
        told = [json.loads(line) for line in lines]
    (chat,) = [one for one in told if one.get("id") == answer.headers["x-request-id"]]
    assert (chat["path"], chat["status"], chat["answered"]) == (CHAT, 200, 30)
    assert not any("my-secret" in line for line in lines)
    said = answer.json()["choices"][0]["message"]["content"]
    assert not any(said in line for line in lines)
    assert not any(ord(char) < 32 or ord(char) > 126 for line in lines for char in line)
    assert any("\x1b" in one.get("path", "") for one in told)


def test_an_engine_that_ends_by_itself_leaves_nobody_waiting():
    with serving(make_client(rows=1)) as server:
        client = server.client()
        stream = client.chat.completions.create(**body_of(max_tokens=60_000), stream=True)
        next(iter(stream))
        server.engine.step = lambda: 1 / 0
        with pytest.raises(openai.APIError, match="failed to answer"):
            list(stream)
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert server.post(CHAT, body_of()).status_code == 503


needs_nano = pytest.mark.skipif(
    not (ASSETS / "nano" / "model.safetensors").exists(), reason="nano is not packaged here"
)


@contextlib.contextmanager
def started(*given: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `weir serve nano` in a separate process, and yield the process and its address."""
    source = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-c", "from weir.cli import main; main()", "serve", "nano"]
    process = subprocess.Popen(
        [*command, "--rows", "2", "--port", "0", *given],
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = [process.stderr.readline()]
        while not (found := re.match(r"(http://127\.0\.0\.1:\d+)/v1 \(no keys: ", lines[-1])):
            assert lines[-1], lines
            lines.append(process.stderr.readline())
        shown = "\n".join(lines)
        for line in (
            r"nano under .*",
            r"the first \d+ tokens of the system message and tools are never evicted .*",
            r"memory: \S+ MB in all: weights \S+ MB, 2 rows of .*",
            r"on top of that: at most 768\.0 MB for requests in progress, and 1\.0 GB while .*",
        ):
            assert re.search(f"^{line}$", shown, re.MULTILINE), shown
        # The socket is bound before the server listens, so the first requests can be refused.
        for _ in range(400):
            with contextlib.suppress(httpx.ConnectError):
                httpx.get(f"{found[1]}/health")
                break
            time.sleep(0.05)
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@needs_nano
def test_a_server_that_is_told_to_end_lets_answers_end_first():
    with started("--keep", "4") as (process, url):
        body = {"model": "nano", "prompt": "Prince Andrew", "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert "waiting up to 30 s for 1 answer to finish." in process.stderr.read()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_a_cluster_does_not_compile(tmp_path):
    with pytest.raises(WeirError, match="--compile is for a single server"):
        run(["serve", "nano", "--cluster", "local", "--data", str(tmp_path), "--compile"])


def test_what_cannot_be_compiled_is_said_in_a_sentence_and_served_as_usual(capsys, monkeypatch):
    engine = make_client(rows=3).engine

    def none(engine):
        raise WeirError("the steps of this model cannot be compiled here: no compiler")

    monkeypatch.setattr("weir.serve.compile_engine", none)
    compile_or_say(engine)
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "the steps of this model cannot be compiled here: no compiler; decode steps run uncompiled",
    ]


@needs_nano
def test_a_disk_that_has_no_estimate_memory_one_turn_is_refused_at_the_start(tmp_path):
    wrong = ["serve", "nano", "--data", str(tmp_path / "a"), "--disk", "100KB", "--port", "0"]
    with pytest.raises(WeirError, match=r"--disk 100\.0 kB is too small"):
        run(wrong)


@pytest.mark.slow
@needs_nano
def test_who_is_not_done_when_the_server_ends_is_told():
    with started("--keep", "4", "--drain", "1") as (process, url):
        given = {"max_tokens": 20_000, "ignore_eos": True, "stream": True}
        body = {"model": "nano", "prompt": "Prince Andrew", **given}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        told = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert told["code"] == "server_closing"
        assert process.wait(30) == 0


@pytest.mark.slow
@needs_nano
def test_what_a_client_saw_the_end_of_is_there_after_a_kill(tmp_path):
    folder = str(tmp_path / "data")
    body = {"model": "nano", "max_tokens": 5, "temperature": 0}
    messages = [{"role": "user", "content": "Prince Andrew"}]
    with started("--data", folder) as (process, url):
        first = httpx.post(f"{url}{CHAT}", json={**body, "messages": messages}, timeout=600)
        process.kill()
        process.wait()
    content = first.json()["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Then"}]
    with started("--data", folder, "--disk", "1GB") as (_, url):
        answer = httpx.post(f"{url}{CHAT}", json={**body, "messages": messages}, timeout=600).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (
            first.json()["usage"]["total_tokens"] - 1
        )
        told = httpx.get(f"{url}/v1/sessions/{first.headers['x-session-id']}").json()
        assert told["turns"] == 2
