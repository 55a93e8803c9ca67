"""A peer as a process of its own environment, which is asked in lines of JSON."""

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
"""Seconds that an answer may take."""


def python_of(home: str) -> str:
    """The Python of a peer's environment; weir's own for ""."""
    if not home:
        return sys.executable
    python = HOME / home / "bin" / "python"
    if not python.exists():
        raise WeirError(f"{home} is not installed; `make peers` makes its environment")
    return str(python)


class PeerProcess:
    """A peer that runs, and what it takes."""

    def __init__(
        self,
        home: str,
        script: str,
        wanted: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        python, threads = python_of(home), str(wanted["threads"])
        variables = {**os.environ, "OMP_NUM_THREADS": threads, **(environment or {})}
        # Closed in `close`, like the process.
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
        """Call a method of the peer."""
        return self._send({"do": do, **given})

    @property
    def peak(self) -> int:
        """The most bytes of memory it has had; 0 where the system has no /proc."""
        return status_bytes(self.pid, "VmHWM")

    @property
    def memory(self) -> int:
        """Bytes of memory it has now."""
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
        """Why the process has ended, in a sentence."""
        code = self._process.wait()
        if -code in (signal.SIGILL, signal.SIGTRAP):
            return "it was built with instructions that this processor does not have"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        self._said.seek(0)
        lines = self._said.read().strip().splitlines() or ["it ended without a word"]
        return lines[-1][:300]
