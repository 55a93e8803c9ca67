"""`weir policies`: what there is, with parameters and papers."""

from __future__ import annotations

import inspect
from typing import Any

from rich.table import Table

from weir.cli import app
from weir.cli.common import AsJson, output, print_json


@app.command()
def policies(as_json: AsJson = False) -> None:
    """List the named policies and the pools a pipe can be made of."""
    from weir.policy import NAMED
    from weir.pools import POOLS

    named = [
        {
            "name": name,
            "parameters": _parameters(it.make),
            "pipe": _pipe(it.make),
            "about": _first_line(it.make),
            "paper": it.paper,
        }
        for name, it in NAMED.items()
    ]
    pools = [
        {"name": name, "parameters": _parameters(kind), "about": _first_line(kind)}
        for name, kind in POOLS.items()
    ]
    if as_json:
        print_json({"policies": named, "pools": pools})
        return
    table = Table("policy", "pipe with its defaults", "what it does", "where from")
    for row in named:
        table.add_row(f"{row['name']}({row['parameters']})", row["pipe"], row["about"], row["paper"])
    output.print(table)
    table = Table("pool", "what it does")
    for row in pools:
        table.add_row(f"{row['name']}({row['parameters']})", row["about"])
    output.print(table)
    output.print("A pipe is pools with | between them: sink(4) | recent(252)", markup=False)


def _parameters(make: Any) -> str:
    parts = []
    for name, parameter in inspect.signature(make).parameters.items():
        default = parameter.default
        known = default is not parameter.empty
        parts.append(f"{name}={'none' if default is None else default}" if known else name)
    return ", ".join(parts)


def _pipe(make: Any) -> str:
    return str(make())


def _first_line(it: Any) -> str:
    return (inspect.getdoc(it) or "").splitlines()[0]
