"""Checks that a policy follows the rules for pools, by running it on a model.

The rules are those of docs/writing-a-pool.md, and what users of a cache rely on: a row of a batch,
a stream that is cut into other calls, and a restored row all continue as they would alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from weir.cache import StreamingCache, choose_policy
from weir.errors import WeirError, first_line
from weir.loading import load
from weir.models import CACHE
from weir.policies import KVzip, Pipe, Policy, Recompute
from weir.pools import Fold, Pool, is_own
from weir.slab import QuantizedSlots, Slots

Outcome = Literal["passed", "failed", "not applicable"]

RUNS = "It reads a text without an error."
ONCE = "Each pool keeps a token or passes it on, and does not do both."
SLOTS = "Each pool keeps at most slots() slots, and keeps all tokens while they fit."
IN_PLACE = "No pool writes in place into the slots that it receives."
EXACT = "While all tokens are held, the logits equal those of dense."
BUDGET = "A named policy has at most as many slots as its budget."
SEED = "The same seed gives the same result."
DECLARES = "Each pool does what it declares."
READS = "Each pool reads only what it declares."
CUT = "The result does not depend on how the text is cut into calls."
BATCH = "A row of a batch gives the same result as alone."
RESTORE = "A row that was taken and put into another cache continues identically."
WATCHED = (ONCE, SLOTS, IN_PLACE)
"""Rules that are checked at each fold of the first run. So is `DECLARES`, in part."""

CHUNK = 16
"""Tokens between folds. It is small, so that few tokens arrive at once and most pools can hold
them.
"""
MORE = 64
"""How many queries more than a pool declares are kept, to find whether it reads more."""
STEP, DRAWS = 2.0**-14, 3
"""The share by which weights are changed to find how far rounding changes logits, and how often."""


@dataclass(frozen=True)
class RuleResult:
    """The result of checking one rule.

    Attributes:
        rule: the rule in words.
        outcome: "passed", "failed" or "not applicable".
        reason: why it failed or is not applicable; empty if it passed.
    """

    rule: str
    outcome: Outcome
    reason: str = ""


@torch.no_grad()
def check_policy(policy: str | Policy, model: PreTrainedModel | None = None) -> list[RuleResult]:
    """Check that a policy's pools follow the rules for pools, on random tokens.

    Args:
        policy: the policy, as for `Stream`.
        model: the model that runs it; nano if it is None.

    Returns:
        The result for each rule.

    Raises:
        WeirError: the policy has no pools (`recompute`, `kvzip`), or the model is not supported.
        PolicyError: the policy cannot be parsed.
    """
    model = load("nano")[0] if model is None else model
    chosen = choose_policy(model, policy, chunk=CHUNK)
    if isinstance(chosen, Recompute | KVzip):
        raise WeirError(
            f"the policy {chosen} has no pools that could be checked. Use a pipe of pools, such as "
            "'sink(4) | recent(252)', or a named policy that is made of pools."
        )
    return list(_Check(model, chosen).results())


# --- watching folds


@dataclass
class _Watch:
    """A record of what the pools of a policy did in a run, and of the rules that they broke.

    Attributes:
        faults: the first fault that was found, by rule.
        excused: why a rule does not apply to a pool, by rule.
        whole: the number of tokens after which the first token was lost or represented by others.
        merged: pools in which slots have come to represent several tokens.
        arrived, held: pools to which tokens came, and pools that have held a token.
        sized: pools that must keep all tokens while they fit, each with its slots and with the
            slots of the pools before it.
        fitted: those of them to which tokens came that fit.
        passed: the newest token that a pool has passed on, by pool, layer and head; only for pools
            that are `in_order`.
    """

    faults: dict[str, str] = field(default_factory=dict)
    excused: dict[str, str] = field(default_factory=dict)
    whole: float = math.inf
    merged: set[str] = field(default_factory=set)
    arrived: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    sized: dict[str, tuple[int, int]] = field(default_factory=dict)
    fitted: set[str] = field(default_factory=set)
    passed: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def pipe(self, pipe: Pipe) -> Pipe:
        """Return the same pipe of exact slots, whose folds are watched."""
        before = 0
        for pool in pipe.pools:
            room = pool.slots() or 0
            if room and not (pool.needs_marks or pool.shares_slots):
                least, most = self.sized.get(pool.name, (room, before))
                self.sized[pool.name] = min(room, least), max(before, most)
            before += room
        return Pipe(tuple(self._pool(pool) for pool in pipe.pools), pipe.text)

    @property
    def untried(self) -> set[str]:
        """Pools of `sized` to which more tokens came at once than they have slots, or none."""
        return self.sized.keys() - self.fitted

    def _pool(self, pool: Pool) -> Pool:
        kind = type(pool)

        def fold(own: Any, held: Slots, new: Slots, facts: Fold) -> Any:
            return self._fold(kind.fold, own, held, new, facts)

        made = copy(pool)
        space = {"fold": fold, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        object.__setattr__(made, "__class__", type(kind.__name__, (kind,), space))
        return made

    def _fold(
        self, run: Callable[..., Any], pool: Pool, held: Slots, new: Slots, fold: Fold
    ) -> Any:
        before = [(t, t.clone()) for slots in (held, new) for t in _tensors(slots)]
        came, room = _positions(held, new), pool.slots()
        # The last pool of a pipe need not return tokens that it passes on; the check needs them.
        result = run(pool, held, new, replace(fold, last=False))
        if not all(torch.equal(t.nan_to_num(), was.nan_to_num()) for t, was in before):
            self._blame(IN_PLACE, pool, "changed a tensor of the slots that it received")
        if not (isinstance(result, tuple) and all(isinstance(part, Slots) for part in result)):
            return result  # the pipe raises an error
        kept, passed = _positions(result[0]), _positions(*result[1:])
        lost = _positions(*result) != came
        represents = pool.synthetic or pool.ends_pipe or pool.weighs
        if lost and represents:
            self.merged.add(pool.name)
        if (fold.last and any(passed)) or lost:
            self.whole = min(self.whole, int(fold.seen.min()))
        if any(len(set(both)) < len(both) for both in _positions(*result)):
            self._blame(ONCE, pool, "kept a token that it also passed on, or kept it twice")
        elif lost and represents:
            self.excused[ONCE] = f"slots of the pool {pool.name} can represent several tokens"
        elif lost:
            self._blame(ONCE, pool, "did not return some tokens, neither as kept nor as passed on")
        if room is not None and len(result[0]) > room:
            self._blame(SLOTS, pool, f"kept {len(result[0])} slots, and its limit is {room}")
        # Slots that represent other tokens, too, can be fewer than the tokens that would fit.
        merged = pool.name in self.merged
        own_room = None if pool.needs_marks or pool.shares_slots or merged else room
        for all_tokens, its in zip(came, kept, strict=True):
            if own_room is not None and 0 < len(all_tokens) <= own_room:
                self.fitted.add(pool.name)
            if own_room is not None and len(its) < len(all_tokens) <= own_room:
                told = f"kept {len(its)} of {len(all_tokens)} tokens, which fit in its {room} slots"
                self._blame(SLOTS, pool, told)
        if own_room and any(came):
            self.arrived.add(pool.name)
        if any(kept):
            self.held.add(pool.name)
        if fault := self._find_undeclared(pool, held, new, result, fold):
            self._blame(DECLARES, pool, fault)
        return result

    def _find_undeclared(
        self, pool: Pool, held: Slots, new: Slots, result: tuple[Slots, Slots], fold: Fold
    ) -> str:
        """Return what a pool did in a fold although it declares that it does not; "" if nothing."""
        kept, came = _positions(result[0]), _positions(held, new)
        batch = len(new.position)
        heads = len(came) // batch
        if pool.in_order and fold.unbroken:
            for head, its in enumerate(result[1].position.flatten(0, 1).tolist()):
                places = [place for place in its if place >= 0]
                key = id(pool), fold.draws.layer, head
                first = self.passed.get(key, places[0] - 1 if places else -1) + 1
                if places != list(range(first, first + len(places))):
                    return "declares in_order, but did not pass on tokens in order and without gaps"
                if places:
                    self.passed[key] = places[-1]
        newest = (tokens[len(tokens) - len(its) :] for its, tokens in zip(kept, came, strict=True))
        if pool.keeps_run and fold.unbroken and kept != list(newest):
            return "declares keeps_run, but did not keep the newest tokens"
        if pool.heads_agree:
            for row in range(0, len(came), heads):
                part = slice(row, row + heads)
                if _count_kinds(came[part]) == 1 < _count_kinds(kept[part]):
                    return "declares heads_agree, but its heads kept different tokens"
        if not any(map(_has_weights, (held, new, result[0]))):
            return ""
        before, after = _weights(held, new), _weights(result[0])
        changed = any(
            old.get(place, weights) != weights
            for old, its in zip(before, after, strict=True)
            for place, weights in its.items()
        )
        if changed and not pool.two_weights and _differ(after) and not _differ(before):
            return "gave a token log-weights a and b that differ, but does not declare two_weights"
        if changed and not (pool.weighs or pool.ends_pipe):
            return "changed the log-weights of a token, but does not declare weighs"
        return ""

    def _blame(self, rule: str, pool: Pool, what: str) -> None:
        self.faults.setdefault(rule, f"the pool {pool.name} {what}")

    def fault(self, rule: str) -> str:
        """Return the fault that was found for a rule; "" if there is none."""
        if rule == SLOTS and rule not in self.faults and (idle := self.arrived - self.held):
            return f"the pool {min(idle)} never held a token, although tokens arrived"
        return self.faults.get(rule, "")


class _Changed(Policy):
    """A policy whose pipes were changed."""

    def __init__(self, policy: Policy, change: Callable[[Pipe], Pipe]) -> None:
        self.text, self._policy, self._change = policy.text, policy, change

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Return the changed pipe of a layer."""
        return self._change(self._policy.for_layer(layer, layers))

    def for_heads(self, layer: int, layers: int, heads: int) -> tuple[Pipe, ...]:
        """Return the changed pipe of each head. Heads that shared one pipe still share one."""
        pipes = self._policy.for_heads(layer, layers, heads)
        made = {pipe: self._change(pipe) for pipe in dict.fromkeys(pipes)}
        return tuple(made[pipe] for pipe in pipes)


class _WithMoreQueries(Pipe):
    """A pipe for which more queries are kept than its pools declare."""

    @cached_property
    def needs_queries(self) -> int:
        """The number of last queries that are kept."""
        return max(pool.needs_queries for pool in self.pools) + MORE


def _needs(pool: Pool) -> bool:
    """Return whether a pool declares that it reads something that others could read, too."""
    needs = pool.needs_queries or pool.needs_mass or pool.needs_gates or pool.needs_marks
    return bool(needs or pool.is_stochastic)


def _with_exact_slots(pipe: Pipe) -> Pipe:
    """Return the pipe without formats."""
    return Pipe(pipe.pools, pipe.text)


def _tensors(slots: Slots) -> list[Tensor]:
    """Return the tensors of slots, without keys and values that are quantized."""
    quantized = isinstance(slots, QuantizedSlots)
    return list((slots.others() if quantized else slots.tensors()).values())


def _has_weights(slots: Slots) -> bool:
    """Return whether a log-weight of a token is not 0."""
    return any(bool((t[slots.held] != 0).any()) for t in (slots.a, slots.b))


def _weights(*parts: Slots) -> list[dict[int, tuple[float, float]]]:
    """Return the log-weights a and b of the tokens in slots by position, for each head of each
    row.
    """
    position, a, b = (
        torch.cat([getattr(slots, name) for slots in parts], dim=2).flatten(0, 1).tolist()
        for name in ("position", "a", "b")
    )
    return [
        {place: (one, other) for place, one, other in zip(*head, strict=True) if place >= 0}
        for head in zip(position, a, b, strict=True)
    ]


def _differ(weights: list[dict[int, tuple[float, float]]]) -> bool:
    """Return whether the two log-weights of a token differ."""
    return any(a != b for head in weights for a, b in head.values())


def _count_kinds(lists: list[list[int]]) -> int:
    """Count different lists."""
    return len(set(map(tuple, lists)))


def _positions(*parts: Slots) -> list[list[int]]:
    """Return the sorted positions of the tokens in slots, for each head of each row."""
    return _places(torch.cat([slots.position for slots in parts], dim=2).flatten(0, 1))


def _places(position: Tensor) -> list[list[int]]:
    """Return the sorted positions [heads, slots] of the slots that hold a token, for each head."""
    return [[place for place in head if place >= 0] for head in position.sort().values.tolist()]


# --- the rules


class _Check:
    """The runs that the check of a policy needs."""

    def __init__(self, model: PreTrainedModel, policy: Policy) -> None:
        self.model, self.policy = model, policy
        # Rounding of stored keys and values could differ with how the text is cut.
        self.exact = _Changed(policy, _with_exact_slots)
        cache = self._cache()
        self.parts = [part for layer in cache.stack.by_index for part in layer.parts]
        slots = [count or 0 for count in cache.slots_by_layer]
        length = max(*slots, 128) + 6 * CHUNK + 5
        vocabulary = int(cast(Tensor, model.get_input_embeddings().weight).shape[0])
        draw = torch.Generator().manual_seed(0)
        self.ids = torch.randint(vocabulary, (3, length), generator=draw).to(model.device)
        self.off = _find_rounding(model, self.ids[:1])

    def results(self) -> Iterator[RuleResult]:
        """Check one rule after the other."""
        watch, cause = _Watch(), ""
        cache = self._cache(_Changed(self.policy, watch.pipe))
        try:
            watched = self._run(cache, self.ids[:1])
        except Exception as error:
            cause = _explain(error)
        stopped = "the first run stopped with an error" if cause else ""
        yield _result(RUNS, cause or self._report(cache))
        found = {rule: watch.fault(rule) for rule in WATCHED}
        if not (stopped or found[SLOTS]):
            found[SLOTS], watch.excused[SLOTS] = self._fit(watch)
        for rule, fault in found.items():
            yield _result(rule, fault, "" if fault else stopped or watch.excused.get(rule, ""))
        yield _result(BUDGET, *self._budget())
        wrong = watch.fault(DECLARES)
        if stopped:
            for rule in (EXACT, SEED, DECLARES, READS, CUT, BATCH, RESTORE):
                yield _result(rule, wrong if rule == DECLARES else "", stopped)
            return
        whole = int(min(watch.whole, self.ids.shape[1]))
        yield self._check(EXACT, lambda: self._exact(watched[:, :whole]))
        yield (same := self._check(SEED, self._seed))
        random = "" if same.outcome == "passed" else "the same seed gives different results"
        checks = {
            DECLARES: lambda: wrong or self._declares(),
            READS: self._reads,
            CUT: self._cut,
            BATCH: self._batch,
            RESTORE: self._restore,
        }
        for rule, check in checks.items():
            fault = wrong if rule == DECLARES else ""
            yield _result(rule, fault, random) if random else self._check(rule, check)

    def _check(self, rule: str, check: Callable[[], str]) -> RuleResult:
        try:
            return _result(rule, check())
        except Exception as error:
            return _result(rule, _explain(error))

    def _cache(
        self, policy: Policy | str | None = None, seed: int = 0, chunk: int = CHUNK
    ) -> StreamingCache:
        return StreamingCache(self.model, policy or self.policy, chunk=chunk, seed=seed)

    def _run(
        self, cache: StreamingCache, ids: Tensor, step: int | None = None, pads: int = 0
    ) -> Tensor:
        """Feed tokens in calls of `step` tokens, with padding before those of the last row."""
        mask, parts = torch.ones_like(ids), []
        mask[-1, :pads] = 0
        for start in range(0, ids.shape[1], step or ids.shape[1]):
            stop = min(start + (step or ids.shape[1]), ids.shape[1])
            seen = mask[:, :stop] if pads else None
            made = self.model(ids[:, start:stop], attention_mask=seen, **{CACHE: cache})
            parts.append(made.logits)
        return torch.cat(parts, dim=1)

    def _report(self, cache: StreamingCache) -> str:
        """Return why the report of a cache fails; "" if it does not."""
        try:
            cache.report()
        except Exception as error:
            return _explain(error)
        return ""

    def _fit(self, watch: _Watch) -> tuple[str, str]:
        """Give pools that have got too many tokens at once fewer of them.

        Returns the fault that was found, and why the rule is not applicable.
        """
        if not watch.untried:
            return "", ""
        rooms, before = zip(*(watch.sized[name] for name in watch.untried), strict=True)
        again, chunk = _Watch(), min(*rooms, CHUNK)
        try:
            cache = self._cache(_Changed(self.policy, again.pipe), chunk=chunk)
            self._run(cache, self.ids[:1, : max(before) + 4 * chunk])
        except Exception as error:
            return f"with {chunk} tokens between two folds, {_explain(error)}", ""
        untried = min(watch.untried & again.untried, default="")
        excuse = f"the pool {untried} never got tokens that all fit in its slots"
        return again.fault(SLOTS), excuse if untried else ""

    def _budget(self) -> tuple[str, str]:
        """Return by how much the slots exceed the budget, and why the rule is not applicable."""
        called = self.policy.called
        parameter = called.parameters.get("budget") if called else None
        if called is None or parameter is None:
            return "", "the policy has no parameter budget"
        budget = called.given.get("budget", parameter.default)
        if not isinstance(budget, int):
            return "", "the policy has no budget"
        heads = [len(part.spec.heads or (0,)) for part in self.parts]
        slots = [part.spec.pipe.slots for part in self.parts]
        if None in slots:
            return f"{called} has no limit of slots", ""
        mean = sum(n * (count or 0) for n, count in zip(heads, slots, strict=True)) / sum(heads)
        return (f"{called} has {mean:g} slots per KV head" if mean > budget else ""), ""

    def _alone(self) -> Iterator[tuple[Pool, Pipe]]:
        """Find the pools that are not weir's, each with a pipe in which no pool before it declares
        that it needs anything or that it draws random numbers.
        """
        known = set()
        for pools in (part.spec.pipe.pools for part in self.parts):
            for place, pool in enumerate(pools):
                kind = type(getattr(pool, "pool", pool))
                if kind in known or is_own(kind):
                    continue
                known.add(kind)
                quiet = (one for one in pools[:place] if not _needs(one))
                try:
                    yield pool, Pipe((*quiet, pool))
                except WeirError:  # it must come after one of the others
                    yield pool, Pipe(pools[: place + 1])

    @cached_property
    def _ran_alone(self) -> list[tuple[Pool, Pipe, StreamingCache, Tensor | str]]:
        """The pools and pipes of `_alone`, each with its cache and logits, or the error."""
        ran = []
        for pool, pipe in self._alone():
            cache = self._cache(pipe)
            made: Tensor | str
            try:
                made = self._run(cache, self.ids[:1])
            except Exception as error:
                made = _explain(error)
            ran.append((pool, pipe, cache, made))
        return ran

    def _declares(self) -> str:
        for pool, pipe, cache, made in self._ran_alone:
            if isinstance(made, str) or any(one.is_stochastic for one in pipe.pools):
                continue
            other = self._cache(pipe, seed=1)
            got = self._run(other, self.ids[:1])
            if fault := self._differ(got, made, 0.0) or _hold_otherwise(other, cache):
                return (
                    f"the pool {pool.name} does not declare is_stochastic, but with another seed, "
                    f"{fault}"
                )
        return ""

    def _reads(self) -> str:
        for pool, pipe, cache, made in self._ran_alone:
            if isinstance(made, str):
                return (
                    f"without the declarations of other pools, the pool {pool.name} fails: {made}"
                )
            other = self._cache(_WithMoreQueries(pipe.pools))
            got = self._run(other, self.ids[:1])
            if fault := self._differ(got, made) or _hold_otherwise(other, cache):
                return (
                    f"the pool {pool.name} declares needs_queries = {pool.needs_queries}, but if "
                    f"another pool needs {pipe.needs_queries + MORE}, {fault}. Read only the last "
                    "needs_queries queries"
                )
        return ""

    def _exact(self, watched: Tensor) -> str:
        wanted = self._run(self._cache("dense"), self.ids[:1, : watched.shape[1]])
        return self._differ(watched, wanted)

    def _seed(self) -> str:
        caches = self._cache(), self._cache()
        one, other = (self._run(cache, self.ids[:1]) for cache in caches)
        return self._differ(one, other, 0.0) or _hold_otherwise(*caches)

    def _cut(self) -> str:
        whole = self._cache(self.exact)
        wanted = self._run(whole, self.ids[:1])
        for step in (7, 3 * CHUNK):
            cache = self._cache(self.exact)
            got = self._run(cache, self.ids[:1], step)
            if fault := self._differ(got, wanted) or _hold_otherwise(cache, whole):
                return f"in calls of {step} tokens, {fault}"
        return ""

    def _batch(self) -> str:
        # The first two rows fold together, and the last one, which is shorter, folds alone.
        together, pads = self._cache(self.exact), CHUNK - 3
        got = self._run(together, self.ids, 3 * CHUNK, pads)
        for row, padding in enumerate((0, 0, pads)):
            alone = self._cache(self.exact)
            wanted = self._run(alone, self.ids[row : row + 1, padding:])
            fault = self._differ(got[row : row + 1, padding:], wanted)
            if fault := fault or _hold_otherwise(together, alone, row):
                return f"in row {row}, {fault}"
        return ""

    def _restore(self) -> str:
        cache, other = self._cache(), self._cache()
        half = self.ids.shape[1] - 3 * CHUNK
        self._run(cache, self.ids[:1, :half])
        other.put_row(0, cache.take_row(0))
        one, again = (self._run(it, self.ids[:1, half:]) for it in (cache, other))
        return self._differ(one, again, 0.0) or _hold_otherwise(cache, other)

    def _differ(self, got: Tensor, wanted: Tensor, within: float | None = None) -> str:
        """Return how logits differ by more than rounding; "" if they do not."""
        within = self.off if within is None else within
        apart = float((got.double() - wanted.double()).abs().max())
        if apart <= within:  # false for NaN, too
            return ""
        return f"logits differ by {apart:.2g}, and rounding explains {within:.2g}"


def _explain(error: Exception) -> str:
    """Return the message of an error. A WeirError about a pool names its file and line."""
    text = first_line(error)
    return text if isinstance(error, WeirError) else f"{type(error).__name__}: {text}"


def _result(rule: str, fault: str, excuse: str = "") -> RuleResult:
    if fault:
        return RuleResult(rule, "failed", fault)
    return RuleResult(rule, "not applicable" if excuse else "passed", excuse)


def _hold_otherwise(one: StreamingCache, other: StreamingCache, row: int = 0) -> str:
    """Return in which layer a row holds other tokens than row 0 of another cache; "" if none."""
    for layer in range(len(one)):
        mine, theirs = (cache.slots(layer).position for cache in (one, other))
        if _places(mine[row]) != _places(theirs[0]):
            return f"other tokens are held in layer {layer}"
    return ""


def _find_rounding(model: PreTrainedModel, ids: Tensor) -> float:
    """Return how far rounding can move a logit.

    A product in a sum of n terms is off by eps * sqrt(n / 12) of itself, as if its weight were off
    by that much. So the weights are changed at random, and the change of the logits is measured.
    """
    weights = {n: t for n, t in model.named_parameters() if t.is_floating_point()}
    longest = max((t.shape[-1] for t in weights.values() if t.ndim > 1), default=1)
    turned = {n: t for n, t in model.named_buffers() if n.endswith("inv_freq")}
    draw, turn, far = torch.Generator().manual_seed(0), math.sqrt(2 / longest), 0.0

    def logits(tensors: dict[str, Tensor]) -> Tensor:
        given = {"input_ids": ids, "use_cache": False}
        made: Tensor = functional_call(model, tensors, kwargs=given).logits
        return made.double()

    was = logits({})
    for _ in range(DRAWS):
        moved = {n: t * (1 + STEP * turn) for n, t in turned.items()}
        for name, t in weights.items():
            noise = torch.randn(t.shape, generator=draw).to(t)
            moved[name] = t * (1 + STEP * noise)
        far = max(far, float((logits(moved) - was).abs().max()))
    return far / STEP * torch.finfo(model.dtype).eps * math.sqrt(longest / 6)
