"""`weir policies`: it lists all that is registered, with an explanation of every parameter."""

from __future__ import annotations

import pytest

from weir.cli.policies import POLICIES, SHARED, _describe, explain, list_entries, policies
from weir.policies import NAMED, Pipe, Pyramid
from weir.pools import POOLS


def is_ours(name: str) -> bool:
    """Whether weir registers a name itself, rather than another test."""
    made = NAMED[name].make if name in NAMED else POOLS[name]
    return made.__module__.startswith("weir.")


def test_all_that_registers_is_listed_and_what_is_imported_comes_last():
    named, pools = list_entries()
    assert {it.name for it in named} == NAMED.keys() and {it.name for it in pools} == POOLS.keys()
    ours = [it.name for it in named if is_ours(it.name)]
    assert [it.name for it in named][: len(ours)] == ours
    assert set(ours) == {name for group in POLICIES.values() for name in group}
    for it in named[: len(ours)]:
        assert (it.paper, it.pipe) == (NAMED[it.name].paper, NAMED[it.name].pipe)


def test_each_printed_line_is_a_title_an_entry_or_the_hint_at_the_end(capsys):
    policies()
    *lines, hint = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert hint == "To see the parameters, pipe and paper of a policy, run weir policies NAME."
    named, pools = list_entries()
    begins = {*POLICIES, "Pools, the parts of a pipe", "Others"}
    begins |= {it.name for it in (*named, *pools)}
    # A line that is too long for the terminal goes on after the column of names.
    wide = [line for line in lines if line in begins or line.split()[0] in begins]
    assert len(wide) >= len(named) + len(pools) and not any(line.startswith(",") for line in lines)


def test_every_parameter_is_explained():
    named, pools = list_entries()
    for it in (*named, *pools):
        if not is_ours(it.name):
            continue  # another test has registered it
        names = [word.partition("=")[0] for word in it.parameters.split(", ") if word]
        assert list(explain(it, pools)) == names, it.name


@pytest.mark.parametrize("name", NAMED)
def test_the_pipe_that_is_said_is_the_pipe_that_is_made(name):
    made = NAMED[name].make()
    assert NAMED[name].pipe == (str(made) if isinstance(made, Pipe | Pyramid) else None)


def test_parameters_and_what_is_said_of_them_are_read_from_signature_and_docstring():
    def make(n: int = -1, *, b: float | None = None, weighted: bool = False):
        """Keep
        one.

        And more.

        Args:
            b: the second, which
                takes two lines.
            n, weighted: this and that.

        Raises:
            WeirError: never.
        """

    it = _describe("one", make, "A paper")
    assert (it.parameters, it.about) == ("n=-1, b=none, weighted=false", "Keep one.")
    both = dict.fromkeys(("n", "weighted"), "this and that.")
    assert it.explains == {"b": "the second, which takes two lines.", **both}


def test_a_policy_s_budget_is_of_all_its_pools_and_not_of_the_one_that_has_a_budget_too():
    named, pools = list_entries()
    policies = {it.name: it for it in named}
    assert explain(policies["attention_matching"], pools)["budget"] == SHARED["budget"]
    (snap,) = (it for it in pools if it.name == "snap")
    assert explain(snap, pools)["budget"] == snap.explains["budget"] != SHARED["budget"]
    for name in ("reservoir", "uniform"):
        assert "/ n" not in explain(policies[name], pools)["weighted"]
