"""Which pipe, window and positions each layer of a model gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weir.cache.layer import LayerSpec
from weir.errors import WeirError
from weir.models import ModelSpec, OutputProjection
from weir.policies import Pipe, Policy
from weir.pools import CounterRNG, Recent
from weir.slab import Heads, Slab, SlabSpec


@dataclass(frozen=True)
class LayerPlan:
    """A layer of a cache, and the sizes of its attention.

    Attributes:
        spec: the layer.
        heads: as the model's configuration says; of a model spread over devices by heads, a device
            has its share of them.
    """

    spec: LayerSpec
    heads: Heads

    @cached_property
    def slab(self) -> SlabSpec:
        """Its buffers."""
        return self.spec.slab(self.heads)

    def of(self, slab: Slab | None) -> LayerPlan:
        """The plan with the heads that the slots were made for, if there are slots."""
        heads = self.heads if slab is None else slab.heads(self.heads.group)
        return self if heads == self.heads else replace(self, heads=heads)


def pipes_of(policy: Policy, facts: ModelSpec) -> list[Pipe]:
    """The pipe of each layer, before a layer's own window is looked at.

    Sliding layers beside full ones keep their own window; the policy shares out the others.

    Raises:
        WeirError: the policy has no pipe for a layer.
    """
    count = len(facts.layers)
    full = [index for index, layer in enumerate(facts.layers) if layer.positions.window is None]
    served = full or list(range(count))
    asked = [policy.for_layer(place, len(served)) for place in range(len(served))]
    return [asked[served.index(index) if index in served else 0] for index in range(count)]


def three_axes(plans: Sequence[LayerPlan]) -> bool:
    """Whether tokens stand at places in time, height and width."""
    return any(plan.spec.three_axes for plan in plans)


def reach_of(pipes: list[Pipe], chunk: int, *, rolling: bool) -> int | None:
    """The highest position that attention will meet; None where there is no highest."""
    if not rolling or any(pipe.slots is None for pipe in pipes):
        return None
    return max(pipe.slots or 0 for pipe in pipes) + chunk


def plan_layers(
    facts: ModelSpec, pipes: list[Pipe], chunk: int, *, seed: int, rolling: bool
) -> list[LayerPlan]:
    """Every layer of a cache.

    Args:
        facts: of the model, read for the reach of these pipes.
        pipes: of each layer (`pipes_of`).
        chunk: tokens between two folds.
        seed: of all draws.
        rolling: positions inside the cache, not in the stream.

    Raises:
        WeirError: every layer slides over fewer tokens than the policy has slots, or the slots of
            a layer cannot be quantized so.
    """
    limited = all(pipe.slots is not None for pipe in pipes)
    everywhere = facts.sliding is not None and limited
    most = max(pipe.slots or 0 for pipe in pipes) + chunk
    if everywhere and facts.sliding is not None and most > facts.sliding:
        room = facts.sliding - chunk
        raise WeirError(
            f"every layer of this model sees only {facts.sliding} tokens, fewer than the "
            f"policy's {most - chunk} slots and a chunk of {chunk}; take a smaller budget"
            + (f", {room} slots at most" if room > 0 else " and a smaller chunk")
        )
    plans = []
    for index, (layer, pipe) in enumerate(zip(facts.layers, pipes, strict=True)):
        window = None if everywhere else layer.positions.window
        own = pipe if window is None else Pipe((Recent(window),))
        positions = replace(layer.positions, window=window, rolling=rolling)
        draws = CounterRNG(seed, index, first=layer.first_head)
        output = OutputProjection(facts.attentions[index], layer.heads)
        spec = LayerSpec(own, positions, chunk, draws, index, len(pipes), output)
        if own.format is not None:
            wrong = own.format.wrong(layer.heads.key_dim, layer.heads.value_dim)
            if wrong is not None:
                raise WeirError(f"layer {index} of this model has no such slots: {wrong}")
        plans.append(LayerPlan(spec, layer.heads))
    return plans
