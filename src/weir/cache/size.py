"""Estimates the memory of a cache before weights are loaded or slots are allocated."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from weir.cache.cache import Positions
from weir.cache.default_policy import DEFAULT, check_origin, fit_to_model
from weir.cache.layers import LayerPlan, plan_layers
from weir.errors import WeirError
from weir.models import ModelSpec, stored_bytes
from weir.policies import Pipe, Policy, parse_policy, resolve_chunk, with_slots


@dataclass(frozen=True)
class Size:
    """Bytes of a model and of its streams.

    Attributes:
        policy: the policy of the streams.
        dtype: the dtype of weights, keys and values.
        slots: for each layer, the slots of a KV head (the mean of its heads), without the slots for
            new tokens.
        head_slots: the fewest and the most slots of a KV head in any layer, without those for new
            tokens.
        weights: bytes of the model's parameters and buffers.
        stream: bytes of one stream, including everything that is kept for it.
        step_weights: bytes of weights that a decode step reads.
        step_stream: bytes of keys and values that a decode step of one stream with a full tail
            reads.
    """

    policy: str
    dtype: str
    slots: tuple[int, ...]
    head_slots: tuple[int, int]
    weights: int
    stream: int
    step_weights: int
    step_stream: int

    def streams_in(self, memory: int) -> int:
        """Return how many streams fit into `memory` bytes in addition to the weights; 0 if none
        does.
        """
        return max(0, (memory - self.weights) // self.stream)

    def tokens_per_second(self, bandwidth: float, streams: int = 1) -> float:
        """Estimate the tokens per second of all streams together, if decoding is bound by memory
        reads.

        Args:
            bandwidth: bytes per second.
            streams: streams that take each step together.
        """
        return streams * bandwidth / (self.step_weights + streams * self.step_stream)


def size_of(
    model: PreTrainedModel,
    policy: str | Policy = DEFAULT,
    *,
    chunk: int | None = None,
    slots: str | None = None,
    positions: Positions = "rolling",
    tokens: int | None = None,
) -> Size:
    """Compute the bytes of a model and of its streams.

    Args:
        model: the model. It can be on the device `meta`, without weights (`models.skeleton`). If
            the policy `depends_on_weights`, such a model is assumed to get the same budget in all
            heads, and slots of 4 bits if no format of slots is given.
        policy, chunk, slots, positions: as for `StreamingCache`.
        tokens: the length of a stream, for `dense` and other policies that keep every token. The
            bytes of the stream are then those of transformers' own cache, as in
            `StreamingCache.nbytes`.

    Raises:
        WeirError: the model cannot be served, or the policy has no limit and its size does not
            follow from `tokens`.
    """
    wanted = fit_to_model(with_slots(parse_policy(policy), slots), model, chunk)
    chunk = resolve_chunk(wanted, chunk)
    check_origin(wanted, model)
    facts, plans = plan_layers(model, wanted, chunk, rolling=positions == "rolling")
    if tokens is not None and all(plan.spec.dense for plan in plans):
        return _size_of_all(model, wanted, facts, plans, tokens)
    if any(plan.spec.pipe.slots is None for plan in plans):
        raise WeirError(
            f"{wanted} has no limit, so the size of a stream is unknown. Use a policy of fixed "
            "size."
        )
    slabs = [plan.slab for plan in plans]
    held: list[list[Pipe]] = [[] for _ in facts.layers]
    for plan in plans:
        held[plan.spec.index] += [plan.spec.pipe] * plan.heads.kv_heads
    each_head = [pipe.slots or 0 for pipes in held for pipe in pipes]
    weights, step_weights = _weights_of(model)
    return Size(
        policy=str(wanted),
        dtype=str(facts.layers[0].heads.dtype).removeprefix("torch."),
        slots=tuple(sum(pipe.slots or 0 for pipe in each) // len(each) for each in held),
        head_slots=(min(each_head), max(each_head)),
        weights=weights,
        stream=sum(slab.nbytes() for slab in slabs),
        step_weights=step_weights,
        step_stream=sum(slab.step_bytes() for slab in slabs),
    )


def _size_of_all(
    model: PreTrainedModel, policy: Policy, facts: ModelSpec, plans: list[LayerPlan], tokens: int
) -> Size:
    """Compute the bytes of a stream of `tokens` tokens if every token is kept."""
    weights, step_weights = _weights_of(model)
    held = [plan.spec.dense_bytes(plan.heads, tokens) or 0 for plan in plans]
    slots = tuple(n // plan.heads.token_bytes for n, plan in zip(held, plans, strict=True))
    return Size(
        policy=str(policy),
        dtype=str(facts.layers[0].heads.dtype).removeprefix("torch."),
        slots=slots,
        head_slots=(min(slots), max(slots)),
        weights=weights,
        stream=sum(held),
        step_weights=step_weights,
        step_stream=sum(held),
    )


def _weights_of(model: PreTrainedModel) -> tuple[int, int]:
    """Return the bytes of a model's weights, and of those that a decode step reads."""
    weights = stored_bytes(model)
    # A step reads one row of the input embedding, unless the output embedding is tied to it.
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is getattr(table, "weight", None)
    return weights, weights if tied else weights - stored_bytes(table)


def read_bytes(text: str) -> int:
    """Parse a number of bytes: `80GB`, `1.5 TiB`, `512 MB`; `3.35TB/s` for bytes a second.

    Raises:
        WeirError: the text is not a number of bytes.
    """
    words = text.strip().lower().removesuffix("/s").strip()
    number = words.rstrip("abcdefghijklmnopqrstuvwxyz ")
    scale = words[len(number) :].strip()
    factors = {"": 1, "b": 1}
    for place, letter in enumerate("kmgtp", 1):
        factors |= {letter: 1000**place, f"{letter}b": 1000**place, f"{letter}ib": 1024**place}
    try:
        value = float(number.replace("_", "")) * factors[scale]
    except (ValueError, KeyError):
        value = -1.0
    if not 1 <= value < 2**63:
        raise WeirError(
            f"{text!r} must be a number of bytes, at least 1 and less than 2^63. Write, for "
            "example, 80GB, 1.5 TB or 24 GiB."
        )
    return int(value)
