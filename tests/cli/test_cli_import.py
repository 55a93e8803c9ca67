"""`weir --import`: every command can use pools that a user has written."""

from __future__ import annotations

import html
import json
import os
import sys

import pytest
from terminal import run

from weir.cli.app import split_imports
from weir.policies import VARIABLE
from weir.pools import POOLS

POLICY = "recent(8) | mine_broken(8)"
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


BROKEN = """
from dataclasses import dataclass
from weir.pools import Ranked, pool

@pool("mine_broken")
@dataclass(frozen=True)
class Broken(Ranked):
    n: int

    def score(self, slots, fold):
        return slots.mass * 2
"""
TOLD = (
    "the pool mine_broken failed in score() (mine_broken.py, line 11): TypeError: unsupported "
    "operand type(s) for *: 'NoneType' and 'int'. The code reads slots.mass, which is None unless "
    "the pool declares it. Set needs_mass = True in the class."
)


@pytest.fixture
def broken(module, tmp_path, monkeypatch):
    """A file that registers a pool whose `score` fails."""
    monkeypatch.delitem(sys.modules, "mine_broken", raising=False)  # of another test
    path = tmp_path / "mine_broken.py"
    path.write_text(BROKEN)
    return path


COMMANDS = {
    "attention-error": ["attention-error", "--policy", POLICY, "--tokens", "200"],
    "stream": ["stream", "--policy", POLICY, "--json"],
    "inspect": ["inspect", "--only", "kept", "--policy", POLICY, "--tokens", "200"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pool_that_fails_is_one_line_that_names_it(capsys, broken, tmp_path, command):
    text = ["--text", tmp_path / "text.txt"]
    more = {"inspect": ["--out", tmp_path / "page"]}
    (tmp_path / "text.txt").write_text("Well, Prince, so Genoa and Lucca. " * 60)
    ended = run(capsys, "--import", broken, *COMMANDS[command], *more.get(command, text))
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.splitlines()[-1] == f"weir: {TOLD}"


def test_inspect_leaves_out_a_section_whose_pool_fails(capsys, broken, tmp_path):
    words = ["--only", "norms,kept", "--policy", POLICY, "--tokens", "200", "--json"]
    ended = run(capsys, "--import", broken, "inspect", *words, "--out", tmp_path / "page")
    facts = json.loads(ended.out)
    assert (ended.code, list(facts["sections"])) == (0, ["norms"])
    assert facts["left_out"] == {"kept": TOLD}
    page = html.unescape((tmp_path / "page" / "index.html").read_text("utf-8"))
    assert f"Left out: {TOLD}</p>" in page


def test_advise_leaves_out_a_policy_whose_pool_fails(capsys, broken, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The river rose in the night. " * 60)
    words = ["--text", text, "--budget", "16", "--tokens", "200", "--json"]
    words += ["--policies", f"{POLICY}, streaming_llm"]
    found = json.loads(run(capsys, "--import", broken, "advise", *words).out)
    assert found["best"] == "streaming_llm(budget=16)"
    assert found["left_out"] == {POLICY: f"{POLICY}: {TOLD}"}


def test_a_cell_of_eval_whose_pool_fails_records_why(capsys, broken, tmp_path):
    out = tmp_path / "found.jsonl"
    words = ["--policies", POLICY, "--tasks", "ppl(tokens=100)", "--out", out]
    run(capsys, "--import", broken, "eval", *words)
    assert json.loads(out.read_text().splitlines()[-1])["reason"] == TOLD


@pytest.mark.parametrize("command", ["policies", "check"])
def test_import_after_the_command_is_refused_and_told_where_it_goes(capsys, module, command):
    ended = run(capsys, command, "mine_last", "--import", module)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        "weir: No such option: --import; put --import before the command, as in weir --import "
        f"my_pools.py {command}; see weir {command} --help\n"
    )


def test_a_pool_that_was_not_imported_is_refused_with_a_hint_at_import(capsys, module):
    ended = run(capsys, "policies", "mine_last")
    assert "To find your own, import their file: weir --import FILE policies mine_last" in ended.err
    ended = run(capsys, "size", "nano", "--policy", "mine_last(64)")
    assert "See `weir policies`, or import your own: weir --import FILE (char" in ended.err


def test_several_modules_may_be_named_and_what_follows_is_the_command():
    words = ["--import", "a, b.py", "--import=c", "eval", "--import", "d"]
    assert split_imports(words) == (["eval", "--import", "d"], ["a", "b.py", "c"])
    assert split_imports(["policies"]) == (["policies"], [])
