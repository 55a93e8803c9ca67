"""A policy for each layer, as it was written or measured: `[h2o(96), h2o(160)]`."""

from __future__ import annotations

from dataclasses import dataclass, field

from weir.errors import LONGEST, WeirError, quote
from weir.policies.pipe import Origin, Pipe, Policy


@dataclass(frozen=True, repr=False)
class Layered(Policy):
    """A policy for each layer.

    Layers that slide over a window of their own keep it under any policy, and are not counted.

    Attributes:
        policies: the policy of each layer, bottom up.
        origin: where they were measured; None for those that were written by hand. It is no part
            of what the policy is: its text can be read on any model of so many layers.
    """

    policies: tuple[Policy, ...]
    text: str = field(default="", compare=False)
    origin: Origin | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.policies or not all(isinstance(policy, Policy) for policy in self.policies):
            raise WeirError(
                "a policy for each layer is a list of one policy or more, [h2o(96), h2o(160)]"
            )
        self.pipes  # noqa: B018  (raises where a policy has no pipe for its layer)
        if not self.text:
            object.__setattr__(self, "text", f"[{', '.join(map(str, self.policies))}]")

    @property
    def stands_for(self) -> str:
        """The same list in pools."""
        return f"[{', '.join(policy.stands_for for policy in self.policies)}]"

    @property
    def brief(self) -> str:
        """The text; of a long list the number of layers, and their slots."""
        if len(self.text) <= LONGEST or len(self.policies) == 1:
            return self.text
        sizes = sorted({pipe.slots for pipe in self.pipes if pipe.slots is not None})
        some = " to ".join(f"{slots:,}" for slots in dict.fromkeys(sizes[:1] + sizes[-1:]))
        return f"a policy for each of {len(self.policies)} layers, {some or 'any number of'} slots"

    @property
    def pipes(self) -> tuple[Pipe, ...]:
        """The pipe of every layer."""
        count = len(self.policies)
        return tuple(policy.for_layer(layer, count) for layer, policy in enumerate(self.policies))

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Return the pipe of a layer.

        Raises:
            WeirError: the model has another number of layers.
        """
        if layers != len(self.policies):
            source, told = quote(self.text), ""
            if self.origin is not None:
                source, told = self.origin.file, self.origin.told
            raise WeirError(
                f"{source} has policies for {len(self.policies)} layers, and this model has "
                f"{layers} that a policy holds{told}"
            )
        return self.policies[layer].for_layer(layer, layers)
