"""Which pipe, window and positions each layer of a model gets, and whether its slots fit."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from transformers import PreTrainedModel

from weir.cache.layer import LayerSpec
from weir.errors import WeirError, shorten
from weir.models import ModelSpec, OutputProjection, describe, free_memory, load_gates, window_of
from weir.policies import Pipe, Policy
from weir.pools import CounterRNG, Recent
from weir.slab import Heads, Slab, SlabSpec


@dataclass(frozen=True)
class LayerPlan:
    """One layer of a cache, and the sizes of its attention.

    Attributes:
        spec: the layer.
        heads: the heads in the model's configuration; if a model is spread over devices by heads,
            the device's share of them.
    """

    spec: LayerSpec
    heads: Heads

    @cached_property
    def slab(self) -> SlabSpec:
        """The buffers of the layer."""
        return self.spec.slab(self.heads)

    def of(self, slab: Slab | None) -> LayerPlan:
        """Copy the plan with the heads that `slab` was made for, if there is one."""
        heads = self.heads if slab is None else slab.heads(self.heads.group)
        return self if heads == self.heads else replace(self, heads=heads)


def pipes_of(policy: Policy, facts: ModelSpec) -> list[Pipe]:
    """Return the pipe of each layer, before layers with windows of their own are considered.

    In a model with full layers, sliding layers keep their window; the policy covers the full ones.
    """
    count = len(facts.layers)
    full = [index for index, layer in enumerate(facts.layers) if layer.positions.window is None]
    served = full or list(range(count))
    asked = [policy.for_layer(place, len(served)) for place in range(len(served))]
    return [asked[served.index(index) if index in served else 0] for index in range(count)]


def three_axes(plans: Sequence[LayerPlan]) -> bool:
    """Return whether tokens have places in time, height and width."""
    return any(plan.spec.three_axes for plan in plans)


def reads_twice(plans: Sequence[LayerPlan]) -> bool:
    """Return whether a pool of any layer has each chunk read a second time."""
    return any(plan.spec.pipe.needs_second_reading for plan in plans)


def reach_of(pipes: list[Pipe], chunk: int, *, rolling: bool) -> int | None:
    """Return the highest position that attention will see; None if there is no limit."""
    if not rolling or any(pipe.slots is None for pipe in pipes):
        return None
    return max(pipe.slots or 0 for pipe in pipes) + chunk


def plan_layers(
    facts: ModelSpec, pipes: list[Pipe], chunk: int, *, seed: int, rolling: bool
) -> list[LayerPlan]:
    """Plan every layer of a cache, given the pipe of each (`pipes_of`) and facts read for their
    reach.

    Raises WeirError if every layer slides over fewer tokens than the policy has slots, or the slots
    of a layer cannot have the policy's format.
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
        if own.needs_second_reading and own.slots_of(own.run) < chunk:
            raise WeirError(
                f"reconstruct judges the last {chunk} tokens once they are folded, so the pools in "
                f"front of it hold as many: write recent({chunk}) | reconstruct(...), or fold "
                "smaller chunks"
            )
        if own.format is not None:
            wrong = own.format.wrong(layer.heads.key_dim, layer.heads.value_dim)
            if wrong is not None:
                raise WeirError(f"layer {index} of this model has no such slots: {wrong}")
        plans.append(LayerPlan(spec, layer.heads))
    return plans


def with_gates(plans: list[LayerPlan], facts: ModelSpec) -> list[LayerPlan]:
    """Return the plans with the gates that their pools read; WeirError if a layer has none."""
    asked = [plan.spec.index for plan in plans if plan.spec.pipe.needs_gates]
    if not asked:
        return plans
    gates = load_gates(facts.decoder, facts.config)
    if not gates.keys() >= set(asked):
        raise WeirError(
            "the pool gated needs gates that were trained for this model as it is loaded here, and "
            "there are none: weir calibrate --gates --model MODEL --text FILE trains them"
        )
    return [
        replace(plan, spec=replace(plan.spec, gate=gates.get(plan.spec.index))) for plan in plans
    ]


def check_memory(
    plans: Sequence[LayerPlan], policy: Policy, batch: int, device: torch.device
) -> None:
    """Refuse slots of `batch` rows that exceed the free memory of a device (WeirError)."""
    if any(plan.spec.pipe.slots is None for plan in plans):
        return  # it grows without a limit
    needed = sum(plan.slab.nbytes(batch) for plan in plans)
    free = free_memory(device)
    if free is not None and needed > free:
        raise WeirError(
            f"the slots of {shorten(str(policy))} in {len(plans)} layers take {needed:,} bytes "
            f"for {batch} row{'s' * (batch > 1)}, and {free:,} are free on {device}; take a "
            "smaller budget or chunk, or fewer rows"
        )


PACKAGE = __name__.partition(".")[0]


def describe_window_excess(model: PreTrainedModel, policy: Policy, chunk: int) -> str | None:
    """Describe by how much a policy's slots and chunk exceed the model's window; None if they fit,
    or if the policy has no limit.
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
    """Warn if a policy exceeds the model's window (`describe_window_excess`), once per caller."""
    excess = describe_window_excess(model, policy, chunk)
    if excess is not None:
        warnings.warn(f"weir: {excess}", stacklevel=_callers())


def _callers() -> int:
    """Return the stack level of the first caller outside weir, for `warnings.warn`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _of_weir(frame.f_globals.get("__name__")):
        frame, level = frame.f_back, level + 1
    return level


def _of_weir(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == PACKAGE


MOST_KEPT = 2**25 - 2**16
"""Bytes of the tensor that `keep_freed_memory` frees, below glibc's limit with its overhead."""


@lru_cache
def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of up to `MOST_KEPT` bytes for reuse; acts once in a process.

    glibc raises its threshold when so large a tensor is freed; the tensor is never written, so it
    takes no memory. Up to twice as much freed memory may stay with the process.
    """
    torch.empty(MOST_KEPT, dtype=torch.uint8, device="cpu")
