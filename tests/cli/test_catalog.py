"""The names that are read from the source beside those that register when it is imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from weir.cli.catalog import Entry, explained, read_policies, read_pools
from weir.cli.uses import SHARED
from weir.errors import format_value
from weir.policies import NAMED, Pipe, Pyramid
from weir.pools import POOLS


def entry(name: str, make: Callable[..., Any], paper: str | None = None) -> Entry:
    """As the running code says it, without a pipe."""
    parameters = [
        name if each.default is each.empty else f"{name}={format_value(each.default)}"
        for name, each in inspect.signature(make).parameters.items()
    ]
    about = " ".join((inspect.getdoc(make) or "").split("\n\n")[0].split())
    return Entry(name, ", ".join(parameters), about, paper)


def bare(found: list[Entry]) -> list[Entry]:
    """Without what is said of parameters."""
    return [replace(each, explains={}) for each in found]


def test_every_pool_is_read_as_it_registers():
    # Pools that other tests register lie elsewhere.
    own = [(name, kind) for name, kind in POOLS.items() if kind.__module__.startswith("weir.")]
    assert bare(read_pools()) == [entry(name, kind) for name, kind in sorted(own)]
    assert len(own) > 10


def test_every_policy_is_read_as_it_registers():
    own = {name: it for name, it in NAMED.items() if it.make.__module__.startswith("weir.")}
    found = bare(read_policies())
    assert [each.name for each in found] == list(own)
    for each in found:
        expected = entry(each.name, own[each.name].make, own[each.name].paper)
        assert each == Entry(**{**vars(expected), "pipe": own[each.name].pipe})


def test_every_parameter_is_explained():
    pools = read_pools()
    for each in (*read_policies(), *pools):
        names = [word.partition("=")[0] for word in each.parameters.split(", ") if word]
        assert list(explained(each, pools)) == names, each.name


@pytest.mark.parametrize("name", NAMED)
def test_the_pipe_that_is_said_is_the_pipe_that_is_made(name):
    made = NAMED[name].make()
    assert NAMED[name].pipe == (str(made) if isinstance(made, Pipe | Pyramid) else None)


POLICIES = '''
@named("A paper, "
       "in two lines", pipe="sink(4) | first(3)")
def one(n: int = -1, *, b: float | None = None, c: str = "x") -> Policy:
    """Keep
    one.

    And more.

    Args:
        b: the second, which
            takes two lines.

    Raises:
        WeirError: never.
    """

def helper(n): ...

@named("Another")
def two(n): "Keep two."
'''
POOL = '''
@pool("first")
@dataclass(frozen=True)
class First(Pool):
    """Hold the first.

    Attributes:
        n, weighted: this and that.
    """

    needs_mass: ClassVar[bool] = True
    n: int
    weighted: bool = False
'''


def test_what_stands_in_the_source_is_read(tmp_path):
    (tmp_path / "deeper").mkdir()
    (tmp_path / "library.py").write_text(POLICIES)
    (tmp_path / "deeper" / "first.py").write_text(POOL)
    assert read_policies(tmp_path) == [
        Entry(
            "one", "n=-1, b=none, c=x", "Keep one.", "A paper, in two lines", "sink(4) | first(3)",
            {"b": "the second, which takes two lines."},
        ),
        Entry("two", "n", "Keep two.", "Another"),
    ]  # fmt: skip
    said = dict.fromkeys(("n", "weighted"), "this and that.")
    pools = [Entry("first", "n, weighted=false", "Hold the first.", explains=said)]
    assert read_pools(tmp_path) == pools
    one, two = read_policies(tmp_path)
    wanted = {"n": "this and that.", "b": "the second, which takes two lines."}
    assert explained(one, pools) == wanted
    assert explained(two, pools) == {}


def test_a_policy_s_budget_is_of_all_its_pools_and_not_of_the_one_that_has_a_budget_too():
    pools = read_pools()
    policies = {each.name: each for each in read_policies()}
    assert explained(policies["attention_matching"], pools)["budget"] == SHARED["budget"]
    (snap,) = (each for each in pools if each.name == "snap")
    assert explained(snap, pools)["budget"] == snap.explains["budget"] != SHARED["budget"]
    for name in ("reservoir", "uniform"):
        assert "/ n" not in explained(policies[name], pools)["weighted"]
