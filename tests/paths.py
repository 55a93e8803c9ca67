"""Files of weir that a token and a request pass through, in the order in which they are entered.

    PYTHONPATH=src python tests/paths.py

prints both. `test_paths.py` compares them with docs/house.md.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx
import torch

import weir

ROOT = Path(weir.__file__).parent
MACHINE = ("kernels/cpu/", "kernels/gpu/", "native/kernels/")
"""Kernels, which are chosen by the machine and by what is installed."""
HERE = Path(__file__).parent


class Trace:
    """Notes the files whose functions are called while it is on, in this thread and in threads that
    start inside `installed`.

    Attributes:
        on: whether calls are noted.
        files: for each file, the first of its functions that was called.
    """

    def __init__(self) -> None:
        self.on = False
        self.files: dict[str, str] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch the calls of this thread and of new ones."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, value: object) -> None:
        if not self.on or event != "call" or frame.f_code.co_name == "<module>":
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(MACHINE):
                self.files.setdefault(name, frame.f_code.co_qualname)

    def of(self, run: Callable[[], object]) -> list[str]:
        """Return the files that a call passes through."""
        self.on = True
        run()
        self.on = False
        return list(self.files)


def token_path() -> list[str]:
    """Return the files of `Stream.feed` with one token that fills the tail, so that it folds."""
    model, _ = weir.load("nano")
    stream = weir.Stream(model, "sink(4) | recent(28)", chunk=8)
    stream.feed(torch.arange(5, 5 + 55))  # compiles the kernels; leaves room for one token
    assert stream.cache.rows.waiting == [7]
    trace = Trace()
    with trace.installed():
        found = trace.of(lambda: stream.feed([9]))
    assert stream.cache.rows.waiting == [0]
    return found


def native_path() -> list[str]:
    """Return the files of `Stream.feed` with one token that a native step takes, without a fold."""
    model, _ = weir.load("nano")
    weir.compile_steps(model)
    stream = weir.Stream(model, "sink(4) | recent(28)", chunk=64)
    stream.feed(torch.arange(5, 5 + 40))
    while stream.cache.steps["run"] != "native":  # until the kernel is compiled
        time.sleep(0.1)
    for token in range(3):  # the first step is tried and proved
        stream.feed([token])
    trace = Trace()
    with trace.installed():
        return trace.of(lambda: stream.feed([9]))


def request_path() -> list[str]:
    """Return the files of a streamed chat request until its first text has been sent."""
    sys.path[:0] = [str(HERE), str(HERE / "serve")]
    from servers import make_client, serving

    trace = Trace()
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": "ab"}],
        "stream": True,
        "max_tokens": 4,
    }

    def ask(url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as answer:
            for line in answer.iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else None
                if event is not None and event["choices"][0]["delta"].get("content"):
                    trace.on = False

    with trace.installed(), serving(make_client()) as server:
        ask(server.url.removesuffix("/v1"))  # so that work for the very first request is done
        return trace.of(lambda: ask(server.url.removesuffix("/v1")))


if __name__ == "__main__":
    for name, find in (
        ("a token that folds", token_path),
        ("a token of a native step", native_path),
        ("a request", request_path),
    ):
        path = find()
        print(f"{name}: {len(path)} files", *path, sep="\n  ")
