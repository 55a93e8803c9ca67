"""A server as a process of its own, and what it takes while it is measured."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from weir.errors import WeirError
from weir_bench.timing import status_bytes

WAIT = 300.0
"""Seconds that a server may take until it serves."""
START = "import sys; from weir.cli import main; main()"


class Server:
    """A server that runs."""

    def __init__(self, process: subprocess.Popen[str], port: int, model: str) -> None:
        self.port = port
        self.model = model
        self._process = process

    @property
    def memory(self) -> int:
        """Bytes of its resident memory; 0 where the system has no /proc."""
        return status_bytes(self._process.pid, "VmRSS")

    @property
    def worked(self) -> float:
        """Seconds that processors worked for it; 0 where the system has no /proc."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text("ascii")
        except OSError:
            return 0.0
        fields = text.rpartition(")")[2].split()  # from the third field on; a name may have spaces
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None


@contextlib.contextmanager
def weir_serves(model: Path, *options: str | int) -> Iterator[Server]:
    """`weir serve` of a model's folder, at a port that is free."""
    words = [sys.executable, "-c", START, "serve", str(model), "--name", "model", "--port", "0"]
    with _running([*words, *map(str, options)]) as (process, said):
        port = int(_found(process, said, r"http://\S+:(\d+)/v1"))
        _wait_for(process, port)
        yield Server(process, port, "model")


@contextlib.contextmanager
def transformers_serves(model: Path, *options: str | int) -> Iterator[Server]:
    """`transformers serve --continuous-batching` of a model's folder, in float32 on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    start = "import sys; from transformers.cli.transformers import main; main()"
    words = [sys.executable, "-c", start, "serve", str(model), "--continuous-batching"]
    words += ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    with _running([*words, *map(str, options)]) as (process, said):
        _found(process, said, "(Uvicorn running)")
        _wait_for(process, port)
        yield Server(process, port, str(model))


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], queue.Queue[str]]]:
    """A process and the lines it writes; it is ended at the end."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    said: queue.Queue[str] = queue.Queue(1000)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(queue.Full):  # who is up says a line for every request
                said.put_nowait(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield process, said
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10)
        assert process.stdout is not None
        process.stdout.close()


def _wait_for(process: subprocess.Popen[str], port: int) -> None:
    """Returns when a server answers at a port."""
    until = time.monotonic() + WAIT
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise WeirError("the server did not start: it does not answer at its port")


def _found(process: subprocess.Popen[str], said: queue.Queue[str], what: str) -> str:
    """What the first group of a pattern matches in the lines of a process, once it does."""
    lines: list[str] = []
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        with contextlib.suppress(queue.Empty):
            lines.append(said.get(timeout=0.2))
            found = re.search(what, lines[-1])
            if found:
                return found[1]
            continue
        if process.poll() is not None:
            break
    told = " ".join("".join(lines[-3:]).split())
    raise WeirError(f"the server did not start: {told or 'it said nothing'}")
