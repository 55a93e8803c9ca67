"""A policy whose slots are quantized, but for the first and the newest tokens.

Which those are, the pools say. A pool that keeps the first tokens, or those that marks name
(`sink`, `beginning`, `header`), keeps them as the model computes; so does one whose slots change at
every fold. Pools of the newest tokens (`recent`) stay exact too, or only the newest of theirs; all
others are quantized.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weir.errors import WeirError
from weir.policies.checks import check_format
from weir.policies.library import kcenter
from weir.policies.pipe import Pipe, Policy, PolicyWrapper
from weir.policies.recompute import Recompute
from weir.policies.registry import NAMED, PolicyCall, named
from weir.pools import Pool

EXACT = "exact"
"""The name of slots that are as the model computes."""


@dataclass(frozen=True, repr=False)
class Quantized(PolicyWrapper):
    """A policy with quantized slots.

    Attributes:
        policy: the policy that holds the tokens.
        slots: the format of its slots, by the names of `slab.FORMATS`.
        newest: how many of the newest tokens stay exact, of those that pools like `recent` hold;
            None for all of them.
    """

    verb = "quantized"

    policy: Policy
    slots: str = "int8"
    newest: int | None = None
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_format(self.slots)
        if self.newest is not None and self.newest < 0:
            raise WeirError(f"newest tokens that stay exact are 0 or more, not {self.newest}")
        if isinstance(self.policy, Recompute):
            raise WeirError("recompute caches nothing, so there are no slots to quantize")
        if not any(pipe.quantized for pipe in self.pipes):
            if self.newest is not None:
                raise WeirError(
                    f"{self.policy} holds no tokens but the first and the newest {self.newest}, "
                    "which stay exact; take a smaller newest"
                )
            raise WeirError(
                f"all that {self.policy} holds are first and newest tokens, which stay exact; "
                f"quantized({self.policy}, newest=64) quantizes those older than the newest 64"
            )
        self._write()

    @property
    def options(self) -> str:
        """The format, and how many tokens stay exact."""
        newest = "" if self.newest is None else f", newest={self.newest}"
        return f"slots={self.slots}{newest}"

    def rewrite(self, pipe: Pipe) -> Pipe:
        """Give each pool its format; a pool of the newest tokens may become two.

        Raises:
            WeirError: the pipe has no limit, or formats of its own.
        """
        if pipe.quantized:
            raise _has_own_format(self.policy)
        if pipe.slots is None:
            raise WeirError(f"{self.policy} has no limit, and slots that are quantized have one")
        pools: list[Pool] = []
        formats: list[str] = []
        left = self.newest
        for place, pool in enumerate(pipe.pools):
            if place not in pipe.run:
                exact = pool.in_order or pool.needs_marks or pool.synthetic
                pools.append(pool)
                formats.append("" if exact else self.slots)
                continue
            size = pool.slots() or 0
            newest = size if left is None else min(size, left)
            left = None if left is None else left - newest
            for part, name in ((newest, ""), (size - newest, self.slots)):
                if part:
                    pools.append(pool if part == size else pool.resized(part))
                    formats.append(name)
        return Pipe(tuple(pools), formats=tuple(formats))


@named("any policy, its middle in 8 bits or 4")
def quantized(
    policy: Policy | None = None, slots: str = "int8", newest: int | None = None
) -> Policy:
    """A policy whose slots are quantized, but for first and newest tokens.

    Args:
        policy: the policy that holds the tokens; none for kcenter.
        slots: the format of the slots: int8, k8v4 or fp8.
        newest: how many of the newest tokens stay exact; none for all that the policy keeps as
            such.
    """
    return Quantized(kcenter() if policy is None else policy, slots, newest)


def with_slots(policy: Policy, slots: str | None) -> Policy:
    """Give a policy slots of a format; None leaves it as it is.

    A named policy that has a parameter for the format, as `weir` has, is given it there.

    Raises:
        WeirError: there is no such format, the policy has no slots that could be quantized, or it
            has another format already.
    """
    if slots is None or (isinstance(policy, Quantized) and policy.slots == slots):
        return policy
    called = policy.called
    if called is not None and called.given.get("slots") == slots:
        return policy
    # `quantized` has the parameter too, but no word for exact slots.
    around = isinstance(policy, Quantized) and slots == EXACT
    if called is not None and called.takes_slots and not around:
        given = {**called.given, "slots": slots}
        made: Policy = NAMED[called.name].make(**given)
        call = PolicyCall.by_name(called.name, given)
        return made.as_written(str(call), call)
    if slots != EXACT:
        return Quantized(policy, slots)
    if not isinstance(policy, Recompute) and any(pipe.quantized for pipe in policy.pipes):
        raise _has_own_format(policy)
    return policy


def _has_own_format(policy: Policy) -> WeirError:
    return WeirError(
        f"{policy} says by itself how its slots are quantized; write another policy, or leave out "
        "slots= (--slots)"
    )
