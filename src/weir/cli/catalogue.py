"""The named policies and the pools as their source declares them; none of it is imported.

To import a pool imports PyTorch, which takes seconds, and a list of names has no need of it. What
is read: functions under `@named(paper, pipe=...)` in `weir/policies`, and dataclasses under
`@pool(name)` in `weir/pools`. Knows nothing about what they do.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from weir.errors import written

Node = TypeVar("Node", ast.FunctionDef, ast.ClassDef)
SOURCE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Entry:
    """A policy with a name, or a pool.

    Attributes:
        name: as it is written in a policy.
        parameters: with their defaults, as they are written in a policy.
        about: the first paragraph of its docstring, in one line.
        paper: where a policy comes from; None for a pool.
        pipe: what a policy is by default; None for a pool, and for a policy that is no pipe.
    """

    name: str
    parameters: str
    about: str
    paper: str | None = None
    pipe: str | None = None


def read_policies(folder: Path = SOURCE / "policies") -> list[Entry]:
    """Every policy with a name, in the order of the source."""
    found = []
    for node, call in _decorated(folder, "named", ast.FunctionDef):
        given = dict(zip(("paper", "pipe"), map(ast.literal_eval, call.args), strict=False))
        given |= {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        found.append(Entry(node.name, _arguments(node.args), _about(node), **given))
    return found


def read_pools(folder: Path = SOURCE / "pools") -> list[Entry]:
    """Every pool, by name."""
    found = [
        Entry(ast.literal_eval(call.args[0]), _fields(node), _about(node))
        for node, call in _decorated(folder, "pool", ast.ClassDef)
    ]
    return sorted(found, key=lambda entry: entry.name)


def has_plugins() -> bool:
    """Whether an installed package, or `--import`, brings pools of its own."""
    if os.environ.get("WEIR_IMPORT"):
        return True
    # importlib.metadata would take longer to import than all the rest of a list.
    files = (
        path
        for folder in sys.path
        if os.path.isdir(folder)
        for path in Path(folder).glob("*.dist-info/entry_points.txt")
    )
    return any("[weir.pools]" in path.read_text("utf-8", "replace") for path in files)


def others(known: Iterable[Entry], kinds: Mapping[str, Any], about: str) -> list[Entry]:
    """What plugins registered beside what the source declares, by name.

    Args:
        known: entries of the source.
        kinds: what is registered, by name: pools, or functions that make policies.
        about: what stands beside an entry in place of a paper.
    """
    names = sorted(set(kinds) - {entry.name for entry in known})
    return [
        Entry(name, _signature(kinds[name]), _said(inspect.getdoc(kinds[name])), about)
        for name in names
    ]


def _signature(make: Any) -> str:
    """The parameters of what is imported."""
    return ", ".join(
        name if each.default is each.empty else f"{name}={written(each.default)}"
        for name, each in inspect.signature(make).parameters.items()
    )


def _said(doc: str | None) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((doc or "").split("\n\n")[0].split())


def _decorated(folder: Path, name: str, kind: type[Node]) -> Iterator[tuple[Node, ast.Call]]:
    """The definitions under `@name(...)` in the files of a folder, each with that call."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text("utf-8")
        if f"\n@{name}(" not in text:
            continue
        for node in ast.parse(text).body:
            if not isinstance(node, kind):
                continue
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == name:
                    yield node, call


def _arguments(arguments: ast.arguments) -> str:
    """The parameters of a function."""
    every = [*arguments.posonlyargs, *arguments.args]
    required = [None] * (len(every) - len(arguments.defaults))
    pairs = [
        *zip(every, [*required, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return ", ".join(_parameter(each.arg, default) for each, default in pairs)


def _fields(node: ast.ClassDef) -> str:
    """The fields of a dataclass."""
    return ", ".join(
        _parameter(line.target.id, line.value)
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and not ast.unparse(line.annotation).startswith("ClassVar")
    )


def _parameter(name: str, default: Any) -> str:
    return name if default is None else f"{name}={written(ast.literal_eval(default))}"


def _about(node: ast.FunctionDef | ast.ClassDef) -> str:
    return _said(ast.get_docstring(node))
