"""Plans of a cache's layers: the pipe, window and positions of each, and checks that they fit."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from transformers import PreTrainedModel

from weir.cache.layer import LayerSpec
from weir.errors import WeirError, in_words, shorten
from weir.models import (
    ModelSpec,
    OutputProjection,
    describe,
    free_memory,
    frequencies_change_at,
    load_gates,
    window_of,
)
from weir.policies import OtherHeads, Pipe, Policy
from weir.pools import CounterRNG, Recent
from weir.slab import Heads, Slab, SlabSpec


@dataclass(frozen=True)
class LayerPlan:
    """One layer of a cache, or a part of one for some of its KV heads.

    Attributes:
        spec: the layer.
        heads: how many heads the layer has, and the sizes of their keys and values. If the heads of
            a model are distributed over devices, only those of this device count.
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


def _pipes_of(policy: Policy, facts: ModelSpec) -> list[tuple[Pipe, ...]]:
    """Return the pipes of each layer's KV heads under a policy.

    If only some layers have a sliding window, the policy applies to the others. The layers with a
    window then get the pipes of the first other layer here, and `plan_layers` replaces them.
    """
    count = len(facts.layers)
    full = [index for index, layer in enumerate(facts.layers) if layer.positions.window is None]
    served = full or list(range(count))
    asked = {}
    for place, index in enumerate(served):
        kv_heads = facts.layers[index].heads.kv_heads
        try:
            asked[index] = policy.for_heads(place, len(served), kv_heads)
        except OtherHeads as error:
            raise WeirError(f"layer {index} of this model: {error}") from None
    return [asked[index if index in asked else served[0]] for index in range(count)]


def three_axes(plans: Sequence[LayerPlan]) -> bool:
    """Return whether tokens have places in time, height and width."""
    return any(plan.spec.three_axes for plan in plans)


def _reach_of(pipes: list[tuple[Pipe, ...]], chunk: int) -> int | None:
    """Return the largest number of slots that a KV head has, including those for a chunk; None if
    there is no limit.
    """
    sizes = [pipe.slots for each in pipes for pipe in each]
    return None if None in sizes else max(slots or 0 for slots in sizes) + chunk


def plan_layers(
    model: PreTrainedModel, policy: Policy, chunk: int, *, seed: int = 0, rolling: bool = True
) -> tuple[ModelSpec, list[LayerPlan]]:
    """Describe the part of a model that a policy applies to, and plan every layer of its cache.

    The heads of a layer that have the same pipe share one plan. A layer can have several plans, one
    after another.

    Raises WeirError if every layer has a sliding window that is smaller than the policy's slots and
    a chunk together, the slots of a layer cannot have the policy's format, the policy was made for
    another number of layers or heads, or the pool `gated` is used for only some heads of a layer.
    """
    pipes = _pipes_of(policy, describe(model))
    most = _reach_of(pipes, chunk)
    facts = describe(model, reach=most if rolling else None)
    dense = all(pipe.keeps_all for each in pipes for pipe in each)
    everywhere = facts.sliding is not None and most is not None
    if facts.sliding is not None and most is not None and most > facts.sliding:
        room = facts.sliding - chunk
        raise WeirError(
            f"every layer of this model sees only {facts.sliding} tokens, fewer than the policy's "
            f"{most - chunk} slots and a chunk of {chunk}. Use a smaller budget"
            + (f", of at most {in_words(room, 'slot')}." if room > 0 else ", and a smaller chunk.")
        )
    plans = []
    for index, (layer, asked) in enumerate(zip(facts.layers, pipes, strict=True)):
        window = None if everywhere else layer.positions.window
        positions = replace(layer.positions, window=window, rolling=rolling)
        own = asked if window is None else (Pipe((Recent(window),)),) * len(asked)
        draws = CounterRNG(seed, index, first=layer.first_head)
        output = OutputProjection(facts.attentions[index], layer.heads)
        for pipe in [pipe for place, pipe in enumerate(own) if pipe not in own[:place]]:
            _check_pipe(pipe, chunk, index, layer.heads)
            layers = len(pipes)
            spec = LayerSpec(
                pipe, positions, chunk, draws, index, layers, output=output, dense=dense
            )
            members = tuple(head for head, one in enumerate(own) if one == pipe)
            if members != tuple(range(len(own))):
                spec = _of_heads(spec, members, len(own))
            plans.append(LayerPlan(spec, replace(layer.heads, kv_heads=len(members))))
    return facts, plans


def _of_heads(spec: LayerSpec, heads: tuple[int, ...], count: int) -> LayerSpec:
    """Restrict the description of a layer to some of its `count` KV heads."""
    if spec.pipe.needs_gates:
        raise WeirError(
            "the pool gated reads all KV heads of a layer, so they must all have the same policy"
        )
    positions, alibi = spec.positions, spec.positions.alibi
    if alibi is not None:
        slopes = alibi.slopes.view(count, -1)[list(heads)].flatten()
        positions = replace(positions, alibi=replace(alibi, slopes=slopes))
    assert isinstance(spec.output, OutputProjection)
    return replace(
        spec,
        heads=heads,
        positions=positions,
        draws=replace(spec.draws, heads=heads),
        output=spec.output.of_heads(heads),
    )


def _check_pipe(pipe: Pipe, chunk: int, layer: int, heads: Heads) -> None:
    """Refuse a pipe that a layer cannot have (WeirError)."""
    wrong = None if pipe.format is None else pipe.format.wrong(heads.key_dim, heads.value_dim)
    if wrong is not None:
        raise WeirError(f"layer {layer} of this model cannot have these slots: {wrong}")


def with_gates(plans: list[LayerPlan], facts: ModelSpec) -> list[LayerPlan]:
    """Return the plans with the gates that their pools read; WeirError if a gate is missing.

    A gate is a trained linear map that predicts how much a token will be needed (`models.gates`).
    """
    asked = [plan.spec.index for plan in plans if plan.spec.pipe.needs_gates]
    if not asked:
        return plans
    gates = load_gates(facts.decoder, facts.config)
    if not gates.keys() >= set(asked):
        raise WeirError(
            "the pool gated needs gates that were trained for this model as it is loaded, and "
            "there are none. Train them with weir calibrate --gates --model MODEL --text FILE."
        )
    return [
        replace(plan, spec=replace(plan.spec, gate=gates.get(plan.spec.index))) for plan in plans
    ]


def check_memory(
    plans: Sequence[LayerPlan], policy: Policy, batch: int, device: torch.device
) -> None:
    """Refuse slots of `batch` rows that exceed the free memory of a device (WeirError)."""
    if any(plan.spec.pipe.slots is None for plan in plans):
        return  # the slab grows with the stream, so its size is not known in advance
    layers = plans[-1].spec.index + 1
    needed = sum(plan.slab.nbytes(batch) for plan in plans)
    free = free_memory(device)
    if free is not None and needed > free:
        raise WeirError(
            f"the slots of {shorten(str(policy))} in {in_words(layers, 'layer')} take {needed:,} "
            f"bytes for {in_words(batch, 'row')}, but only {free:,} are free on {device}. Use a "
            "smaller budget or chunk, or fewer rows."
        )


WITHIN = (__name__.partition(".")[0], "torch", "transformers")
"""weir, and the libraries that call it. A warning points at the first caller outside of these."""


def describe_window_excess(model: PreTrainedModel, policy: Policy, chunk: int) -> str | None:
    """Describe by how much a policy's slots and chunk exceed the model's window, or the consequence
    of having no limit; None if there is nothing to warn of.
    """
    window = window_of(model.config)
    try:
        pipes = _pipes_of(policy, describe(model))
    except WeirError:
        return None
    most = _reach_of(pipes, chunk)
    if most is None and (first := frequencies_change_at(model.config)) is not None:
        return (
            f"{policy.brief} has no limit, and past {first:,} tokens this model changes its "
            "rotary frequencies, which weir does not. For longer texts use a policy with a "
            "limit, such as window(16384)"
        )
    if window is None or most is None or most <= window:
        return None
    return (
        f"{policy.brief} and a chunk of {chunk:,} hold up to {most:,} tokens, but this model was "
        f"made for {window:,}; beyond that, its answers are unreliable"
    )


def warn_of_window(model: PreTrainedModel, policy: Policy, chunk: int) -> None:
    """Warn if a policy exceeds the model's window (`describe_window_excess`), once per caller."""
    excess = describe_window_excess(model, policy, chunk)
    if excess is not None:
        warnings.warn(f"weir: {excess}", stacklevel=_callers())


def known_places(model: PreTrainedModel) -> int | None:
    """Return the number of places for which `positions="original"` is meant.

    They end where the model's rotary frequencies change or, if these never change, at the end of
    its window. None if the model does not say.
    """
    return frequencies_change_at(model.config) or window_of(model.config)


def warn_of_place(model: PreTrainedModel) -> None:
    """Warn that a stream of `positions="original"` has left the `known_places`, once per caller."""
    if (known := frequencies_change_at(model.config)) is not None:
        why = (
            f"past {known:,} tokens this model changes its rotary frequencies, which weir does not"
        )
    else:
        window = window_of(model.config)
        why = f"this model was made for {window:,} tokens; beyond that, its answers are unreliable"
    warnings.warn(
        f'weir: a stream has passed the last place that positions="original" is meant for: {why}. '
        'positions="rolling" has no such limit.',
        stacklevel=_callers(),
    )


def _callers() -> int:
    """Return the stack level of the first caller outside the packages in `WITHIN`, for
    `warnings.warn`.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_within(frame.f_globals.get("__name__")):
        frame, level = frame.f_back, level + 1
    return level


def _is_within(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in WITHIN


MOST_KEPT = 2**25 - 2**16
"""Bytes of the tensor that `keep_freed_memory` frees. With the overhead of an allocation, this is
below 32 MiB. When a block of up to 32 MiB is freed, glibc raises its mmap threshold, the size from
which it returns freed blocks to the system at once.
"""


@lru_cache
def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of up to `MOST_KEPT` bytes for reuse; acts once in a process.

    glibc raises its mmap threshold when such a large tensor is freed. The tensor is never written,
    so it takes no memory. The process may keep up to twice `MOST_KEPT` bytes of freed memory.
    """
    torch.empty(MOST_KEPT, dtype=torch.uint8, device="cpu")
