"""Finds the largest budget of a policy whose cache fits in a given memory.

Bytes are computed from the model's configuration (`weir.cache.size_of`), so no weights are needed.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from typing import Literal

from transformers import PreTrainedModel

from weir.cache import Positions, size_of
from weir.errors import PolicyError, WeirError, in_words
from weir.evals.notation import with_budget
from weir.models import sight_of
from weir.policies import Policy, Recompute, parse_policy

Counted = Literal["bytes", "kv"]
"""The bytes that count for a stream. `bytes` is everything that weir allocates for it. `kv` is the
keys and values of its slots alone, as papers count: without stored queries, positions, scores or
second copies of keys.
"""
MOST = 2**24
"""The largest budget in slots, whatever the memory."""
FEW = 32
"""If memory leaves a budget of fewer slots than this, weir warns."""
LEAST = 4096
"""Every policy can be made with some budget below this."""


def bytes_of(
    model: PreTrainedModel,
    policy: str | Policy,
    chunk: int = 64,
    positions: Positions = "rolling",
    counted: Counted = "bytes",
) -> int:
    """Return the bytes of one stream under a policy of fixed size, with a tail full of new
    tokens.
    """
    size = size_of(model, policy, chunk=chunk, positions=positions)
    return size.stream if counted == "bytes" else size.step_stream


def budget_in(
    model: PreTrainedModel,
    policy: str,
    memory: int,
    chunk: int = 64,
    most: int | None = None,
    positions: Positions = "rolling",
    counted: Counted = "bytes",
) -> int | None:
    """Find the largest budget of a named policy whose cache of one stream fits; None if none does.

    Args:
        model: the model; a model without weights on the device `meta` is enough.
        policy: a policy that takes a budget, written without one.
        memory, chunk: bytes for the cache, and tokens between two folds.
        most: upper bound of the budget; by default, `largest_budget` next to a chunk.
        positions: as for `StreamingCache`.
        counted: which bytes count.
    """
    most = largest_budget(model, chunk) if most is None else most

    def fits(budget: int) -> bool | None:
        """Whether a budget fits; None if the policy cannot be made so small."""
        try:
            sized = with_budget(policy, budget)
        except PolicyError:
            return None
        return bytes_of(model, sized, chunk, positions, counted) <= memory

    # From small to large, there are budgets too small for the policy, budgets that fit, and budgets
    # that do not.
    last = bisect_left(range(1, most + 1), True, key=lambda budget: fits(budget) is False)
    return last if last and fits(last) else None


def fit_to_memory(
    model: PreTrainedModel,
    policy: str,
    memory: int,
    chunk: int = 64,
    name: str = "",
    positions: Positions = "rolling",
    counted: Counted = "bytes",
) -> tuple[str, int]:
    """Return a policy with the largest budget whose cache of one stream fits, and that budget.

    The arguments are those of `budget_in` without `most`, and `name`, the model's name for error
    messages and warnings. If no budget fits, a WeirError is raised. If the budget is fewer than
    `FEW` slots, a warning is given.
    """
    budget = budget_in(model, policy, memory, chunk, None, positions, counted)
    if budget is None:
        sized, takes = smallest(model, policy, chunk, positions, counted)
        where = f"{policy} on {name}" if name else policy
        raise WeirError(
            f"{memory:,} bytes are too few for {where}: {sized} takes {takes:,} bytes with a "
            f"chunk of {chunk}. Use more memory or a smaller chunk, or leave out the policy."
        )
    if budget < FEW:
        warnings.warn(
            f"weir: {memory:,} bytes leave {policy} {f'on {name} ' if name else ''}only "
            f"{in_words(budget, 'slot')}, too few to judge it by. To give it at least {FEW} slots, "
            "use more memory or a smaller "
            f"chunk{_overhead(model, policy, budget, chunk, positions, counted)}",
            stacklevel=2,
        )
    return with_budget(policy, budget), budget


def check_fixed(
    model: PreTrainedModel,
    policy: str,
    memory: int,
    chunk: int = 64,
    name: str = "",
    positions: Positions = "rolling",
    counted: Counted = "bytes",
) -> None:
    """Refuse a policy with slots written in it if its cache of one stream does not fit.

    A policy without a limit, such as `dense`, is accepted, because others are compared with it.
    """
    read = parse_policy(policy)
    if isinstance(read, Recompute) or any(pipe.slots is None for pipe in read.pipes):
        return
    takes = bytes_of(model, read, chunk, positions, counted)
    if takes > memory:
        where = f"{policy} on {name}" if name else policy
        raise WeirError(
            f"{where} takes {takes:,} bytes with a chunk of {chunk}, more than the {memory:,} that "
            "every policy gets, and its slots are fixed in its text. Write fewer slots, use a "
            "policy that takes a budget, use more memory or a larger budget, or leave out the "
            "policy."
        )


def check_slots(policy: str, most: int) -> None:
    """Refuse a policy with slots written in it if some KV head has more than `most`.

    A policy without a limit is accepted, as in `check_fixed`.
    """
    read = parse_policy(policy)
    if isinstance(read, Recompute) or any(pipe.slots is None for pipe in read.pipes):
        return
    if (slots := max(pipe.slots or 0 for pipe in read.pipes)) > most:
        raise WeirError(
            f"{policy} has {slots:,} slots written in it, more than the {most:,} of the largest "
            "budget, so slots would not be equal. Write fewer slots, use a larger budget, or "
            "leave out the policy."
        )


def largest_budget(model: PreTrainedModel, beside: int) -> int:
    """Return the largest number of slots that a model can attend to in addition to `beside` others,
    at least 1.

    The limit is the model's window, or the layers' window if all of them slide over fewer tokens.
    If the model's configuration names no window, `MOST` is returned.
    """
    sight = sight_of(model)
    return MOST if sight is None else max(1, sight - beside)


def _overhead(
    model: PreTrainedModel,
    policy: str,
    budget: int,
    chunk: int,
    positions: Positions,
    counted: Counted,
) -> str:
    """Return a sentence about the bytes of a cache that are not keys and values of its slots; empty
    if these bytes do not count.
    """
    if counted == "kv":
        return ""
    size = size_of(model, with_budget(policy, budget), chunk=chunk, positions=positions)
    more = size.stream - size.step_stream
    return (
        f". {more:,} of the cache's {size.stream:,} bytes are not keys and values of slots, but "
        "other data such as queries, positions, scores or a second copy of keys. With --equal kv, "
        "only the keys and values of slots are counted"
    )


def smallest(
    model: PreTrainedModel,
    policy: str,
    chunk: int = 64,
    positions: Positions = "rolling",
    counted: Counted = "bytes",
) -> tuple[str, int]:
    """Return a policy with the smallest budget that it accepts, and the bytes of its cache."""
    for budget in range(1, LEAST):
        try:
            sized = with_budget(policy, budget)
        except PolicyError as error:
            refused = error
            continue
        return sized, bytes_of(model, sized, chunk, positions, counted)
    raise WeirError(f"{policy} cannot be made with any budget below {LEAST:,}: {refused}")
