"""Complete state of a row, to continue in any cache of the same kind: its bytes, and its checks.

Sessions of a stream, the turns of a server and exported sessions all store `RowState.to_bytes`.
`RowState.from_bytes` checks the sizes of all tensors before it copies one. It also checks every
number, unless the bytes are known to be weir's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from weir.cache.layer import Layout, lay_out
from weir.cache.layers import LayerPlan, three_axes
from weir.cache.tensor_bytes import TensorBytes, TensorSize, write_tensors
from weir.errors import WeirError, quote, shorten
from weir.policies import FARTHEST, FileFacts, ListOf, Whole, read_facts, saved_policy
from weir.pools import MOST_WEIGHT, name_failure, wrong_ranges
from weir.slab import EMPTY, STATE, QuantizedStorage, quantized_buffers, split_weights

FORMAT = 1
"""Version of the bytes of a row."""
KEY = "weir_row"
"""The key of the facts in the metadata of the bytes."""
V = TypeVar("V")


@dataclass(frozen=True)
class RowFormat:
    """The properties that a row must have to continue in a cache.

    Attributes:
        kind: the kind of the cache (`RowState.kind`).
        plans: the plans of its layers.
        vocabulary: token ids run from 0 to this, exclusive.
    """

    kind: dict[str, Any]
    plans: Sequence[LayerPlan]
    vocabulary: int

    @property
    def chunk(self) -> int:
        """Tokens between two folds."""
        return int(self.kind["chunk"])

    @property
    def origin(self) -> int:
        """The place in the stream of the first token."""
        return int(self.kind["origin"])


@dataclass(frozen=True)
class RowState:
    """One row of a cache, detached from it.

    Attributes:
        kind: properties of the cache, as JSON: `policy` by its name and the `pools` it stands for,
            `chunk`, `positions`, `origin`, the `model` (type, layers, sizes and dtype of each
            layer's heads) and a fingerprint of its `weights`.
        facts: facts of the row, as JSON: columns, seen, waiting, claimed, last and ended (see
            `Rows`), seed, marks (`Marks`, by name), lengths (slots in use by layer and pool), and
            drift (see `Rows`) for a model with three axes.
        tensors: `LAYER.NAME` for each buffer of each layer [1, kv_heads, ...], with only the slots
            in use (`LayerSpec.held`), on the device of the cache that the row was taken from.
    """

    kind: dict[str, Any]
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def to_bytes(self, **notes: Any) -> bytes:
        """Write the state as a safetensors file, with notes about it as JSON."""
        facts = {"format": FORMAT, "kind": self.kind, "row": self.facts, "notes": notes}
        return write_tensors(self.tensors, KEY, json.dumps(facts))

    @classmethod
    def from_bytes(
        cls,
        data: bytes | Tensor,
        row_format: RowFormat,
        *,
        trusted: bool = False,
        whole_prompt: bool = True,
    ) -> tuple[RowState, dict[str, Any]]:
        """Read what `to_bytes` wrote: the state and the notes.

        Args:
            data: the bytes. If they are a tensor [bytes], uint8, the tensors of the state share its
                memory where alignment allows it.
            row_format: what the row must be like.
            trusted: whether the bytes are known to be as they were written, so that the numbers in
                tensors need no check.
            whole_prompt: whether the row may come from a cache that folds a whole prompt at once,
                whatever its length (`prefill="full"`).

        Raises:
            WeirError: the bytes are damaged or not those of a row, the row is of another kind, or
                no stream through such a cache could have produced it.
        """
        try:
            found = TensorBytes.read(data)
            facts = json.loads(found.metadata[KEY])
        except (ValueError, LookupError, RecursionError) as error:
            raise WeirError(
                f"it is damaged or not the state of a row ({quote(str(error))})"
            ) from None
        version = facts.get("format") if isinstance(facts, dict) else facts
        if version != FORMAT:
            raise WeirError(
                f"it has the format {quote(version)}, but this version of weir reads {FORMAT}"
            )
        read_facts(_RowFile, facts)
        check_kind(row_format.kind, facts["kind"])
        _check_facts(row_format, facts["row"], whole_prompt=whole_prompt)
        _check_sizes(row_format.plans, found.sizes, facts["row"])
        tensors = {name: found.tensor(name) for name in found.sizes}
        if not trusted:
            _check_numbers(row_format, tensors, facts["row"])
        return cls(row_format.kind, facts["row"], tensors), facts["notes"]


class _RowFile(FileFacts):
    """The facts in the bytes of a row, in addition to its tensors."""

    format: int
    kind: dict[str, Any]
    row: dict[str, Any]
    notes: dict[str, Any]


class _MarksFacts(FileFacts):
    """The marks of a row; `kept` is left out if there is nothing to keep."""

    beginning: Whole | None
    turn: Whole
    header: Whole
    kept: list[Any] = Field(default_factory=list)


class _RowFacts(FileFacts):
    """`RowState.facts`, each checked separately."""

    columns: Whole
    seen: Whole
    waiting: Whole
    claimed: Whole
    last: Whole | None
    ended: bool
    seed: Annotated[int, Field(ge=0)]
    marks: _MarksFacts
    lengths: ListOf[ListOf[Whole]]
    drift: Annotated[int, Field(ge=-FARTHEST, le=FARTHEST)] = 0


@contextmanager
def located(place: str) -> Iterator[None]:
    """Prefix errors with a place."""
    try:
        yield
    except WeirError as error:
        raise WeirError(f"{place}: {error}") from None


def check_state(row_format: RowFormat, state: RowState) -> None:
    """Refuse a state that no row of such a cache can have (WeirError); its kind has been
    checked.
    """
    with located("no row of this cache can have this state"):
        # The row may come from a cache that folds whole prompts.
        _check_facts(row_format, state.facts, whole_prompt=True)
        for name, t in state.tensors.items():
            if not isinstance(t, Tensor):
                raise WeirError(f"{name} must be a tensor, got {quote(t)}")
        sizes = {name: (tuple(t.shape), t.dtype) for name, t in state.tensors.items()}
        _check_sizes(row_format.plans, sizes, state.facts)
        _check_numbers(row_format, state.tensors, state.facts)


def _by_layer(named: Mapping[str, V], layers: int) -> list[dict[str, V]]:
    """Group values by layer. A value `LAYER.NAME` becomes the value `NAME` of its layer."""
    found: list[dict[str, V]] = [{} for _ in range(layers)]
    for name, one in named.items():
        layer, _, own = str(name).partition(".")
        if not layer.isdecimal() or int(layer) >= layers or name != f"{int(layer)}.{own}":
            raise WeirError(f"{quote(name)} does not belong to a layer")
        found[int(layer)][own] = one
    return found


def _check_facts(row_format: RowFormat, facts: dict[str, Any], *, whole_prompt: bool) -> None:
    """Refuse facts of a row that are wrong, or contradict each other.

    Args:
        whole_prompt: as for `RowState.from_bytes`.
    """
    read_facts(_RowFacts, facts, "the facts of a row")
    plans, chunk, origin = row_format.plans, row_format.chunk, row_format.origin
    if three_axes(plans) != ("drift" in facts):
        raise WeirError("unexpected field 'drift'" if "drift" in facts else "drift is missing")
    if "kept" in facts["marks"] and (why := wrong_ranges(facts["marks"]["kept"])) is not None:
        raise WeirError(f"marks.kept {why}")
    seen, waiting, columns = facts["seen"], facts["waiting"], facts["columns"]
    if origin + seen > FARTHEST:
        raise WeirError(
            f"seen is {seen:,} from place {origin:,} on, which is longer than a stream can be"
        )
    if waiting >= chunk:
        raise WeirError(f"waiting must be at most {chunk - 1}, got {waiting}")
    if waiting > seen or not (whole_prompt or waiting == seen % chunk):
        raise WeirError(
            f"waiting is {waiting}, which is impossible after {seen:,} tokens in chunks of {chunk}"
        )
    for name in ("seen", "claimed"):
        if facts[name] > columns:
            raise WeirError(f"{name} must be at most columns, {columns:,}, got {facts[name]:,}")
    check_token(facts["last"], row_format.vocabulary, "last")
    clock = origin + seen + facts.get("drift", 0)
    if not origin <= clock <= FARTHEST:
        raise WeirError(f"drift is {facts['drift']:,}, which is impossible after {seen:,} tokens")
    _check_lengths(plans, facts["lengths"])
    for layer, lengths in enumerate(facts["lengths"]):
        if waiting == seen and any(lengths):
            raise WeirError(f"lengths[{layer}] must be zero, because nothing has been folded")


def check_token(token: int | None, vocabulary: int, place: str) -> None:
    """Refuse a token id that the model does not have."""
    if token is not None and token >= vocabulary:
        raise WeirError(f"{place} must be a token id from 0 to {vocabulary - 1}, got {token}")


def _check_lengths(plans: Sequence[LayerPlan], lengths: list[list[int]]) -> None:
    """Refuse more slots in use than the pools have."""
    if len(lengths) != len(plans):
        raise WeirError(f"lengths must have {len(plans)} entries, got {len(lengths)}")
    for layer, (plan, own) in enumerate(zip(plans, lengths, strict=True)):
        pools = plan.spec.pipe.pools
        if len(own) != len(pools):
            raise WeirError(f"lengths[{layer}] must have {len(pools)} entries, got {len(own)}")
        for index, (pool, length) in enumerate(zip(pools, own, strict=True)):
            most = pool.slots()
            if most is not None and length > most:
                raise WeirError(f"lengths[{layer}][{index}] must be at most {most}, got {length}")
        if plan.spec.pipe.too_many_shared(own):
            raise WeirError(
                f"lengths[{layer}] has more kept tokens than the beginning leaves room for"
            )


def _check_sizes(
    plans: Sequence[LayerPlan], found: Mapping[str, TensorSize], facts: Mapping[str, Any]
) -> None:
    """Refuse tensors of names or sizes that a row of such layers does not have."""
    by_layer = _by_layer(found, len(plans))
    for layer, (plan, own) in enumerate(zip(plans, by_layer, strict=True)):
        with located(f"layer {layer}"):
            _check_layer_sizes(plan, own, facts["lengths"][layer])


def _check_layer_sizes(
    plan: LayerPlan, found: Mapping[str, TensorSize], lengths: Sequence[int]
) -> None:
    """Refuse tensors of one row of a layer that are not its slots in use (`LayerSpec.held`)."""
    wanted = plan.slab.tensors(1)
    for name in found:
        if name not in wanted:
            raise WeirError(f"this layer has no tensor {quote(name)}")
    held = plan.spec.held(lengths)
    grows = plan.spec.pipe.slots is None
    for name, (shape, dtype) in wanted.items():
        if name not in found:
            raise WeirError(f"{name} is missing")
        size, kind = found[name]
        if kind != dtype:
            raise WeirError(f"{name} must be {_dtype_name(dtype)}, got {_dtype_name(kind)}")
        if name in held:
            slots = sum(part.stop - part.start for part in held[name])
            shape = (*shape[:2], slots, *shape[3:])
        longer = grows and name.startswith(STATE) and len(size) == len(shape) > 2
        longer = longer and size[2] >= shape[2]
        if size != shape and not (longer and (*size[:2], *size[3:]) == (*shape[:2], *shape[3:])):
            raise WeirError(f"{name} must have the shape {list(shape)}, got {list(size)}")


def _check_numbers(
    row_format: RowFormat, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Refuse tensors of the right sizes with numbers that no stream produces."""
    plans = row_format.plans
    by_layer = _by_layer(tensors, len(plans))
    for layer, (plan, own) in enumerate(zip(plans, by_layer, strict=True)):
        with located(f"layer {layer}"):
            _check_layer_numbers(plan, own, facts, facts["lengths"][layer], row_format.origin)


def _check_layer_numbers(
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
            raise WeirError(f"{name} has numbers that are not finite")
    if pipe.format is not None:
        wrong = QuantizedStorage(
            pipe.format, quantized_buffers(tensors), tensors["keys"].dtype
        ).wrong()
        if wrong is not None:
            raise WeirError(wrong)
    if "mass" in tensors and not bool(
        ((tensors["mass"] >= 0) & (tensors["mass"] < math.inf)).all()
    ):
        raise WeirError("mass has numbers that cannot be sums of attention")
    if "frame" in tensors:
        frame, most = tensors["frame"], ahead + chunk
        if not bool(((frame >= -frame.shape[2]) & (frame <= most)).all()):
            raise WeirError("frame has positions that no slot can have")
    if "span" in tensors:
        held = tensors["position"][:, :, : used + facts["waiting"]] != EMPTY
        _check_spans(tensors["span"][:, :, : held.shape[2]][held], origin, facts)
    if "queries" in tensors:
        waits = tensors["queries"]
        asked = waits[:, :, : max(0, waits.shape[2] - chunk + facts["waiting"])]
        if not bool(asked.isfinite().all()):
            raise WeirError("queries has numbers that are not finite")
    for index, pool in enumerate(pipe.pools):
        start = f"state.{index}."
        state = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
        with name_failure(pool, "wrong_state"):
            wrong = pool.wrong_state(state, lengths[index], ahead) if state else None
        if wrong is not None:
            raise WeirError(f"in the state of the pool {pool.name}, {wrong}")


def _check_positions(position: Tensor, lies: Layout, ahead: int, chunk: int, origin: int) -> None:
    """Check that the front holds folded tokens, that positions rise by one in the run and the tail,
    and that the rest is empty.
    """
    for kept in (position[:, :, : lies.quantized_front], position[:, :, lies.first : lies.front]):
        if not bool(((kept == EMPTY) | ((kept >= origin) & (kept < ahead))).all()):
            raise WeirError(
                "position has places other than those of the folded tokens, which begin at place "
                f"{origin} and end before place {ahead}"
            )
    rising = torch.arange(ahead - lies.run, ahead + chunk, device=position.device)
    parts = [slice(lies.quantized_front, lies.quantized), slice(lies.front, lies.used + chunk)]
    newest = torch.cat([position[:, :, part] for part in parts], dim=2)
    if not bool((newest == rising).all()):
        raise WeirError("position does not rise from token to token among the newest tokens")
    for rest in (position[:, :, lies.quantized : lies.first], position[:, :, lies.used + chunk :]):
        if not bool((rest == EMPTY).all()):
            raise WeirError("position has places in slots that are not in use")


def _check_weights(
    name: str, weights: Tensor, empty: Tensor, used: int, chunk: int, waiting: int
) -> None:
    """Check that log-weights are valid in slots in use, 0 in the tail, and -inf in all others.

    Dropped tokens among the `waiting` tokens of the tail also have -inf. `empty` says which slots
    before the tail hold no token [1, kv_heads, used].
    """
    kept = weights[:, :, :used]
    if not bool((kept <= MOST_WEIGHT).all()):
        raise WeirError(f"{name} has numbers that cannot be log-weights")
    if bool((kept[empty] != -math.inf).any()):
        raise WeirError(f"{name} gives weight to slots without a token")
    tail = weights[:, :, used : used + chunk]
    dropped = tail.isneginf()
    dropped[:, :, waiting:] = False
    if bool(((tail != 0) & ~dropped).any()):
        raise WeirError(f"{name} is not 0 in the slots for new tokens")
    if bool((weights[:, :, used + chunk :] != -math.inf).any()):
        raise WeirError(f"{name} gives weight to slots that are not in use")


def _check_spans(spans: Tensor, origin: int, facts: Mapping[str, Any]) -> None:
    """Check that the spans [tokens, 2] of text tokens and images begin within the stream on three
    axes, and have a valid length.
    """
    clock = origin + facts["seen"] + facts["drift"]
    begins, reach = spans[:, 0], spans[:, 1]
    if not bool(((begins >= origin) & (begins <= clock)).all()):
        raise WeirError(f"span begins at places that are not among {origin} to {clock}")
    if not bool(((reach >= 1) & (reach <= FARTHEST)).all()):
        raise WeirError("span has lengths that no token and no image can have")


def _check_split(tensors: Mapping[str, Tensor]) -> None:
    """Check that the weights for `split_attention` agree with a and b."""
    for name, t in zip(
        ("mask", "numerator", "denominator"),
        split_weights(tensors["a"], tensors["b"]),
        strict=True,
    ):
        # Allow for differences, because devices round exp differently.
        if name in tensors and not torch.allclose(tensors[name], t):
            raise WeirError(f"{name} does not match a and b")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


FACTS = ("policy", "chunk", "positions", "origin", "model", "weights")
"""Properties that must be equal in two caches, so that a row of one can continue in the other."""


def check_kind(mine: dict[str, Any], theirs: dict[str, Any], subject: str = "this row is") -> None:
    """Refuse a row of kind `theirs` (`RowState.kind`) that cannot continue in a cache of kind
    `mine`.

    Args:
        subject: the beginning of errors.
    """
    for name in FACTS:
        if name == "policy":
            if (unlike := unlike_policies(mine, theirs)) is not None:
                raise WeirError(
                    f"{subject} of a cache with policy {quote(unlike[1])}, but this cache has "
                    f"{quote(unlike[0])}"
                )
        elif mine.get(name) != theirs.get(name):
            if name == "model":
                what = _difference(mine["model"], theirs.get("model"))
                raise WeirError(f"{subject} of another model: {what}")
            if name == "weights":
                raise WeirError(f"{subject} of another model, with other weights")
            raise WeirError(
                f"{subject} of a cache with {name} {quote(theirs.get(name))}, but this cache has "
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
        pass  # a policy that cannot be parsed counts as a different one
    names = mine["policy"], theirs.get("policy")
    return pools if names[0] == names[1] else names


def _difference(mine: dict[str, Any], theirs: Any) -> str:
    if not isinstance(theirs, dict):
        return f"{quote(theirs)} is not a description of a model"
    for name, value in mine.items():
        if theirs.get(name) != value:
            return f"{name} {shorten(str(theirs.get(name)))}, here {shorten(str(value))}"
    return "its description has fields that the model of this cache does not have"
