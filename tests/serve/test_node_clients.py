"""Clients for Node, with a server that runs nano: SDKs, and agents such as Codex and Claude Code.

They are skipped where they are not installed. `make clients` installs them, in the versions of
clients/package.json. `WEIR_NODE_CLIENTS` names another folder that has them. The agents are
configured with lines that the tests take from docs/agents.md.

nano's answers mean nothing, and its window of 512 tokens is shorter than any agent's prompt. The
tests check that every request is answered in a form that the client accepts, and that nothing is
read twice.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from relay import Exchange, Relay, relaying
from servers import Server, serving_nano

from weir.models import ASSETS

HERE = Path(__file__).parent / "clients"
sys.path.insert(0, str(HERE))

from environments import NODE as FOLDER  # noqa: E402
from environments import missing_node  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text("utf-8")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ASSETS / "nano" / "model.safetensors").exists(), reason="nano is not packaged here"
    ),
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node here"),
]

SDKS = {
    "openai-chat": "openai",
    "openai-responses": "openai",
    "ai-sdk-responses": "@ai-sdk/openai",
    "ai-sdk-chat": "@ai-sdk/openai",
    "ai-sdk-compatible": "@ai-sdk/openai-compatible",
    "ai-sdk-anthropic": "@ai-sdk/anthropic",
    "anthropic": "@anthropic-ai/sdk",
    "ollama": "ollama",
    "langchain": "@langchain/openai",
}


def needs(package: str) -> None:
    """Skip a test whose package is not installed in the required version."""
    if missing := missing_node(package):
        pytest.skip(missing)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving_nano() as server:
        yield server


@pytest.fixture
def relay(server: Server) -> Iterator[Relay]:
    with relaying(server.port) as relay:
        yield relay


@pytest.mark.parametrize("name", SDKS)
def test_an_sdk_holds_a_conversation(name: str, server: Server) -> None:
    needs(SDKS[name])
    run = [str(shutil.which("node")), str(HERE / "sdks.mjs"), server.url, str(FOLDER), name]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    turns = said["turns"]
    for (before, _), (_, cached) in pairwise(turns[:3]):
        assert cached >= before  # the answer was read when it was made
    for read, cached in turns[1:3]:
        assert read - cached < 10
    if name == "ollama":
        return
    assert said["call"][0] == "where"
    assert list(said["call"][1]) == ["place"]
    assert len(said["call"][1]["place"]) <= 8
    (called, _), (after, cached) = turns[3:]
    assert cached >= called  # only the result of the call is read
    assert after - cached < 40
    assert said.get("warned", []) == []


class Agent:
    """An agent that is started again for each turn.

    Attributes:
        package: the npm package that the agent is in.
        tool: a tool of the agent without effects, which the model is made to call.
        least_tools: how many tools the agent's own requests have at least. Requests of its helper
            agents have fewer.
    """

    package, tool, least_tools = "", "", 1

    def __init__(self, url: str, folder: Path) -> None:
        needs(self.package)
        home, self.folder = folder / "home", folder / "project"
        for each in (home, self.folder):
            each.mkdir()
        subprocess.run(["git", "init", "-q"], cwd=self.folder, check=True)
        self.url = url
        programs = str(FOLDER / "node_modules" / ".bin")
        path = os.pathsep.join([programs, os.environ["PATH"]])
        self.environment = {"PATH": path, "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8"}
        self.prepare(home)

    def prepare(self, home: Path) -> None:
        """Write the agent's configuration."""

    def lines(self, section: str, language: str) -> str:
        """Return the lines to paste from a section of the page, with this server's address."""
        text = re.split(rf"^## {section}$", PAGE, maxsplit=1, flags=re.MULTILINE)[1]
        found = re.search(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        assert found is not None
        return found[1].replace("http://127.0.0.1:8000", self.url)

    def command(self, words: str, *, resumed: bool) -> list[str]:
        raise NotImplementedError

    def say(self, words: str, *, resumed: bool = False) -> str:
        """Run one turn, and return what the agent prints."""
        done = subprocess.run(
            self.command(words, resumed=resumed),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.stdout + done.stderr


class Codex(Agent):
    package, tool = "@openai/codex", "get_goal"

    def prepare(self, home: Path) -> None:
        (home / ".codex").mkdir()
        (home / ".codex" / "config.toml").write_text(self.lines("Codex", "toml"), "utf-8")
        self.environment["WEIR_KEY"] = "none"

    def command(self, words: str, *, resumed: bool) -> list[str]:
        return ["codex", "exec", *(["resume", "--last"] if resumed else []), words]


class ClaudeCode(Agent):
    package, tool = "@anthropic-ai/claude-code", "ReportFindings"

    def prepare(self, home: Path) -> None:
        for line in self.lines("Claude Code", "bash").splitlines():
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").partition("=")
                self.environment[name] = value
        self.environment["DISABLE_AUTOUPDATER"] = "1"

    def command(self, words: str, *, resumed: bool) -> list[str]:
        return ["claude", "-p", *(["--continue"] if resumed else []), words]


class OpenCode(Agent):
    package, tool = "opencode-ai", "todowrite"

    def prepare(self, home: Path) -> None:
        (self.folder / "opencode.json").write_text(self.lines("opencode", "json"), "utf-8")

    def command(self, words: str, *, resumed: bool) -> list[str]:
        return ["opencode", "run", *(["--continue"] if resumed else []), words]


class QwenCode(Agent):
    package, tool, least_tools = "@qwen-code/qwen-code", "todo_write", 6

    def prepare(self, home: Path) -> None:
        (home / ".qwen").mkdir()
        settings = self.lines("Qwen Code", "json")
        (home / ".qwen" / "settings.json").write_text(settings, "utf-8")
        self.environment |= {"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": "none"}

    def command(self, words: str, *, resumed: bool) -> list[str]:
        return ["qwen", *(["--continue"] if resumed else []), "-p", words]


class Pi(Agent):
    package, tool = "@mariozechner/pi-coding-agent", "read"

    def prepare(self, home: Path) -> None:
        folder = home / ".pi" / "agent"
        folder.mkdir(parents=True)
        (folder / "models.json").write_text(self.lines("Pi", "json"), "utf-8")
        (folder / "settings.json").write_text('{"compaction": {"enabled": false}}', "utf-8")

    def command(self, words: str, *, resumed: bool) -> list[str]:
        last = ["--continue"] if resumed else []
        return ["pi", "--provider", "weir", "--model", "nano", *last, "-p", words]


class Continue(Agent):
    package, tool = "@continuedev/cli", "Read"

    def prepare(self, home: Path) -> None:
        self.file = home / "config.yaml"
        self.file.write_text(self.lines("Continue", "yaml"), "utf-8")

    def command(self, words: str, *, resumed: bool) -> list[str]:
        return ["cn", "--config", str(self.file), *(["--resume"] if resumed else []), "-p", words]


def main_requests(exchanges: list[Exchange], least_tools: int) -> list[Exchange]:
    """Return the requests with tools. Agents also send others, such as requests for a title."""
    assert exchanges, "the agent has sent no request"
    for one in exchanges:
        # Claude Code also requests a page that only its maker's server has.
        assert one.status == 200 or not one.path.startswith("/v1/"), (one.path, one.answer)
    return [one for one in exchanges if len(one.body.get("tools") or []) >= least_tools]


AGENTS = [Codex, ClaudeCode, OpenCode, QwenCode, Pi, Continue]


@pytest.mark.parametrize("kind", AGENTS, ids=lambda kind: kind.__name__)
def test_an_agent_works_and_nothing_is_read_twice(
    kind: type[Agent], relay: Relay, tmp_path: Path
) -> None:
    agent = kind(relay.url, tmp_path)
    agent.say("Prince Andrew")
    first = main_requests(relay.take(), kind.least_tools)
    seen, cached = first[0].tokens
    assert seen > 512  # the first turn is longer than the model's window
    assert cached == 0

    # Resume the session, with a call and its result.
    relay.forced = agent.tool
    agent.say("And then?", resumed=True)
    second = main_requests(relay.take(), kind.least_tools)
    assert relay.forced is None, "no request had the tool"
    assert second[0].has_call
    assert len(second) > 1, "the agent sent no result"
    for before, now in zip([*first, *second], [*first[1:], *second], strict=False):
        # Only what the client adds is read, and never a thousand tokens of the history.
        length, cached = now.tokens
        assert length - cached < 600, (before.tokens, now.tokens, now.warning)

    # Another conversation of the same agent shares the system message and the tools.
    agent.say("Natasha")
    third = main_requests(relay.take(), kind.least_tools)
    length, cached = third[0].tokens
    assert length - cached < 600, third[0].tokens
