"""Run a peer as a process in its own environment, and exchange lines of JSON with it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weir.errors import WeirError
from weir_bench.timing import status_bytes

ROOT = Path(__file__).parents[3]
HOME = ROOT / ".peers"
"""Where `make peers` puts environments and models."""
SIDES = Path(__file__).with_name("sides")
WAIT = 900.0
"""The most seconds to wait for an answer."""


def python_of(home: str) -> str:
    """Return the path of the Python in a peer's environment, or of this Python for ""."""
    if not home:
        return sys.executable
    python = HOME / home / "bin" / "python"
    if not python.exists():
        raise WeirError(f"{home} is not installed; `make peers` installs it")
    return str(python)


class PeerProcess:
    """A running peer."""

    def __init__(
        self,
        home: str,
        script: str,
        wanted: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        python, threads = python_of(home), str(wanted["threads"])
        variables = {**os.environ, "OMP_NUM_THREADS": threads, **(environment or {})}
        # `close` closes this file and ends the process.
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(SIDES / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=variables,
        )
        self.pid = self._process.pid
        try:
            self._send(dict(wanted))
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **given: Any) -> Any:
        """Call the peer's method `do`, and return its result."""
        return self._send({"do": do, **given})

    @property
    def peak(self) -> int:
        """The peer's peak memory in bytes, or 0 on a system without /proc."""
        return status_bytes(self.pid, "VmHWM")

    @property
    def memory(self) -> int:
        """The peer's current memory in bytes, or 0 on a system without /proc."""
        return status_bytes(self.pid, "VmRSS")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, what: dict[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(what) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise WeirError(self._ended()) from None
        if not select.select([stdout], [], [], WAIT)[0]:
            raise WeirError(f"it did not answer in {WAIT:g} seconds")
        line = stdout.readline()
        if not line:
            raise WeirError(self._ended())
        answer = json.loads(line)
        if "error" in answer:
            raise WeirError(answer["error"])
        return answer["made"]

    def _ended(self) -> str:
        """Return the reason why the process has ended, in a sentence."""
        code = self._process.wait()
        if -code in (signal.SIGILL, signal.SIGTRAP):
            return "it was built with instructions that this processor does not have"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        self._said.seek(0)
        lines = self._said.read().strip().splitlines() or ["it ended without a word"]
        return lines[-1][:300]
