"""Servers that tests kill: each line of the input starts one, as a copy of this process.

So a server starts without starting Python, and all servers have the same random model. Each prints
its port and process id. When it is dead, this process prints that.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch  # noqa: E402

torch.set_num_threads(1)  # a copy of a process has none of its threads

from servers import POLICY, make_model, make_tokenizer, serving  # noqa: E402

import weir  # noqa: E402
from weir.serve import Engine, EngineClient, Limits, ResponseStore  # noqa: E402
from weir.serve.cluster import SharedTurns, open_storage  # noqa: E402
from weir.serve.sessions.disk_turns import DiskTurns  # noqa: E402
from weir.serve.sessions.store import SessionStore  # noqa: E402
from weir.serve.sessions.store_format import StoreFormat  # noqa: E402

TOKENIZER = make_tokenizer()
MODEL = make_model(TOKENIZER)
weir.Stream(MODEL, POLICY, chunk=4).feed(
    list(range(32))
)  # loads what the first call needs, before any copy


def serve(folder: Path, *, shared: bool) -> None:
    if shared:
        store = SessionStore(
            SharedTurns(open_storage(str(folder)), StoreFormat.of(MODEL, POLICY, 4))
        )
        engine = Engine(MODEL, POLICY, 3, store, chunk=4)
        client = EngineClient(engine, TOKENIZER, "small", Limits(), is_replica=True)
    else:
        store = SessionStore(DiskTurns(folder, StoreFormat.of(MODEL, POLICY, 4)))
        engine = Engine(MODEL, POLICY, 3, store, chunk=4)
        client = EngineClient(
            engine, TOKENIZER, "small", Limits(), ResponseStore(folder / "book.db")
        )
    with serving(client) as server:
        print("up", server.port, os.getpid(), flush=True)
        threading.Event().wait()


def main(folder: str, kind: str) -> None:
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                serve(Path(folder), shared=kind == "cluster")
            finally:
                os._exit(1)
        os.waitpid(pid, 0)
        print("dead", pid, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
