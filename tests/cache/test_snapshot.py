"""Which tokens are held, and by which pools: counted by hand, and compared with all slots."""

from __future__ import annotations

import json
import math

import pytest
import torch

import weir
from weir.cache import Holding
from weir.errors import WeirError

pytestmark = pytest.mark.thinned(3, least=2)


def test_sinks_and_recent_tokens_by_hand(llama, ids):
    stream = weir.Stream(llama, "sink(2) | recent(5)", chunk=3)
    stream.feed(ids(1, 20))
    holding = stream.holding()
    # 18 tokens are folded: the first two and 13 to 17 stay; 18 and 19 wait.
    assert holding.seen == 20 and holding.pairs == 4
    assert holding.pools == ("sink", "recent", "new")
    wanted = {0: "sink", 1: "sink", 18: "new", 19: "new"} | dict.fromkeys(range(13, 18), "recent")
    assert {held.token: held.pools for held in holding.tokens()} == {
        token: {pool: 4} for token, pool in wanted.items()
    }
    assert {(held.pairs, held.above, held.below) for held in holding.tokens()} == {(4, 1.0, 1.0)}


@pytest.mark.parametrize(
    "policy",
    [
        "sink(2) | recent(8) | heavy(10)",
        "recent(8) | kcenter(12)",
        "recent(8) | residue(6)",
        "sink(1) | recent(6) | balance(16, block=8)",
        "sink(1) | recent(6) | subgen(samples=8, clusters=4, per_cluster=2)",
        "pyramidkv(budget=24, window=4)",
        "dense",
    ],
)
def test_every_slot_of_every_layer_and_head_is_told_once(llama, ids, policy):
    stream = weir.Stream(llama, policy, chunk=5)
    stream.feed(ids(1, 93))
    holding = stream.holding()
    wanted = []
    for layer in range(2):
        has = stream.slots(layer)
        for head, slot in (has.position[0] >= 0).nonzero().tolist():
            pool = has.pools[int(has.pool[0, head, slot])]
            weights = (float(has.a[0, head, slot]), float(has.b[0, head, slot]))
            wanted.append((layer, head, int(has.position[0, head, slot]), pool, *weights))
    columns = (holding.layer, holding.head, holding.token, holding.pool, holding.a, holding.b)
    got = [
        (layer, head, token, holding.pools[pool], a, b)
        for layer, head, token, pool, a, b in zip(*(t.tolist() for t in columns), strict=True)
    ]
    assert sorted(got) == sorted(wanted)
    # For each token: the pairs of layer and head that hold it, and its weights, averaged over them.
    for held in holding.tokens():
        mine = [entry for entry in wanted if entry[2] == held.token]
        pairs = {(layer, head) for layer, head, *_ in mine}
        assert held.pairs == len(pairs)
        assert held.pools == {
            name: len({entry[:2] for entry in mine if entry[3] == name})
            for name in dict.fromkeys(sorted((e[3] for e in mine), key=holding.pools.index))
        }
        above = sum(math.exp(entry[4]) for entry in mine) / len(pairs)
        below = sum(math.exp(entry[5]) for entry in mine) / len(pairs)
        assert (held.above, held.below) == pytest.approx((above, below))


def test_heads_that_keep_their_own_hold_different_tokens(llama, ids):
    stream = weir.Stream(llama, "recent(8) | heavy(10)", chunk=4)
    stream.feed(ids(1, 120))
    some = [held for held in stream.holding().tokens() if 0 < held.pairs < 4]
    assert some and all(held.pools == {"heavy": held.pairs} for held in some)


def test_a_token_in_two_slots_of_a_head_counts_once():
    ones = torch.zeros(3)
    where = [torch.tensor(values) for values in ([0, 0, 0], [0, 0, 1], [7, 7, 7], [0, 1, 1])]
    (held,) = Holding(9, 4, ("a", "b", "new"), *where, a=ones + math.log(2.0), b=ones).tokens()
    assert held.token == 7 and held.pairs == 2
    assert held.pools == {"a": 1, "b": 2}
    assert (held.above, held.below) == pytest.approx((3.0, 1.5))


def test_tokens_are_counted_from_zero_in_every_row_whatever_the_padding_and_the_origin(llama, ids):
    cache = weir.StreamingCache(llama, "sink(1) | recent(3)", chunk=2, origin=1000)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    with torch.no_grad():
        llama(ids(2, 9), attention_mask=mask, past_key_values=cache)
    first, second = (cache.holding(row) for row in range(2))
    assert [held.token for held in first.tokens()] == [0, 5, 6, 7, 8]
    assert [held.token for held in second.tokens()] == [0, 1, 2, 3, 4]
    assert (first.seen, second.seen) == (9, 5)


def test_it_can_be_written_as_json(llama, ids):
    stream = weir.Stream(llama, "sink(1) | recent(2)", chunk=2)
    stream.feed(ids(1, 7))
    told = json.loads(json.dumps(stream.holding().as_json(), allow_nan=False))
    assert told["seen"] == 7 and told["pairs"] == 4 and told["pools"] == ["sink", "recent", "new"]
    assert told["tokens"][0] == {
        "token": 0,
        "pairs": 4,
        "pools": {"sink": 4},
        "above": 1.0,
        "below": 1.0,
    }
    # The exponential of this log-weight is beyond float64, and is still written as JSON.
    where = torch.zeros(4, 1, dtype=torch.int64)
    odd = Holding(1, 1, ("new",), *where, a=torch.tensor([1e4]), b=torch.zeros(1))
    json.dumps(odd.as_json(), allow_nan=False)


def test_nothing_fed_no_such_row_and_nothing_cached_are_said(llama, ids):
    cache = weir.StreamingCache(llama, "sink(1) | recent(2)")
    with pytest.raises(WeirError, match="no rows yet"):
        cache.holding()
    stream = weir.Stream(llama, "sink(1) | recent(2)")
    stream.feed(ids(1, 3))
    with pytest.raises(WeirError, match="row 1 does not exist"):
        stream.holding(1)
    with pytest.raises(WeirError, match="recompute caches nothing"):
        weir.Stream(llama, "recompute(budget=8)").holding()
