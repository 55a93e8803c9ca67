"""The registry of pools: a registered pool can be written in any policy."""

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
"""The pattern of names, and of values that are words, in a policy."""

WAITING = "new"
"""The name of tokens that wait for the next fold, in lists that name the pool of each token."""

CONSTANTS = {"true": True, "false": False, "none": None}
"""Words that are values and not names, in letters of either case."""

PoolClass = TypeVar("PoolClass", bound=type[Pool])


def pool(name: str) -> Callable[[PoolClass], PoolClass]:
    """Register a pool under `name`, and make its class check its arguments.

    A class of the same module and name may be registered again, as when a cell of a notebook is run
    twice.

    Raises:
        WeirError: the name cannot be written in a policy or is another pool's; or the class is no
            subclass of `Pool`, lacks a method, or is no dataclass.
    """
    check_name(name, "a pool")
    if name == WAITING:
        raise WeirError(
            f"a pool cannot be called {WAITING}: a cache says so of tokens that no pool holds yet"
        )

    def register(kind: PoolClass) -> PoolClass:
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
    """Refuse a name that a policy cannot be written with, for a thing such as "a pool"."""
    if not isinstance(name, str) or WORD.fullmatch(name) is None:
        raise WeirError(
            f"{what} cannot be called {quote(name)}: a name in a policy is letters, digits and "
            "underscores, and does not begin with a digit"
        )
    if name.lower() in CONSTANTS:
        raise WeirError(f"{what} cannot be called {name}, which is a value in a policy")


def check_free(name: str, made: Any, known: Mapping[str, Any], what: str) -> None:
    """Refuse a name that is taken, but by a class or function of the same module and name."""
    other = known.get(name, made)
    origin = f"{other.__module__}.{other.__qualname__}"
    if origin != f"{made.__module__}.{made.__qualname__}":
        raise WeirError(f"{what} is called {name} already, {origin}; take another name")
