"""What holds for every run of the tests: the environment, hypothesis, and garbage collection.

Tests import nothing from here: `tests/train` has a `conftest` too, and which of the two a name
stands for would depend on what pytest was given first. Nothing here needs PyTorch: the process that
hands out the tests to pytest-xdist's workers runs none, and they wait for it.
"""

from __future__ import annotations

import gc
import math
import os
import tempfile
import time
import zlib
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
    """Load the fixtures wherever tests are run."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("model_fixtures")


@pytest.hookimpl(tryfirst=True)  # before pytest looks for marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `thinned(n, least=m)` leaves out: all but one in n of a test's cases.

    Which stay depends on their names alone, so that it is the same everywhere, and no parameter of
    several has one value in all of them.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thinned") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test in cases.values():
        test.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        mark = test[0].get_closest_marker("thinned")
        assert mark is not None
        stay = max(mark.kwargs.get("least", 1), math.ceil(len(test) / mark.args[0]))
        for item in test[stay:]:
            item.add_marker("slow")


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
