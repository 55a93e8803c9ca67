"""Keys that point away from their block: the pool holds what a naive loop holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference.outliers import Outliers as Reference
from torch import Tensor

import weir
from weir.draws import Draws
from weir.errors import WeirError
from weir.pools import Balance, Fold, Outliers, Recent, Sink
from weir.slab import Slots

FOLD = Fold(Draws(0), layer=0, layers=1, seen=torch.tensor([0]), scale=0.5)


def stream(length: int, seed: int = 0) -> Tensor:
    """Keys [2, 2, length, 4] that lean one way, all but a few."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 2, length, 4, generator=generator)
    return keys + torch.tensor([1.2, 0.0, 0.0, 0.0])


def at(keys: Tensor, places: Tensor) -> Slots:
    """The tokens at places [2, 2, n], -1 for none."""
    index = places.clamp_min(0)[..., None].expand(-1, -1, -1, 4)
    weight = torch.zeros(places.shape).masked_fill(places < 0, -torch.inf)
    return Slots(keys.gather(2, index), keys.gather(2, index), weight, weight.clone(), places)


@pytest.mark.parametrize(
    ("pool", "chunk", "share"),
    [
        (Outliers(12, 256, 2), 16, 1.0),
        (Outliers(12, 8, 1), 20, 1.0),
        (Outliers(40, 16, 0), 7, 0.7),
        (Outliers(5, 256, 25), 64, 0.9),
        (Outliers(9, 4, 1), 3, 1.0),
    ],
)
def test_it_holds_what_a_naive_loop_holds(pool, chunk, share):
    length, generator = 2000, torch.Generator().manual_seed(1)
    keys = stream(length)
    held = at(keys, torch.empty(2, 2, 0, dtype=torch.int64))
    state = pool.state(held)
    loops = [[Reference(pool.n, pool.block, pool.dilate) for _ in range(2)] for _ in range(2)]
    crowded = 0
    for start in range(0, length, chunk):
        places = torch.arange(start, min(start + chunk, length)).expand(2, 2, -1)
        coins = torch.rand(places.shape, generator=generator) < share
        # Arrivals of a head lie side by side, as they do behind a pool whose heads differ.
        places = places.where(coins, length).sort(dim=2).values
        places = places.where(places < length, -1)
        fold = replace(FOLD, state=dict(state), unbroken=share == 1)
        held, rest = pool.fold(held, at(keys, places), fold)
        state = fold.state
        assert state["score"].shape == (2, 2, pool.n)
        assert len(held) <= pool.slots()
        for row in range(2):
            for head in range(2):
                came = [p for p in places[row, head].tolist() if p >= 0]
                gone = loops[row][head].take(keys[row, head, came].double().tolist(), came)
                mine = [p for p in held.position[row, head].tolist() if p >= 0]
                assert mine == [p for _, p in loops[row][head].held]
                assert sorted(p for p in rest.position[row, head].tolist() if p >= 0) == gone
        crowded += len(held) == pool.n
    assert crowded > 10


def test_what_points_away_is_kept_with_its_neighbours():
    keys = torch.ones(1, 1, 40, 4)
    keys[0, 0, 17] = -1.0
    places = torch.arange(40)[None, None]
    pool = Outliers(16, dilate=3)
    weight = torch.zeros(1, 1, 40)
    new = Slots(keys, keys, weight, weight.clone(), places)
    fold = replace(FOLD, state=pool.state(new.part(0, 0)))
    held, rest = pool.fold(new.part(0, 0), new, fold)
    assert held.position[0, 0].tolist() == list(range(14, 21))
    assert rest.position[0, 0].tolist() == [*range(14), *range(21, 40)]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"n": 0}, "n of outliers is 1 or more, not 0"),
        ({"block": 1}, "block of outliers is 2 or more, not 1"),
        ({"dilate": -1}, "dilate of outliers is 0 or more, not -1"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(given, reason):
    with pytest.raises(WeirError, match=reason):
        Outliers(**{"n": 8, **given})


def test_the_policy_gives_it_slots():
    pools = weir.policy("balancekv(256, outliers=64)").pools
    assert pools == (Sink(32), Recent(32), Outliers(64), Balance(128))
    with pytest.raises(WeirError, match="leaves no room"):
        weir.policy("balancekv(64, outliers=60)")


PIPE = "sink(2) | recent(6) | outliers(8, dilate=1) | balance(16, block=4)"


def test_below_its_budget_it_is_dense(llama, ids):
    tokens = ids(1, 24)
    stream = weir.Stream(llama, PIPE, chunk=4)
    with torch.no_grad():
        wanted = llama(tokens).logits
    torch.testing.assert_close(stream.feed(tokens, all_logits=True), wanted, atol=1e-4, rtol=0)


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
        torch.testing.assert_close(more[0], together[row, 50:], atol=1e-3, rtol=0)
        assert torch.equal(again.feed(tokens[row : row + 1, 50:], all_logits=True), more)
    held = both.slots(layer=1)
    mine = held.pool == held.pools.index("balance")
    # Nothing is lost: it is exact, or in the weights of what is balanced.
    exact = (held.position >= 0) & ~mine
    total = held.a.exp().where(mine, 0.0).sum(dim=2) + exact.sum(dim=2)
    torch.testing.assert_close(total, torch.full_like(total, 90.0))
