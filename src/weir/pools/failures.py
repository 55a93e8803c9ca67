"""Errors in methods of pools that users wrote, and the checks of what these methods return."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from inspect import isfunction
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, cast

from torch import OutOfMemoryError, Tensor

from weir.errors import WeirError, first_line, quote
from weir.pools.base import Pool
from weir.pools.observed_attention import UndeclaredError
from weir.pools.parameters import Natural, fits
from weir.slab import Slots

_DECLARED = {
    "mass": ("slots.mass", "needs_mass = True"),
    "queries": ("fold.queries", "needs_queries = 16, or another number,"),
    "gate": ("fold.read.gate", "needs_gates = True"),
    "kept": ("fold.kept", "needs_marks = True"),
    "turn": ("fold.turn", "needs_marks = True"),
    "beginning": ("fold.beginning", "needs_marks = True"),
}
"""Attributes that are None unless a pool declares that it reads them: the attribute as code writes
it, and what to set in the class.
"""


def is_own(kind: type | Callable[..., Any]) -> bool:
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
    except (MemoryError, OutOfMemoryError):
        raise
    except Exception as error:
        named = isinstance(error, WeirError) and not isinstance(error, UndeclaredError)
        if named or (users := _find_users(pool)) is None:
            raise
        modules = {kind.__module__ for kind in type(users).__mro__ if not is_own(kind)}
        frames = _frames_of(error, modules)
        where = ""
        if frames:
            method, (last, line) = frames[0][0].f_code.co_name, frames[-1]
            where = _locate(last.f_code, line)
        elif (code := _find_refusing(users, error, modules)) is not None:
            method, where = code.co_name, _locate(code, code.co_firstlineno)
        call = "" if isinstance(getattr(type(users), method, None), property) else "()"
        if isinstance(error, UndeclaredError):
            what = str(error)
        else:
            advice = _advise(users, error, [frame for frame, _ in frames])
            what = f"{_describe_error(error)} {advice}"
        raise WeirError(f"the pool {users.name} failed in {method}{call}{where}: {what}") from error


@contextmanager
def name_failed_policy(make: Callable[..., Any]) -> Iterator[None]:
    """Raise a WeirError if the function of a named policy that a user wrote fails, as
    `name_failure` does for a pool.
    """
    try:
        yield
    except (WeirError, MemoryError, OutOfMemoryError):
        raise
    except Exception as error:
        # Without frames, the function was called with arguments that it does not have.
        frames = _frames_of(error, {make.__module__})
        if is_own(make) or not frames:
            raise
        last, line = frames[-1]
        raise WeirError(
            f"the policy function {make.__name__}() failed{_locate(last.f_code, line)}: "
            f"{_describe_error(error)} Change the function's code."
        ) from error


def _describe_error(error: Exception) -> str:
    """Return the type of an error and the first line of its message, as a sentence."""
    return f"{type(error).__name__}: {first_line(error).rstrip('.')}."


def _frames_of(error: Exception, modules: set[str]) -> list[tuple[FrameType, int]]:
    """Return the frames of an error that run code of these modules, each with its line."""
    return [
        (frame, line)
        for frame, line in walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") in modules
    ]


def _find_refusing(pool: Pool, error: Exception, modules: set[str]) -> CodeType | None:
    """Return the code of a user's method if the error says that it was called with arguments that
    it does not have. No frame of the method exists then.
    """
    found = re.search(r"(\w+)\(\) (takes|missing|got)", str(error))
    function = getattr(type(pool), found[1], None) if found and type(error) is TypeError else None
    return function.__code__ if isfunction(function) and function.__module__ in modules else None


def _locate(code: CodeType, line: int) -> str:
    """Return the file of some code and the line, in parentheses."""
    return f" ({os.path.basename(code.co_filename)}, line {line})"


def check_declared(pool: Pool) -> None:
    """Refuse values of a pool's declarations, such as `needs_queries`, that have a wrong type."""
    if (users := _find_users(pool)) is None:
        return
    for name, kind in vars(Pool).items():
        if not isinstance(kind, property):
            continue
        with name_failure(users, name):
            value = getattr(users, name)
        wanted = Natural if name == "needs_queries" else bool
        if not fits(value, wanted):
            words = "a whole number of at least 0" if wanted is Natural else "True or False"
            raise WeirError(
                f"{name} of the pool {users.name} must be {words}, got {quote(value)}. "
                "Change it in the pool's class."
            )


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
