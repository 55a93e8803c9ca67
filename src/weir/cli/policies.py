"""`weir policies`: what there is and what it is good for; of one, its parameters and its paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import typer

from weir.cli.app import command
from weir.cli.catalog import (
    Entry,
    explained,
    has_plugins,
    others,
    read_policies,
    read_pools,
)
from weir.cli.common import AsJson, output, print_json
from weir.cli.uses import POLICIES
from weir.errors import suggest


@command(words="[NAME]...")
def policies(context: typer.Context, as_json: AsJson = False) -> None:
    """List the named policies and the pools a pipe can be made of, or tell all of those named."""
    named, pools = read_policies(), read_pools()
    if has_plugins():
        from weir.policies import NAMED, load_plugins
        from weir.pools import POOLS

        load_plugins()
        named += others(named, {name: it.make for name, it in NAMED.items()}, "imported")
        pools += others(pools, POOLS, "imported")
    known = {entry.name for entry in (*named, *pools)}
    for name in context.args:
        if name not in known:
            like = suggest(name.partition("(")[0].strip().lower(), known)
            raise typer.BadParameter(
                f"no policy and no pool is called {name!r}{like or '; `weir policies` lists them'}"
            )
    if context.args or as_json:
        every = pools
        named, pools = (
            [
                replace(it, explains=explained(it, every))
                for it in of
                if not context.args or it.name in context.args
            ]
            for of in (named, pools)
        )
    if as_json:
        of_pool = ("name", "parameters", "about", "explains")
        print_json(
            {
                "policies": [asdict(entry) for entry in named],
                "pools": [{key: getattr(entry, key) for key in of_pool} for entry in pools],
            }
        )
    elif not context.args:
        _list(named, pools)
    else:
        for kind, entries in (("policy", named), ("pool", pools)):
            for entry in entries:
                _tell(entry, kind)


def _list(named: Sequence[Entry], pools: Sequence[Entry]) -> None:
    """All of them, a name and what it is good for in a line."""
    known = {name for group in POLICIES.values() for name in group}
    own = {entry.name: entry.about for entry in named if entry.name not in known}
    width = max(len(entry.name) for entry in (*named, *pools))
    for title, group in {**POLICIES, **({"Others": own} if own else {})}.items():
        _print(title, group, width)
    _print("Pools, of which a pipe is made", {it.name: _short(it.about) for it in pools}, width)
    output().print("A pipe is pools with | between them: sink(4) | recent(252)", markup=False)
    output().print("Parameters, pipe and paper of one: weir policies NAME", markup=False)


def _short(about: str) -> str:
    """What stands in all of a list's lines is left out."""
    return about.removeprefix("Keep ").removesuffix(".").removesuffix(", each KV head its own")


def _print(title: str, lines: Mapping[str, str], width: int) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="cyan", min_width=width)
    table.add_column()
    for name, line in lines.items():
        table.add_row(Text(name), Text(line))
    output().print(Text(title, style="bold"))
    output().print(table)
    output().print()


def _tell(entry: Entry, kind: str) -> None:
    """All of one: as it is written, what it keeps, and where it comes from."""
    uses = {name: line for group in POLICIES.values() for name, line in group.items()}
    parameters = "\n".join(
        ": ".join(filter(None, (each, entry.explains.get(each.partition("=")[0]))))
        for each in entry.parameters.split(", ")
    )
    good = uses.get(entry.name) if kind == "policy" else None
    facts = {
        "keeps": entry.about,
        "good for": good,
        "parameters": parameters or "none",
        "pipe": entry.pipe,
        "from": entry.paper,
    }
    _print(f"{entry.name}, a {kind}", {k: v for k, v in facts.items() if v}, len("parameters"))
