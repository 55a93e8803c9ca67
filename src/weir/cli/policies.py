"""`weir policies`: list named policies and pools, or describe one in detail."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from typer import Argument, BadParameter

from weir.cli.app import command
from weir.cli.common import describe_parameters, first_paragraph, output, print_json
from weir.cli.options import AsJson
from weir.errors import suggest

SHARED = {
    "budget": "number of slots of each KV head in each layer.",
    "sinks": "number of first tokens of the stream that are always kept.",
}
"""Descriptions of parameters that mean the same in every policy, unless a policy has its own."""
POLICIES: dict[str, dict[str, str]] = {
    "Plain": {
        "dense": "everything, exactly, in memory that grows with the stream",
        "window": "the newest tokens. Most models also need the first token",
        "recompute": "a slow reference: recomputes its window at every step",
    },
    "From the papers that weir reproduces": {
        "streaming_llm": "endless reading at the lowest cost",
        "reservoir": "endless reading with a fair sample of everything in between",
        "subgen": "SubGen's Algorithm 1, as published",
        "kcenter": "names and numbers from long ago, as in SubGen's experiments",
        "balancekv": "an estimate of attention over all of a long prompt",
        "uniform": "the baseline of balancekv: a uniform sample",
        "buzz": "tokens that got much attention, from all of the stream",
    },
    "From other papers": {
        "h2o": "tokens that received the most attention so far",
        "snapkv": "a long prompt and one answer: what the prompt's end looks at",
        "kvzip": "one text, read whole: what the model needs to repeat it",
        "pyramidkv": "like snapkv, with more slots in the lower layers",
        "defensivekv": "tokens that any query needed, not only the average query",
        "reskv": "the newest tokens, and averages of the evicted ones",
        "attention_matching": "slots reweighted to replace evicted tokens (experimental)",
        "certified": "a bound on the error that eviction causes",
        "tova": "what the last token attends to, with little bookkeeping",
        "keydiff": "tokens with unusual keys, without attention scores",
        "keyformer": "tokens that got much attention, with noise for variety",
        "lacache": "a ladder: neighboring layers keep different old tokens",
    },
    "weir's own": {
        "weir": "the default: endless reading that also finds older facts",
        "centers": "single names and numbers from long ago, for small models",
    },
    "Around another policy": {
        "quantized": "twice as many tokens in the same bytes",
        "pyramid": "more slots in the lower layers",
        "pinned": "the beginning of a conversation, never evicted",
    },
}
"""A line about each named policy, for `weir policies`: what it keeps, or what it is good for."""

_PARAMETER = re.compile(r" {4}(\w+(?:, \w+)*): (.+)")
"""First line of a docstring's entry about one or several parameters."""


@dataclass(frozen=True)
class Entry:
    """An entry of the list: a named policy or a pool.

    Attributes:
        name: the name, as it is written in a policy.
        parameters: parameters with their defaults, as they are written in a policy.
        about: the first paragraph of the docstring, in one line.
        paper: the paper or other origin of a policy; None for a pool.
        pipe: the pipe or pyramid that a policy stands for by default; None for a pool, and for a
            policy that is not made of pools or comes from a plugin.
        explains: the docstring's sentences about parameters, by parameter.
    """

    name: str
    parameters: str
    about: str
    paper: str | None = None
    pipe: str | None = None
    explains: Mapping[str, str] = field(default_factory=dict)


@command()
def policies(
    names: Annotated[
        list[str] | None,
        Argument(metavar="NAME", help="Policies or pools to describe. By default, list all."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the named policies and the pools that policies are made of, or describe the ones you
    name.
    """
    named, pools = list_entries()
    known = {entry.name for entry in (*named, *pools)}
    for name in names or ():
        if name not in known:
            like = suggest(name.partition("(")[0].strip().lower(), known)
            raise BadParameter(
                "there is no policy or pool called "
                f"{name!r}{like or '. Run `weir policies` for the list.'} To find your own, import "
                f"their file: weir --import FILE policies {name}"
            )
    if names or as_json:
        wanted = names or known
        every = pools
        named, pools = (
            [replace(e, explains=explain(e, every)) for e in entries if e.name in wanted]
            for entries in (named, pools)
        )
    if as_json:
        of_pool = ("name", "parameters", "about", "explains")
        print_json(
            {
                "policies": [asdict(entry) for entry in named],
                "pools": [{key: getattr(entry, key) for key in of_pool} for entry in pools],
            }
        )
    elif not names:
        _print_list(named, pools)
    else:
        for kind, entries in (("policy", named), ("pool", pools)):
            for entry in entries:
                _print_entry(entry, kind)


# --- finding entries


def list_entries() -> tuple[list[Entry], list[Entry]]:
    """Return the named policies and the pools. Those of weir come before those of plugins."""
    from weir.policies import NAMED, load_plugins
    from weir.pools import POOLS

    load_plugins()
    ours = {name: p for name, p in NAMED.items() if p.make.__module__.startswith("weir.")}
    named = [_describe(name, p.make, p.paper, p.pipe) for name, p in ours.items()]
    named += [
        _describe(name, NAMED[name].make, NAMED[name].paper or "imported")
        for name in sorted(NAMED.keys() - ours.keys())
    ]
    imported = {name: not kind.__module__.startswith("weir.") for name, kind in POOLS.items()}
    order = sorted(POOLS, key=lambda name: (imported[name], name))
    return named, [_describe(name, POOLS[name]) for name in order]


def _describe(name: str, make: Any, paper: str | None = None, pipe: str | None = None) -> Entry:
    explains = _read_parameters(inspect.getdoc(make) or "")
    about = first_paragraph(make)
    return Entry(name, describe_parameters(make), about, paper, pipe, explains)


def _read_parameters(doc: str) -> dict[str, str]:
    """Read the entries about parameters from a docstring, in its `Args` or `Attributes`."""
    found: dict[str, str] = {}
    names: list[str] = []
    inside = False
    for line in doc.splitlines():
        if line and not line.startswith(" "):
            inside = line in ("Args:", "Attributes:")
        elif inside and (begun := _PARAMETER.match(line)):
            names = begun[1].split(", ")
            found |= dict.fromkeys(names, begun[2])
        elif inside and line:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def explain(entry: Entry, pools: Iterable[Entry]) -> dict[str, str]:
    """Return the descriptions of an entry's parameters. For a parameter that a policy does not
    describe itself, use the description in `SHARED` or in one of its pools.
    """
    words = set(re.findall(r"\w+", entry.pipe or ""))
    known: dict[str, str] = {}
    for pool in pools:
        known |= pool.explains if pool.name in words else {}
    # A policy's budget counts the slots of all its pools; a pool's counts only its own.
    known |= {} if entry.paper is None else SHARED
    known |= entry.explains
    names = [word.partition("=")[0] for word in entry.parameters.split(", ")]
    return {name: known[name] for name in names if name in known}


# --- printing


def _print_list(named: Sequence[Entry], pools: Sequence[Entry]) -> None:
    """Print a line for each entry: its name and its use."""
    known = {name for group in POLICIES.values() for name in group}
    others = {entry.name: entry.about for entry in named if entry.name not in known}
    width = max(len(entry.name) for entry in (*named, *pools))
    for title, group in {**POLICIES, **({"Others": others} if others else {})}.items():
        _print_grid(title, group, width)
    _print_grid(
        "Pools, the parts of a pipe", {pool.name: _shorten(pool.about) for pool in pools}, width
    )
    output().print(
        "To see the parameters, pipe and paper of a policy, run weir policies NAME.", markup=False
    )


def _shorten(about: str) -> str:
    """Remove words that would be in every line of the list."""
    return about.removeprefix("Keep ").removesuffix(".")


def _print_grid(title: str, lines: Mapping[str, str], width: int) -> None:
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


def _print_entry(entry: Entry, kind: str) -> None:
    """Print all details of one entry."""
    uses = {name: line for group in POLICIES.values() for name, line in group.items()}
    parameters = "\n".join(
        ": ".join(filter(None, (word, entry.explains.get(word.partition("=")[0]))))
        for word in entry.parameters.split(", ")
    )
    facts = {
        "keeps": entry.about,
        "good for": uses.get(entry.name) if kind == "policy" else None,
        "parameters": parameters or "none",
        "pipe": entry.pipe,
        "from": entry.paper,
    }
    _print_grid(f"{entry.name}, a {kind}", {k: v for k, v in facts.items() if v}, len("parameters"))
