"""What is said where a policy may hold more tokens at once than its model was made for.

It is no error: some models read a little further. Knows nothing of tensors.
"""

from __future__ import annotations

import sys
import warnings

from transformers import PreTrainedModel

from weir.cache.layers import pipes_of, reach_of
from weir.errors import WeirError
from weir.models import describe, window_of
from weir.policies import Policy

PACKAGE = __name__.partition(".")[0]


def beyond_window(model: PreTrainedModel, policy: Policy, chunk: int) -> str | None:
    """A sentence on a policy whose slots and chunk exceed the model's window; None where they fit.

    Positions are those in the cache. A policy without a limit is passed over: who takes one knows.

    Args:
        model: the model.
        policy: of a cache of it; one that caches nothing holds nothing.
        chunk: tokens between two folds.
    """
    window = window_of(model.config)
    try:
        pipes = pipes_of(policy, describe(model))
    except WeirError:
        return None
    most = reach_of(pipes, chunk, rolling=True)
    if window is None or most is None or most <= window:
        return None
    return (
        f"{policy.brief} and a chunk of {chunk:,} hold up to {most:,} tokens, and this model was "
        f"made for {window:,}: what it says beyond is worth little"
    )


def warn_of_window(model: PreTrainedModel, policy: Policy, chunk: int) -> None:
    """Warn of `beyond_window`, as from where weir was called: Python says it once a place."""
    told = beyond_window(model, policy, chunk)
    if told is not None:
        warnings.warn(f"weir: {told}", stacklevel=_callers())


def _callers() -> int:
    """How many calls up the first is that is not weir's, as `warnings.warn` counts them."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _of_weir(frame.f_globals.get("__name__")):
        frame, level = frame.f_back, level + 1
    return level


def _of_weir(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == PACKAGE
