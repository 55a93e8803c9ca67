"""Tokens that stay, and tokens that flow on, which are only made if another pool follows."""

from __future__ import annotations

import torch
from pools.probe import Probe

from weir.policies.pipe import Pipe
from weir.pools import CounterRNG, Fold, Sink, split
from weir.slab import AttentionParams, Slots

COUNT = 16
POSITION = torch.arange(COUNT).expand(1, 2, -1)
WEIGHT = torch.zeros(1, 2, COUNT)
NEW = Slots(torch.ones(1, 2, COUNT, 3), torch.ones(1, 2, COUNT, 3), WEIGHT, WEIGHT, POSITION)
FOLD = Fold(CounterRNG(0), torch.tensor([COUNT]), AttentionParams(1.0))


def test_only_the_last_pool_is_told_that_it_is():
    told = []
    probes = [Probe(n, look=lambda slots, fold: told.append(fold.last)) for n in (3, 4, 5)]
    pipe = Pipe((Sink(1), *probes))
    kept = pipe.fold([NEW.part(0, 0)] * 4, NEW, FOLD, [{}, {}, {}, {}])
    assert told == [False, False, True]
    assert [len(slots) for slots in kept] == [1, 3, 4, 5]


def test_what_flows_on_is_made_only_where_somebody_is_behind():
    last = Fold(CounterRNG(0), torch.tensor([COUNT]), AttentionParams(1.0), last=True)
    for fold, flows_on in ((None, 12), (FOLD, 12), (last, 0)):
        kept, overflow = split(NEW, POSITION > 11, fold)
        assert (len(kept), len(overflow)) == (4, flows_on)


def test_heads_that_keep_equally_many_have_no_empty_slots_and_others_do():
    alike, other = POSITION.clone() < 5, POSITION.clone() < 5
    alike[0, 1] = POSITION[0, 1] % 4 == 1
    alike[0, 1, 0] = True
    other[0, 1, 3] = False
    assert NEW.only(alike).position.tolist() == [[[0, 1, 2, 3, 4], [0, 1, 5, 9, 13]]]
    assert NEW.only(other).position.tolist() == [[[0, 1, 2, 3, 4], [0, 1, 2, 4, -1]]]
    assert NEW.only(other).a[0, 1].isneginf().tolist() == [False] * 4 + [True]
    assert NEW.only(POSITION >= 0) is NEW
