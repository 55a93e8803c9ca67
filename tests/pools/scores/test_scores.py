"""Each score from the literature is that of a naive loop, in a layer that reads a random stream."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from reference import scores as naive
from reference.reading import frame_of
from roundings import softmax_off
from torch import Tensor

from weir.cache.layer.layer import Layer
from weir.cache.layer.layer_state import LayerSpec
from weir.errors import WeirError
from weir.policies.grammar import policy
from weir.policies.pipe import Pipe
from weir.pools import (
    RKV,
    Caote,
    CounterRNG,
    Critical,
    CurDKV,
    Expected,
    Fold,
    KeyDiff,
    Keyformer,
    KNorm,
    LagKV,
    ObservedAttention,
    Pool,
    QFilters,
    Ranked,
    Recent,
    Scissorhands,
    Sink,
    Tova,
    Tri,
    Vase,
)
from weir.pools.scores.vase import gumbel
from weir.slab import AttentionParams, LayerPositions, Rotary, Slots

pytestmark = pytest.mark.thinned(3, least=2)

DIM, VALUE, HEADS, GROUP, LENGTH, CHUNK = 8, 5, 2, 2, 60, 6
FORM = AttentionParams(0.4, softcap=6.0)
POSITIONS = LayerPositions(Rotary(torch.tensor([0.7, 0.11, 0.013]).double(), scaling=1.25))
"""Six of the eight dimensions are rotated."""
OFF = softmax_off(DIM, 40)
"""How far off shares of attention may be, relative to themselves: the terms of a logit add up to at
most 40.
"""


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


Q = random(2, HEADS * GROUP, LENGTH, DIM)
K, V = random(2, HEADS, LENGTH, DIM), random(2, HEADS, LENGTH, VALUE)


@dataclass
class Asked:
    """One call of a pool's `score`, with its arguments and its result."""

    slots: Slots
    fold: Fold
    score: Tensor
    whole: Tensor

    def sights(self) -> list[tuple[naive.Sight, dict[int, float], int, int]]:
        """For each row and head, return the input of a naive score, the pool's scores, and the
        numbers of the row and the head.
        """
        found = []
        for row in range(2):
            for head in range(HEADS):
                mine = self.slots.position[row, head].tolist()
                there = {p for p in self.whole[row, head].tolist() if p >= 0}
                seen = int(self.fold.seen[row])
                group = slice(head * GROUP, (head + 1) * GROUP)
                sight = naive.Sight(
                    [p for p in mine if p >= 0],
                    frame_of(sorted(there), seen),
                    Q[row, group].transpose(0, 1).tolist(),
                    K[row, head].tolist(),
                    V[row, head].tolist(),
                    seen,
                    head * GROUP,
                    POSITIONS,
                    FORM,
                )
                score = dict(zip(mine, self.score[row, head].tolist(), strict=True))
                score.pop(-1, None)
                found.append((sight, score, row, head))
        return found


def asked(pool: Ranked, monkeypatch: Any, front: tuple[Pool, ...] | None = None) -> list[Asked]:
    """Return all calls of a pool's `score` in a layer that reads the stream in two forwards."""
    every: list[Asked] = []
    score = type(pool).score

    def noted(self: Ranked, slots: Slots, fold: Fold) -> Any:
        scores = score(self, slots, fold)
        first = scores[0] if isinstance(scores, tuple) else scores
        whole = fold.read.whole.position.clone()  # a view of the slab
        every.append(Asked(slots.map(torch.clone), fold, first.clone(), whole))
        return scores

    monkeypatch.setattr(type(pool), "score", noted)
    pipe = Pipe((*((Sink(2), Recent(9)) if front is None else front), pool))
    layer = Layer(LayerSpec(pipe, POSITIONS, CHUNK, draws=CounterRNG(3, layer=5)))
    for start, stop in ((0, 23), (23, LENGTH)):
        q, k, v = (t[:, :, start:stop] for t in (Q, K, V))
        layer.feed(q, k, v, FORM, seen=start, waiting=start % CHUNK)
    assert len(every) >= 5
    return every


def same(got: dict[int, float], wanted: dict[int, float], off: float = OFF) -> None:
    """Check that scores are equal up to rounding, relative to the largest finite one."""
    assert got.keys() == wanted.keys()
    size = max((abs(x) for x in wanted.values() if math.isfinite(x)), default=0.0)
    for place, score in wanted.items():
        assert got[place] == pytest.approx(score, abs=off * size), place


# For each score, the pool and the naive function that computes it from a `Sight`.
PLAIN: dict[str, tuple[Ranked, Callable[[naive.Sight], dict[int, float]]]] = {
    "knorm": (KNorm(7), naive.knorm),
    "keydiff": (KeyDiff(7), naive.keydiff),
    "curdkv": (CurDKV(7, window=4), lambda s: naive.curdkv(s, 4)),
    "curdkv whole": (CurDKV(7, window=None), lambda s: naive.curdkv(s, None)),
    "tova": (Tova(7, per_head=True), lambda s: s.mean_share(1)),
    "scissorhands": (Scissorhands(7, window=8), lambda s: naive.scissorhands(s, 8)),
    "rkv": (RKV(7, window=12, kernel=3), lambda s: naive.rkv(s, 12, 3, 0.1, 0.5)),
    "rkv alike": (
        RKV(7, window=11, kernel=1, weight=0.4, alike=0.1),
        lambda s: naive.rkv(s, 11, 1, 0.4, 0.1),
    ),
    "critical": (
        Critical(7, window=6, first=0.6, floor=0.01),
        lambda s: naive.critical(s, 6, 7, 0.6, 0.01),
    ),
    "caote": (Caote(7, window=6), lambda s: naive.caote(s, 6)),
    "qfilters": (QFilters(7, queries=17), lambda s: naive.qfilters(s, 17)),
    "expected": (
        Expected(7, ahead=9, queries=12),
        lambda s: naive.expected(s, 9, 12, True, 0.0),
    ),
    "expected mean": (
        Expected(7, ahead=5, queries=40, covariance=False, floor=0.05),
        lambda s: naive.expected(s, 5, 40, False, 0.05),
    ),
    "tri": (Tri(7, ahead=9, queries=12), lambda s: naive.tri(s, [1, 2, 4, 8], 12)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_score_is_that_of_a_naive_loop(name, monkeypatch):
    pool, twin = PLAIN[name]
    for each in asked(pool, monkeypatch)[1::3]:
        for sight, score, _, _ in each.sights()[::3]:
            same(score, twin(sight))


def test_expected_shares_too_small_for_a_float_do_not_tie():
    """If queries are large, the expected attention of most tokens is too small for a float, but
    still larger for some than for others.
    """
    keys = torch.arange(40.0)[torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    keys = torch.stack([keys, torch.zeros(40)], dim=1)[None, None]
    zero, place = torch.zeros(1, 1, 40), torch.arange(40).expand(1, 1, 40)
    slots = Slots(keys, torch.ones(1, 1, 40, 3), zero, zero, place)
    queries, seen = torch.tensor([9.0, 0.0]).expand(1, 1, 2, 64, 2), torch.tensor([40])
    form, none = AttentionParams(1.0), place[:, :, :0]
    read = ObservedAttention(lambda: slots, lambda: none, queries, seen, form, LayerPositions())
    fold = Fold(CounterRNG(0), seen, form, queries, read)
    kept, _ = Expected(30).fold(slots.part(0, 0), slots, fold)
    assert sorted(kept.keys[0, 0, :, 0].tolist()) == list(range(10, 40))


def test_tova_averages_over_the_heads_of_the_layer(monkeypatch):
    for each in asked(Tova(7), monkeypatch)[::2]:
        sights = each.sights()
        for row in range(2):
            heads = [s.mean_share(1) for s, _, its, _ in sights if its == row]
            mean = {p: sum(h[p] for h in heads) / HEADS for p in heads[0]}
            for _, score, its, _ in sights:
                if its == row:
                    same(score, mean)


@pytest.mark.parametrize(
    "front", ["header(4)", "reservoir(6)", "uniform(6, per_head=false)", "sink(2) | recent(4)"]
)
def test_tova_stands_behind_what_is_the_same_in_all_heads(front):
    policy(f"{front} | tova(8)")


@pytest.mark.parametrize(
    "front", ["heavy(4)", "reservoir(6, per_head=true)", "uniform(6)", "tova(4, true)"]
)
def test_tova_is_refused_behind_what_each_head_has_its_own(front):
    name = front.partition("(")[0]
    with pytest.raises(WeirError, match=f"{name} before it keeps different ones in each"):
        policy(f"{front} | tova(8)")
    policy(f"{front} | tova(8, per_head=true)")


def test_lagkv_scores_a_token_once_by_the_stretch_behind_its_own(monkeypatch):
    for front in ((Sink(2), Recent(9)), ()):
        told: dict[tuple[int, int], dict[int, float]] = {}
        lag = 3 if front else 4
        for each in asked(LagKV(10, lag), monkeypatch, front):
            for sight, score, row, head in each.sights():
                known = {p: x for p, x in told.get((row, head), {}).items() if p in score}
                wanted = naive.lagkv(sight, lag, known)
                same(score, wanted)
                told[row, head] = {p: x for p, x in wanted.items() if x < math.inf}
        monkeypatch.undo()


def test_keyformer_adds_up_what_each_query_gives_once_with_noise(monkeypatch):
    pool = Keyformer(7, hot=3.0, over=40, window=CHUNK + 3)
    told: dict[tuple[int, int], dict[int, float]] = {}

    def noise(draws: CounterRNG, head: int) -> Callable[..., float]:
        def of(place: int, query: int, one: int) -> float:
            where = torch.full((1, HEADS, 1), place)
            return float(gumbel(draws.uniform(0, where, query * GROUP + one))[0, head, 0])

        return of

    # There were three folds before the first call of `score`. The scores that they added up are
    # taken from this call, and compared only from the second one on.
    every = asked(pool, monkeypatch)
    for each in every:
        for sight, score, row, head in each.sights():
            if (row, head) in told:
                fresh = range(sight.seen - CHUNK, sight.seen)
                wanted = naive.keyformer(
                    sight, told[row, head], fresh, 3.0, 40, noise(each.fold.draws, head)
                )
                same(score, wanted)
            told[row, head] = score


def test_vase_keeps_wide_values_and_draws_the_rest_by_their_attention(monkeypatch):
    for each in asked(Vase(7, wide=2, window=6, kernel=3), monkeypatch)[::3]:
        drawn = each.fold.draws.uniform(0, each.slots.position, each.fold.next[:, None, None])
        noise = gumbel(drawn)
        for sight, score, row, head in each.sights():
            place = each.slots.position[row, head].tolist()
            its = dict(zip(place, noise[row, head].tolist(), strict=True))
            same(score, naive.vase(sight, 6, 7, 2, 3, its))


def test_a_draw_by_noisy_logarithms_is_one_without_replacement():
    """Two of three tokens with weights 1, 2 and 5 are drawn one after the other, many times."""
    weight, times = torch.tensor([1.0, 2.0, 5.0]).double(), 20_000
    place = torch.arange(3).expand(1, 1, 3)
    index = torch.arange(times)[:, None, None]
    noise = gumbel(CounterRNG(1).uniform(0, place, index))[:, 0]
    left_out = (weight.log() + noise).argmin(dim=-1).bincount(minlength=3) / times
    for out in range(3):
        first, second = (i for i in range(3) if i != out)
        chance = sum(
            float(weight[a] / 8 * weight[b] / (8 - weight[a]))
            for a, b in ((first, second), (second, first))
        )
        deviation = math.sqrt(chance * (1 - chance) / times)
        assert abs(float(left_out[out]) - chance) < 5 * deviation


def test_gumbel_noise_makes_the_largest_logit_a_draw_from_the_softmax():
    logits, times = torch.tensor([0.0, 1.0, 2.0]).double(), 20_000
    u = CounterRNG(2).uniform(
        0, torch.arange(3).expand(1, 1, 3), torch.arange(times)[:, None, None]
    )
    won = (logits + gumbel(u)[:, 0]).argmax(dim=-1).bincount(minlength=3) / times
    for share, chance in zip(won.tolist(), logits.softmax(dim=0).tolist(), strict=True):
        assert abs(share - chance) < 5 * math.sqrt(chance * (1 - chance) / times)


# --- what is refused


def test_scores_of_equal_keys_and_values_are_numbers():
    """If all keys and values are equal, nothing varies, and dividing by a variance would give NaN,
    which `Ranked` refuses.
    """
    place = torch.arange(9).expand(1, 1, 9)
    same_keys = torch.ones(1, 1, 9, 3)
    zero = torch.zeros(1, 1, 9)
    slots = Slots(same_keys, same_keys, zero, zero, place)
    fold = Fold(CounterRNG(0), torch.tensor([9]), AttentionParams(1.0))
    for pool in (KNorm(4), KeyDiff(4), CurDKV(4), LagKV(7, lag=3)):
        state = pool.state(slots.part(0, 0))
        kept, _ = pool.fold(slots.part(0, 0), slots, replace(fold, state=state))
        assert len(kept) == pool.slots()
