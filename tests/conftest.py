"""Settings for all tests: the environment, hypothesis, and garbage collection.

Tests import nothing from here: `tests/train` has a `conftest` too, and which of the two is imported
would depend on the paths that pytest is given. Nothing here imports PyTorch: with pytest-xdist, the
process that distributes tests runs none itself, and its workers wait for it.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Set before anything imports PyTorch. Otherwise threads spin while they wait for each other, which
# takes long if the machine has other work, such as a second worker of pytest-xdist.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Set before anything imports numba, so that compiled kernels outlive a temporary checkout.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(tempfile.gettempdir()) / "weir-kernels"))

settings.register_profile(
    "weir",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("weir")


def pytest_configure(config: pytest.Config) -> None:
    """Load the plugin that thins tests in all processes, and fixtures in those that run tests."""
    config.pluginmanager.import_plugin("thinning")
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("model_fixtures")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of weir's kernels if the environment switches the kernels off."""
    if os.environ.get("WEIR_KERNELS") == "reference" and item.get_closest_marker("own_kernels"):
        pytest.skip("WEIR_KERNELS chooses other kernels")


LONG = 0.15
"""Seconds. If a full collection takes longer, its objects are hidden from later collections."""
_last = {"began": 0.0, "took": 0.0}


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep conversations of tests out of the user's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


def pytest_collection_finish() -> None:
    """Hide all objects that exist before the first test from the garbage collector.

    These are about a million objects of modules. Every full collection would look through them,
    which takes half a second, and tests that check what is freed with a cache run many collections.
    """
    _hide()
    gc.callbacks.append(_time)


def pytest_runtest_logfinish() -> None:
    """Hide objects again after a test that has imported or compiled a lot."""
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
    """Record how long full collections take."""
    if info["generation"] == 2:
        if phase == "start":
            _last["began"] = time.perf_counter()
        else:
            _last["took"] = max(_last["took"], time.perf_counter() - _last["began"])
