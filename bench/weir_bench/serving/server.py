"""A server as a process of its own, and what it takes while it is measured."""

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
"""Seconds that a server may take until it serves."""
START = "import sys; from weir.cli import main; main()"


@dataclass(frozen=True)
class Server:
    """A server that runs at a port of this machine, and what it calls its model."""

    process: subprocess.Popen[bytes]
    port: int
    model: str

    @property
    def memory(self) -> int:
        """Bytes of its resident memory and its workers' own; 0 where the system has no /proc."""
        own = status_bytes(self.process.pid, "VmRSS")
        return own + sum(status_bytes(worker, "RssAnon") for worker in self.workers)

    @property
    def workers(self) -> list[int]:
        """Processes that it has started, which share what they have not written to with it."""
        try:
            text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except OSError:
            return []
        return [int(number) for number in text.split()]

    @property
    def worked(self) -> float:
        """Seconds that processors worked for its own process; 0 where the system has no /proc."""
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text("ascii")
        except OSError:
            return 0.0
        fields = text.rpartition(")")[2].split()  # from the third field on; a name may have spaces
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None


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
def _running(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process and the file that it writes its lines to; it is ended at the end."""
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
    """Returns when a server answers at a port."""
    until = time.monotonic() + WAIT
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise WeirError("the server did not start: it does not answer at its port")


def _found(process: subprocess.Popen[bytes], log: Path, what: str) -> str:
    """What the first group of a pattern matches in the lines of a process, once it does."""
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
