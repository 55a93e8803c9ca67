"""How quantized slots are written in a policy, and which combinations are refused."""

from __future__ import annotations

import pytest

import weir
from weir.errors import PolicyError, WeirError
from weir.policies import NAMED, Pipe, Quantized, with_pin, with_slots
from weir.pools import Recent, Sink


def test_a_format_stands_behind_a_pool():
    found = weir.policy("sink(4) | recent(8) : int8 | kcenter(16):int8")
    assert found.formats == ("", "int8", "int8")
    assert found.stands_for == "sink(4) | recent(8):int8 | kcenter(16):int8"
    assert weir.policy(found.stands_for) == found
    assert found != weir.policy("sink(4) | recent(8) | kcenter(16)")
    assert found.quantized == (2, 1) and found.quantized_slots == 24
    assert weir.policy("sink:int8 | recent(4)").formats == ("int8", "")


@pytest.mark.parametrize(
    ("inner", "more", "pipe"),
    [
        ("kcenter(16)", "", "recent(8) | kcenter(8):int8"),
        ("kcenter(16)", ", newest=3", "recent(3) | recent(5):int8 | kcenter(8):int8"),
        ("kcenter(16)", ", newest=0", "recent(8):int8 | kcenter(8):int8"),
        ("kcenter(16)", ", newest=99", "recent(8) | kcenter(8):int8"),
        ("streaming_llm(16)", ", newest=4", "sink(4) | recent(4) | recent(8):int8"),
        (
            "sink(2) | recent(4) | recent(6) | heavy(3)",
            ", newest=6",
            "sink(2) | recent(4) | recent(2) | recent(4):int8 | heavy(3):int8",
        ),
        ("snapkv(16, window=4)", "", "snap(budget=16, window=4):int8"),
        (
            "pinned(h2o(16), n=3, header=2)",
            "",
            "beginning(3) | recent(8) | header(2) | kept(3) | heavy(8):int8",
        ),
    ],
)
def test_first_and_newest_tokens_stay_exact(inner, more, pipe):
    found = weir.policy(f"quantized({inner}, slots=int8{more})")
    assert found.for_layer(0, 1) == weir.policy(pipe)
    assert weir.policy(str(found)) == found
    assert weir.policy(found.stands_for).for_layer(0, 1) == found.for_layer(0, 1)


def test_pins_and_pyramids_keep_the_formats():
    pinned = with_pin(with_slots(weir.policy("kcenter(16)"), "int8"), 3)
    assert pinned.for_layer(0, 1).stands_for == (
        "beginning(3) | recent(8) | header(16) | kept(3) | kcenter(8):int8"
    )
    pyramid = weir.policy("quantized(pyramid(recent(8) | heavy(24), beta=2), newest=4)")
    layers = [pyramid.for_layer(layer, 3) for layer in range(3)]
    assert [pipe.formats for pipe in layers] == [("", "int8", "int8")] * 3
    assert layers[0].slots > layers[2].slots
    deep = weir.policy("quantized(pinned(pyramid(recent(8) | heavy(24), beta=2)))")
    assert weir.policy(str(deep)) == deep


def test_exact_slots_are_the_policy_itself():
    policy = weir.policy("kcenter(16)")
    assert with_slots(policy, "exact") is policy
    assert with_slots(policy, None) is policy
    assert with_slots(policy, "int8") == Quantized(policy, "int8")
    for name in {*NAMED} - {"centers", "quantized", "weir"}:
        assert with_slots(weir.policy(name), "exact") == weir.policy(name)


@pytest.mark.parametrize("slots", ["exact", "int8"])
@pytest.mark.parametrize(
    "text",
    [
        "weir(64, slots=fp8)",
        "pinned(weir(64))",
        "recent(4) | kcenter(8):int8",
        "[h2o(8), quantized(kcenter(8))]",
    ],
)
def test_a_policy_that_says_how_its_slots_are_held_is_not_overruled(text, slots):
    with pytest.raises(WeirError, match=r"already sets the format of its slots. .* slots="):
        with_slots(weir.policy(text), slots)
    assert with_slots(weir.policy(text), None) == weir.policy(text)


@pytest.mark.parametrize("text", ["weir(64, slots=k8v4)", "quantized(h2o(64), slots=k8v4)"])
def test_a_word_that_the_policy_says_too_is_let_through(text):
    policy = weir.policy(text)
    assert with_slots(policy, "k8v4") is policy


def test_quantized_is_not_undone():
    with pytest.raises(WeirError, match="already sets the format of its slots"):
        with_slots(weir.policy("quantized(h2o(64))"), "exact")


@pytest.mark.parametrize("slots", ["exact", "k8v4"])
def test_a_policy_with_a_word_for_its_slots_is_given_it_there(slots):
    given = with_slots(weir.policy("weir(64, sinks=2)"), slots)
    assert str(given) == f"weir(budget=64, sinks=2, slots={slots})"
    assert given == weir.policy(str(given))
    inside = with_slots(weir.policy("quantized(h2o(64), newest=8)"), "fp8")
    assert inside == weir.policy("quantized(h2o(64), newest=8, slots=fp8)")


@pytest.mark.parametrize(
    ("text", "said", "at"),
    [
        ("recent(4) | kcenter(8):int3", "unknown format of slots 'int3'", 23),
        ("recent(4) | kcenter(8):in8", "did you mean 'int8'", 23),
        ("recent(4) | kcenter(8):", "expected a format of slots", 23),
        ("recent(4) | recent(none):int8", "without a limit", 0),
        ("sink(4) | recent(4):int8 | recent(4)", "not the reverse", 0),
        ("quantized(kcenter(16), slots=int5)", "unknown format of slots 'int5'", 0),
        ("quantized(kcenter(16), newest=-1)", "newest must be at least 0", 0),
        ("quantized(streaming_llm(16))", r"newest=6\) .* older than the newest 6", 0),
        ("quantized(streaming_llm(96))", r"newest=64\) to quantize those older", 0),
        ("quantized(sink(4))", r"stay exact\. Use another policy", 0),
        ("quantized(streaming_llm(16), newest=12)", "Use a smaller newest", 0),
        ("quantized(dense)", "has no limit", 0),
        ("quantized(recompute(16))", "caches nothing", 0),
        ("quantized(recent(4) | heavy(4):int8)", "already sets the format", 0),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_stands(text, said, at):
    with pytest.raises(PolicyError, match=said) as caught:
        weir.policy(text)
    assert caught.value.at == at


def test_formats_in_python_are_looked_at_too():
    with pytest.raises(WeirError, match="2 pools need 2 formats, got 1"):
        Pipe((Sink(4), Recent(8)), formats=("int8",))
    with pytest.raises(WeirError, match="unknown format of slots"):
        Pipe((Sink(4), Recent(8)), formats=("", "int2"))
    with pytest.raises(WeirError, match="unknown format of slots"):
        with_slots(weir.policy("kcenter(8)"), "int2")
