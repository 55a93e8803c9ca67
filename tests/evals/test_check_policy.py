"""`check_policy`: weir's policies pass, and a pool that breaks one rule fails exactly this rule."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import weir
from weir.errors import WeirError
from weir.evals import check
from weir.evals.check import RuleResult, check_policy
from weir.loading.loader import ASSETS
from weir.policies import NAMED, Pipe, Policy, named, registry
from weir.pools import Defend, Fold, Heavy, Pool, Ranked, Recent, Sink, SizedPool
from weir.slab import Slots

pytestmark = pytest.mark.skipif(not (ASSETS / "nano").exists(), reason="nano is not packaged here")


@pytest.fixture(scope="module")
def nano():
    return weir.load("nano")[0]


WITHOUT_BUDGET = {"dense": "dense"}
WITHOUT_BUDGET |= {name: f"{name}(snap(96))" for name in ("pyramid", "pinned", "quantized")}
NAMES = sorted(set(NAMED) - {"recompute", "kvzip"})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thinned(8)
def test_named_policies_pass(nano, name):
    text = WITHOUT_BUDGET.get(name, f"{name}(budget=96)")
    results = check_policy(text, nano)
    assert [result for result in results if result.outcome == "failed"] == []
    assert len({result.rule for result in results}) == len(results) == 12


@pytest.mark.parametrize("name", ["recompute", "kvzip"])
def test_policies_without_pools_are_refused(nano, name):
    with pytest.raises(WeirError, match="has no pools that could be checked"):
        check_policy(name, nano)


@dataclass(frozen=True)
class Newest(SizedPool):
    """Keep the newest tokens. The faulty pools derive from it, and each breaks one rule."""

    name = "newest"

    n: int

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        both = held.join(new)
        cut = max(0, len(both) - self.n)
        index = torch.arange(len(both)).expand(both.position.shape)
        return both.take(index[:, :, cut:]), both.take(index[:, :, :cut])


class Fails(Newest):
    def fold(self, held, new, fold):
        raise ValueError("no such thing")


class Loses(Newest):
    def fold(self, held, new, fold):
        kept, passed = super().fold(held, new, fold)
        return kept, passed.part(0, max(0, len(passed) - 1))


class Doubles(Newest):
    def fold(self, held, new, fold):
        kept, passed = super().fold(held, new, fold)
        return kept, passed.join(kept.part(0, 1)) if len(passed) else passed


class Evicts(Newest):
    def fold(self, held, new, fold):
        return held, new


class KeepsTooMany(Newest):
    def fold(self, held, new, fold):
        return Newest(self.n + 1).fold(held, new, fold)


class Overwrites(Newest):
    def fold(self, held, new, fold):
        kept, passed = super().fold(held, new, fold)
        held.values.zero_()
        return kept, passed


class Scales(Newest):
    def fold(self, held, new, fold):
        kept, passed = super().fold(held, new, fold)
        return replace(kept, values=kept.values * 1.001), passed


class Draws(Newest):
    def fold(self, held, new, fold):
        both = held.join(new)
        order = torch.randperm(len(both)).expand(both.position.shape)
        room = max(0, len(both) - self.n)
        return both.take(order[:, :, room:]), both.take(order[:, :, :room])


class DependsOnCalls(Newest):
    """It sees how many tokens the model's last call had, which the test notes in `width`."""

    def fold(self, held, new, fold):
        return (OldestOf if WIDTH == [7] else Newest)(self.n).fold(held, new, fold)


class OldestOf(Newest):
    def fold(self, held, new, fold):
        both = held.join(new)
        index = torch.arange(len(both)).expand(both.position.shape)
        return both.take(index[:, :, : self.n]), both.take(index[:, :, self.n :])


class DependsOnBatch(Newest):
    def fold(self, held, new, fold):
        return (Newest if len(fold.next) == 1 else OldestOf)(self.n).fold(held, new, fold)


class CannotBeBatched(Newest):
    def fold(self, held, new, fold):
        # `fold.next` is [batch], so this needs fold.next[:, None, None].
        assert (fold.next - new.position).shape == new.position.shape
        return super().fold(held, new, fold)


class CannotReport(Newest):
    def report(self, state, row):
        raise ValueError("no such row")


class KeepsHalf(Newest):
    def fold(self, held, new, fold):
        return Newest(self.n // 2).fold(held, new, fold)


@dataclass(frozen=True)
class KeepsAll(Pool):
    """Keep every token, and declare nothing."""

    name = "all"

    def slots(self):
        return None

    def fold(self, held, new, fold):
        return held.join(new), new.part(0, 0)


class Oldest(Newest):
    def fold(self, held, new, fold):
        return OldestOf(self.n).fold(held, new, fold)


class NotInOrder(Newest):
    """It passes on the newest token first."""

    in_order = True

    def fold(self, held, new, fold):
        kept, passed = super().fold(held, new, fold)
        index = torch.arange(len(passed)).flip(0).expand(passed.position.shape)
        return kept, passed.take(index)


class NotARun(Oldest):
    keeps_run = True


class HeadsDisagree(Newest):
    """Its first head keeps the newest tokens, and its second head the oldest."""

    heads_agree = True

    def fold(self, held, new, fold):
        both = held.join(new)
        index = torch.arange(len(both)).expand(both.position.shape)
        gone = max(0, len(both) - self.n)
        stays, goes = index[:, :, gone:].clone(), index[:, :, :gone].clone()
        stays[:, 1], goes[:, 1] = index[:, 1, : self.n], index[:, 1, self.n :]
        return both.take(stays), both.take(goes)


class Weighs(Newest):
    def fold(self, held, new, fold):
        kept, passed = super().fold(held, new, fold)
        if len(passed):
            kept = replace(kept, a=kept.a + 0.5, b=kept.b + 0.5)
        return kept, passed


class WeighsTwice(Newest):
    weighs = True

    def fold(self, held, new, fold):
        kept, passed = super().fold(held, new, fold)
        return (replace(kept, a=kept.a + 0.5) if len(passed) else kept), passed


@dataclass(frozen=True)
class Scored(Ranked):
    """A pool that ranks by a score. The next faulty pools derive from it."""

    name = "newest"

    n: int

    def score(self, slots: Slots, fold: Fold) -> torch.Tensor:
        return slots.values.norm(dim=3)


class DrawsUndeclared(Scored):
    def score(self, slots, fold):
        return fold.draws.uniform(0, slots.position)


class ReadsQueries(Scored):
    def score(self, slots, fold):
        return fold.read.received(slots, 8)


class ReadsMass(Scored):
    def score(self, slots, fold):
        return slots.mass


class ReadsTooManyQueries(Scored):
    needs_queries = 8

    def score(self, slots, fold):
        return fold.read.attention(slots).amax(dim=(2, 3))


class RefusesItsState(Newest):
    def state(self, like):
        return {"came": like.a.new_zeros(like.a.shape[:2])}

    def wrong_state(self, state, held, ahead):
        return "it is never right"


WIDTH: list[int] = []
"""The number of tokens in the last call of the model."""

ALONE = "without the declarations of other pools, the pool newest fails:"
FAULTY = {
    Fails: (check.RUNS, "the pool newest failed in fold() (test_check_policy.py, line "),
    Loses: (check.ONCE, "the pool newest did not return some tokens"),
    Doubles: (check.ONCE, "the pool newest kept a token that it also passed on"),
    CannotReport: (check.RUNS, "the pool newest failed in report() (test_check_policy.py, line "),
    NotInOrder: (
        check.DECLARES,
        "the pool newest declares in_order, but did not pass on",
    ),
    HeadsDisagree: (check.DECLARES, "the pool newest declares heads_agree, but its heads kept"),
    Weighs: (check.DECLARES, "the pool newest changed the log-weights of a token, but does not"),
    WeighsTwice: (check.DECLARES, "the pool newest gave a token log-weights a and b that differ"),
    DrawsUndeclared: (check.DECLARES, "the pool newest does not declare is_stochastic, but with"),
    ReadsQueries: (
        check.READS,
        f"{ALONE} the pool newest failed in score() (test_",
    ),
    ReadsMass: (check.READS, f"{ALONE} the score of the pool newest cannot"),
    ReadsTooManyQueries: (
        check.READS,
        "newest declares needs_queries = 8, but if another pool",
    ),
    Evicts: (check.SLOTS, "the pool newest kept 0 of 16 tokens, which fit in its 24 slots"),
    KeepsTooMany: (check.SLOTS, "the pool newest kept 25 slots, and its limit is 24"),
    Overwrites: (check.IN_PLACE, "the pool newest changed a tensor"),
    Scales: (check.EXACT, "logits differ by "),
    Draws: (check.SEED, "logits differ by "),
    DependsOnCalls: (check.CUT, "in calls of 7 tokens, logits differ by "),
    DependsOnBatch: (check.BATCH, "in row 0, logits differ by "),
    CannotBeBatched: (check.BATCH, "the pool newest failed in fold() (test_check_policy.py, line "),
    RefusesItsState: (check.RESTORE, "no row of this cache can have this state"),
}


@pytest.mark.parametrize("kind", FAULTY)
@pytest.mark.thinned(2)
def test_a_faulty_pool_fails_exactly_the_rule_that_it_breaks(nano, kind):
    def note(model, args, kwargs):
        WIDTH[:] = [args[0].shape[1]] if args else []

    rule, reason = FAULTY[kind]
    # These two pools need what ReadsQueries and ReadsMass do not declare.
    more = (Heavy(8), Defend(8)) if kind in (ReadsQueries, ReadsMass) else ()
    pipe = (Sink(4), Recent(60), kind(24), *more)
    hook = nano.register_forward_pre_hook(note, with_kwargs=True)
    try:
        results = check_policy(Pipe(pipe), nano)
    finally:
        hook.remove()
    failed = {result.rule: result.reason for result in results if result.outcome == "failed"}
    if rule in (check.ONCE, check.SLOTS) and check.RUNS in failed:
        assert failed.pop(check.RUNS).startswith("the pool newest ")  # a normal run stops, too
    assert list(failed) == [rule]
    assert reason in failed[rule]


def test_a_pool_whose_slots_are_fewer_than_a_chunk_must_keep_all_tokens_while_they_fit(nano):
    results = {it.rule: it for it in check_policy(Pipe((Sink(4), Recent(12), KeepsHalf(8))), nano)}
    assert [rule for rule, it in results.items() if it.outcome == "failed"] == [check.SLOTS]
    told = "the pool newest kept 4 of 8 tokens, which fit in its 8 slots"
    assert results[check.SLOTS].reason == told


def test_that_tokens_stay_while_they_fit_is_not_applicable_if_none_came(nano):
    results = {it.rule: it for it in check_policy(Pipe((KeepsAll(), Newest(24))), nano)}
    assert results[check.SLOTS].outcome == "not applicable"
    told = "the pool newest never got tokens that all fit in its slots"
    assert results[check.SLOTS].reason == told


def test_a_pool_that_declares_a_run_must_keep_the_newest_tokens(nano):
    results = {it.rule: it for it in check_policy(Pipe((Recent(60), NotARun(24))), nano)}
    told = "the pool newest declares keeps_run, but did not keep the newest tokens"
    assert results[check.DECLARES].reason == told


@pytest.mark.parametrize(
    ("size", "outcome", "reason"),
    [(96, "passed", ""), (100, "failed", "double(budget=96) has 100 slots per KV head")],
)
def test_a_named_policy_has_at_most_as_many_slots_as_its_budget(
    nano, monkeypatch, size, outcome, reason
):
    monkeypatch.setattr(registry, "NAMED", {})

    @named("nothing")
    def double(budget: int = 8) -> Policy:
        return Pipe((Sink(4), Recent(size - 4)))

    results = {it.rule: it for it in check_policy(double(budget=96), nano)}
    assert (results[check.BUDGET].outcome, results[check.BUDGET].reason) == (outcome, reason)


def test_a_pool_without_a_fault_passes_every_rule(nano):
    results = check_policy(Pipe((Sink(4), Recent(60), Newest(24))), nano)
    others = [result for result in results if result.outcome != "passed"]
    told = "the policy has no parameter budget"
    assert others == [RuleResult(check.BUDGET, "not applicable", told)]
