"""What is wrong with an option and can be said before PyTorch is imported, which takes seconds.

Only what is certain: everything else is found when it is read, where it belongs.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from weir.cli.uses import POLICIES
from weir.errors import PolicyError, WeirError, find_nearest, quote

_FIRST = re.compile(r"\s*([^\W\d]\w*)\s*(?=[(|:]|$)")
"""The name that a policy begins with; a file's name, or a list of policies, begins otherwise."""


def known_policy(text: str | None) -> str | None:
    """A policy as it was given, if one or a pool is called as it begins.

    Raises:
        PolicyError: none is, as `weir.policy` raises it.
    """
    first = _FIRST.match(text or "")
    if text is None or first is None or any(first[1] in group for group in POLICIES.values()):
        return text
    from weir.cli.catalog import has_plugins, read_policies, read_pools

    if has_plugins():  # whose names nobody knows before they are imported
        return text
    names = [entry.name for entry in (*read_pools(), *read_policies())]
    if first[1] in names:
        return text
    near = find_nearest(first[1], names)
    hint = "" if near is None else f"; did you mean {near!r}?"
    raise PolicyError(f"no pool or policy is called {quote(first[1])}{hint}", text, first.start(1))


def known_model(name: str) -> str:
    """A model's name as it was given, if it is not that of a folder that is missing.

    Raises:
        WeirError: it is, as `weir.load` raises it.
    """
    with suppress(RuntimeError):  # of a home that nobody has
        if name and (not name.startswith((".", "/", "~")) or Path(name).expanduser().exists()):
            return name
    raise WeirError(f"there is no model folder {name!r}")
