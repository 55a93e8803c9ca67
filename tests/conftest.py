"""What holds for every run of the tests: the environment, hypothesis, and garbage collection.

Tests import nothing from here: `tests/train` has a `conftest` too, and which of the two a name
stands for would depend on what pytest was given first. Nothing here needs PyTorch: the process that
hands out the tests to pytest-xdist's workers runs none, and they wait for it.
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

# Before anything imports PyTorch: two threads of a step that wait for each other spin, and on a
# machine with other work, as that of a second worker, they wait for long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before anything imports numba: kernels outlive a checkout that is thrown away.
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
    """Load what thins tests everywhere, and the fixtures wherever tests are run."""
    config.pluginmanager.import_plugin("thinning")
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("model_fixtures")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of weir's kernels where the environment switches them off."""
    if os.environ.get("WEIR_KERNELS") == "reference" and item.get_closest_marker("own_kernels"):
        pytest.skip("WEIR_KERNELS chooses other kernels")


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
