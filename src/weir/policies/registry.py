"""Every policy that has a name, and how one gets its name. Knows nothing about what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weir.pools import Make, checked


@dataclass(frozen=True)
class Named:
    """A policy with a name.

    Attributes:
        make: from its parameters to a policy.
        paper: where it comes from.
        pipe: what it makes by default, as text; None if that is not said, or no pipe.
    """

    make: Callable[..., Any]
    paper: str
    pipe: str | None = None


NAMED: dict[str, Named] = {}
"""Every named policy."""


def named(paper: str, pipe: str | None = None) -> Callable[[Make], Make]:
    """Make a policy known under the name of the function that returns it.

    Args:
        paper: where it comes from.
        pipe: what it makes by default, for lists that cannot wait for PyTorch.
    """

    def register(make: Make) -> Make:
        careful = checked(make, make.__name__)
        NAMED[make.__name__] = Named(careful, paper, pipe)
        return careful

    return register
