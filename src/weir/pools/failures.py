"""Errors in methods of pools that users wrote, and the checks of what these methods return."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from traceback import walk_tb
from types import FrameType
from typing import Any, cast

from torch import OutOfMemoryError, Tensor

from weir.errors import WeirError, first_line, quote
from weir.pools.base import Pool
from weir.slab import Slots

_DECLARED = {
    "mass": ("slots.mass", "needs_mass = True"),
    "queries": ("fold.queries", "needs_queries = 16, or another number,"),
    "kept": ("fold.kept", "needs_marks = True"),
    "turn": ("fold.turn", "needs_marks = True"),
    "beginning": ("fold.beginning", "needs_marks = True"),
}
"""Attributes that are None unless a pool declares that it reads them: the attribute as code writes
it, and what to set in the class.
"""


def is_own(kind: type) -> bool:
    """Return whether a class or function belongs to weir, so that weir's tests check it."""
    return kind.__module__.partition(".")[0] == "weir"


@contextmanager
def name_failure(pool: Pool, method: str) -> Iterator[None]:
    """Raise a WeirError if a method of a pool that a user wrote fails. It names the pool, the
    method and the line, and its cause is the error.

    An error in a pool of weir's is not changed, and neither are errors that are about memory and
    not about the pool. A `WeirError` already says what is wrong.
    """
    try:
        yield
    except (WeirError, MemoryError, OutOfMemoryError):
        raise
    except Exception as error:
        if (users := _find_users(pool)) is None:
            raise
        modules = {kind.__module__ for kind in type(users).__mro__ if not is_own(kind)}
        frames = [
            (frame, line)
            for frame, line in walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__") in modules
        ]
        where = ""
        if frames:
            method, (last, line) = frames[0][0].f_code.co_name, frames[-1]
            where = f" ({os.path.basename(last.f_code.co_filename)}, line {line})"
        what = f"{type(error).__name__}: {first_line(error)}"
        raise WeirError(
            f"the pool {users.name} failed in {method}(){where}: {what.rstrip('.')}. "
            f"{_advise(users, error, [frame for frame, _ in frames])}"
        ) from error


def _find_users(pool: Pool) -> Pool | None:
    """Return the pool, or the first of its inner pools, that a user wrote. None if weir has all."""
    if not is_own(type(pool)):
        return pool
    inner = (getattr(pool, f.name) for f in fields(cast(Any, pool)))
    found = (_find_users(one) for one in inner if isinstance(one, Pool))
    return next((one for one in found if one is not None), None)


def _advise(pool: Pool, error: Exception, frames: list[FrameType]) -> str:
    """Return what to change in the pool: a missing declaration if it reads what is then None."""
    if isinstance(error, AssertionError) or "NoneType" in str(error):
        for name in (name for frame in reversed(frames) for name in frame.f_code.co_names):
            read, setting = _DECLARED.get(name, ("", ""))
            if read and not getattr(pool, setting.split()[0]):
                return (
                    f"The code reads {read}, which is None unless the pool declares it. Set "
                    f"{setting} in the class."
                )
    return "Change the pool's code."


def make_state(pool: Pool, like: Slots) -> dict[str, Tensor]:
    """Return the state of a pool before the first token (`Pool.state`), once it is checked.

    Raises:
        WeirError: the state is not a dictionary of tensors [batch, kv_heads, ...].
    """
    with name_failure(pool, "state"):
        state: Any = pool.state(like)
    if not isinstance(state, dict):
        raise WeirError(
            f"state() of the pool {pool.name} must return a dictionary of tensors, got "
            f"{_describe(state)}. Return, for example, {{'came': like.a.new_zeros(…)}}."
        )
    batch, heads = like.position.shape[:2]
    for name, found in state.items():
        if not isinstance(name, str) or not isinstance(found, Tensor):
            raise WeirError(
                f"state() of the pool {pool.name} must return tensors by name, got "
                f"{_describe(found)} for {quote(name)}. Return a tensor for each name."
            )
        if tuple(found.shape[:2]) != (batch, heads):
            raise WeirError(
                f"the state {name} of the pool {pool.name} must have the shape [batch, kv_heads, "
                f"...], here [{batch}, {heads}, ...], got {list(found.shape)}. Begin its shape "
                "with like.position.shape[:2] in state()."
            )
    return state


def _describe(value: object) -> str:
    """Return the name of a value's type; None for None."""
    return "None" if value is None else type(value).__name__
