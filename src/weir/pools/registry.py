"""The registry of pools. A registered pool can be used in any policy."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from weir.errors import WeirError, quote, suggest
from weir.pools.base import Pool, SizedPool
from weir.pools.failures import name_failure
from weir.pools.parameters import check_arguments, fits
from weir.pools.ranked import Ranked

POOLS: dict[str, type[Pool]] = {}
"""Every pool, by its name in a policy."""

WORD = re.compile(r"[^\W\d]\w*")
"""The pattern of names, and of values that are words, in a policy."""

WAITING = "new"
"""The name for tokens that wait for the next fold, in lists that give the pool of each token."""

NEEDS = "needs_"
"""The beginning of the names by which a pool declares what it reads, such as `needs_mass`."""

ALIKE = 0.85
"""How similar a name must be to a declaration, from 0 to 1, to be taken for a misspelling of it."""

CONSTANTS = {"true": True, "false": False, "none": None}
"""Words that are values and not names, in upper or lower case."""

PoolClass = TypeVar("PoolClass", bound=type[Pool])


def pool(name: str) -> Callable[[PoolClass], PoolClass]:
    """Make a class decorator that registers a pool under `name` for use in policies, and makes its
    class check its arguments.

    A class with the same module and name may be registered again, for example when a cell of a
    notebook is run twice.

    Raises:
        WeirError: the name cannot be written in a policy, is reserved (`WAITING`) or belongs to
            another pool; or the class is not a subclass of `Pool`, lacks a method, or is not a
            dataclass.
    """
    if isinstance(name, type):
        raise WeirError(
            f'@pool needs the name of the pool. Write @pool("name") above {name.__name__}.'
        )
    check_name(name, "a pool")
    if name == WAITING:
        raise WeirError(
            f"a pool cannot be called {WAITING}: that is the name of tokens that no pool holds "
            "yet. Use another name."
        )

    def register(kind: PoolClass) -> PoolClass:
        if not (isinstance(kind, type) and issubclass(kind, Pool)):
            raise WeirError(
                f"the pool {name} must be a subclass of weir.pools.Pool, got {quote(kind)}"
            )
        if inspect.isabstract(kind):
            missing = " and ".join(f"{method}()" for method in sorted(kind.__abstractmethods__))
            raise WeirError(
                f"the pool {name} cannot be used, because {kind.__name__} lacks {missing}. Define "
                "what is missing."
            )
        if not is_dataclass(kind):
            raise WeirError(
                f"the pool {name} is not a dataclass, so a policy cannot set its parameters. "
                f"Write @dataclass(frozen=True) between @pool and the class {kind.__name__}."
            )
        if issubclass(kind, SizedPool) and not fields(kind):
            raise WeirError(
                f"the pool {name} has no parameters, but the first parameter of a pool that "
                f"derives from {kind.__mro__[1].__name__} is its number of slots. Write n: int in "
                f"the class {kind.__name__}."
            )
        _check_declarations(name, kind)
        check_free(name, kind, POOLS, "a pool")
        kind.name = name
        if (after := getattr(kind, "__post_init__", None)) is not None:
            kind.__post_init__ = _naming_failures(after)
        POOLS[name] = check_arguments(kind, name)
        return kind

    return register


def _naming_failures(after: Callable[..., None]) -> Callable[..., None]:
    """Return `__post_init__` such that its errors name the pool."""

    @functools.wraps(after)
    def run(self: Pool, *args: Any) -> None:
        with name_failure(self, "__post_init__"):
            after(self, *args)

    return run


def _check_declarations(name: str, kind: type[Pool]) -> None:
    """Refuse an attribute such as `needs_mas` or `is_stochastc`, which begins as the declarations
    of `Pool` do or is spelled almost as one of them, and is none of them.
    """
    known = [key for key in vars(Pool) if key.startswith(NEEDS)]
    for base in kind.__mro__:
        for key in vars(base):
            if key.startswith(NEEDS) and key not in known:
                raise WeirError(
                    f"the pool {name} sets {key}, which weir does not know"
                    f"{suggest(key, known) or '.'} Use one of {', '.join(known)}, or a name that "
                    f"does not begin with {NEEDS}."
                )
            if near := _find_misspelt(kind, key, vars(base)[key]):
                raise WeirError(
                    f"the pool {name} sets {key}, which weir does not know, did you mean {near!r}? "
                    f"Write {near}, or use a name that is less similar."
                )


def _find_misspelt(kind: type[Pool], key: str, value: Any) -> str:
    """Return the declaration that a constant of a class almost has the name of; "" if none.

    A parameter and a private name are no declarations, and neither is a value of another type.
    """
    if key.startswith("_") or key in {field.name for field in fields(cast(Any, kind))}:
        return ""
    known = [name for name, made in vars(Pool).items() if isinstance(made, property)]
    if not isinstance(value, bool):
        known = ["tie_margin"] if issubclass(kind, Ranked) and fits(value, float) else []
    near = get_close_matches(key, known, 1, ALIKE)
    return near[0] if near and key not in known else ""


def check_name(name: Any, what: str) -> None:
    """Refuse a name that cannot be written in a policy. `what` is the kind of thing, such as "a
    pool".
    """
    if not isinstance(name, str) or WORD.fullmatch(name) is None:
        raise WeirError(
            f"{what} cannot be called {quote(name)}: a name in a policy consists of letters, "
            "digits and underscores, and does not begin with a digit. Use another name."
        )
    if name.lower() in CONSTANTS:
        raise WeirError(
            f"{what} cannot be called {name}, which is a value in policies. Use another name."
        )


def check_free(name: str, made: Any, known: Mapping[str, Any], what: str) -> None:
    """Refuse a name that is taken, unless by a class or function with the same module and name."""
    other = known.get(name, made)
    origin = f"{other.__module__}.{other.__qualname__}"
    if origin != f"{made.__module__}.{made.__qualname__}":
        raise WeirError(f"{what} called {name} already exists: {origin}. Use another name.")
