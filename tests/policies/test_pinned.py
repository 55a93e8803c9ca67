"""`pinned` adds slots to any policy: for a conversation's beginning and for a turn's header."""

from __future__ import annotations

import pytest

import weir
from weir.errors import WeirError
from weir.policies import Pinned, Pipe, Pyramid, with_pin
from weir.policies.registry import NAMED


@pytest.mark.parametrize(
    ("inner", "pipe"),
    [
        ("streaming_llm(64)", "beginning(8) | sink(4) | recent(60) | header(16) | kept(8)"),
        ("window(64)", "beginning(8) | recent(64) | header(16) | kept(8)"),
        ("h2o(64)", "beginning(8) | recent(32) | header(16) | kept(8) | heavy(32)"),
        ("snapkv(64)", "beginning(8) | header(16) | kept(8) | snap(64)"),
        (
            "sink(4) | recent(40) | reservoir(20, weighted=true)",
            "beginning(8) | sink(4) | recent(40) | header(16) | kept(8) | "
            "reservoir(20, weighted=true)",
        ),
    ],
)
def test_three_pools_more_stand_where_tokens_still_come_in_order(inner, pipe):
    found = weir.policy(f"pinned({inner}, n=8)")
    assert found.for_layer(0, 1) == weir.policy(pipe)
    assert found.stands_for == pipe
    assert weir.policy(str(found)) == found
    assert weir.policy(found.stands_for) == weir.policy(pipe)


@pytest.mark.parametrize(
    ("policy", "pipe"),
    [
        (
            "window(64), n=8, format=int8",
            "beginning(8):int8 | recent(64) | header(16) | kept(8):int8",
        ),
        (
            "window(64), n=8, format=same",
            "beginning(8):int8 | recent(64) | header(16) | kept(8):int8",
        ),
        (
            "kcenter(8):int4, n=8, format=same",
            "beginning(8):int4 | header(16) | kept(8):int4 | kcenter(8):int4",
        ),
        ("kcenter(8):int4, n=8", "beginning(8) | header(16) | kept(8) | kcenter(8):int4"),
    ],
)
def test_the_beginning_can_have_quantized_slots(policy, pipe):
    found = weir.policy(f"pinned({policy})")
    assert found.for_layer(0, 1) == weir.policy(pipe)
    assert weir.policy(str(found)) == found
    assert weir.policy(found.stands_for) == weir.policy(pipe)


@pytest.mark.parametrize("given", ["window(8), format=int9", "kcenter(8):int4, format=int8"])
def test_a_format_that_cannot_be_is_refused(given):
    with pytest.raises(WeirError, match="format"):
        weir.policy(f"pinned({given}, n=8)")


def test_every_policy_with_a_limit_can_be_pinned():
    for name in set(NAMED) - {"dense", "recompute", "kvzip", "pinned"}:
        inner = weir.policy(name)
        found = with_pin(inner)
        slots = inner.for_layer(0, 2).slots
        assert found.for_layer(0, 2).slots == slots + inner.for_layer(0, 1).slots // 4 + 16


def test_the_layers_of_a_pyramid_have_as_much_of_it_each():
    inner = weir.policy("pyramid(recent(8) | heavy(24), beta=2)")
    found = with_pin(inner, 5)
    assert isinstance(inner, Pyramid)
    for layer in range(3):
        own, its = (policy.for_layer(layer, 3) for policy in (inner, found))
        assert its.pools[0].slots() == 5
        assert its.slots == own.slots + 5 + 16
    assert weir.policy(str(found)) == found
    assert weir.policy(found.stands_for).for_layer(1, 3) == found.for_layer(1, 3)


def test_a_quarter_more_unless_somebody_says_how_many():
    inner = weir.policy("streaming_llm(256)")
    assert with_pin(inner) == Pinned(inner, 64)
    assert with_pin(inner, 7) == Pinned(inner, 7)
    assert with_pin(inner, 0) is inner
    everything = weir.policy("[dense, h2o(96)]")
    assert with_pin(everything) is everything
    pinned = with_pin(inner, 7)
    assert with_pin(pinned) is pinned
    everything = weir.policy("dense")
    assert with_pin(everything) is everything
    small = weir.policy("recent(3)")
    assert isinstance(small, Pipe)
    assert with_pin(small) is small


@pytest.mark.parametrize(
    ("inner", "n", "match"),
    [
        ("dense", 8, "dense has no limit and keeps the beginning anyway"),
        ("pinned", 8, "already keeps the beginning of a stream"),
        ("recompute", 8, "which a cache cannot do"),
        ("h2o", -1, "at least 1 token, got -1"),
    ],
)
def test_what_cannot_be_pinned_is_refused(inner, n, match):
    with pytest.raises(WeirError, match=match):
        with_pin(weir.policy(inner), n)
