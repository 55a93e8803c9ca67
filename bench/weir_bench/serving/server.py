"""Run a server in a separate process, and read its memory and processor time."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from weir.errors import WeirError
from weir_bench.timing import status_bytes

WAIT = 300.0
"""Seconds that a server may take to start."""
START = "import sys; from weir.cli import main; main()"


@dataclass(frozen=True)
class Server:
    """A server process, its port on this machine, and its name of the model."""

    process: subprocess.Popen[bytes]
    port: int
    model: str

    @property
    def memory(self) -> int:
        """Bytes of the server's resident memory, plus the unshared memory of its child processes.

        0 on a system without /proc.
        """
        own = status_bytes(self.process.pid, "VmRSS")
        return own + sum(status_bytes(worker, "RssAnon") for worker in self.workers)

    @property
    def workers(self) -> list[int]:
        """Ids of the server's child processes, which share unmodified memory with it."""
        try:
            text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except OSError:
            return []
        return [int(number) for number in text.split()]

    @property
    def worked(self) -> float:
        """The server's processor seconds without its children, or 0 on a system without /proc."""
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text("ascii")
        except OSError:
            return 0.0
        fields = text.rpartition(")")[2].split()  # fields from the third on
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def running(self) -> bool:
        """Whether the process is still running."""
        return self.process.poll() is None


@contextlib.contextmanager
def weir_serves(model: Path, *options: str | int) -> Iterator[Server]:
    """Run `weir serve` with a model's folder on a free port."""
    words = [sys.executable, "-c", START, "serve", str(model), "--name", "model", "--port", "0"]
    with _running([*words, *map(str, options)]) as (process, said):
        port = int(_found(process, said, r"http://\S+:(\d+)/v1"))
        _wait_for(process, port)
        yield Server(process, port, "model")


@contextlib.contextmanager
def transformers_serves(model: Path, *options: str | int) -> Iterator[Server]:
    """Run `transformers serve --continuous-batching` with a model's folder in float32 on CPU."""
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
def _running(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Yield a process and the file with its output, and end the process afterwards."""
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as said:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            yield process, log
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until a server accepts connections at a port."""
    until = time.monotonic() + WAIT
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise WeirError("the server did not start: it does not answer at its port")


def _found(process: subprocess.Popen[bytes], log: Path, what: str) -> str:
    """Wait until a pattern matches the output of a process, and return its first group."""
    until = time.monotonic() + WAIT
    while True:
        over = process.poll() is not None or time.monotonic() > until
        said = log.read_text("utf-8", "replace")
        if found := re.search(what, said):
            return found[1]
        if over:
            told = " ".join(" ".join(said.splitlines()[-3:]).split())
            raise WeirError(f"the server did not start: {told or 'it said nothing'}")
        time.sleep(0.05)
