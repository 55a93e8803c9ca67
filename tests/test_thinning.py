"""Thinning draws cases by the commit, is the same everywhere, and never leaves out a proof."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import thinning

TESTS = Path(__file__).parent
FILE = '''
import pytest
pytestmark = pytest.mark.thinned(5)
ten = pytest.mark.parametrize("n", range(10))

@ten
def test_some(n):
    pass

@ten
@pytest.mark.thinned(1)
def test_all(n):
    pass

@ten
def test_what_the_paper_says(n):
    pass

@ten
def test_a_loop(n):
    """It is that of Theorem 3.1."""

@ten
@pytest.mark.thinned(2, repeats="one loop for every size")
def test_a_naive_loop(n):
    pass

@pytest.mark.parametrize("n", [*range(9), pytest.param(9, marks=pytest.mark.claim)])
def test_with_a_claim(n):
    pass

@ten
@pytest.mark.slow
def test_slow(n):
    pass
'''


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    (tmp_path / "test_sample.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  thinned\n  claim\n")
    return tmp_path


def run(folder: Path, *words: str, salt: str | None = "a") -> str:
    """Return what pytest prints for the tests of a folder that are not slow."""
    command = [sys.executable, "-m", "pytest", "-p", "thinning", "-p", "no:cacheprovider"]
    kept = {name: value for name, value in os.environ.items() if name != thinning.VARIABLE}
    env = kept | {"PYTHONPATH": str(TESTS)} | ({thinning.VARIABLE: salt} if salt else {})
    done = subprocess.run(
        [*command, "-m", "not slow", "-v", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def cases(told: str) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for name, case in re.findall(r"::(test_\w+)\[(\d+)\]", told):
        found.setdefault(name, set()).add(int(case))
    return found


def test_a_file_is_thinned_but_for_what_proves_something(sample: Path) -> None:
    found = cases(run(sample))
    assert {name: len(which) for name, which in found.items()} == {
        "test_some": 2,
        "test_all": 10,
        "test_what_the_paper_says": 10,
        "test_a_loop": 10,
        "test_a_naive_loop": 5,
        "test_with_a_claim": 3,
    }
    assert 9 in found["test_with_a_claim"]


def test_another_salt_draws_others_and_the_same_draws_the_same(sample: Path) -> None:
    drawn = [cases(run(sample, salt=salt))["test_some"] for salt in ("a", "b", "c", "a")]
    assert drawn[0] == drawn[3]
    assert drawn[0] != drawn[1] or drawn[0] != drawn[2]


def test_after_some_commits_every_case_was_run() -> None:
    names = [f"test_some[{n}]" for n in range(30)]
    ran = set().union(*(thinning.choose(names, 3, 1, f"{commit:x}") for commit in range(40)))
    assert ran == set(names)
    assert len(thinning.choose(names, 7, 1, "a")) == 5  # rounded up
    assert len(thinning.choose(names[:3], 7, 2, "a")) == 2


def test_the_salt_is_printed_above_and_below_a_run_that_fails(sample: Path) -> None:
    assert "drawn by the salt a; WEIR_TEST_SALT=a draws the same again" in run(sample)
    (sample / "test_red.py").write_text("def test_red():\n    assert False\n")
    with pytest.raises(AssertionError, match="WEIR_TEST_SALT=a"):
        run(sample, "-q", "test_red.py")


def test_the_workers_of_xdist_draw_what_one_process_draws(sample: Path) -> None:
    pytest.importorskip("xdist")
    # Without a salt in the environment, it is weir's commit or version, found only once.
    alone, spread = (run(sample, *words, salt=None) for words in ((), ("-n", "2")))
    assert cases(alone) == cases(spread)
    assert "PASSED" in spread


def repository(folder: Path) -> str:
    """Make a repository with one commit, and return its hash."""
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], [*name, "commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a source distribution of version 1.2.3, unpacked in a folder `outside`."""
    monkeypatch.delenv(thinning.VARIABLE, raising=False)
    for variable in ("GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.delenv(variable, raising=False)
    face = tmp_path / "outside" / "weir-1.2.3" / "src" / "weir"
    face.mkdir(parents=True)
    (face / "__init__.py").write_text('"""All."""\n__version__ = "1.2.3"\n')
    return face.parents[1]


def test_the_salt_is_the_commit_and_without_one_the_version(unpacked: Path, monkeypatch) -> None:
    assert thinning.find_salt(unpacked) == "version-1.2.3"
    repository(unpacked.parent)  # the repository around it is another project's
    assert thinning.find_salt(unpacked) == "version-1.2.3"
    commit = repository(unpacked)
    assert thinning.find_salt(unpacked) == commit[:12]
    monkeypatch.setenv("PATH", "")  # no git is found
    assert thinning.find_salt(unpacked) == "version-1.2.3"
    monkeypatch.setenv(thinning.VARIABLE, "mine")
    assert thinning.find_salt(unpacked) == "mine"


def test_a_listed_test_is_never_thinned() -> None:
    listed = thinning.listed_claims()
    assert "tests/cache/test_cache.py::test_it_is_streaming_llm" in listed
