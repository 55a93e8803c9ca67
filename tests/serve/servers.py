"""Servers for tests: a small random model with a tokenizer of bytes, on a real socket."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from openai import OpenAI
from reference.naive import make_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import weir
from weir.serve import Engine, EngineClient, Limits, ResponseStore, SessionStore
from weir.serve.api import Keys, bind, make_app
from weir.serve.api.protocol import BoundedConnection
from weir.serve.api.schemas.base import Only, Strict
from weir.serve.sessions.disk_turns import DiskTurns
from weir.serve.sessions.store_format import StoreFormat
from weir.serve.worker import Worker

POLICY = "sink(2) | recent(6) | heavy(4)"
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A tokenizer in which every byte is a token, with a few special tokens."""
    bytes_of = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: n for n, c in enumerate(bytes_of)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.chat_template = template
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Any:
    """A random Llama that says ASCII letters only, so that any answer is text, and no end token."""
    model = make_llama(layers=1, vocab_size=len(tokenizer), tie_word_embeddings=False)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    letters = tokenizer("abcdefghijklmnopqrstuvwxyz .", add_special_tokens=False)["input_ids"]
    others = torch.ones(len(tokenizer), dtype=torch.bool)
    others[letters] = False

    def only_letters(module: Any, given: Any, out: Any) -> Any:
        return out.masked_fill(others, -50.0)

    model.lm_head.register_forward_hook(only_letters)
    return model


@dataclass
class Server:
    """A server and its port."""

    engine_client: EngineClient
    server: uvicorn.Server
    port: int

    @property
    def engine(self) -> Engine:
        return self.engine_client.engine

    @property
    def store(self) -> SessionStore:
        return self.engine_client.store

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none", **given: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **given)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=600)

    def settled(self) -> None:
        """Wait until no request is being answered."""
        for _ in range(1000):
            load = self.engine.load()
            under_way = self.engine_client.open_requests("127.0.0.1")
            if not load.busy and not load.waiting and not under_way:
                return
            time.sleep(0.01)
        raise AssertionError(f"turns do not come to an end: {self.engine.load()}")


def logged(caplog: Any, field: str) -> list[dict[str, Any]]:
    """Wait for log lines with `field`, and return their fields. A line follows its response."""
    for _ in range(200):
        found = [r.fields for r in caplog.records if field in getattr(r, "fields", {})]
        if found:
            break
        time.sleep(0.01)
    return found


def make_client(
    rows: int = 3,
    limits: Limits | None = None,
    template: str | None = CHATML,
    most: int = 256,
    data: Path | None = None,
    policy: str = POLICY,
    limit: int | None = None,
    shared: bool = False,
    worker: Worker | None = None,
    aliases: Iterable[str] = (),
    notes_changes: bool = False,
    archive: int | None = None,
    recall: int = 0,
    **disk: Any,
) -> EngineClient:
    """A client of an engine of a small model, whose turns are in memory or in a folder."""
    limits = limits or Limits()
    tokenizer = make_tokenizer(template)
    model = make_model(tokenizer)
    store: SessionStore = SessionStore(keep=most)
    if data is not None:
        store = SessionStore(DiskTurns(data, StoreFormat.of(model, policy, 4), limit), **disk)
    if archive is not None:
        store.place.open_archive(archive)
    engine = Engine(model, policy, rows, store, chunk=4, queue=limits.queue, shared=shared)
    book = ResponseStore(None if data is None else data / "book.db", limits.texts)
    return EngineClient(
        engine,
        tokenizer,
        "small",
        limits,
        book,
        worker=worker,
        aliases=aliases,
        notes_changes=notes_changes,
        recall=recall,
    )


def run_app(
    app: Any, connection: type[BoundedConnection], bound: socket.socket
) -> tuple[uvicorn.Server, threading.Thread]:
    """Start to serve an app at a socket, in a thread."""
    config = uvicorn.Config(
        app, http=connection, log_config=None, lifespan="on", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    return server, thread


@contextlib.contextmanager
def serving_nano(
    pinned: int = 64, rows: int = 2, answer: int = 64, aliases: Sequence[str] = ()
) -> Iterator[Server]:
    """Serve nano for tests with real clients, with `pinned` slots for the beginning of a stream."""
    model, tokenizer = weir.load("nano")
    limits, store = Limits(answer=answer), SessionStore(keep=64)
    policy = f"pinned(streaming_llm(budget=256), n={pinned}, header=16)"
    engine = Engine(model, policy, rows, store, queue=limits.queue)
    book = ResponseStore(None, limits.texts)
    client = EngineClient(engine, tokenizer, "nano", limits, book, aliases=aliases)
    with serving(client) as server:
        yield server


@contextlib.contextmanager
def serving(
    engine_client: EngineClient, keys: Keys | None = None, **access: list[str]
) -> Iterator[Server]:
    """Serve a client of an engine by uvicorn, in a separate thread."""
    bound = bind("127.0.0.1", 0, keys or Keys())
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # unread data soon fills it
    server, thread = run_app(make_app(engine_client, keys, **access), BoundedConnection, bound)
    try:
        yield Server(engine_client, server, bound.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        bound.close()
        assert not thread.is_alive()
        engine_client.responses.close()
        engine_client.store.close()


def raw(
    port: int, path: str, body: bytes, *headers: str, length: int | None = None
) -> socket.socket:
    """Send a request by hand, and return the connection with its answer still unread."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(600)
    connection.connect(("127.0.0.1", port))
    head = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
    return connection


def fields_without_effect(kind: type[Strict]) -> tuple[dict[str, Any], list[str]]:
    """(unsupported fields, each with a value that is accepted; names of ignored fields)."""
    known = {name: field for name, field in kind.model_fields.items() if field.annotation is Any}
    unserved = {
        name: only.allowed[-1]
        for name, field in known.items()
        for only in field.metadata
        if isinstance(only, Only)
    }
    return unserved, [name for name in known if name not in unserved]
