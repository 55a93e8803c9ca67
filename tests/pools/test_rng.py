"""Random numbers of tokens: always the same for one token and purpose, and otherwise random."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weir.errors import WeirError
from weir.pools.counter_rng import CounterRNG, _mix

MANY = 1 << 16


def places(batch: int = 1, heads: int = 1, n: int = MANY) -> Tensor:
    """The first n places of a stream."""
    return torch.arange(n).expand(batch, heads, n)


def chi_square(x: Tensor, bins: int) -> float:
    """How far counts in bins are from even, in standard deviations of a chi-square distribution
    with bins - 1 degrees of freedom.
    """
    counts = torch.histc(x.double(), bins, 0, 1).double()
    even = x.numel() / bins
    statistic = float(((counts - even) ** 2 / even).sum())
    return (statistic - (bins - 1)) / math.sqrt(2 * (bins - 1))


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation, in standard deviations of the correlation of independent numbers."""
    both = torch.stack([x.flatten(), y.flatten()])
    return float(torch.corrcoef(both)[0, 1]) * math.sqrt(x.numel())


def test_the_draws_are_those_of_every_release():
    # These numbers must never change, because a saved session must go on with the same draws.
    got = CounterRNG(seed=1, layer=2).uniform(3, torch.tensor([[[0, 1], [0, 4_000_000]]]))
    assert got.tolist() == [
        [
            [0.8882126053469354, 0.027450619879058058],
            [0.5889115058139234, 0.8456699010016611],
        ]
    ]


def test_heads_that_are_shared_out_draw_what_they_would_together():
    whole = CounterRNG(seed=1, layer=2).uniform(3, places(heads=4, n=8))
    share = CounterRNG(seed=1, layer=2, first=2)
    assert torch.equal(share.uniform(3, places(heads=2, n=8)), whole[:, 2:])
    # A draw that all heads share is the same in each part of the heads.
    assert torch.equal(share.of_layer().uniform(3, places(n=8)), whole[:, :1])


def test_mixing_is_splitmix64():
    # Vigna's reference of SplitMix64 seeded with 0 begins with these three.
    golden = 0x9E3779B97F4A7C15
    wanted = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    states = torch.tensor([_signed(golden * n) for n in (1, 2, 3)])
    assert _mix(states).tolist() == [_signed(x) for x in wanted]


def _signed(x: int) -> int:
    x %= 1 << 64
    return x - (1 << 64) if x >= 1 << 63 else x


@given(st.integers(0, 2**70), st.integers(0, 200), st.integers(0, 2**40), st.integers(0, 9))
def test_draws_lie_between_zero_and_one_for_every_seed_and_layer(seed, layer, place, index):
    draws = CounterRNG(seed, layer).uniform(layer, torch.tensor([[[place]]]), index)
    assert draws.dtype == torch.float64
    assert 0 <= float(draws) < 1


def test_a_row_draws_what_it_would_draw_alone():
    draws = CounterRNG(5, 1)
    position = torch.randint(0, 10**9, (4, 3, 17), generator=torch.Generator().manual_seed(0))
    together = draws.uniform(2, position)
    for row in range(4):
        assert torch.equal(together[row : row + 1], draws.uniform(2, position[row : row + 1]))


def test_a_token_draws_the_same_whatever_stands_beside_it():
    draws = CounterRNG(5)
    position = torch.randperm(50, generator=torch.Generator().manual_seed(0)).expand(1, 2, 50)
    in_order = draws.uniform(0, places(heads=2, n=50))
    assert torch.equal(draws.uniform(0, position), in_order.gather(2, position))


def test_one_head_for_all_or_each_for_itself():
    draws = CounterRNG(3)
    shared, own = draws.uniform(0, places(n=9)), draws.uniform(0, places(heads=2, n=9))
    assert shared.shape == (1, 1, 9)
    assert torch.equal(own[:, :1], shared)
    assert not bool((own[:, 1] == own[:, 0]).any())


@pytest.mark.parametrize("bins", [16, 256])
def test_draws_are_uniform(bins):
    # Draws are uniform over places, seeds, layers, purposes and indexes. By chance, a check exceeds
    # five deviations about once in a million times.
    place = places()
    streams = {
        "places": CounterRNG(0).uniform(0, place),
        "far places": CounterRNG(0).uniform(0, place + 4_000_000),
        "indexes": CounterRNG(0).uniform(0, place[..., :1].expand(1, 1, MANY), place),
        "purposes": torch.cat([CounterRNG(0).uniform(p, place[..., :64]) for p in range(1024)]),
        "seeds": torch.cat([CounterRNG(s).uniform(0, place[..., :64]) for s in range(1024)]),
        "layers": torch.cat([CounterRNG(0, la).uniform(0, place[..., :64]) for la in range(1024)]),
    }
    for name, x in streams.items():
        assert abs(chi_square(x, bins)) < 5, name


def test_draws_of_different_names_have_nothing_to_do_with_each_other():
    place = places(heads=2)
    one = CounterRNG(1, 1).uniform(1, place, 1)
    others = {
        "seed": CounterRNG(2, 1).uniform(1, place, 1),
        "layer": CounterRNG(1, 2).uniform(1, place, 1),
        "pool": CounterRNG(1, 1, 1).uniform(1, place, 1),
        "purpose": CounterRNG(1, 1).uniform(2, place, 1),
        "position": CounterRNG(1, 1).uniform(1, place + 1, 1),
        "index": CounterRNG(1, 1).uniform(1, place, 2),
        "head": one.flip(1),
        "layer and purpose in each other's place": CounterRNG(1, 2).uniform(1, place, 2),
        "layer and pool in each other's place": CounterRNG(1, 0, 1).uniform(1, place, 1),
    }
    for name, other in others.items():
        x, y = (one[:, :1], other[:, :1]) if name == "head" else (one, other)
        assert abs(correlation(x, y)) < 5, name
        assert abs(correlation(x, (y - 0.5).abs())) < 5, name
        # If numbers are independent, and not only uncorrelated, their sums modulo 1 are uniform
        # too.
        assert abs(chi_square((x + y) % 1, 64)) < 5, name


def test_draws_of_one_token_are_told_apart_by_their_index():
    place = places(n=100)[..., None].expand(1, 1, 100, 1).flatten(2)
    index = torch.arange(4)[None, None]
    many = [CounterRNG(0).uniform(0, place, int(i)) for i in index.flatten()]
    table = CounterRNG(0).uniform(0, place.repeat_interleave(4, dim=2), index.repeat(1, 1, 100))
    assert torch.equal(table.view(1, 1, 100, 4), torch.stack(many, dim=-1))


def test_several_draws_for_a_token_are_those_of_each_index():
    at = places(batch=2, heads=3, n=5) + torch.tensor([[[0]], [[1000]]])
    draws = CounterRNG(seed=7, layer=1, pool=2)
    got = draws.uniforms(4, at, 6)
    for index in range(6):
        assert torch.equal(got[..., index], draws.uniform(4, at, index))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("seeds", [(5, 2**70, 5, 0), (7, 7, 7, 7), (1, 2, 3, 4)])
def test_a_row_with_a_seed_of_its_own_draws_what_it_would_draw_alone(seeds, heads):
    position = torch.randint(0, 10**9, (4, heads, 17), generator=torch.Generator().manual_seed(1))
    together = CounterRNG(seeds, 1, 2)
    for row, seed in enumerate(seeds):
        alone, of_row = CounterRNG(seed, 1, 2), position[row : row + 1]
        assert torch.equal(together.uniform(2, position)[row : row + 1], alone.uniform(2, of_row))
        many = together.uniforms(3, position, 5)[row : row + 1]
        assert torch.equal(many, alone.uniforms(3, of_row, 5))


def test_rows_with_the_same_seed_draw_what_one_seed_for_all_draws():
    position = places(batch=3, heads=2, n=9)
    assert torch.equal(
        CounterRNG((6, 6, 6)).uniform(0, position), CounterRNG(6).uniform(0, position)
    )
    differ = CounterRNG((6, 8, 6)).uniform(0, position)
    assert torch.equal(differ[0], differ[2])
    assert not bool((differ[0] == differ[1]).any())


def test_the_draws_of_some_rows_are_theirs():
    position, draws = places(batch=3, heads=2, n=9), CounterRNG((6, 8, 9), 1, 1)
    index = torch.tensor([2, 0])
    some = draws.of_rows([2, 0]).uniform(4, position[index])
    assert torch.equal(some, draws.uniform(4, position)[index])
    assert CounterRNG(6).of_rows([2, 0]) == CounterRNG(6)


@pytest.mark.parametrize("rows", [1, 3])
def test_seeds_for_more_or_fewer_rows_than_there_are_are_refused(rows):
    with pytest.raises(WeirError, match=f"seeds for 2 rows, but the batch has {rows}"):
        CounterRNG((1, 2)).uniform(0, places(batch=rows, n=4))
