"""`weir policies`: what there is, with parameters and papers."""

from __future__ import annotations

import inspect
from typing import Any

from rich.padding import Padding
from rich.text import Text

from weir.cli import app
from weir.cli.common import AsJson, output, print_json
from weir.errors import written


@app.command()
def policies(as_json: AsJson = False) -> None:
    """List the named policies and the pools a pipe can be made of."""
    from weir.policies import NAMED, Pipe, Pyramid
    from weir.pools import POOLS

    named: list[dict[str, Any]] = []
    for name, it in NAMED.items():
        made = it.make()
        facts = {"name": name, "parameters": parameters(it.make), "about": about(it.make)}
        pipe = str(made) if isinstance(made, Pipe | Pyramid) else None
        named.append({**facts, "pipe": pipe, "paper": it.paper})
    pools = [
        {"name": name, "parameters": parameters(kind), "about": about(kind)}
        for name, kind in POOLS.items()
    ]
    if as_json:
        print_json({"policies": named, "pools": pools})
        return
    output.print(Text("Policies", style="bold"))
    for row in named:
        it_is = [f"= {row['pipe']}"] if row["pipe"] else []
        _entry(row, *it_is, row["about"], f"({row['paper']})")
    output.print(Text("\nPools", style="bold"))
    for row in pools:
        _entry(row, row["about"])
    output.print("\nA pipe is pools with | between them: sink(4) | recent(252)", markup=False)


def _entry(row: dict[str, Any], *lines: str) -> None:
    output.print(Text(f"  {row['name']}({row['parameters']})", "cyan"), soft_wrap=True)
    for line in lines:
        output.print(Padding(Text(line), (0, 0, 0, 6), expand=False))


def parameters(make: Any) -> str:
    """Its parameters with their defaults, as they are written in a policy."""
    parts = []
    for name, parameter in inspect.signature(make).parameters.items():
        default = parameter.default
        known = default is not parameter.empty
        parts.append(f"{name}={written(default)}" if known else name)
    return ", ".join(parts)


def about(it: Any) -> str:
    """The first sentence of a docstring."""
    return " ".join((inspect.getdoc(it) or "").split("\n\n")[0].split())
