"""A plugin of pytest that decides which cases `make test` leaves out.

A test marked `thinned(n)` has many cases that repeat one claim, for other models, policies and
sizes. `make test` runs one in n of them, and `make test-all` runs them all. The draw depends on a
salt, the hash of the commit, so each commit runs different cases. `WEIR_TEST_SALT` overrides it.

Two kinds of tests are never thinned, whatever mark a file has:

- those that `tests/claims.toml` lists, each with the sentence of the page that it proves;
- those that look like a proof: they cite a paper ("Theorem 2", "the paper") or compare with a naive
  reference. If such a test only repeats one claim, its mark says which:
  `thinned(12, repeats="the same loop in every family")`.

A single case is kept if its parameter is marked: `pytest.param(1, marks=pytest.mark.claim)`.

Nothing here imports PyTorch, because the process that distributes tests to pytest-xdist's workers
loads this file, too.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import os
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CLAIMS = TESTS / "claims.toml"
VARIABLE = "WEIR_TEST_SALT"
SALT = pytest.StashKey[str]()
PROVES = re.compile(
    r"\b(Table|Figure|Theorem|Lemma|Algorithm|Proposition|Definition|Equation|[Ss]ection) \d"
    r"|\bpapers?\b|arXiv|\bnaive\b|\btwins?\b|from reference\b"
)
"""Words in the body of a test that proves something."""
NAMED_AS_PROOF = re.compile(r"naive|paper|theorem|lemma|algorithm|unbiased|table_\d|figure_\d")
"""Words in the name of such a test."""


def find_salt(root: Path = ROOT) -> str:
    """Return the salt: `WEIR_TEST_SALT` if it is set, else the commit's hash, else weir's version.

    A source distribution has no commit. If it is unpacked inside another repository, that
    repository's commit must not be used.
    """
    if given := os.environ.get(VARIABLE):
        return given
    command = ["git", "rev-parse", "--show-toplevel", "HEAD"]
    try:
        told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        top, commit = told.stdout.split("\n")[:2]
        if Path(top).samefile(root):
            return commit[:12]
    except (OSError, subprocess.CalledProcessError, ValueError):
        pass
    face = root / "src" / "weir" / "__init__.py"
    found = re.search(r'^__version__ = "(.*)"', face.read_text("utf-8"), re.M)
    return f"version-{found.group(1) if found else 'unknown'}"


@functools.cache
def listed_claims(path: Path = CLAIMS) -> frozenset[str]:
    """Return the tests that the list names, as `tests/file.py::test`.

    A claim with an entry `repeated` is left out, because its test may be thinned.
    """
    if not path.is_file():
        return frozenset()
    claims = tomllib.loads(path.read_text("utf-8"))["claim"]
    whole = (claim for claim in claims if "repeated" not in claim)
    return frozenset(test for claim in whole for test in claim["tests"])


@functools.cache
def looks_like_a_proof(function: Callable[..., Any]) -> bool:
    """Whether a test cites a paper or compares with a naive reference."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        source = ""
    # Decorators describe cases and not the claim.
    body = source[source.find("def ") :]
    return bool(NAMED_AS_PROOF.search(function.__name__) or PROVES.search(body))


def choose(names: list[str], n: int, least: int, salt: str) -> set[str]:
    """Return the names to keep: one in n, but at least `least`."""
    stay = max(least, math.ceil(len(names) / n))

    def drawn(name: str) -> bytes:
        return hashlib.blake2b(f"{salt}\0{name}".encode()).digest()

    return set(sorted(names, key=drawn)[:stay])


def _thinning(item: pytest.Item) -> pytest.Mark | None:
    """Return the mark that lets an item be left out, or None if it must always run."""
    mark = item.get_closest_marker("thinned")
    if mark is None or item.get_closest_marker("slow") or item.get_closest_marker("claim"):
        return None
    if item.nodeid.partition("[")[0] in listed_claims():
        return None
    function = getattr(item, "function", None)
    if function is not None and not mark.kwargs.get("repeats") and looks_like_a_proof(function):
        return None
    return mark


def pytest_configure(config: pytest.Config) -> None:
    """Find the salt. Workers of pytest-xdist get it from the process that started them."""
    given = getattr(config, "workerinput", {}).get(VARIABLE)
    config.stash[SALT] = given or find_salt()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the salt to a worker of pytest-xdist."""
    node.workerinput[VARIABLE] = node.config.stash[SALT]


def _say_salt(config: pytest.Config) -> str:
    salt = config.stash[SALT]
    return f"thinned tests are drawn by the salt {salt}; {VARIABLE}={salt} draws the same again"


def pytest_report_header(config: pytest.Config) -> str:
    """Print the salt above every run."""
    return _say_salt(config)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Print the salt again below a run that failed, because `pytest -q` has no header."""
    if exitstatus == pytest.ExitCode.TESTS_FAILED:
        terminalreporter.write_line(_say_salt(config))


@pytest.hookimpl(tryfirst=True)  # before pytest looks for marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what `thinned(n, least=m)` leaves out: all but one in n of a test's cases."""
    cases: dict[str, list[tuple[pytest.Item, pytest.Mark]]] = {}
    for item in items:
        if (mark := _thinning(item)) is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append((item, mark))
    for test in cases.values():
        mark = test[0][1]
        names = [item.nodeid for item, _ in test]
        least = mark.kwargs.get("least", 1)
        stay = choose(names, mark.args[0], least, config.stash[SALT])
        for item, _ in test:
            if item.nodeid not in stay:
                item.add_marker("slow")
