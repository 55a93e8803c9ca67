"""`check_policy`: weir's policies pass, and a pool that breaks one rule fails exactly this rule."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import weir
from weir.errors import WeirError
from weir.evals import check
from weir.evals.check import check_policy
from weir.loading.loader import ASSETS
from weir.policies import NAMED, Pipe
from weir.pools import Fold, Recent, Sink, SizedPool
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
    assert len({result.rule for result in results}) == len(results) == 9


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


class RefusesItsState(Newest):
    def state(self, like):
        return {"came": like.a.new_zeros(like.a.shape[:2])}

    def wrong_state(self, state, held, ahead):
        return "it is never right"


WIDTH: list[int] = []
"""The number of tokens in the last call of the model."""

FAULTY = {
    Fails: (check.RUNS, "the pool newest failed in fold() (test_check_policy.py, line "),
    Loses: (check.ONCE, "the pool newest did not return some tokens"),
    Doubles: (check.ONCE, "the pool newest kept a token that it also passed on"),
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
def test_a_faulty_pool_fails_exactly_the_rule_that_it_breaks(nano, kind):
    def note(model, args, kwargs):
        WIDTH[:] = [args[0].shape[1]] if args else []

    rule, reason = FAULTY[kind]
    hook = nano.register_forward_pre_hook(note, with_kwargs=True)
    try:
        results = check_policy(Pipe((Sink(4), Recent(60), kind(24))), nano)
    finally:
        hook.remove()
    failed = [result for result in results if result.outcome == "failed"]
    assert [result.rule for result in failed] == [rule]
    assert reason in failed[0].reason


def test_a_pool_without_a_fault_passes_every_rule(nano):
    results = check_policy(Pipe((Sink(4), Recent(60), Newest(24))), nano)
    assert {result.outcome for result in results} == {"passed"}
