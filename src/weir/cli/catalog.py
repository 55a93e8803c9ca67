"""The named policies and the pools as their source declares them; none of it is imported.

To import a pool imports PyTorch, which takes seconds, and a list of names has no need of it. What
is read: functions under `@named(paper, pipe=...)` in `weir/policies`, and dataclasses under
`@pool(name)` in `weir/pools`. Knows nothing about what they do.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from weir.cli.uses import SHARED
from weir.errors import format_value

Node = TypeVar("Node", ast.FunctionDef, ast.ClassDef)
SOURCE = Path(__file__).parents[1]
WORD = re.compile(r"\w+")
_ENTRY = re.compile(r" {4}(\w+(?:, \w+)*): (.+)")
"""The first line of what a docstring says of a parameter, or of several."""


@dataclass(frozen=True)
class Entry:
    """A policy with a name, or a pool.

    Attributes:
        name: as it is written in a policy.
        parameters: with their defaults, as they are written in a policy.
        about: the first paragraph of its docstring, in one line.
        paper: where a policy comes from; None for a pool.
        pipe: what a policy is by default; None for a pool, and for a policy that is no pipe.
        explains: what its docstring says of each parameter.
    """

    name: str
    parameters: str
    about: str
    paper: str | None = None
    pipe: str | None = None
    explains: Mapping[str, str] = field(default_factory=dict)


def read_policies(folder: Path = SOURCE / "policies") -> list[Entry]:
    """Every policy with a name, in the order of the source."""
    found = []
    for node, call in _decorated(folder, "named", ast.FunctionDef):
        given = dict(zip(("paper", "pipe"), map(ast.literal_eval, call.args), strict=False))
        given |= {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        doc = ast.get_docstring(node)
        found.append(
            Entry(node.name, _arguments(node.args), _said(doc), **given, explains=_explains(doc))
        )
    return found


def read_pools(folder: Path = SOURCE / "pools") -> list[Entry]:
    """Every pool, by name."""
    found = [
        Entry(ast.literal_eval(call.args[0]), _fields(node), _said(doc), explains=_explains(doc))
        for node, call in _decorated(folder, "pool", ast.ClassDef)
        for doc in (ast.get_docstring(node),)
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
        Entry(name, _signature(kinds[name]), _said(doc), about, explains=_explains(doc))
        for name in names
        for doc in (inspect.getdoc(kinds[name]),)
    ]


def explained(entry: Entry, pools: Iterable[Entry]) -> dict[str, str]:
    """What there is to say of each parameter; what a policy does not explain its pools do.

    Args:
        entry: a policy, or a pool.
        pools: all there are.

    Returns:
        Sentences by parameter, in the order of the parameters.
    """
    words = set(WORD.findall(entry.pipe or ""))
    inner = {name: said for it in pools if it.name in words for name, said in it.explains.items()}
    # In a policy these are of all its pools; in a pool, of the pool alone.
    shared = {} if entry.pipe is None and entry.paper is None else SHARED
    known = {**inner, **shared, **entry.explains}
    names = [each.partition("=")[0] for each in entry.parameters.split(", ")]
    return {name: known[name] for name in names if name in known}


def _signature(make: Any) -> str:
    """The parameters of what is imported."""
    return ", ".join(
        name if each.default is each.empty else f"{name}={format_value(each.default)}"
        for name, each in inspect.signature(make).parameters.items()
    )


def _said(doc: str | None) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((doc or "").split("\n\n")[0].split())


def _explains(doc: str | None) -> dict[str, str]:
    """What a docstring says of parameters: the entries of its `Args` or `Attributes`."""
    found: dict[str, str] = {}
    names: list[str] = []
    inside = False
    for line in (doc or "").splitlines():
        if line and not line.startswith(" "):
            inside = line in ("Args:", "Attributes:")
        elif inside and (begun := _ENTRY.match(line)):
            names = begun[1].split(", ")
            found |= dict.fromkeys(names, begun[2])
        elif inside and line:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


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
    return name if default is None else f"{name}={format_value(ast.literal_eval(default))}"
