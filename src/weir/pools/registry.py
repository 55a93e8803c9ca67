"""How a pool gets its name, and what is refused one.

A pool that is registered can be written in any policy. Knows nothing about what pools do.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

from weir.errors import WeirError, quote
from weir.pools.base import Pool
from weir.pools.parameters import check_arguments

POOLS: dict[str, type[Pool]] = {}
"""Every pool by the name it has in a policy."""

WORD = re.compile(r"[^\W\d]\w*")
"""What a name, and a value that is a word, looks like in a policy."""

WAITING = "new"
"""What tokens that wait for the next fold go by, where pools are told apart by their names."""

CONSTANTS = {"true": True, "false": False, "none": None}
"""Words that are no names but values, in letters of either case."""

Kind = TypeVar("Kind", bound=type[Pool])


def pool(name: str) -> Callable[[Kind], Kind]:
    """Make a pool known under `name` in policies, and refuse parameters that are no such things.

    The same class may be registered again, as when a cell of a notebook is run twice or a module
    reloaded: by its module and name, and the later one counts.

    Raises:
        WeirError: the name cannot be written in a policy or is another pool's; or what is
            registered is no class of `Pool`, lacks a method, or is no dataclass.
    """
    check_name(name, "a pool")
    if name == WAITING:
        raise WeirError(
            f"a pool cannot be called {WAITING}: a cache says so of tokens that no pool holds yet"
        )

    def register(kind: Kind) -> Kind:
        if not (isinstance(kind, type) and issubclass(kind, Pool)):
            raise WeirError(
                f"the pool {name} is to be a class made from weir.pools.Pool, not {quote(kind)}"
            )
        if inspect.isabstract(kind):
            missing = " and ".join(f"{method}()" for method in sorted(kind.__abstractmethods__))
            raise WeirError(f"the pool {name} cannot be used yet: {kind.__name__} lacks {missing}")
        if not is_dataclass(kind):
            raise WeirError(
                f"the pool {name} is no dataclass, so a policy cannot give it parameters; write "
                f"@dataclass(frozen=True) between @pool and the class {kind.__name__}"
            )
        check_free(name, kind, POOLS, "a pool")
        kind.name = name
        POOLS[name] = check_arguments(kind, name)
        return kind

    return register


def check_name(name: Any, what: str) -> None:
    """Refuse a name that a policy cannot be written with.

    Args:
        name: of `what`, "a pool", say.
        what: is to be called so.

    Raises:
        WeirError: with the reason.
    """
    if not isinstance(name, str) or WORD.fullmatch(name) is None:
        raise WeirError(
            f"{what} cannot be called {quote(name)}: a name in a policy is letters, digits and "
            "underscores, and does not begin with a digit"
        )
    if name.lower() in CONSTANTS:
        raise WeirError(f"{what} cannot be called {name}, which is a value in a policy")


def check_free(name: str, made: Any, known: Mapping[str, Any], what: str) -> None:
    """Refuse a name that something else has.

    Args:
        name: as it is to be known.
        made: what is to be known so, a class or a function; it may take the place of one that was
            defined in the same module under the same name.
        known: what is known, by name.
        what: what each of them is, "a pool", say.

    Raises:
        WeirError: the name is taken.
    """
    other = known.get(name)
    if other is not None and _origin(other) != _origin(made):
        raise WeirError(
            f"{what} is called {name} already, {'.'.join(_origin(other))}; take another name"
        )


def _origin(made: Any) -> tuple[str, str]:
    """Where a class or function was defined: (module, name within it)."""
    return made.__module__, made.__qualname__
