"""The clients of docs/serving.md, against a server with the packaged model.

Of its clients the tests bring only OpenAI's. Where another one is installed beside pytest and weir,
its part of the page is run as well.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Server, serving

import weir
from weir.loading.loader import ASSETS
from weir.serve import Engine, EngineClient, Limits, ResponseStore, SessionStore

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
SECTION = re.compile(r"^### (\w+)\n(.*?)(?=^##|\Z)", re.DOTALL | re.MULTILINE)
PARTS = {
    name: code
    for name, text in SECTION.findall(PAGE)
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
}
NEEDS = {
    "openai": "openai",
    "LangChain": "langchain_openai",
    "LlamaIndex": "llama_index.llms.openai_like",
    "LiteLLM": "litellm",
}

needs_nano = pytest.mark.skipif(
    not (ASSETS / "nano" / "model.safetensors").exists(), reason="nano is not packaged here"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    model, tokenizer = weir.load("nano")
    limits, store = Limits(), SessionStore(keep=64)
    policy = "pinned(streaming_llm(budget=256), n=64, header=16)"
    engine = Engine(model, policy, 4, store, queue=limits.queue)
    client = EngineClient(engine, tokenizer, "nano", limits, ResponseStore(None, limits.texts))
    with serving(client) as server:
        yield server


@needs_nano
@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_a_client_is_served_as_the_page_shows(name: str, server: Server, monkeypatch) -> None:
    if importlib.util.find_spec(NEEDS[name].split(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # the page sets it for good
    code = PARTS[name].replace("http://127.0.0.1:8000", server.url)
    assert server.url in code
    space: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "serving.md", "exec", dont_inherit=True), space)
    if name == "openai":
        assert 0 < space["cached"] < space["answer"].usage.prompt_tokens
        assert space["second"].usage.input_tokens_details.cached_tokens > 0
        assert space["chunk"].usage.weir["seen"] > space["answer"].usage.weir["seen"]


def test_every_client_of_the_page_has_its_part() -> None:
    assert PARTS.keys() == NEEDS.keys()
