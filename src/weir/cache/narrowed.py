"""A cache that for a while is some of its rows and no more.

Who serves many streams feeds a prompt to one row and a token to those that answer. A call over all
rows would compute for those that have nothing: so a call is made over rows that lie side by side,
in the slots they always have. Knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from weir.cache.layer import Layer
from weir.cache.rows import Rows
from weir.errors import WeirError


class Narrowable(Protocol):
    """The cache."""

    stack: list[Layer]
    rows: Rows
    broken: bool


@contextmanager
def narrowed(cache: Narrowable, start: int, stop: int) -> Iterator[None]:
    """Within, the rows `start` to `stop` are all that a cache has, numbered from 0.

    Nothing is copied: slots are views. What forwards do to the rows they have done to the cache
    afterwards, whether or not the last of them failed.

    Args:
        cache: past its first token, or made with `batch=n`.
        start, stop: rows that exist.

    Raises:
        WeirError: pools of the policy have no limit, so that slots may have to be made anew; or the
            cache is narrowed already.
    """
    if any(layer.spec.pipe.slots is None for layer in cache.stack):
        raise WeirError("this policy has no limit, so that its rows cannot be fed apart")
    if any(layer.narrowed for layer in cache.stack):
        raise WeirError("this cache is narrowed already")
    rows = cache.rows
    if start == 0 and stop == rows.batch:
        yield
        return
    for layer in cache.stack:
        layer.narrow(start, stop)
    cache.rows = rows.select(list(range(start, stop)))
    try:
        yield
    finally:
        for layer in cache.stack:
            layer.widen()
        inside, cache.rows = cache.rows, rows
        for row in range(start, stop):
            cache.rows = cache.rows.with_row(row, inside.select([row - start]))
