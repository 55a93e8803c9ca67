"""Any policy whose middle is held in 8 bits or 4, and its older newest tokens too where asked.

The first tokens, the newest and what marks name stay exact, so that nothing is changed before a
token has entered the middle. Pools stay as they are: what changes is how their slots are written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weir.errors import WeirError
from weir.policies.checks import check_format
from weir.policies.pipe import Origin, Pipe, Policy
from weir.policies.recompute import Recompute
from weir.policies.registry import NAMED, PolicyCall
from weir.pools import Pool

EXACT = "exact"
"""What slots are called that are as the model computes."""


@dataclass(frozen=True, repr=False)
class Quantized(Policy):
    """A policy with quantized slots.

    Attributes:
        policy: who holds them.
        slots: how they are written, by the names of `slab.FORMATS`.
        newest: so many of the newest tokens stay exact, and older ones that pools like `recent`
            hold do not; None for all that such pools hold.
    """

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
            raise WeirError(self._nothing)
        if not self.text:
            object.__setattr__(self, "text", f"quantized({self.policy}{self._how})")

    @property
    def _how(self) -> str:
        newest = "" if self.newest is None else f", newest={self.newest}"
        return f", slots={self.slots}{newest}"

    @property
    def _nothing(self) -> str:
        """Why it has no slots to quantize."""
        if self.newest is not None:
            return (
                f"{self.policy} holds no tokens but the first and the newest {self.newest}, which "
                "stay exact; take a smaller newest"
            )
        return (
            f"all that {self.policy} holds are first and newest tokens, which stay exact; "
            f"quantized({self.policy}, newest=64) quantizes those older than the newest 64"
        )

    @property
    def stands_for(self) -> str:
        """Its pools, or itself around what is no pipe, the way it is written."""
        if isinstance(self.policy, Pipe):
            return self.pipes[0].stands_for
        return f"quantized({self.policy.stands_for}{self._how})"

    @property
    def brief(self) -> str:
        """With a short word for the policy, where that has one."""
        if self.policy.brief == self.policy.text:
            return self.text
        return f"{self.policy.brief}, quantized with {self._how.removeprefix(', ')}"

    @property
    def pipes(self) -> tuple[Pipe, ...]:
        """Those of the policy, and how their slots are written."""
        return tuple(map(self._quantized, self.policy.pipes))

    @property
    def origin(self) -> Origin | None:
        """Where the policy was measured."""
        return self.policy.origin

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """The layer's pipe, and how its slots are written.

        Raises:
            WeirError: it has no limit, or says by itself how its slots are written.
        """
        return self._quantized(self.policy.for_layer(layer, layers))

    def _quantized(self, pipe: Pipe) -> Pipe:
        if pipe.quantized:
            raise _says_itself(self.policy)
        if pipe.slots is None:
            raise WeirError(f"{self.policy} has no limit, and slots that are quantized have one")
        pools: list[Pool] = []
        formats: list[str] = []
        left = self.newest
        for place, pool in enumerate(pipe.pools):
            if place not in pipe.run:
                pools.append(pool)
                formats.append(
                    "" if pool.in_order or pool.needs_marks or pool.synthetic else self.slots
                )
                continue
            size = pool.slots() or 0
            exact = size if left is None else min(size, left)
            left = None if left is None else left - exact
            for part, form in ((exact, ""), (size - exact, self.slots)):
                if part:
                    pools.append(pool if part == size else pool.resized(part))
                    formats.append(form)
        return Pipe(tuple(pools), formats=tuple(formats))


def with_slots(policy: Policy, slots: str | None) -> Policy:
    """A policy with slots of a format; None for the policy as it is.

    A named policy that has a parameter for it, as `weir` has, is given the format there.

    Raises:
        WeirError: there is no such format, the policy has no slots that could be quantized, or it
            says by itself how they are, and not in the same word.
    """
    if slots is None or (isinstance(policy, Quantized) and policy.slots == slots):
        return policy
    if policy.called is not None and policy.called.given.get("slots") == slots:
        return policy
    # `quantized` has the parameter too, and no word for slots that are exact.
    around = isinstance(policy, Quantized) and slots == EXACT
    if policy.called is not None and policy.called.takes_slots and not around:
        given = {**policy.called.given, "slots": slots}
        made: Policy = NAMED[policy.called.name].make(**given)
        written = PolicyCall.by_name(policy.called.name, given)
        return made.as_written(str(written), written)
    if slots != EXACT:
        return Quantized(policy, slots)
    if not isinstance(policy, Recompute) and any(pipe.quantized for pipe in policy.pipes):
        raise _says_itself(policy)
    return policy


def _says_itself(policy: Policy) -> WeirError:
    return WeirError(
        f"{policy} says by itself how its slots are quantized; write another policy, or leave out "
        "slots= (--slots)"
    )
