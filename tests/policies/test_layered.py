"""A policy for each layer, written as a list."""

from __future__ import annotations

import pytest
import torch

import weir
from weir.errors import PolicyError, WeirError
from weir.policies import Layered, Pipe, parse_call, with_pin, with_slots
from weir.pools import Heavy, Recent, Sink

TWO = "[h2o(8), sink(2) | recent(14)]"


def test_each_layer_has_its_own_pipe():
    found = weir.policy(TWO)
    assert found.pipes == (
        Pipe((Recent(4), Heavy(4))),
        Pipe((Sink(2), Recent(14))),
    )
    assert [found.for_layer(layer, 2) for layer in (0, 1)] == list(found.pipes)
    assert str(found) == TWO
    assert found.stands_for == "[recent(4) | heavy(4), sink(2) | recent(14)]"
    assert weir.policy(found.stands_for).pipes == found.pipes
    made = Layered((weir.policy("h2o(8)"), weir.policy("sink(2) | recent(14)")))
    assert made == found == weir.policy(str(made))
    assert parse_call(TWO) is None
    assert parse_call("/tmp/two.toml") is None


def test_a_layer_of_a_pyramid_is_that_layer():
    pyramid = weir.policy("pyramid(recent(4) | heavy(12), beta=4)")
    mixed = weir.policy("[pyramid(recent(4) | heavy(12), beta=4), h2o(8)]")
    assert mixed.pipes == (pyramid.for_layer(0, 2), weir.policy("h2o(8)"))
    heads = weir.policy("[h2o(8), [h2o(8), pyramid(recent(4) | heavy(12), beta=4)]]")
    assert heads.pipes[1:] == heads.for_heads(1, 2, 2) == (heads.pipes[0], pyramid.for_layer(1, 2))


@pytest.mark.parametrize(
    ("around", "pipes"),
    [
        (
            "quantized([kcenter(8), kcenter(16)], newest=2)",
            (
                "recent(2) | recent(2):int8 | kcenter(4):int8",
                "recent(2) | recent(6):int8 | kcenter(8):int8",
            ),
        ),
        (
            "pinned([h2o(8), h2o(16)], n=3, header=2)",
            (
                "beginning(3) | recent(4) | header(2) | kept(3) | heavy(4)",
                "beginning(3) | recent(8) | header(2) | kept(3) | heavy(8)",
            ),
        ),
    ],
)
def test_policies_around_a_list_reach_every_layer(around, pipes):
    found = weir.policy(around)
    assert found.pipes == tuple(map(weir.policy, pipes))
    assert [found.for_layer(layer, 2) for layer in (0, 1)] == list(found.pipes)
    assert weir.policy(str(found)) == found
    assert weir.policy(found.stands_for).pipes == found.pipes


def test_a_list_is_pinned_by_its_mean_and_quantized_as_any_policy():
    found = with_slots(with_pin(weir.policy("[kcenter(8), kcenter(16)]")), "int8")
    assert [pipe.pools[0].slots() for pipe in found.pipes] == [3, 3]  # a quarter of 12
    assert all(pipe.formats[-1] == "int8" for pipe in found.pipes)


# Where the error lies is marked with »; the marks are taken out before it is read.
MISTAKES = {
    "[h2o(8)»": "expected ',' or ']'",
    "[h2o(8) »h2o(8)]": "expected ',' or ']'",
    "[»]": "expected a pool or a policy",
    "[h2o(8), »]": "expected a pool or a policy",
    "[h2o(8)] »| recent(4)": "expected '|' or the end",
    "[h2o(8), »nothing(3)]": "unknown pool or policy 'nothing'",
    "»[h2o(8), recompute(4)]": "which a cache cannot do",
    "recent([»3])": "expected a pool or a policy",
    "»pyramid([h2o(8)])": "a pyramid needs a pipe",
    "chunks(»[heavy(8)]) | recent(4)": "expected one pool",
    "[[[[[[[[[»h2o(8)]]]]]]]]]": "at most 8 deep",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_pointed_at(text):
    bare, at = text.replace("»", ""), text.index("»")
    with pytest.raises(PolicyError) as raised:
        weir.policy(bare)
    assert MISTAKES[text] in str(raised.value)
    assert raised.value.at == at


LONG = "[" + ", ".join(f"sink(4) | recent({n - 4})" for n in (1252, 66, 90, 100)) + "]"


@pytest.mark.parametrize(
    ("text", "brief"),
    [
        (LONG, "a policy for each of 4 layers, 66 to 1,252 slots"),
        (f"[{', '.join(['sink(4) | recent(60)'] * 4)}]", "a policy for each of 4 layers, 64 slots"),
        (
            f"pinned({LONG}, n=8, header=4)",
            "a policy for each of 4 layers, 66 to 1,252 slots, pinned with n=8, header=4",
        ),
        (
            f"quantized({LONG}, newest=8)",
            "a policy for each of 4 layers, 66 to 1,252 slots, quantized with slots=int8, newest=8",
        ),
        ("[h2o(96), pinned(h2o(160))]", "[h2o(96), pinned(h2o(160))]"),
        ("pinned(h2o(160), n=8)", "pinned(h2o(160), n=8)"),
        ("recompute(64)", "recompute(64)"),
    ],
)
def test_a_long_list_is_said_by_its_layers_and_their_slots(text, brief):
    policy = weir.policy(text)
    assert policy.brief == brief
    assert str(policy) == text


def test_a_list_of_nothing_and_one_of_something_else_are_refused():
    for wrong in ((), ("h2o(8)",)):
        with pytest.raises(WeirError, match="a list of at least one policy"):
            Layered(wrong)


def test_a_model_of_other_layers_is_refused(shallow):
    with pytest.raises(WeirError, match="has policies for 2 layers, but this model has 3 "):
        weir.policy(TWO).for_layer(0, 3)
    with pytest.raises(WeirError, match=r"has policies for 2 layers, but this model has 1 "):
        weir.Stream(shallow, TWO)


def test_a_list_of_a_pyramids_layers_is_the_pyramid(llama, ids, tmp_path):
    pyramid = weir.policy("pyramid(sink(2) | recent(8) | heavy(14), beta=3)")
    text = ", ".join(pyramid.for_layer(layer, 2).stands_for for layer in (0, 1))
    tokens = ids(2, 120)
    wanted = weir.Stream(llama, pyramid, chunk=8).feed(tokens, all_logits=True)
    stream = weir.Stream(llama, f"[{text}]", chunk=8)
    assert torch.equal(stream.feed(tokens, all_logits=True), wanted)
    stream.save(tmp_path / "session")
    restored = weir.Stream.restore(llama, tmp_path / "session")
    assert restored.policy == stream.policy
    more = ids(2, 20, seed=1)
    assert torch.equal(restored.feed(more), stream.feed(more))
