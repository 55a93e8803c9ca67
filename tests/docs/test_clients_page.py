"""The Python clients of docs/clients.md, against a server with the packaged model.

Each part of the page is run by the interpreter that has its client (`make clients`), and skipped
where there is none.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Server, serving_nano

from weir.models import ASSETS

sys.path.insert(0, str(Path(__file__).parents[1] / "serve" / "clients"))

from environments import missing_python, python_of

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text("utf-8")
SECTION = re.compile(r"^## ([\w ]+)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
PARTS = {
    name: code
    for name, text in SECTION.findall(PAGE)
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
}
NEEDS = {
    "openai": "native",
    "Anthropic": "native",
    "Ollama": "native",
    "LangChain": "langchain",
    "LlamaIndex": "llamaindex",
    "LiteLLM": "litellm",
    "Pydantic AI": "pydantic-ai",
    "OpenAI Agents": "openai-agents",
    "smolagents": "smolagents",
    "Instructor": "instructor",
    "DSPy": "dspy",
    "AutoGen": "autogen",
    "CrewAI": "crewai",
}
"""The parts of the page, and the environments that have their clients."""
CHECKS = {
    "openai": """
assert 0 < cached < answer.usage.prompt_tokens
assert second.usage.input_tokens_details.cached_tokens > 0
assert chunk.usage.weir["seen"] > answer.usage.weir["seen"]
""",
    "Anthropic": "assert cached > 0\n",
    "Pydantic AI": "assert second.usage.cache_read_tokens > 0\n",
    "Instructor": "assert len(person.name) <= 20\n",
}
"""Code that is run after the lines of a part, to check their results."""

needs_nano = pytest.mark.skipif(
    not (ASSETS / "nano" / "model.safetensors").exists(), reason="nano is not packaged here"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving_nano(rows=4, answer=200) as server:
        yield server


@needs_nano
@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_a_client_is_served_as_the_page_shows(name: str, server: Server) -> None:
    if missing := missing_python(NEEDS[name]):
        pytest.skip(missing)
    code = PARTS[name].replace("http://127.0.0.1:8000", server.url) + CHECKS.get(name, "")
    assert server.url in code
    run = [str(python_of(NEEDS[name])), "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_every_client_of_the_page_has_its_part() -> None:
    assert PARTS.keys() == NEEDS.keys()
