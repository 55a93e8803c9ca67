"""Put faults into weir on purpose, one at a time, and check that tests notice.

    python tests/mutants/run.py                        # every fault of every list in this folder
    python tests/mutants/run.py 'reservoir-*' policies # by name (globs) or by list
    python tests/mutants/run.py --slow                 # with the tests marked slow, too
    python tests/mutants/run.py --list                 # names and files; runs nothing

A list is a TOML file with a table for each fault:

    [[mutant]]
    name = "reservoir-never-replaces"          # unique among all lists
    file = "src/weir/pools/reservoir.py"
    old = "place >= self.n"                    # occurs exactly once in the file
    new = "place > self.n"
    tests = ["tests/pools/test_reservoir.py"]  # files, folders or ids of tests; one must fail
    slow = true                                # if only slow tests notice it; needs --slow

The tree is copied to a temporary folder; the working tree is never touched. Exits with 1 if a fault
survives, its text no longer occurs exactly once, or the tests fail without any fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LEAVE_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.pyc", "node_modules", "site", "out")
LIMIT = 900
"""Seconds that the tests of one fault may take. If they hang, the fault counts as noticed."""
VERDICTS = {0: "SURVIVED", 1: "killed", 5: "NO TESTS"}
"""What is printed for each exit status of pytest. Any other status means that no test could run."""

_times = count(int(time.time()) + 10)
"""Modification times, each later than the one before, so that Python never uses bytecode that it
cached for an earlier version of a file.
"""


def main() -> int:
    """Run the faults that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="names of faults, globs, or names of lists")
    parser.add_argument("--slow", action="store_true", help="run tests marked slow, too")
    parser.add_argument("--list", action="store_true", help="print names and files")
    parser.add_argument(
        "--no-check", action="store_true", help="do not run the tests unchanged first"
    )
    asked = parser.parse_args()
    chosen = [mutant for mutant in read_mutants() if is_wanted(mutant, asked.names)]
    if not chosen:
        print(f"no fault is called {' or '.join(asked.names)}")
        return 1
    if asked.list:
        for mutant in chosen:
            print(f"{mutant['list']:12} {mutant['name']:44} {mutant['file']}")
        return 0
    with tempfile.TemporaryDirectory(prefix="weir-mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEAVE_OUT)
        if not asked.no_check:
            tests = sorted({test for mutant in chosen for test in mutant["tests"]})
            if run_tests(tree, tests, slow=asked.slow) != 0:
                print("the tests fail without any fault. Fix them first")
                return 1
        bad = [mutant["name"] for mutant in chosen if not try_mutant(tree, mutant, asked.slow)]
    print(f"{len(chosen) - len(bad)} of {len(chosen)} as expected")
    return 1 if bad else 0


def read_mutants() -> list[dict[str, Any]]:
    """Read every list in the folder of this file."""
    found = []
    for path in sorted(HERE.glob("*.toml")):
        for mutant in tomllib.loads(path.read_text("utf-8"))["mutant"]:
            found.append({**mutant, "list": path.stem})
    names = [mutant["name"] for mutant in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise SystemExit(f"names occur twice: {', '.join(sorted(twice))}")
    return found


def is_wanted(mutant: dict[str, Any], names: list[str]) -> bool:
    """Return whether one of the names, or of their globs, means this fault."""
    return not names or any(
        fnmatch(mutant["name"], name) or mutant["list"] == name for name in names
    )


def try_mutant(tree: Path, mutant: dict[str, Any], slow: bool) -> bool:
    """Put one fault in, run its tests and take it out again. Return whether a test failed, as it
    should, or the fault was left out because it is marked slow.
    """
    path = tree / mutant["file"]
    whole = path.read_text("utf-8") if path.is_file() else ""
    there = whole.count(mutant["old"])
    if there != 1:
        print(f"{mutant['name']}: STALE, its text occurs {there} times in {mutant['file']}")
        return False
    if mutant.get("slow") and not slow:
        print(f"{mutant['name']}: left out, because only slow tests notice it. Use --slow")
        return True
    began = time.monotonic()
    write(path, whole.replace(mutant["old"], mutant["new"]))
    try:
        status = run_tests(tree, mutant["tests"], slow=slow)
    finally:
        write(path, whole)
    verdict = VERDICTS.get(status, f"ERROR {status}: the fault may not be valid Python")
    print(f"{mutant['name']}: {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
    return status == 1


def write(path: Path, text: str) -> None:
    """Write a source file so that Python compiles it again."""
    path.write_text(text, "utf-8")
    later = next(_times)
    os.utime(path, (later, later))


def run_tests(tree: Path, tests: list[str], *, slow: bool) -> int:
    """Run some tests of the copied tree until one fails, and return pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    if not slow:
        command += ["-m", "not slow"]
    env = {**os.environ, "PYTHONPATH": str(tree / "src")}
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
