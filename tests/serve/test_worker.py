"""The process that works on what clients send: its results, its errors, and its end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from servers import Server, make_client, serving

from weir.errors import WeirError
from weir.serve import Limits, worker
from weir.serve.api import requests
from weir.serve.api.errors import APIError
from weir.serve.engine.scheduler import Busy
from weir.serve.messages import StrayResult
from weir.serve.prompts import PromptRenderer
from weir.serve.worker import RATE, CallQueue, WaitingCall, Worker, WorkerProcess
from weir.stream import PromptTooLong
from weir_bench.serving.attackers import CHAT, IMPORT, RESPONSE, make_bodies

pytestmark = pytest.mark.thinned(3, least=2)

SIZE = 150_000


def pid_of(opened: Any, *given: Any) -> tuple[Any, ...]:
    return os.getpid(), opened, *given


ERRORS = [
    APIError(413, "large", code="x", headers={"a": "b"}),
    StrayResult(3, 1, "call", twice=True),
    PromptTooLong(7),
    WeirError("wrong"),
]


def fail(opened: Any, number: int) -> None:
    raise ERRORS[number]


def fail_oddly(opened: Any) -> None:
    raise ValueError(threading.Lock())


def end(opened: Any) -> None:
    os._exit(1)


def length_of(opened: Any, value: Any) -> int:
    return len(value)


def twice(opened: Any, value: list[int]) -> list[int]:
    return [*value, *value]


def size_and_list(opened: Any, size: int) -> tuple[int, list[int]]:
    return size, list(range(size))


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerProcess]:
    """One process for all these tests, because its imports take as long as all of them."""
    made = WorkerProcess()  # started afresh, since a fork would copy this process with its threads
    yield made
    made.close()


@pytest.fixture
def process(shared: WorkerProcess) -> WorkerProcess:
    shared.open("opened")
    return shared


def test_a_process_works_with_what_it_was_opened_with(process):
    pid, *rest = process.call(pid_of, 1, bytearray(b"x"))
    assert pid != os.getpid()
    assert rest == ["opened", 1, b"x"]


def test_a_body_is_emptied_once_it_is_sent(process):
    """Otherwise a large body would be in both processes while one of them works on it."""
    body = bytearray(worker.PIECE + 1)
    assert process.call(length_of, body) == worker.PIECE + 1
    assert body == b""


@pytest.mark.parametrize("kind", [Worker, WorkerProcess])
def test_what_is_held_is_worked_on_where_it_is(kind, process):
    it = process if kind is WorkerProcess else Worker()
    held = it.hold([1, 2])
    assert held.call(length_of) == 2
    assert held.map(twice).get() == [1, 2, 1, 2]
    small, large = it.split(size_and_list, 3)
    assert (small, large.call(length_of), large.get()) == (3, 3, [0, 1, 2])


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_errors_of_a_process_are_raised_as_they_are(process, number):
    with pytest.raises(type(ERRORS[number])) as raised:
        process.call(fail, number)
    assert str(raised.value) == str(ERRORS[number])
    assert vars(raised.value) == vars(ERRORS[number])


def test_an_error_that_cannot_be_sent_is_told(process):
    with pytest.raises(RuntimeError, match="ValueError"):
        process.call(fail_oddly)


@pytest.mark.slow
def test_a_lost_process_is_started_again(process, monkeypatch):
    with pytest.raises(Busy):
        process.call(end)
    assert process.call(pid_of)[1] == "opened"
    monkeypatch.setattr(worker, "SECONDS", 0.1)
    with pytest.raises(WeirError, match="too long"):
        process.call(_sleep)
    monkeypatch.undo()
    assert process.call(pid_of)[1] == "opened"


def _sleep(opened: Any) -> None:
    time.sleep(60)


def test_threads_work_where_a_process_cannot_have_the_tokenizer(process, monkeypatch, caplog):
    monkeypatch.setattr(PromptRenderer, "__reduce__", lambda it: (_break, ()))
    client = make_client(worker=process)
    assert type(client.worker) is Worker
    assert client.matcher.complete("", "a" * 1000).ids


def _break() -> None:
    raise ModuleNotFoundError("transformers_modules")


# --- a server with one


@pytest.fixture(scope="module")
def running(shared: WorkerProcess) -> Iterator[tuple[Server, Server, PromptRenderer]]:
    made = [make_client(limits=Limits(prompt=4000), worker=each) for each in (None, shared)]
    with serving(made[0]) as plain, serving(made[1]) as apart:
        yield plain, apart, made[1].renderer


@pytest.fixture
def servers(
    shared: WorkerProcess, running: tuple[Server, Server, PromptRenderer]
) -> tuple[Server, Server]:
    """A server that parses bodies in threads, and one that uses a separate process."""
    shared.open(running[2])
    return running[:2]


def ask(server: Server, path: str, body: bytes, kind: str = "application/json") -> tuple[int, Any]:
    answer = httpx.post(
        f"{server.url}{path}", content=body, headers={"Content-Type": kind}, timeout=60
    )
    told = answer.json()
    return answer.status_code, told.get("error") or told["usage"]["prompt_tokens"]


@pytest.mark.parametrize("kind", make_bodies("small", 1000))
def test_large_bodies_get_the_answers_that_they_get_in_threads(servers, kind, monkeypatch):
    plain, apart = servers
    path, body = make_bodies("small", SIZE)[kind]
    wanted = ask(plain, path, body)
    monkeypatch.setattr(requests, "parse_body", None)  # this process does not parse it
    assert ask(apart, path, body) == wanted


def without_ids(usage: dict[str, Any]) -> dict[str, Any]:
    """Return usage without the ids of turns, which differ from server to server."""
    turns = [{**turn, "id": None} for turn in usage["weir"]["forgotten_turns"]]
    return {**usage, "weir": {**usage["weir"], "forgotten_turns": turns}}


def test_a_long_chat_goes_on_from_a_saved_turn(servers):
    usages = []
    for server in servers:
        body = {"model": "small", "temperature": 0, "max_tokens": 4, "user": "x" * SIZE}
        said = [{"role": "user", "content": "a" * 400}]
        first = server.post(CHAT, {**body, "messages": said}).json()
        said += [first["choices"][0]["message"], {"role": "user", "content": "b" * 100}]
        usages.append(server.post(CHAT, {**body, "messages": said}).json()["usage"])
    assert without_ids(usages[0]) == without_ids(usages[1])
    assert usages[0]["prompt_tokens_details"]["cached_tokens"] > 400


@pytest.mark.slow
def test_a_long_input_goes_on_from_a_response(servers):
    usages = []
    for server in servers:
        body = {"model": "small", "temperature": 0, "max_output_tokens": 4}
        first = server.post(RESPONSE, {**body, "input": "a" * 400, "user": "x" * SIZE}).json()
        body |= {"previous_response_id": first["id"], "user": "x" * SIZE}
        items = [{"role": "user", "content": "b"}] * 100
        usages.append(server.post(RESPONSE, {**body, "input": items}).json()["usage"])
    assert without_ids(usages[0]) == without_ids(usages[1])
    assert usages[0]["input_tokens_details"]["cached_tokens"] > 400


def test_files_that_are_no_sessions_get_the_same_error(servers):
    for file in (b"", b"\xff" * 100, (10).to_bytes(8, "little") + b'{"a": 1}  '):
        answers = [ask(server, IMPORT, file, "application/octet-stream") for server in servers]
        assert answers[0] == answers[1]
        assert answers[0][0] == 400


# --- whose turn it is


class Calls:
    """Calls that wait for a process, and only record who got one."""

    def __init__(self, processes: int) -> None:
        self.queue = CallQueue([object()] * processes)
        self.order: list[str] = []
        self.most = 0
        self._working = 0
        self._lock = threading.Lock()
        self._go_on = threading.Event()

    def run(self, calls: list[tuple[str, int]]) -> None:
        """Let calls begin to wait in this order, then run them all."""
        threads = [threading.Thread(target=self._call, args=one) for one in calls]
        for number, thread in enumerate(threads, 1):
            thread.start()
            until = time.monotonic() + 10
            while len(self.queue._waiting) + len(self.order) < number:
                assert time.monotonic() < until
                time.sleep(0.001)
        self._go_on.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()

    def _call(self, holder: str, size: int) -> None:
        with self.queue.take(holder, size):
            with self._lock:
                self.order.append(f"{holder}{size}")
                self._working += 1
                self.most = max(self.most, self._working)
            self._go_on.wait(10)
            with self._lock:
                self._working -= 1


def test_clients_take_turns_and_a_small_call_goes_first():
    calls = Calls(1)
    calls.run([("z", 0), ("a", 9_000_000), ("a", 10), ("a", 20), ("b", 5_000_000), ("b", 4)])
    assert calls.order == ["z0", "a10", "b4", "a20", "b5000000", "a9000000"]


def test_a_large_call_does_not_wait_for_ever_behind_small_ones():
    queue = CallQueue([object()])
    early, late = WaitingCall("a", 0.0 + 2_000_000 / RATE), WaitingCall("a", 3.0 + 10 / RATE)
    queue._waiting = [late, early]
    assert queue._next() is early


def test_a_client_has_one_process_and_leaves_the_other_to_everybody_else():
    calls = Calls(2)
    calls.run([("a", 1), ("a", 2), ("a", 3), ("b", 4)])
    assert calls.order[:2] == ["a1", "b4"]  # before the first client's other two calls
    assert sorted(calls.order[2:]) == ["a2", "a3"]
    alone = Calls(2)
    alone.run([("a", number) for number in range(4)])
    assert alone.most == 1


def test_nobody_waits_for_processes_that_have_ended():
    queue = CallQueue([])
    failed: list[Exception] = []

    def wait() -> None:
        try:
            with queue.take("a", 1):
                pass
        except Busy as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    queue.close()
    thread.join(10)
    assert not thread.is_alive()
    assert "shutting down" in str(failed[0])
