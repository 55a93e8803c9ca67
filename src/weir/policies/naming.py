"""How a policy gets a name, and what is refused one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

from weir.errors import WeirError, quote
from weir.policies.pipe import Policy
from weir.policies.registry import NAMED, NamedPolicy, PolicyCall
from weir.pools import Make, check_arguments, check_free, check_name


def named(paper: str, pipe: str | None = None) -> Callable[[Make], Make]:
    """Make a policy known under the name of the function that returns it.

    The function may be defined again, as when a cell of a notebook is run twice. What it returns
    remembers how it was called (`Policy.called`).

    Args:
        paper: where the policy comes from.
        pipe: what it makes by default, for lists that cannot wait for PyTorch.

    Raises:
        WeirError: what is named is no function, or its name cannot be written in a policy or is
            another policy's.
    """

    def register(make: Make) -> Make:
        if not inspect.isfunction(make):
            raise WeirError(f"a named policy is a function that returns one, not {quote(make)}")
        name = make.__name__
        check_name(name, "a policy")
        check_free(name, make, {known: it.make for known, it in NAMED.items()}, "a policy")
        careful = check_arguments(make, name)
        signature = inspect.signature(make)

        @functools.wraps(make)
        def makes(*args: Any, **kwargs: Any) -> Policy:
            made = careful(*args, **kwargs)
            if not isinstance(made, Policy):
                raise WeirError(
                    f"{name} is known as a policy and returned {quote(made)}; it has to return a "
                    "Policy, as in Pipe((Sink(4), Recent(252)))"
                )
            called = PolicyCall.by_name(name, signature.bind(*args, **kwargs).arguments)
            return made.as_written(made.text, called)

        NAMED[name] = NamedPolicy(makes, paper, pipe)
        return cast(Make, makes)

    return register
