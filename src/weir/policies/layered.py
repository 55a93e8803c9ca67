"""A policy for each layer of a model, or for each KV head of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from weir.errors import LONGEST, WeirError, in_words, quote
from weir.policies.pipe import Origin, Pipe, Policy


@dataclass(frozen=True, repr=False)
class Layered(Policy):
    """A policy for each layer.

    If only some layers of a model have a sliding window, these keep it under any policy, and are
    not counted.

    Attributes:
        policies: the policy of each layer, from the bottom up.
        origin: where the policies were measured; None if they were written by hand. The origin is
            not part of the policy: the text works for any model with this many layers.
        name: the call that people know the policy by, such as `weir(budget=1024)`, if its budget
            was divided among the layers; empty for a list that was written or measured.
    """

    policies: tuple[Policy, ...]
    text: str = field(default="", compare=False)
    origin: Origin | None = field(default=None, compare=False)
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.policies or not all(isinstance(policy, Policy) for policy in self.policies):
            raise WeirError(
                "a policy for each layer must be a list of at least one policy, as in [h2o(96), "
                "h2o(160)]"
            )
        self.pipes  # noqa: B018  (raises where a policy has no pipe for its layer)
        if not self.text:
            object.__setattr__(self, "text", f"[{', '.join(map(str, self.policies))}]")

    @property
    def stands_for(self) -> str:
        """The same list, written as pools."""
        return f"[{', '.join(policy.stands_for for policy in self.policies)}]"

    @property
    def brief(self) -> str:
        """The name or the text, or for a long list the number of layers and their slots."""
        if self.name:
            return self.name
        if len(self.text) <= LONGEST or len(self.policies) == 1:
            return self.text
        sizes = sorted({pipe.slots for pipe in self.pipes if pipe.slots is not None})
        some = " to ".join(f"{slots:,}" for slots in dict.fromkeys(sizes[:1] + sizes[-1:]))
        by_head = any(isinstance(policy, ByHead) for policy in self.policies)
        each = "policies for the KV heads of" if by_head else "a policy for each of"
        slots = "1 slot" if some == "1" else f"{some or 'any number of'} slots"
        return f"{each} {in_words(len(self.policies), 'layer')}, {slots}"

    @property
    def pipes(self) -> tuple[Pipe, ...]:
        """The pipe of every layer, or of every KV head in layers with a pipe for each head."""
        count = len(self.policies)
        each = (
            policy.for_heads(layer, count, len(policy.policies))
            if isinstance(policy, ByHead)
            else (policy.for_layer(layer, count),)
            for layer, policy in enumerate(self.policies)
        )
        return tuple(pipe for pipes in each for pipe in pipes)

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Return the pipe of a layer. Refuse a model with another number of layers."""
        return self._of(layer, layers).for_layer(layer, layers)

    def for_heads(self, layer: int, layers: int, heads: int) -> tuple[Pipe, ...]:
        """Return the pipes of a layer's KV heads. Refuse another number of layers or heads."""
        return self._of(layer, layers).for_heads(layer, layers, heads)

    def _of(self, layer: int, layers: int) -> Policy:
        if layers != len(self.policies):
            source, told = quote(self.text), ""
            if self.origin is not None:
                source, told = self.origin.file, self.origin.told
            raise WeirError(
                f"{source} has policies for {in_words(len(self.policies), 'layer')}, but this "
                f"model has {in_words(layers, 'layer')} with a policy{told}"
            )
        return self.policies[layer]


class OtherHeads(WeirError):
    """A layer has another number of KV heads than there are policies.

    The code that catches this error knows which layer it is, and adds its number to the message.
    """


class ByHead(Layered):
    """A policy for each KV head of one layer, in the list of a `Layered`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(isinstance(policy, Layered) for policy in self.policies):
            raise WeirError(
                "lists of policies can be nested at most two deep: a list for layers, with lists "
                "for KV heads"
            )

    @property
    def pipes(self) -> tuple[Pipe, ...]:
        """The pipe of every KV head, as in a model of one layer; a `Layered` knows the layer."""
        return self.for_heads(0, 1, len(self.policies))

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Refuse to return one pipe for the whole layer."""
        raise WeirError(
            f"{quote(self.text)} in a list is for the KV heads of a layer, but one policy for the "
            "whole layer is needed here"
        )

    def for_heads(self, layer: int, layers: int, heads: int) -> tuple[Pipe, ...]:
        """Return the pipes. Refuse another number of KV heads."""
        if heads != len(self.policies):
            raise OtherHeads(
                f"{quote(self.text)} has policies for {len(self.policies)} KV heads, but the "
                f"layer has {heads}"
            )
        return tuple(policy.for_layer(layer, layers) for policy in self.policies)
