"""Any policy, and beside it a conversation's beginning and the header of its running turn.

In front of a layer's pools comes one that keeps the stream's beginning, and behind those that hand
tokens on in order one for the header of the running turn. How much of either a row has, its marks
say (`weir.pools.Marks`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weir.errors import WeirError
from weir.policies.pipe import Origin, Pipe, Policy
from weir.pools import Beginning, Header

SHARE = 4
"""Of so many slots that a policy has, one more is for the beginning, where nobody says how many."""


@dataclass(frozen=True, repr=False)
class Pinned(Policy):
    """A policy whose layers have slots for a stream's beginning and for its turn's header as well.

    Attributes:
        policy: what holds the rest.
        n: slots of each layer for the beginning.
        header: slots of each layer for the header.
    """

    policy: Policy
    n: int = 64
    header: int = 16
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        self.pipes  # noqa: B018  (each has room for both pools, or says why not)
        if not self.text:
            object.__setattr__(
                self, "text", f"pinned({self.policy}, n={self.n}, header={self.header})"
            )

    @property
    def stands_for(self) -> str:
        """Its pools, or itself around what is no pipe, the way it is written."""
        if isinstance(self.policy, Pipe):
            return self.pipes[0].stands_for
        return f"pinned({self.policy.stands_for}, n={self.n}, header={self.header})"

    @property
    def brief(self) -> str:
        """With a short word for the policy, where that has one."""
        if self.policy.brief == self.policy.text:
            return self.text
        return f"{self.policy.brief}, pinned with n={self.n} and header={self.header}"

    @property
    def pipes(self) -> tuple[Pipe, ...]:
        """Those of the policy, each with two pools more."""
        return tuple(map(self._with_both, self.policy.pipes))

    @property
    def origin(self) -> Origin | None:
        """Where the policy was measured."""
        return self.policy.origin

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """The layer's pipe with two pools more.

        Raises:
            WeirError: it has such pools already, or no limit and so nothing to lose.
        """
        return self._with_both(self.policy.for_layer(layer, layers))

    def _with_both(self, pipe: Pipe) -> Pipe:
        if pipe.needs_marks:
            raise WeirError(f"{self.policy} keeps a stream's beginning already")
        if pipe.slots is None:
            raise WeirError(f"{self.policy} has no limit, so a beginning need not be pinned")
        pools = pipe.pools
        # Where tokens do not come in order any more, pools behind have to sort: so late as may be.
        place = next((at for at, pool in enumerate(pools) if not pool.in_order), len(pools))
        with_both = (Beginning(self.n), *pools[:place], Header(self.header), *pools[place:])
        formats = ("", *pipe.formats[:place], "", *pipe.formats[place:])
        return Pipe(with_both, formats=formats)


def with_pin(policy: Policy, slots: int | None = None) -> Policy:
    """A policy as conversations are served under it.

    Args:
        policy: what holds the rest.
        slots: of each layer for the beginning; 0 for the policy as it is. None for a quarter of
            what it has in a layer on average, unless it keeps beginnings by itself, or everything.

    Raises:
        WeirError: the policy cannot be pinned.
    """
    if slots is None:
        pipes = policy.pipes
        mean = sum(pipe.slots or 0 for pipe in pipes) // len(pipes)
        kept = any(pipe.needs_marks or pipe.slots is None for pipe in pipes)
        slots = 0 if kept else mean // SHARE
    return Pinned(policy, slots) if slots else policy
