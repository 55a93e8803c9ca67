"""Any policy, and beside it a conversation's beginning and the header of its running turn.

In front of a layer's pools comes one that keeps the stream's beginning, and behind those that pass
tokens on in order one for the header of the running turn. How much of either a row uses, its marks
say (`weir.pools.Marks`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weir.errors import WeirError
from weir.policies.library import streaming_llm
from weir.policies.pipe import Pipe, Policy, PolicyWrapper
from weir.policies.registry import named
from weir.pools import Beginning, Header

SHARE = 4
"""One slot for the beginning for so many of the policy, where no number is given."""


@dataclass(frozen=True, repr=False)
class Pinned(PolicyWrapper):
    """A policy with more slots in each layer, for the stream's beginning and its turn's header.

    Attributes:
        policy: the policy that holds everything else.
        n: slots of each layer for the beginning.
        header: slots of each layer for the header.
    """

    verb = "pinned"

    policy: Policy
    n: int = 64
    header: int = 16
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        self.pipes  # noqa: B018  (raises where a pipe has no room for both pools)
        self._write()

    @property
    def options(self) -> str:
        """Both numbers of slots."""
        return f"n={self.n}, header={self.header}"

    def rewrite(self, pipe: Pipe) -> Pipe:
        """Add the two pools.

        Raises:
            WeirError: it has such pools already, or no limit and so nothing to lose.
        """
        if pipe.needs_marks:
            raise WeirError(f"{self.policy} keeps a stream's beginning already")
        if pipe.slots is None:
            raise WeirError(f"{self.policy} has no limit, so a beginning need not be pinned")
        pools = pipe.pools
        # As late as possible: behind the header tokens are out of order, and pools have to sort.
        place = next((at for at, pool in enumerate(pools) if not pool.in_order), len(pools))
        with_both = (Beginning(self.n), *pools[:place], Header(self.header), *pools[place:])
        formats = ("", *pipe.formats[:place], "", *pipe.formats[place:])
        return Pipe(with_both, formats=formats)


@named("any policy, and what a conversation must not lose beside it")
def pinned(policy: Policy | None = None, n: int = 64, header: int = 16) -> Policy:
    """A policy, and beside it the beginning of the stream and the header of the running turn.

    `n` slots are for the beginning and `header` for the control tokens in front of an answer, in
    addition to those of the policy. How many of them a row uses, its marks say; a row without marks
    has `n` more sinks.

    Args:
        policy: the policy that holds everything else; none for StreamingLLM.
        n: slots for the beginning of the stream.
        header: slots for the control tokens in front of an answer.
    """
    return Pinned(streaming_llm() if policy is None else policy, n, header)


def with_pin(policy: Policy, slots: int | None = None) -> Policy:
    """Pin a policy for serving conversations.

    Args:
        policy: the policy that holds everything else.
        slots: slots of each layer for the beginning; 0 leaves the policy as it is. None for a
            quarter of its slots in a layer on average, unless it keeps beginnings by itself, or
            everything.

    Raises:
        WeirError: the policy cannot be pinned.
    """
    if slots is None:
        pipes = policy.pipes
        mean = sum(pipe.slots or 0 for pipe in pipes) // len(pipes)
        kept = any(pipe.needs_marks or pipe.slots is None for pipe in pipes)
        slots = 0 if kept else mean // SHARE
    return Pinned(policy, slots) if slots else policy
