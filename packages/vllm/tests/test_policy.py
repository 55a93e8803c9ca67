"""The grammar is weir's, and every policy that blocks cannot hold is refused."""

import random

import pytest
import weir
from weir.policies.registry import NAMED
from weir.pools import POOLS

from weir_vllm.errors import StreamError, StreamPolicyError
from weir_vllm.policy import _PARAMETERS, REASONS, Ends, parse_policy
from weir_vllm.settings import read_settings

GOOD = {
    "sink(4) | recent(252)": Ends(4, 252),
    "sink | recent(252)": Ends(4, 252),
    "sink()|recent(n=8)": Ends(4, 8),
    "  sink( n = 1_0 )  |recent(+4) ": Ends(10, 4),
    "recent(7)": Ends(0, 7),
    "recent(4) | recent(5)": Ends(0, 9),
    "streaming_llm": Ends(4, 252),
    "streaming_llm()": Ends(4, 252),
    "streaming_llm(100, 10)": Ends(10, 90),
    "streaming_llm(sinks=1, budget=9)": Ends(1, 8),
    "streaming_llm(8, 0)": Ends(0, 8),
    "window": Ends(0, 256),
    "window(budget=4096)": Ends(0, 4096),
    "dense": Ends(0, None),
    "recent(none)": Ends(0, None),
    "sink(4) | recent(None)": Ends(0, None),
}
BAD = [
    "",
    "sink(4)",
    "sink(0) | recent(4)",
    "recent(0)",
    "recent(4.0)",
    "recent(1e2)",
    "recent(-4)",
    "recent()",
    "recent(4,)",
    "recent(4) | sink(4)",
    "recent(none) | recent(4)",
    "dense | recent(4)",
    "window(0)",
    "streaming_llm(8, 8)",
    "streaming_llm(8, -3)",
    "streaming_llm(budget=8, 4)",
    "streaming_llm(8, budget=8)",
    "streaming_llm(8, 4, 2)",
    "recent(4) recent(4)",
    "RECENT(4)",
    "recent(４)",
    "recent(9007199254740994)",
    "sinks(4) | recent(4)",
    "[recent(4)",
    "[]",
]


def kept(policy):
    """Return sinks and window of a policy of weir."""
    pools = policy.for_layer(0, 1).pools
    assert {pool.name for pool in pools} <= {"sink", "recent"}
    sinks = sum(pool.n for pool in pools if pool.name == "sink")
    newest = [pool.n for pool in pools if pool.name == "recent"]
    return Ends(0, None) if None in newest else Ends(sinks, sum(newest))


@pytest.mark.parametrize("text", GOOD)
def test_what_is_accepted_means_what_it_means_to_weir(text):
    (ends,) = parse_policy(text).layers
    assert ends == GOOD[text] == kept(weir.policy(text))
    if ends.recent is not None:
        assert kept(weir.policy(str(ends))) == ends


def test_lists_give_each_layer_a_policy():
    text = "[sink(4) | recent(28), streaming_llm(64), recent(16)]"
    assert parse_policy(text).layers == (Ends(4, 28), Ends(4, 60), Ends(0, 16))
    theirs = weir.policy(text)
    assert [kept(each) for each in theirs.policies] == list(parse_policy(text).layers)


@pytest.mark.parametrize("text", BAD)
def test_what_weir_refuses_is_refused(text):
    with pytest.raises(StreamPolicyError):
        parse_policy(text)
    if text != "sink(4)":  # weir accepts this one, although it keeps no new tokens
        with pytest.raises(weir.WeirError):
            weir.policy(text)


def test_every_pool_and_policy_of_weir_is_served_or_refused_with_its_reason():
    """A new pool of weir must be added to REASONS or to _PARAMETERS."""
    assert REASONS.keys() | _PARAMETERS.keys() == POOLS.keys() | NAMED.keys()
    assert not REASONS.keys() & _PARAMETERS.keys()
    for name, reason in REASONS.items():
        with pytest.raises(StreamPolicyError) as error:
            parse_policy(name)
        assert name in str(error.value)
        assert reason in str(error.value)
        assert "streaming_llm(budget=4096, sinks=4)" in str(error.value)


def test_defaults_are_those_of_weir():
    import inspect

    for name, parameters in _PARAMETERS.items():
        make = POOLS.get(name) or NAMED[name].make
        theirs = {
            key: ... if found.default is found.empty else found.default
            for key, found in inspect.signature(make).parameters.items()
        }
        assert parameters == theirs


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sink(4) | recent(124):int8", "only exact slots"),
        ("[[window(64), window(512)], window(128)]", "by KV head"),
        ("budgets.toml", "policy files"),
        ("[recent(64), dense]", "in some layers lets their memory grow"),
        ("sink(4) | recent(60) | heavy(64)", "heavy cannot be served by vLLM"),
        ("quantized(streaming_llm(64))", "8-bit or 4-bit slots"),
        ("no_such(4)", "no pool or policy is called 'no_such'"),
    ],
)
def test_other_policies_are_refused_with_a_reason(text, says):
    with pytest.raises(StreamPolicyError, match="The plug-in serves") as error:
        parse_policy(text)
    assert says in str(error.value)


def test_random_texts_are_read_as_weir_reads_them():
    """What the plug-in accepts, weir accepts, and it means the same."""
    draw = random.Random(0)
    names = ["sink", "recent", "window", "streaming_llm", "dense", "n", "budget", "sinks", "none"]
    pieces = [*names, *"()()|[],= :", "4", "8", "64", "1_6"]
    accepted = 0
    for _ in range(60_000):
        text = "".join(draw.choice(pieces) for _ in range(draw.randint(1, 9)))
        try:
            mine = parse_policy(text)
        except StreamPolicyError:
            continue
        accepted += 1
        theirs = weir.policy(text)
        layers = theirs.policies if mine.is_list else [theirs]
        assert tuple(kept(each) for each in layers) == mine.layers, text
    assert accepted > 100


def test_sizes_are_rounded_up_to_whole_blocks():
    assert Ends(4, 4092).whole_blocks(32) == Ends(32, 4096)
    assert Ends(0, 1).whole_blocks(16) == Ends(0, 16)
    assert Ends(32, 64).whole_blocks(32) == Ends(32, 64)
    assert Ends(0, None).whole_blocks(32) == Ends(0, None)


def test_the_policy_comes_from_the_configuration_or_the_environment():
    assert read_settings({}, {}) is None
    assert read_settings({"weir": "dense"}, {}) is None
    assert read_settings({"weir": "recent(64)"}, {}).policy.layers == (Ends(0, 64),)
    assert read_settings({}, {"WEIR_VLLM": " recent(64) "}).policy.layers == (Ends(0, 64),)
    both = read_settings({"weir": "window(64)"}, {"WEIR_VLLM": "recent(64)"})
    assert both.policy.layers == (Ends(0, 64),)
    with pytest.raises(StreamError, match="Remove one"):
        read_settings({"weir": "recent(64)"}, {"WEIR_VLLM": "recent(32)"})
    given = read_settings({"weir": {"policy": "recent(64)", "untested_models": True}}, {})
    assert given.untested_models
    assert read_settings({"weir": given.as_config()}, {}) == given
    for wrong in (
        {"polcy": "recent(4)"},
        {"policy": "recent(4)", "untested_models": 1},
        ["recent(4)"],
        4,
    ):
        with pytest.raises(StreamError):
            read_settings({"weir": wrong}, {})
