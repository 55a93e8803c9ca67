"""Clients for Python, with a server that runs nano.

They are skipped where they are not installed. `make clients` installs them, in the versions of
clients/package.json. `WEIR_PYTHON_CLIENTS` names another folder with their environments.

Each client holds a conversation of four turns. The second is longer than nano's window, and the
third comes after the client has saved its history and loaded it again. Clients that can force a
call do so, and send its result. The tests check that every request is answered in a form that the
client accepts, that no response has a warning, and that each turn reads only what is new.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from relay import Exchange, Relay, relaying
from servers import Server, serving_nano

from weir.models import ASSETS

HERE = Path(__file__).parent / "clients"
PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text("utf-8")
sys.path.insert(0, str(HERE))

from environments import PYTHON, VERSIONS, missing_python, python_of  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ASSETS / "nano" / "model.safetensors").exists(), reason="nano is not packaged here"
    ),
]

SDKS = {
    "openai-chat": "native",
    "openai-responses": "native",
    "openai-by-id": "native",
    "openai-conversation": "native",
    "anthropic": "native",
    "ollama": "native",
    "langchain-chat": "langchain",
    "langchain-responses": "langchain",
    "langchain-anthropic": "langchain",
    "langchain-ollama": "langchain",
    "langchain-agent": "langchain",
    "llamaindex-openai": "llamaindex",
    "llamaindex-anthropic": "llamaindex",
    "llamaindex-ollama": "llamaindex",
    "litellm-openai": "litellm",
    "litellm-anthropic": "litellm",
    "litellm-ollama": "litellm",
    "litellm-responses": "litellm",
    "pydantic-ai-chat": "pydantic-ai",
    "pydantic-ai-responses": "pydantic-ai",
    "pydantic-ai-anthropic": "pydantic-ai",
    "pydantic-ai-ollama": "pydantic-ai",
    "openai-agents-chat": "openai-agents",
    "openai-agents-responses": "openai-agents",
    "smolagents": "smolagents",
    "instructor": "instructor",
    "dspy": "dspy",
    "autogen": "autogen",
    "crewai": "crewai",
}
"""The clients of clients/sdks.py, and their environments."""
WARNED = {"llamaindex-ollama": "no effect here: options.num_ctx"}
"""Clients whose answers all have this warning."""
WINDOW = 512
ANSWERED = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")


def needs(environment: str) -> None:
    """Skip a test whose client is not installed in the required version."""
    if missing := missing_python(environment):
        pytest.skip(missing)


class ReadTokens(logging.Handler):
    """Collects from the log how many tokens each request read, which a stream may not say."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, dict[str, Any]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        if "method" in fields:
            self.lines[fields["id"]] = fields

    def of(self, exchange: Exchange) -> tuple[int, int]:
        """Return how many tokens were read, and how many were cached. Wait for the log line."""
        for _ in range(500):
            if exchange.id in self.lines:
                break
            time.sleep(0.01)
        line = self.lines[exchange.id]
        return line["read"], line["cached"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving_nano(512, aliases=["claude-sonnet-4-5-20250929", "gpt-4o"]) as server:
        yield server


@pytest.fixture
def relay(server: Server) -> Iterator[Relay]:
    with relaying(server.port) as relay:
        yield relay


@pytest.fixture
def log() -> Iterator[ReadTokens]:
    logger, found = logging.getLogger("weir.serve"), ReadTokens()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(found)
    yield found
    logger.removeHandler(found)
    logger.setLevel(level)


def histories(exchanges: list[Exchange]) -> list[list[Exchange]]:
    """Return the requests for answers, as a separate list for each history of the client."""
    found: list[list[Exchange]] = []
    for one in exchanges:
        if one.path.startswith("/mark/"):
            found.append([])
        elif one.path.startswith(ANSWERED) and not one.path.endswith("count_tokens"):
            found[-1].append(one)
    return found


def check_reading(history: list[Exchange], log: ReadTokens, new: int) -> None:
    """Check that each turn continues the one before, and reads fewer than `new` tokens.

    A turn with a long message can read up to 1,000.
    """
    for before, now in pairwise(history):
        read, cached = log.of(now)
        assert cached >= sum(log.of(before)), (log.of(before), read, cached)
        assert read < (1000 if "officer" in last_message(now) else new), (read, cached)


def last_message(exchange: Exchange) -> str:
    """Return the newest message of a request, as text."""
    body = exchange.body
    found = body.get("messages") or body.get("input")
    return json.dumps(found if isinstance(found, str) else found[-1])


@pytest.mark.parametrize("name", SDKS)
def test_a_client_holds_a_conversation(name: str, relay: Relay, log: ReadTokens) -> None:
    needs(SDKS[name])
    run = [str(python_of(SDKS[name])), str(HERE / "sdks.py"), relay.url, name]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    exchanges = relay.take_all()
    for one in exchanges:
        assert one.status in (200, 204), (one.path, one.body, one.answer)
        if one.path.startswith(ANSWERED):
            # smolagents' system message is longer than what this server pins.
            unpinned = name == "smolagents" and one.warning.startswith("only the first")
            assert unpinned or one.warning == WARNED.get(name, ""), (one.path, one.warning)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    talk, calls = histories(exchanges)
    assert len(talk) == 4
    assert said["answered"] == 4
    assert sum(log.of(talk[-1])) > WINDOW
    check_reading(talk, log, new=10)
    if said["call"] is None:
        assert calls == []
        return
    assert said["call"][0] == "where"
    assert list(said["call"][1]) == ["place"]
    assert calls
    if not said["rewrites"]:
        check_reading(calls, log, new=40)


def test_llm_continues_its_conversation(relay: Relay, log: ReadTokens, tmp_path: Path) -> None:
    """The command line of llm, with the configuration in docs/clients.md."""
    needs("llm")
    text = PAGE.split("\n## llm\n")[1].split("```yaml\n")[1].split("```")[0]
    models = text.replace("http://127.0.0.1:8000", relay.url)
    (tmp_path / "extra-openai-models.yaml").write_text(models, "utf-8")
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    relay.exchanges.append(Exchange("/mark/fresh", {}, 204, "", ""))
    for given in (["-m", "weir", "Prince Andrew went to the"], ["-c", "In winter he was a"]):
        for more in ([], ["--no-stream"]):
            if more and given[0] == "-m":
                continue
            run = [str(python_of("llm")), "-m", "llm", *more, *given]
            subprocess.run(run, env=environment, check=True, timeout=300, capture_output=True)
    (talk,) = histories(relay.take_all())
    assert [one.status for one in talk] == [200] * 3
    check_reading(talk, log, new=10)


def test_every_client_has_its_version() -> None:
    assert set(SDKS.values()) <= set(VERSIONS["python"])
    text = (HERE / "sdks.py").read_text("utf-8").split("CLIENTS: ")[1]
    assert all(f'"{name}": ' in text for name in SDKS)
    assert PYTHON
