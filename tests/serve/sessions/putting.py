"""Processes that save turns until they are killed, and print the name of each turn that is safe.

Each line of the input starts one, as a copy of this process, so that Python is not started again.
When the copy is dead, this process prints that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import torch  # noqa: E402

torch.set_num_threads(1)  # a copy of a process has none of its threads

from stores import NODES, record, store  # noqa: E402


def put(folder: Path, number: str) -> None:
    its = store(folder)
    print("pid", os.getpid(), flush=True)
    for count in range(100_000):
        name, n = f"r{number}n{count}", count % len(NODES)

        def done(error: Exception | None, name: str = name, n: int = n) -> None:
            assert error is None
            print(name, n, flush=True)

        its.save(NODES[n], record(name, n), done)
        if count % 5 == 4:
            its.save(NODES[n], record("again", n), lambda error: None)


def main(folder: str) -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                put(Path(folder), line.strip())
            finally:
                os._exit(1)
        os.waitpid(pid, 0)
        print("dead", pid, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
