"""Distributes the bytes of a policy over layers by their measured effect on a text.

A policy says how many slots a layer has on average. `calibrate` gives each layer the size with
which the mean error of attention is smallest, within the bytes of the policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir import __version__
from weir.cache import DEFAULT, AttentionCall, LayerPlan, ListeningCache, StreamingCache
from weir.cache.layer import Layer
from weir.errors import WeirError, quote
from weir.models import fingerprint, window_of
from weir.policies import (
    Layered,
    Pipe,
    Policy,
    Recompute,
    check_folder,
    expand_home,
    format_policy_file,
    is_file,
    is_weir,
    parse_policy,
    share_slots,
)
from weir.stream import read_stream, replace_atomically


class SizeOption(NamedTuple):
    """Bytes of a layer at a candidate size, and the error that remains."""

    nbytes: int
    error: float


def choose_sizes(layers: Sequence[Sequence[SizeOption]], total: int) -> list[int]:
    """Choose one size for each layer, by index, so that the total error is smallest within `total`
    bytes.

    If even the cheapest sizes do not fit, they are returned. This is the multiple-choice knapsack
    problem, solved exactly by dynamic programming over layers (Kellerer, Pferschy and Pisinger
    2004, "Knapsack Problems", chapter 11). Among the choices for the first layers, it drops those
    that another choice beats in both bytes and error, and those for which the Lagrangian
    bound on the total error is above the error of a known solution.
    """
    least = np.array([min(size.nbytes for size in each) for each in layers])
    if total < least.sum():
        return [min(range(len(each)), key=each.__getitem__) for each in layers]
    # The price of a byte, in errors, at which the best sizes of all layers together just fit.
    low, price = 0.0, 1.0
    while _taken_at(layers, price).nbytes > total:
        low, price = price, 2 * price
    for _ in range(60):
        middle = (low + price) / 2
        fits = _taken_at(layers, middle).nbytes <= total
        low, price = (low, middle) if fits else (middle, price)
    known = _taken_at(layers, price).error
    known += 1e-9 * (known + price * total)  # for rounding errors
    spent, error = np.zeros(1), np.zeros(1)
    ways: list[np.ndarray] = []
    for place, choices in enumerate(layers):
        options = np.array(choices)
        spent = np.add.outer(spent, options[:, 0]).ravel()
        error = np.add.outer(error, options[:, 1]).ravel()
        rest = _taken_at(layers[place + 1 :], price)
        bound = error + rest.error + price * (spent + rest.nbytes - total)
        way = np.flatnonzero((spent + least[place + 1 :].sum() <= total) & (bound <= known))
        way = way[np.lexsort((error[way], spent[way]))]
        before = np.minimum.accumulate(np.append(np.inf, error[way]))
        way = way[error[way] < before[:-1]]
        ways.append(way)
        spent, error = spent[way], error[way]
    taken, at = [], int(error.argmin())
    for choices, way in zip(reversed(layers), reversed(ways), strict=True):
        at, choice = divmod(int(way[at]), len(choices))
        taken.append(choice)
    return taken[::-1]


def _taken_at(layers: Sequence[Sequence[SizeOption]], price: float) -> SizeOption:
    """Return the bytes and error of all layers, each with its best size at a given price of
    bytes.
    """
    best = (min(each, key=lambda size: (size.error + price * size.nbytes, size)) for each in layers)
    return SizeOption(*np.array([(0, 0.0), *best]).sum(axis=0))


EIGHTHS = (*range(2, 17), *range(18, 33, 2))
"""The sizes that are tried, in eighths of the slots that can be distributed: 1/4 to 4."""
NEWEST = (1 / 4, 1 / 2, 3 / 4, 7 / 8)
"""The shares of newest tokens that are tried in addition to the share in the pipe."""


def size_ladder(pipe: Pipe, most: int, *, splits: bool = False) -> list[Pipe]:
    """Return the sizes to try of a pipe with a limit, smallest first, including the pipe's own.

    Slots for first tokens, slots of pools that read the marks of rows (`Pool.needs_marks`), and
    slots that a pool declares fixed stay as they are. The other slots keep their proportions. Sizes
    other than the pipe's own have at most `most` slots. With `splits`, several shares of newest
    tokens are tried, too, in pipes that hold newest and other tokens.
    """
    assert pipe.slots is not None
    free = [
        0
        if pool.needs_marks or (pool.in_order and not pool.keeps_run)
        else (pool.slots() or 0) - pool.fixed(pipe.pools[:place])
        for place, pool in enumerate(pipe.pools)
    ]
    total, newest = sum(free), sum(free[place] for place in pipe.run)
    shares: list[float | None] = [None]
    if splits and 0 < newest < total:
        shares += NEWEST
    found = {pipe.stands_for: pipe}
    for eighths in EIGHTHS if total else ():
        slots = round(total * eighths / 8)
        if pipe.slots - total + slots <= most:
            for sized in _sized(pipe, free, slots, shares):
                found.setdefault(sized.stands_for, sized)
    return sorted(found.values(), key=lambda sized: sized.slots or 0)


def _sized(pipe: Pipe, free: list[int], slots: int, shares: list[float | None]) -> Iterator[Pipe]:
    """Return the pipe with `slots` resizable slots, once for each share of newest tokens."""
    for share in shares:
        if share is None:
            parts = [(free, slots)]
        else:
            first = [n if place in pipe.run else 0 for place, n in enumerate(free)]
            rest = [n - own for n, own in zip(free, first, strict=True)]
            newest = round(slots * share)
            parts = [(first, newest), (rest, slots - newest)]
        if any(n < sum(size > 0 for size in sizes) for sizes, n in parts):
            continue  # a pool would have no slots
        given = [sum(counts) for counts in zip(*(share_slots(n, s) for s, n in parts), strict=True)]
        try:
            pools = tuple(
                pool if n == now else pool.resized((pool.slots() or 0) + now - n)
                for pool, n, now in zip(pipe.pools, free, given, strict=True)
            )
            yield Pipe(pools, formats=pipe.formats)
        except WeirError:
            continue  # some pools exist only in certain sizes


PIECE = 512
"""Number of tokens that the model reads in one call."""


def measure_sizes(
    model: PreTrainedModel,
    passages: Sequence[Tensor],
    sizes: Mapping[int, Sequence[Pipe]],
    *,
    chunk: int = 64,
    seed: int = 0,
    on_step: Callable[[float], None] = lambda share: None,
) -> dict[int, list[float]]:
    """Measure the relative error of every size of every layer.

    The error is |z - exact| / |exact| (Frobenius norm over all heads and passages) of the attention
    outputs in the second half of each passage, because fewer tokens are evicted in the first.
    `sizes` has the pipes to try, by layer. Passages are ids [length], no longer than the model's
    window.
    """
    wrong = {layer: [0.0] * len(pipes) for layer, pipes in sizes.items()}
    whole = dict.fromkeys(sizes, 0.0)
    others: dict[int, list[Layer]] = {}
    half = at = 0

    def hear(call: AttentionCall) -> None:
        """Send the same inputs to every size of the layer, and add up squares of differences."""
        if call.layer not in sizes:
            return
        plan = call.forward.plan.on(call.out.device)
        exact = call.out[:, :, max(0, half - at) :].double()
        whole[call.layer] += float(exact.square().sum())
        for place, other in enumerate(others[call.layer]):
            answer = other.attend(call.queries, call.keys, call.values, call.params, plan)
            other.commit()
            off = answer[:, :, call.out.shape[2] - exact.shape[2] :].double() - exact
            wrong[call.layer][place] += float(off.square().sum())

    for number, passage in enumerate(passages):
        half = len(passage) // 2
        # With as many slots as tokens, nothing is evicted, and positions are those of rolling
        # caches.
        policy = f"window(budget={len(passage)})"
        cache = ListeningCache(model, policy, hear, chunk=chunk, seed=seed)
        others = {
            layer: [Layer(replace(cache.stack[layer].spec, pipe=pipe)) for pipe in pipes]
            for layer, pipes in sizes.items()
        }
        try:
            for at in range(0, len(passage), PIECE):
                cache.read(passage[at : at + PIECE])
                on_step((number + min(1, (at + PIECE) / len(passage))) / len(passages))
        finally:
            cache.detach()
    return {
        layer: [(part / whole[layer]) ** 0.5 if whole[layer] else 0.0 for part in wrong[layer]]
        for layer in sizes
    }


PASSAGE = 8
"""Length of a passage as a multiple of the average slots of a layer, if the window allows it."""
PASSAGES = 8
"""Number of passages that are read by default."""


@dataclass(frozen=True)
class LayerBudget:
    """The pipe chosen for a layer, and the measured errors.

    Attributes:
        index: index of the layer in the model.
        pipe, nbytes: the chosen pipe, and bytes of the layer's slab, for one stream.
        error, before: relative error of the attention with this pipe, and with the policy's pipe.
        tried: every pipe that was tried, as text, with its error; smallest first.
    """

    index: int
    pipe: Pipe
    nbytes: int
    error: float
    before: float
    tried: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Calibration:
    """Budgets by layer, and the text they were measured on.

    Attributes:
        asked: the policy whose bytes were distributed.
        layers: budgets from the bottom layer up, without layers that have their own sliding window.
        nbytes, before: bytes of all these layers for one stream, with these budgets and under the
            original policy.
        chunk: tokens between two folds.
        passages, length: number of passages that were read, and tokens of each.
        text, digest: the name of the file, and SHA-256 of the ids that were read.
        model: the model's fingerprint.
    """

    asked: str
    layers: tuple[LayerBudget, ...]
    nbytes: int
    before: int
    chunk: int
    passages: int
    length: int
    text: str
    digest: str
    model: dict[str, Any]

    @property
    def policy(self) -> Layered:
        """The budgets as a policy."""
        pipes = [layer.pipe for layer in self.layers]
        return Layered(tuple(pipes), f"[{', '.join(pipe.stands_for for pipe in pipes)}]")

    @property
    def errors(self) -> tuple[float, float]:
        """The layers' mean error under the original policy, and with the calibrated budgets."""
        before = fmean(layer.before for layer in self.layers)
        return before, fmean(layer.error for layer in self.layers)

    def write(self, path: str | Path) -> None:
        """Write the policy file. If that fails, nothing is written.

        Raises:
            WeirError: the name of the file does not end with .toml, or it cannot be written.
        """
        path = check_path(path)
        text = {"name": self.text, "sha256": self.digest, "passages": self.passages}
        facts = {
            "weir": __version__,
            "calibrated": self.asked,
            "chunk": self.chunk,
            "bytes": self.nbytes,
            "text": {**text, "length": self.length},
        }
        layers = [
            {
                "policy": layer.pipe.stands_for,
                "slots": layer.pipe.slots,
                "bytes": layer.nbytes,
                "error": round(layer.error, 6),
                "error_before": round(layer.before, 6),
                "tried": [[pipe, round(error, 6)] for pipe, error in layer.tried],
            }
            for layer in self.layers
        ]
        try:
            with replace_atomically(path) as new:
                new.write_text(format_policy_file(facts, self.model, layers), "utf-8")
        except OSError as error:
            raise WeirError(f"cannot write the policy file {path}: {error.strerror}") from None


def check_path(path: str | Path) -> Path:
    """Check that a policy file can be written, and return its path."""
    path = expand_home(path)
    if not is_file(path.name):
        raise WeirError(f"the name of a policy file must end with .toml, got {path.name}")
    check_folder(path, path.name)
    return path


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    policy: str | Policy = DEFAULT,
    *,
    tokens: int | None = None,
    chunk: int = 64,
    seed: int = 0,
    splits: bool = False,
    on_step: Callable[[float], None] = lambda share: None,
) -> Calibration:
    """Distribute the bytes of a policy over a model's layers by their measured effect on a text.

    The text is read in passages no longer than the model's window, so that there is exact attention
    to compare with. `measure_sizes` measures the error of each size in `size_ladder`, and
    `choose_sizes` spends the bytes. If the mean error does not fall, every layer keeps the size
    that the policy gives it.

    Args:
        model, tokenizer, text: the text is a file, UTF-8, plain or .xz.
        policy: the policy of every layer; it must have a limit.
        tokens: how many tokens to read, in whole passages; by default eight passages, or the whole
            text if it is shorter.
        chunk, seed: tokens between two folds, and the seed of all random draws.
        splits: whether to also measure several shares of newest tokens in each layer.
        on_step: called with the share of the work that is done.

    Raises:
        WeirError: the text cannot be read, is shorter than a passage, or has fewer tokens than
            `tokens`; the model is not supported; or the policy has no limit, has only one size, has
            different slots in the KV heads of one layer, or has so many slots that nothing is
            evicted from a passage.
        PolicyError: the policy cannot be parsed.
    """
    asked = parse_policy(policy)
    plans, sliding = _plans(model, asked, chunk)
    slots = [plan.spec.pipe.slots or 0 for plan in plans.values()]
    length = PASSAGE * round(fmean(slots))
    for limit in (window_of(model.config), None if sliding is None else sliding - chunk):
        length = length if limit is None else min(length, limit)
    if max(slots) + chunk >= length:
        raise WeirError(
            f"{quote(str(asked))} has {max(slots)} slots and a chunk of {chunk}, so nothing is "
            f"evicted from {length} tokens (the length of a passage), and there is nothing to "
            "measure. Use a smaller budget, or less memory."
        )
    ids = read_stream(tokenizer, text, None if tokens is None else tokens + 1).ids
    if tokens is not None and tokens > len(ids):
        raise WeirError(f"the text has only {len(ids):,} tokens, but {tokens:,} are needed")
    ids = ids[: PASSAGES * length if tokens is None else tokens]
    passages = [part for part in ids.split(length) if len(part) == length]
    if not passages:
        remedy = "Use a longer text" if tokens is None else "Read more of the text"
        raise WeirError(
            f"{len(ids):,} tokens are too few, because a passage has {length:,} tokens. {remedy}."
        )
    sizes = {
        layer: size_ladder(plan.spec.pipe, length - chunk, splits=splits)
        for layer, plan in plans.items()
    }
    if all(len(pipes) == 1 for pipes in sizes.values()):
        raise WeirError(f"{quote(str(asked))} has only one size, so no slots can be distributed")
    errors = measure_sizes(model, passages, sizes, chunk=chunk, seed=seed, on_step=on_step)
    layers, before = _share_bytes(plans, sizes, errors)
    return Calibration(
        asked=str(asked),
        layers=layers,
        nbytes=sum(layer.nbytes for layer in layers),
        before=before,
        chunk=chunk,
        passages=len(passages),
        length=length,
        text=Path(text).name.encode("utf-8", "replace").decode(),
        digest=hashlib.sha256(b"".join(part.numpy().tobytes() for part in passages)).hexdigest(),
        model=fingerprint(model),
    )


def _plans(
    model: PreTrainedModel, policy: Policy, chunk: int
) -> tuple[dict[int, LayerPlan], int | None]:
    """Return the plans of layers that follow the policy, by index, and the size of the sliding
    window if all layers have one.
    """
    if isinstance(policy, Recompute):
        raise WeirError(
            "recompute caches nothing, so it has no slots to distribute. Use another policy."
        )
    if any(pipe.slots is None for pipe in policy.pipes):
        raise WeirError(f"{policy} has no limit, so there are no slots to distribute")
    if is_weir(policy) and policy.called is not None and "heads" not in policy.called.given:
        policy = parse_policy(policy.called.with_arguments(heads="alike"))
    cache = StreamingCache(model, policy, chunk=chunk)
    cache.detach()
    if len(cache.plans) > len(cache):
        raise WeirError(
            "slots are distributed among layers, but this policy has different slots in the KV "
            "heads of one layer. If the policy is weir, pass it heads=alike."
        )
    plans = enumerate(cache.plans)
    held = {layer: plan for layer, plan in plans if plan.spec.positions.window is None}
    return held, cache.attachment.facts.sliding


def _share_bytes(
    plans: dict[int, LayerPlan], sizes: dict[int, list[Pipe]], errors: dict[int, list[float]]
) -> tuple[tuple[LayerBudget, ...], int]:
    """Return the budget of each layer, and the bytes of all layers under the original policy."""
    choices, own = [], []
    for layer, plan in plans.items():
        specs = [replace(plan.spec, pipe=pipe) for pipe in sizes[layer]]
        nbytes = [replace(plan, spec=spec).slab.nbytes() for spec in specs]
        choices.append([SizeOption(*pair) for pair in zip(nbytes, errors[layer], strict=True)])
        own.append(sizes[layer].index(plan.spec.pipe))
    before = [each[place] for each, place in zip(choices, own, strict=True)]
    total = sum(choice.nbytes for choice in before)
    taken = choose_sizes(choices, total)
    after = [each[place] for each, place in zip(choices, taken, strict=True)]
    if fmean(layer.error for layer in after) >= fmean(layer.error for layer in before):
        taken, after = own, before
    found = []
    for layer, place, now, was in zip(plans, taken, after, before, strict=True):
        names = [pipe.stands_for for pipe in sizes[layer]]
        tried = tuple(zip(names, errors[layer], strict=True))
        pipe = sizes[layer][place]
        found.append(LayerBudget(layer, pipe, now.nbytes, now.error, was.error, tried))
    return tuple(found), total
