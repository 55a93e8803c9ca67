"""`weir --import`: every command can use pools that a user has written."""

from __future__ import annotations

import json
import os

import pytest
from terminal import run

from weir.cli.app import split_imports
from weir.policies import VARIABLE
from weir.pools import POOLS

POOL = """
from dataclasses import dataclass
from weir.pools import Recent, pool

@pool("mine_last")
@dataclass(frozen=True)
class Last(Recent):
    '''The newest, under a name of their own.

    And more.
    '''
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A file that registers a pool, which is taken away after the test."""
    pools = dict(POOLS)
    monkeypatch.setenv(VARIABLE, "")
    path = tmp_path / "mine_last.py"
    path.write_text(POOL)
    yield path
    POOLS.clear()
    POOLS.update(pools)


@pytest.mark.slow
def test_a_pool_that_is_imported_goes_through_commands_and_their_processes(
    capsys, module, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    listed = run(capsys, "--import", "mine_last.py", "policies", "--json")
    (entry,) = [it for it in json.loads(listed.out)["pools"] if it["name"] == "mine_last"]
    assert entry["parameters"] == "n"
    assert entry["about"] == "The newest, under a name of their own."
    assert os.environ[VARIABLE].split(os.pathsep) == [str(module)]
    words = ("--policies", "mine_last(64)", "--tasks", "ppl(tokens=100)", "--out", "found.jsonl")
    ended = run(capsys, "--import", module, "eval", *words, "--json")
    assert json.loads(ended.out)["failed"] == 0, ended
    sized = run(capsys, "--import", module, "size", "nano", "--policy", "mine_last(64)", "--json")
    plain = run(capsys, "size", "nano", "--policy", "recent(64)", "--json")
    assert json.loads(sized.out)["stream_bytes"] == json.loads(plain.out)["stream_bytes"]


def test_a_module_that_is_not_there_is_one_line(capsys, module):
    ended = run(capsys, "--import", "mine_nowhere", "policies")
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert "there is no module 'mine_nowhere' to import." in ended.err
    for words in (("--import",), ("--import", ","), ("--import=",)):
        ended = run(capsys, *words)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err == (
            "weir: --import needs the name of a module or a .py file, as in --import my_pools\n"
        )


def test_several_modules_may_be_named_and_what_follows_is_the_command():
    words = ["--import", "a, b.py", "--import=c", "eval", "--import", "d"]
    assert split_imports(words) == (["eval", "--import", "d"], ["a", "b.py", "c"])
    assert split_imports(["policies"]) == (["policies"], [])
