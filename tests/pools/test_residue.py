"""The pool `residue`: which tokens are merged into means, and how much weight the means get."""

from __future__ import annotations

import math

import pytest
import torch
from model_runs import reads_as, rows_read_alone
from reference.residue import joined, residue_of
from roundings import close, weights_off, within
from torch import Tensor

import weir
from weir.errors import WeirError
from weir.pools import Fold, ObservedAttention, Residue
from weir.pools.counter_rng import CounterRNG
from weir.pools.residue import GATES, measure_misled, merge_nearest
from weir.slab import AttentionParams, LayerPositions, Slots, two_weight_attention

pytestmark = pytest.mark.thinned(3, least=2)

FORM = AttentionParams(0.5)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("chunk", "half_life", "spread"), [(1, "20", True), (7, "none", True), (7, "9", False)]
)
def test_a_model_reads_as_with_a_naive_pool(llama, ids, naive, twins, chunk, half_life, spread):
    def scale_of(at):
        return llama.model.layers[at.layer].self_attn.scaling

    life = math.inf if half_life == "none" else float(half_life)
    twin = naive(llama, twins.pipe(residue_of(8, life, spread, 9, scale_of)), pools=1, chunk=chunk)
    words = f"half_life={half_life}, spread={str(spread).lower()}, gate=false, window=9"
    reads_as(weir.Stream(llama, f"residue(8, {words})", chunk=chunk), twin, ids(1, 45))


# --- which tokens are merged


def test_points_are_joined_as_in_a_naive_loop():
    points, weights = random(2, 2, 30, 4), random(2, 2, 30).abs().double() + 0.01
    among = torch.ones(2, 2, 30, dtype=torch.bool)
    among[1, 0, 20:] = False
    found = merge_nearest(points, weights, among, 6)
    for row in range(2):
        for head in range(2):
            there = int(among[row, head].sum())
            wanted = joined(list(points[row, head, :there]), weights[row, head, :there].tolist(), 6)
            group = found[row, head].tolist()
            got = [[i for i in range(there) if group[i] == g] for g in sorted(set(group[:there]))]
            assert got == sorted(sorted(members) for members in wanted)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e15])
def test_points_that_are_all_alike_or_far_out_are_joined_too(size):
    points = size * random(1, 1, 1, 3).expand(1, 2, 20, 3)
    weights = torch.zeros(1, 2, 20, dtype=torch.float64)
    weights[:, 1] = 1.0
    found = merge_nearest(points, weights, torch.ones(1, 2, 20, dtype=torch.bool), 3)
    assert [len(set(head)) for head in found[0].tolist()] == [3, 3]


# --- the weights of means, and the gate that lowers them: folds without a model


def tokens(keys: Tensor, values: Tensor, first: int) -> Slots:
    """Tokens from place `first` on [1, heads, n, dim]."""
    position = torch.arange(first, first + keys.shape[2]).expand(1, keys.shape[1], -1)
    weights = torch.zeros(position.shape)
    return Slots(keys, values, weights, weights.clone(), position)


def reading(whole: Slots, queries: Tensor) -> ObservedAttention:
    """The attention of the last queries [1, heads, group, n, dim], without positions."""
    nowhere = whole.position[:, :, :0]
    ahead = torch.tensor([int(whole.position.max()) + 1 + queries.shape[3]])
    return ObservedAttention(lambda: whole, lambda: nowhere, queries, ahead, FORM, LayerPositions())


def folded(pool: Residue, new: Slots, queries: Tensor, rest: Slots) -> tuple[Slots, dict]:
    """The slots and the state of an empty pool after a fold of arrivals."""
    read = reading(rest.join(new), queries)
    state = pool.state(new.part(0, 0))
    fold = Fold(CounterRNG(0), read.next, FORM, queries, read, state=state)
    return pool.fold(new.part(0, 0), new, fold)[0], state


def test_how_far_gates_mislead_is_what_the_answers_say():
    """The squared distance between attention over the rest and the means, and attention over the
    rest and the arrivals themselves.
    """
    parts = [tokens(random(1, 2, n, 4), random(1, 2, n, 3), 10 * n) for n in (9, 4, 6)]
    rest, held, new = sorted(parts, key=lambda it: int(it.position.min()))
    for weights in (held.a, held.b):
        weights += 0.7
    queries = random(1, 2, 3, 5, 4)
    means = tokens(random(1, 2, 2, 4), random(1, 2, 2, 3), 60)
    means.a, means.b = means.a + 1.5, means.b + 1.5
    read = reading(rest.join(held).join(new), queries)

    def answers(slots):
        return two_weight_attention(queries, slots.keys, slots.values, slots.a, slots.b, FORM)

    truth, wanted = answers(rest.join(new)), []
    for gate in GATES:
        log = math.log(gate) if gate else -math.inf
        believed = Slots(means.keys, means.values, means.a + log, means.b + log, means.position)
        wanted.append((answers(rest.join(believed)) - truth).square().sum(dim=(2, 3, 4)))
    got = measure_misled(read, held, new, means, 5)
    # The shares of held tokens are subtracted from 1. If a tenth is left, a digit is lost.
    close(got, torch.stack(wanted, dim=2), terms=1000)


def test_equal_tokens_become_one_that_counts_for_all_of_them():
    key, value = random(1, 2, 1, 4), random(1, 2, 1, 3)
    new = tokens(key.expand(-1, -1, 6, -1), value.expand(-1, -1, 6, -1), 3)
    kept, state = folded(Residue(1, window=5), new, random(1, 2, 3, 5, 4), tokens(key, value, 0))
    close(kept.keys, key, 6)
    close(kept.values, value, 6)
    for log in (kept.a, kept.b, state["a"], state["b"]):
        close(log, torch.full_like(log, math.log(6)), 6)
    assert kept.position.unique().tolist() == [8]
    assert Residue(1).report(state, 0) == {"gate": 1.0}


def test_a_mean_of_keys_that_queries_tell_apart_weighs_more():
    """The mean of e^x and e^-x is above 1, for small x by about half of x squared."""
    keys = torch.tensor([[0.3, 0.0], [-0.3, 0.0]]).expand(1, 1, 2, 2)
    queries = torch.tensor([1.0, 0.0]).expand(1, 1, 1, 4, 2)
    new = tokens(keys, torch.ones(1, 1, 2, 1), 1)
    rest = tokens(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 1), 0)
    kept = folded(Residue(1, gate=False, window=4), new, queries, rest)[0]
    # Without rotation, each dimension counts separately instead of in pairs, so x is scale * 0.3.
    close(kept.b, torch.full_like(kept.b, math.log(2) + (0.5 * 0.3) ** 2 / 2), 8)
    plain = folded(Residue(1, gate=False, window=4, spread=False), new, queries, rest)[0]
    close(plain.b, torch.full_like(plain.b, math.log(2)), 8)


def test_means_that_mislead_weigh_nothing_in_any_head_of_the_layer():
    """One head's mean is right. The other head merges keys so different that its mean misleads."""
    loud = torch.tensor([[8.0, 0.0], [0.0, 8.0]])
    keys = torch.stack([torch.zeros(2, 2), -loud])[None]
    values = torch.stack([torch.ones(2, 1), 1e6 * torch.ones(2, 1)])[None]
    queries = torch.tensor([4.0, 4.0]).expand(1, 2, 1, 4, 2)
    rest = tokens(torch.zeros(1, 2, 1, 2), torch.zeros(1, 2, 1, 1), 0)
    new = tokens(keys, values, 1)
    kept, state = folded(Residue(1, window=4), new, queries, rest)
    assert kept.b.isneginf().all() and kept.a.isneginf().all()
    assert Residue(1).report(state, 0) == {"gate": 0.0}
    assert state["b"].isfinite().all()  # the weights of merged tokens are still known
    assert folded(Residue(1, window=4, gate=False), new, queries, rest)[0].b.isfinite().all()


def test_what_was_merged_fades_by_what_arrives(llama, ids):
    stream = weir.Stream(llama, "recent(4) | residue(5, half_life=10, gate=false)", chunk=5)
    stream.feed(ids(1, 60))
    wanted = 1.0  # of the first five tokens four are recent
    for _ in range(11):
        wanted = wanted * 0.5 ** (5 / 10) + 5
    for layer in stream.cache.stack:
        weight = layer.state.slab.state["1.b"].double().exp().sum(dim=2)
        bound = weights_off(wanted, 11 * 5) * wanted
        within(weight, torch.full_like(weight, wanted), bound)


# --- its slots do not hold single tokens


def test_slots_that_change_at_every_fold_are_not_quantized():
    with pytest.raises(WeirError, match=r"Write residue without :int8"):
        weir.policy("recent(64) | residue(16):int8")
    made = weir.policy("quantized(sink(4) | recent(64) | kcenter(16) | residue(16))")
    assert made.for_layer(0, 1).formats == ("", "", "int8", "")


@pytest.mark.parametrize("name", ["a", "b", "spread", "misled"])
def test_what_no_fold_has_left_is_not_restored(name):
    pool = Residue(3)
    state = pool.state(tokens(torch.zeros(1, 1, 0, 2), torch.zeros(1, 1, 0, 2), 0))
    assert pool.wrong_state(state, 0, 10) is None
    assert name in pool.wrong_state({**state, name: state[name] * 0 + math.nan}, 0, 10)
    assert name in pool.wrong_state({**state, name: torch.full_like(state[name], math.inf)}, 0, 10)


@pytest.mark.parametrize("seed", [11, 12, 18])
def test_rounding_chooses_no_gate(llama, ids, seed):
    """If queries attend only to means and arrivals, all gates but 0 give the same answers."""
    policy = "residue(16, window=9, spread=false)"
    rows_read_alone(llama, policy, ids(2, 90, seed), [0, 13], [30, 1, 59], chunk=7)
