"""The names that are read from the source beside those that register when it is imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from weir.cli.catalogue import Entry, read_policies, read_pools
from weir.errors import written
from weir.policies import NAMED, Pipe, Pyramid
from weir.pools import POOLS


def entry(name: str, make: Callable[..., Any], paper: str | None = None) -> Entry:
    """As the running code says it, without a pipe."""
    parameters = [
        name if each.default is each.empty else f"{name}={written(each.default)}"
        for name, each in inspect.signature(make).parameters.items()
    ]
    about = " ".join((inspect.getdoc(make) or "").split("\n\n")[0].split())
    return Entry(name, ", ".join(parameters), about, paper)


def test_every_pool_is_read_as_it_registers():
    # Pools that other tests register lie elsewhere.
    own = [(name, kind) for name, kind in POOLS.items() if kind.__module__.startswith("weir.")]
    assert read_pools() == [entry(name, kind) for name, kind in sorted(own)]
    assert len(own) > 10


def test_every_policy_is_read_as_it_registers():
    own = {name: it for name, it in NAMED.items() if it.make.__module__.startswith("weir.")}
    found = read_policies()
    assert [each.name for each in found] == list(own)
    for each in found:
        expected = entry(each.name, own[each.name].make, own[each.name].paper)
        assert each == Entry(**{**vars(expected), "pipe": own[each.name].pipe})


@pytest.mark.parametrize("name", NAMED)
def test_the_pipe_that_is_said_is_the_pipe_that_is_made(name):
    made = NAMED[name].make()
    assert NAMED[name].pipe == (str(made) if isinstance(made, Pipe | Pyramid) else None)


POLICIES = '''
@named("A paper, "
       "in two lines", pipe="sink(4)")
def one(n: int = -1, *, b: float | None = None, c: str = "x") -> Policy:
    """Keep
    one.

    And more.
    """

def helper(n): ...

@named("Another")
def two(n): "Keep two."
'''
POOL = '''
@pool("first")
@dataclass(frozen=True)
class First(Pool):
    """Hold the first."""

    needs_mass: ClassVar[bool] = True
    n: int
    weighted: bool = False
'''


def test_what_stands_in_the_source_is_read(tmp_path):
    (tmp_path / "deeper").mkdir()
    (tmp_path / "library.py").write_text(POLICIES)
    (tmp_path / "deeper" / "first.py").write_text(POOL)
    assert read_policies(tmp_path) == [
        Entry("one", "n=-1, b=none, c=x", "Keep one.", "A paper, in two lines", "sink(4)"),
        Entry("two", "n", "Keep two.", "Another"),
    ]
    assert read_pools(tmp_path) == [Entry("first", "n, weighted=false", "Hold the first.")]
