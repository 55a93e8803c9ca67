"""Re-computation as a policy: what only a stream can do, and a cache refuses.

`weir.stream.recomputation` does it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weir.errors import WeirError
from weir.policies.pipe import Pipe, Policy


@dataclass(frozen=True, repr=False)
class Recompute(Policy):
    """Sliding window with re-computation: keys and values of the window made anew for each token.

    For every new token the model reads the last `budget` tokens from scratch: the quality oracle of
    StreamingLLM (Xiao et al. 2024, Figure 1c), and as slow as that sounds.

    Attributes:
        budget: tokens of the window.
        sinks: how many of them are the first of the stream; the others are its last.
    """

    budget: int
    sinks: int = 0
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise WeirError(f"recompute reads at least 1 token, not {self.budget}")
        if not 0 <= self.sinks < self.budget:
            raise WeirError(
                f"recompute with a budget of {self.budget} has room for 0 to {self.budget - 1} "
                f"sinks, not {self.sinks}"
            )
        if not self.text:
            object.__setattr__(self, "text", self.stands_for)

    @property
    def stands_for(self) -> str:
        """Itself, with its size."""
        sinks = f", sinks={self.sinks}" if self.sinks else ""
        return f"recompute(budget={self.budget}{sinks})"

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Raise an error: nothing is cached.

        Raises:
            WeirError: always.
        """
        raise WeirError(
            "recompute reads the window anew for every token, which a cache cannot do; "
            "use weir.Stream or `weir stream`"
        )
