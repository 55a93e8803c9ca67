"""Turns whose end a client has seen survive many kill -9 in a row, also on a full disk.

`WEIR_KILLS=50` sets how often each server is killed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

KILLS = int(os.environ.get("WEIR_KILLS", "3"))
SCRIPT = Path(__file__).with_name("killed.py")


@dataclass
class Chat:
    """A conversation as its client knows it: only the turns whose end it has seen."""

    name: str
    said: list[dict[str, str]] = field(default_factory=list)
    total: int = 0
    turns: int = 0
    last: str | None = None

    def ask(self, url: str, responses: bool) -> int | None:
        """Send a turn. Return how many of its tokens were cached, or None if the disk is full."""
        text = f"{self.name} {self.turns}"
        if responses:
            body = {"model": "small", "input": text, "max_output_tokens": 3, "temperature": 0}
            if self.last is not None:
                body["previous_response_id"] = self.last
            answer = httpx.post(f"{url}/v1/responses", json=body, timeout=600)
        else:
            said = [*self.said, {"role": "user", "content": text}]
            body = {"model": "small", "messages": said, "max_tokens": 3, "temperature": 0}
            headers = {"x-session-id": self.name}
            answer = httpx.post(
                f"{url}/v1/chat/completions", json=body, headers=headers, timeout=600
            )
        if answer.status_code == 507:
            return None
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        used = whole["usage"]
        details = used.get("prompt_tokens_details") or used["input_tokens_details"]
        known, self.total = details["cached_tokens"], used["total_tokens"]
        self.turns += 1
        if responses:
            self.last = whole["id"]
        else:
            self.said = [*said, whole["choices"][0]["message"]]
        return known


class Servers:
    """Servers that run one after the other on the same folder."""

    def __init__(self, folder: Path, kind: str) -> None:
        command = [sys.executable, str(SCRIPT), str(folder), kind]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._running: int | None = None

    def start(self) -> tuple[str, int]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        said, port, pid = self._line()
        assert said == "up"
        self._running = int(pid)
        return f"http://127.0.0.1:{port}", int(pid)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self._running = None
        assert self._line()[0] == "dead"

    def _line(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()

    def close(self) -> None:
        # A failed test left it running, and it would keep the pipe open.
        if self._running is not None:
            os.kill(self._running, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()


def mounted(folder: Path) -> None:
    """Mount a small separate disk at a folder."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("only root can make a small disk")
    made = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)]
    if subprocess.run(made, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["empty", "full"])
@pytest.mark.parametrize("kind", ["chat", "responses", "cluster"])
def test_turns_that_have_ended_outlive_kills(tmp_path, kind, disk):
    draw = random.Random(7)
    if disk == "full":
        mounted(tmp_path)
    servers = Servers(tmp_path / "data", kind)
    try:
        chats = [Chat(f"s{n}") for n in range(2)]
        refused = 0
        for kill in range(KILLS):
            url, pid = servers.start()
            (tmp_path / "filler").unlink(missing_ok=True)
            for chat in chats:
                before = chat.total
                known = chat.ask(url, kind == "responses")
                assert known == max(0, before - 1), (kill, chat, known)
            if disk == "full":
                fill(tmp_path, draw.choice([2**16, 2**19, 2**20]))
            after = draw.randint(1, 8), draw.uniform(0.0, 0.05)
            refused += talk(url, pid, servers, chats, kind, *after)
        assert refused > 0 or disk == "empty"
    finally:
        servers.close()
        if disk == "full":
            subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(folder: Path, left: int) -> None:
    """Write a file that leaves only this many bytes of a disk free."""
    found = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(max(0, found.f_bavail * found.f_frsize - left)))


def talk(
    url: str, pid: int, servers: Servers, chats: list[Chat], kind: str, steps: int, seconds: float
) -> int:
    """Let clients talk, and kill the server in the middle of a turn.

    Return how often the disk had no room. A client without room deletes its session and begins
    another.
    """
    refused, errors = [], []
    stepped = threading.Semaphore(0)

    def client(place: int) -> None:
        chat = chats[place]
        try:
            while True:
                known = chat.ask(url, kind == "responses")
                stepped.release()
                if known is not None:
                    continue
                refused.append(chat)
                session = chat.name
                if chat.last is not None:
                    found = httpx.get(f"{url}/v1/sessions", timeout=600).json()["data"]
                    node = chat.last.removeprefix("resp_")
                    session = next((s["id"] for s in found if s["head"] == node), "none")
                chats[place] = fresh = Chat(f"{chat.name}x"[-40:])
                gone = httpx.delete(f"{url}/v1/sessions/{session}", timeout=600)
                assert gone.status_code in (200, 404), gone.text
                chat = fresh
                time.sleep(0.01)
        except httpx.TransportError:
            pass  # the server was killed
        except Exception as error:
            errors.append(error)
        for _ in range(steps):
            stepped.release()

    threads = [threading.Thread(target=client, args=(place,)) for place in range(len(chats))]
    for thread in threads:
        thread.start()
    for _ in range(steps):
        stepped.acquire()
    time.sleep(seconds)
    servers.kill(pid)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return len(refused)
