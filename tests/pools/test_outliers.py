"""Keys that point away from the others: the pool holds what a naive loop holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference.outliers import Outliers as Reference
from roundings import close_runs, weights_off, within
from torch import Tensor

import weir
from weir.pools import Fold, Outliers
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams
from weir.slab.slots import Slots

pytestmark = pytest.mark.thinned(3, least=2)

FOLD = Fold(CounterRNG(0), torch.tensor([0]), AttentionParams(0.5))


def stream(length: int, seed: int = 0) -> Tensor:
    """Random keys [2, 2, length, 4], most of which point roughly in the same direction."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 2, length, 4, generator=generator)
    return keys + torch.tensor([1.2, 0.0, 0.0, 0.0])


def at(keys: Tensor, places: Tensor) -> Slots:
    """The tokens at places [batch, kv_heads, n], -1 for none; weights depend on them."""
    index = places.clamp_min(0)[..., None].expand(-1, -1, -1, keys.shape[3])
    weight = (places % 5 * 0.25).masked_fill(places < 0, -torch.inf)
    return Slots(keys.gather(2, index), keys.gather(2, index), weight, weight.clone(), places)


def once(pool: Outliers, keys: Tensor) -> tuple[list[int], list[int]]:
    """The tokens that stay and those that flow on, if keys [length, key_dim] arrive at once."""
    new = at(keys[None, None], torch.arange(len(keys))[None, None])
    none = new.part(0, 0)
    held, rest = pool.fold(none, new, replace(FOLD, state=pool.state(none)))
    return held.position[0, 0].tolist(), rest.position[0, 0].tolist()


@pytest.mark.parametrize(
    ("pool", "chunk", "share"),
    [
        (Outliers(12, 64), 1, 1.0),
        (Outliers(12, 1024, 2), 16, 1.0),
        (Outliers(40, 2, 0, 0.0), 7, 0.7),
        (Outliers(60, 256, 25, 0.0), 150, 0.9),
        (Outliers(9, 16, 3, -0.9), 3, 1.0),
    ],
)
def test_it_holds_what_a_naive_loop_holds(pool, chunk, share):
    length, generator = 500, torch.Generator().manual_seed(1)
    keys = stream(length)
    held = at(keys, torch.empty(2, 2, 0, dtype=torch.int64))
    state = pool.state(held)
    parameters = (pool.n, pool.over, pool.dilate, pool.below)
    loops = [[Reference(*parameters) for _ in range(2)] for _ in range(2)]
    for start in range(0, length, chunk):
        places = torch.arange(start, min(start + chunk, length)).expand(2, 2, -1)
        places = places.where(torch.rand(places.shape, generator=generator) < share, -1)
        fold = replace(FOLD, state=dict(state), unbroken=share == 1)
        held, rest = pool.fold(held, at(keys, places), fold)
        assert {name: t.shape for name, t in fold.state.items()} == {
            name: t.shape for name, t in state.items()
        }
        state = fold.state
        assert len(held) <= pool.slots()
        assert bool(held.held.any(dim=0).any(dim=0).all()), "a column is empty in every head"
        for slots in (held, rest):
            assert torch.equal(slots.a, at(keys, slots.position).a)
        for row in range(2):
            for head in range(2):
                gone = []
                for p in places[row, head].tolist():
                    if p >= 0:
                        gone += loops[row][head].take(keys[row, head, p].double().tolist(), p)
                mine = [p for p in held.position[row, head].tolist() if p >= 0]
                assert mine == sorted(loops[row][head].held)
                assert [p for p in rest.position[row, head].tolist() if p >= 0] == sorted(gone)


def test_what_points_away_is_kept_with_its_neighbors():
    keys = torch.ones(40, 4)
    keys[17] = -1.0
    stays, rest = once(Outliers(10, dilate=3, below=0.0), keys)
    assert stays == [*range(14, 21), 37, 38, 39]  # the newest wait for their neighbors
    assert rest == [*range(14), *range(21, 37)]
    assert 17 in once(Outliers(1), keys)[0]


def test_who_points_away_most_stays_and_of_equals_the_older():
    keys = torch.ones(30, 2)
    keys[11], keys[20] = torch.tensor([1.0, 0.5]), torch.tensor([1.0, -0.5])
    assert once(Outliers(1), keys)[0] == [20]
    assert once(Outliers(2), keys)[0] == [11, 20]
    assert once(Outliers(4), torch.ones(30, 2))[0] == [0, 1, 2, 3]


def test_an_empty_slot_changes_nothing():
    pool, keys = Outliers(2, over=4, dilate=1, below=0.0), torch.ones(1, 1, 5, 2)
    kept = []
    for places in ([0, 1, 2, 3, 4], [-1, 0, 1, 2, 3, 4], [0, 1, -1, 2, 3, 4]):
        new = at(keys, torch.tensor([[places]]))
        held, _ = pool.fold(new.part(0, 0), new, replace(FOLD, state=pool.state(new.part(0, 0))))
        kept.append(held.position[0, 0].tolist())
    assert kept == [[4]] * 3


def test_the_mean_forgets():
    # A key like the old ones points away from the newer ones.
    keys = torch.tensor([1.0, 0.0]).repeat(120, 1)
    keys[60:] = torch.tensor([0.0, 1.0])
    keys[119] = torch.tensor([1.0, 0.0])
    assert once(Outliers(1, over=8), keys[100:])[0] == [19]
    assert once(Outliers(61, over=8), keys)[0][-1] == 119


PIPE = "sink(2) | recent(6) | outliers(8, dilate=1) | balance(16, block=4)"


@pytest.mark.slow
def test_a_row_gets_what_it_would_get_alone_and_goes_on_after_a_restore(llama, ids, tmp_path):
    tokens = ids(2, 90)
    both = weir.Stream(llama, PIPE, chunk=4)
    together = both.feed(tokens, all_logits=True)
    for row in range(2):
        alone = weir.Stream(llama, PIPE, chunk=4)
        alone.feed(tokens[row : row + 1, :50])
        alone.save(tmp_path / "session.safetensors")
        again = weir.Stream.restore(llama, tmp_path / "session.safetensors")
        more = alone.feed(tokens[row : row + 1, 50:], all_logits=True)
        close_runs(more[0], together[row, 50:], llama)
        assert torch.equal(again.feed(tokens[row : row + 1, 50:], all_logits=True), more)
    held = both.slots(layer=1)
    mine = held.pool == held.pools.index("balance")
    # No token is lost: each is held exactly, or counts in the weights of `balance`.
    exact = (held.position >= 0) & ~mine
    total = held.a.exp().where(mine, 0.0).sum(dim=2) + exact.sum(dim=2)
    within(total, torch.full_like(total, 90.0), weights_off(90) * 90)
