"""Complete state of a row, to continue in any cache of the same kind, and its validation.

States and session facts that come from outside are checked by kinds: functions that check a value,
and are combined into kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weir.cache.layer import Layout, lay_out
from weir.cache.layers import LayerPlan, three_axes
from weir.errors import WeirError, quote, shorten
from weir.policies import saved_policy
from weir.pools import MOST_WEIGHT, wrong_ranges
from weir.slab import EMPTY, STATE, QuantizedStorage, quantized_buffers, split_weights


@dataclass(frozen=True)
class RowState:
    """One row of a cache, detached from it.

    Attributes:
        kind: properties of the cache, as JSON: `policy` by its name and the `pools` it stands for,
            `chunk`, `positions`, `origin`, the `model` (type, layers, sizes and dtype of each
            layer's heads) and a fingerprint of its `weights`.
        facts: facts of the row, as JSON: columns, seen, waiting, claimed, last, ended, seed, marks
            (`Marks`, by name), lengths (slots in use by layer and pool), and for a model with three
            axes drift.
        tensors: `LAYER.NAME` for each buffer of each layer [1, kv_heads, ...], with the slots in
            use alone (`LayerSpec.held`), on the device of the cache that the row was taken from.
    """

    kind: dict[str, Any]
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.nbytes for t in self.tensors.values())


Kind = Callable[[Any, str], None]
"""Check of a value, given its place in the facts; raises `ValidationError`."""

FARTHEST = 2**53
"""Longest stream: the largest whole number that every JSON reader reads exactly."""


class ValidationError(Exception):
    """A fact that is invalid; says which, what it should be and what it is."""


@contextmanager
def located(place: str) -> Iterator[None]:
    """Prefix the place to a `ValidationError`."""
    try:
        yield
    except ValidationError as wrong:
        raise ValidationError(f"{place}: {wrong}") from None


def integer(low: int = 0, high: int | None = FARTHEST) -> Kind:
    """A whole number from `low` to `high`; None for no limit."""
    limit = "on" if high is None else f"to {high:,}"

    def check(value: Any, place: str) -> None:
        number = isinstance(value, int) and not isinstance(value, bool)
        if not number or value < low or (high is not None and value > high):
            raise ValidationError(
                f"{place} must be a whole number from {low} {limit}, not {_describe(value)}"
            )

    return check


def boolean(value: Any, place: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise ValidationError(f"{place} must be true or false, not {_describe(value)}")


def text(*choices: str) -> Kind:
    """A text, one of the choices if there are any."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, str) or (choices and value not in choices):
            wanted = " or ".join(map(repr, choices)) or "a text"
            raise ValidationError(f"{place} must be {wanted}, not {_describe(value)}")

    return check


def optional(kind: Kind) -> Kind:
    """None, or a value of the kind."""

    def check(value: Any, place: str) -> None:
        if value is not None:
            kind(value, place)

    return check


def list_of(kind: Kind, count: int | None = None) -> Kind:
    """A list of `count` values of the kind; None for any number."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, list):
            raise ValidationError(f"{place} must be a list, not {_describe(value)}")
        if count is not None and len(value) != count:
            raise ValidationError(f"{place} must have {count} entries, not {len(value)}")
        for index, entry in enumerate(value):
            kind(entry, f"{place}[{index}]")

    return check


def record(**kinds: Kind) -> Kind:
    """Facts by name: exactly these."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise ValidationError(
                f"{place or 'what it says'} must be facts by name, not {_describe(value)}"
            )
        dot = f"{place}." if place else ""
        for name, kind in kinds.items():
            if name not in value:
                raise ValidationError(f"{dot}{name} is missing")
            kind(value[name], f"{dot}{name}")
        for name in value:
            if name not in kinds:
                raise ValidationError(f"{dot}{quote(name)} is a fact too many")

    return check


def _describe(value: Any) -> str:
    """Describe any value in a few words."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"{len(value)} facts by name"
    return quote(value) if not isinstance(value, int) or abs(value) < 10**30 else "so large a one"


Size = tuple[tuple[int, ...], torch.dtype]
"""A tensor's shape and dtype."""


def row_facts(plans: Sequence[LayerPlan], vocabulary: int, chunk: int) -> Kind:
    """The kind of the facts of a row of such a cache (`RowState.facts`)."""
    lengths = [
        [integer(0, pool.slots() if pool.slots() is not None else FARTHEST) for pool in pools]
        for pools in (plan.spec.pipe.pools for plan in plans)
    ]
    more = {"drift": integer(-FARTHEST)} if three_axes(plans) else {}
    return record(
        columns=integer(),
        seen=integer(),
        waiting=integer(0, chunk - 1),
        claimed=integer(),
        last=optional(integer(0, vocabulary - 1)),
        ended=boolean,
        seed=integer(0, None),
        marks=_marks,
        lengths=_list_by_entry([_list_by_entry(pools) for pools in lengths]),
        **more,
    )


def _marks(value: Any, place: str) -> None:
    """The marks of a row; `kept` is left out if there is nothing to keep."""
    numbers = record(beginning=optional(integer()), turn=integer(), header=integer())
    if isinstance(value, dict) and "kept" in value:
        value = dict(value)
        if (why := wrong_ranges(value.pop("kept"))) is not None:
            raise ValidationError(f"{place}.kept {why}")
    numbers(value, place)


def _list_by_entry(kinds: Sequence[Kind]) -> Kind:
    """A list with a kind of its own for each entry."""

    def check(value: Any, place: str) -> None:
        list_of(lambda *_: None, len(kinds))(value, place)
        for index, (kind, entry) in enumerate(zip(kinds, value, strict=True)):
            kind(entry, f"{place}[{index}]")

    return check


def check_row(
    plans: Sequence[LayerPlan],
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    chunk: int,
    origin: int,
    whole_prompt: bool,
    row: int | None = None,
) -> None:
    """Refuse a row that no stream through such a cache can have; the ValidationError says what is
    wrong.

    Args:
        facts: `RowState.facts`; `row_facts` has checked each alone.
        tensors: `RowState.tensors`; none is read before its name, shape and dtype are right.
        whole_prompt: the first tokens may have been folded at once, in any number.
        row: number of the row, for errors; None for the only one.
    """
    with nullcontext() if row is None else located(f"rows[{row}]"):
        _check_facts(facts, chunk=chunk, origin=origin, whole_prompt=whole_prompt)
    by_layer = _by_layer(tensors, len(plans))
    for layer, (plan, own) in enumerate(zip(plans, by_layer, strict=True)):
        with located(f"layer {layer}" if row is None else f"row {row}, layer {layer}"):
            if plan.spec.pipe.too_many_shared(facts["lengths"][layer]):
                raise ValidationError("lengths has more kept tokens than the beginning leaves room")
            sizes = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
            _check_sizes(plan, sizes, facts["lengths"][layer])
            _check_numbers(plan, own, facts, facts["lengths"][layer], origin)


def _by_layer(tensors: Mapping[str, Tensor], layers: int) -> list[dict[str, Tensor]]:
    """Group tensors by layer, under their own names."""
    found: list[dict[str, Tensor]] = [{} for _ in range(layers)]
    for name, t in tensors.items():
        layer, _, own = str(name).partition(".")
        if not layer.isdecimal() or int(layer) >= layers or name != f"{int(layer)}.{own}":
            raise ValidationError(f"{quote(name)} is of no layer")
        if not isinstance(t, Tensor):
            raise ValidationError(f"{name} is not a tensor")
        found[int(layer)][own] = t
    return found


def _check_facts(facts: Mapping[str, Any], *, chunk: int, origin: int, whole_prompt: bool) -> None:
    """Refuse facts of a row that contradict each other."""
    seen, waiting, columns = facts["seen"], facts["waiting"], facts["columns"]
    if origin + seen > FARTHEST:
        raise ValidationError(
            f"seen is {seen:,} from place {origin:,} on, and no stream is so long"
        )
    if waiting > seen or not (whole_prompt or waiting == seen % chunk):
        raise ValidationError(
            f"waiting is {waiting}, which {seen:,} tokens in chunks of {chunk} never leave"
        )
    for name in ("seen", "claimed"):
        if facts[name] > columns:
            raise ValidationError(f"{name} is {facts[name]:,}, and columns only {columns:,}")
    clock = origin + seen + facts.get("drift", 0)
    if not origin <= clock <= FARTHEST:
        raise ValidationError(f"drift is {facts['drift']:,}, which {seen:,} tokens never leave")
    for layer, lengths in enumerate(facts["lengths"]):
        if waiting == seen and any(lengths):
            raise ValidationError(f"lengths[{layer}] is not zero though nothing has been folded")


def _check_sizes(plan: LayerPlan, found: Mapping[str, Size], lengths: Sequence[int]) -> None:
    """Refuse tensors of one row of a layer that are not its slots in use (`LayerSpec.held`)."""
    wanted = plan.slab.tensors(1)
    for name in found:
        if name not in wanted:
            raise ValidationError(f"{quote(name)} is not a tensor of this layer")
    held = plan.spec.held(lengths)
    grows = plan.spec.pipe.slots is None
    for name, (shape, dtype) in wanted.items():
        if name not in found:
            raise ValidationError(f"{name} is missing")
        size, kind = found[name]
        if kind != dtype:
            raise ValidationError(f"{name} is {_dtype_name(kind)} and must be {_dtype_name(dtype)}")
        if name in held:
            slots = sum(part.stop - part.start for part in held[name])
            shape = (*shape[:2], slots, *shape[3:])
        longer = grows and name.startswith(STATE) and len(size) == len(shape) > 2
        longer = longer and size[2] >= shape[2]
        if size != shape and not (longer and (*size[:2], *size[3:]) == (*shape[:2], *shape[3:])):
            raise ValidationError(f"{name} is {list(size)} and must be {list(shape)}")


def _check_numbers(
    plan: LayerPlan,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    lengths: Sequence[int],
    origin: int,
) -> None:
    """Refuse tensors [1, kv_heads, ...] of a layer, of the right sizes, with numbers no stream
    produces.
    """
    pipe, chunk = plan.spec.pipe, plan.spec.chunk
    lies = lay_out(pipe, lengths).packed
    used = lies.used
    ahead = origin + facts["seen"] - facts["waiting"]
    _check_positions(tensors["position"], lies, ahead, chunk, origin)
    empty = tensors["position"][:, :, :used] == EMPTY
    for name in ("a", "b"):
        if name in tensors:
            _check_weights(name, tensors[name], empty, used, chunk, facts["waiting"])
    _check_split(tensors)
    for name in ("keys", "values", "masters"):
        if name in tensors and not bool(tensors[name].isfinite().all()):
            raise ValidationError(f"{name} has numbers that are not finite")
    if pipe.format is not None:
        wrong = QuantizedStorage(
            pipe.format, quantized_buffers(tensors), tensors["keys"].dtype
        ).wrong()
        if wrong is not None:
            raise ValidationError(wrong)
    if "mass" in tensors and not bool(
        ((tensors["mass"] >= 0) & (tensors["mass"] < math.inf)).all()
    ):
        raise ValidationError("mass has numbers that no sum of attention is")
    if "frame" in tensors:
        frame, most = tensors["frame"], ahead + chunk
        if not bool(((frame >= -frame.shape[2]) & (frame <= most)).all()):
            raise ValidationError("frame has positions that no slot pretends")
    if "span" in tensors:
        held = tensors["position"][:, :, : used + facts["waiting"]] != EMPTY
        _check_spans(tensors["span"][:, :, : held.shape[2]][held], origin, facts)
    if "queries" in tensors:
        waits = tensors["queries"]
        asked = waits[:, :, : max(0, waits.shape[2] - chunk + facts["waiting"])]
        if not bool(asked.isfinite().all()):
            raise ValidationError("queries has numbers that are not finite")
    for index, pool in enumerate(pipe.pools):
        start = f"state.{index}."
        state = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
        wrong = pool.wrong_state(state, lengths[index], ahead) if state else None
        if wrong is not None:
            raise ValidationError(f"the state of the pool {pool.name} is wrong: {wrong}")


def _check_positions(position: Tensor, lies: Layout, ahead: int, chunk: int, origin: int) -> None:
    """Check that the front holds folded tokens, run and tail rise by one, and the rest is empty."""
    for kept in (position[:, :, : lies.quantized_front], position[:, :, lies.first : lies.front]):
        if not bool(((kept == EMPTY) | ((kept >= origin) & (kept < ahead))).all()):
            raise ValidationError(
                f"position has places that are not among those of the stream, {origin} to {ahead}"
            )
    rising = torch.arange(ahead - lies.run, ahead + chunk, device=position.device)
    parts = [slice(lies.quantized_front, lies.quantized), slice(lies.front, lies.used + chunk)]
    newest = torch.cat([position[:, :, part] for part in parts], dim=2)
    if not bool((newest == rising).all()):
        raise ValidationError(
            "position does not rise from token to token where the newest tokens are"
        )
    for rest in (position[:, :, lies.quantized : lies.first], position[:, :, lies.used + chunk :]):
        if not bool((rest == EMPTY).all()):
            raise ValidationError("position has places in slots that are not in use")


def _check_weights(
    name: str, weights: Tensor, empty: Tensor, used: int, chunk: int, waiting: int
) -> None:
    """Check log-weights: valid in slots in use, 0 in waiting slots, -inf in all others.

    Of the `waiting` tokens in the tail, those that were dropped have -inf. `empty` says which slots
    before the tail hold no token [1, kv_heads, used].
    """
    kept = weights[:, :, :used]
    if not bool((kept <= MOST_WEIGHT).all()):
        raise ValidationError(f"{name} has numbers that are not log-weights")
    if bool((kept[empty] != -math.inf).any()):
        raise ValidationError(f"{name} gives weight to slots without a token")
    tail = weights[:, :, used : used + chunk]
    dropped = tail.isneginf()
    dropped[:, :, waiting:] = False
    if bool(((tail != 0) & ~dropped).any()):
        raise ValidationError(f"{name} is not 0 in slots that wait for a token")
    if bool((weights[:, :, used + chunk :] != -math.inf).any()):
        raise ValidationError(f"{name} gives weight to slots that are not in use")


def _check_spans(spans: Tensor, origin: int, facts: Mapping[str, Any]) -> None:
    """Check that words and images [tokens, 2] begin within the stream on three axes, with a valid
    reach.
    """
    clock = origin + facts["seen"] + facts["drift"]
    begins, reach = spans[:, 0], spans[:, 1]
    if not bool(((begins >= origin) & (begins <= clock)).all()):
        raise ValidationError(f"span begins at places that are not among {origin} to {clock}")
    if not bool(((reach >= 1) & (reach <= FARTHEST)).all()):
        raise ValidationError("span reaches as far as no word or image does")


def _check_split(tensors: Mapping[str, Tensor]) -> None:
    """Check that the weights for `split_attention` agree with a and b."""
    for name, t in zip(
        ("mask", "numerator", "denominator"),
        split_weights(tensors["a"], tensors["b"]),
        strict=True,
    ):
        if name in tensors and not torch.allclose(tensors[name], t):  # exp rounds by device
            raise ValidationError(f"{name} does not match a and b")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


FACTS = ("policy", "chunk", "positions", "origin", "model", "weights")
"""Properties that must be equal in two caches for a row of one to continue in the other."""


def check_kind(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Refuse a row of kind `theirs` (`RowState.kind`) that cannot continue in a cache of kind
    `mine`.
    """
    for name in FACTS:
        if name == "policy":
            if (unlike := unlike_policies(mine, theirs)) is not None:
                raise WeirError(
                    f"this row is of a cache with policy {quote(unlike[1])}, and this one has "
                    f"{quote(unlike[0])}"
                )
        elif mine.get(name) != theirs.get(name):
            if name == "model":
                what = _difference(mine["model"], theirs.get("model"))
                raise WeirError(f"this row belongs to another model: {what}")
            if name == "weights":
                raise WeirError("this row belongs to another model, with other weights")
            raise WeirError(
                f"this row is of a cache with {name} {quote(theirs.get(name))}, and this one has "
                f"{quote(mine[name])}"
            )


def unlike_policies(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Compare the policies of two kinds (`RowState.kind`) by their pools; None if they are equal.

    Returns the two names, or the pools if one name stands for different pools.
    """
    pools = mine["pools"], theirs.get("pools")
    if pools[0] == pools[1]:
        return None
    try:
        if isinstance(pools[1], str) and saved_policy(pools[0]) == saved_policy(pools[1]):
            return None
    except WeirError:
        pass  # a policy that cannot be read is a different one
    names = mine["policy"], theirs.get("policy")
    return pools if names[0] == names[1] else names


def _difference(mine: dict[str, Any], theirs: Any) -> str:
    if not isinstance(theirs, dict):
        return f"{quote(theirs)} is not a description of a model"
    for name, value in mine.items():
        if theirs.get(name) != value:
            return f"{name} {shorten(str(theirs.get(name)))}, here {shorten(str(value))}"
    return "it says more of it than is known here"


def check_state(
    plans: Sequence[LayerPlan], state: RowState, *, vocabulary: int, chunk: int, origin: int
) -> None:
    """Refuse a state of a checked kind that no row of such a cache can have (WeirError)."""
    try:
        facts = state.facts
        row_facts(plans, vocabulary, chunk)(facts, "")
        # The row may come from a cache that folds whole prompts.
        check_row(plans, facts, state.tensors, chunk=chunk, origin=origin, whole_prompt=True)
    except ValidationError as wrong:
        raise WeirError(f"this row's state is that of no row: {wrong}") from None
