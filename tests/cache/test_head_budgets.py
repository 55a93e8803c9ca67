"""KV heads of a layer with separate pipes: `[[window(8), window(16)], h2o(8)]`.

A layer whose heads have different pipes is divided into parts. If all of its pipes hold the same
tokens, the layer must read as an undivided layer does. Rows, files and refused calls are tested
together with all other policies, in `test_row_states.py`, `test_not_finite.py` and
`test_compiled.py`.
"""

from __future__ import annotations

import pytest
import torch
from model_runs import fed, reads_as, restored_goes_on, rows_read_alone
from reference.models import make, tokens
from roundings import close_runs

import weir
from weir.cache import size_of
from weir.errors import PolicyError, WeirError
from weir.models import describe

pytestmark = pytest.mark.thinned(3, least=2)

CUT = "[[sink(2) | recent(14), sink(2) | recent(3)], [recent(9), sink(1) | recent(20)]]"


def in_two_ways(model, one, other):
    """A policy that gives KV heads `one` and `other` alternately, swapped in every second layer."""
    layers = []
    for number, layer in enumerate(describe(model).layers):
        if layer.positions.window is None:
            heads = range(layer.heads.kv_heads)
            pair = (one, other) if number % 2 else (other, one)
            layers.append(f"[{', '.join(pair[head % 2] for head in heads)}]")
    return f"[{', '.join(layers)}]"


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "bloom", "mpt", "falcon-alibi"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("sink(2) | recent(14)", "sink(2) | recent(6) | recent(8)"),
        ("recent(6) | recent(8):int8", "recent(6) | recent(3):int8 | recent(5):int8"),
        ("recent(6) | heavy(8)", "recent(2) | recent(4) | heavy(8)"),
        ("recent(6) | caote(8, 3)", "recent(2) | recent(4) | caote(8, 3)"),
    ],
)  # fmt: skip
@pytest.mark.thinned(9)
def test_heads_with_the_same_tokens_read_as_a_whole_layer(name, one, other):
    try:
        model = make(name)
    except Exception as error:  # a family that this transformers does not have
        pytest.skip(str(error))
    ids = tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    whole, cut = (
        weir.StreamingCache(model, policy, chunk=4)
        for policy in (one, in_two_ways(model, one, other))
    )
    sizes = [23, 1, 1, 9, 26]
    runs = [fed(model, cache, ids, sizes, mask) for cache in (cut, whole)]
    close_runs(runs[0][0], runs[1][0], model)
    close_runs(runs[0][1, 7:], runs[1][1, 7:], model)
    heads = describe(model).layers[-1].heads.kv_heads
    assert len(cut.stack) > len(whole.stack) == len(cut) or heads == 1


def test_each_head_holds_what_its_pipe_says(llama, ids, naive, twins):
    """Against a loop over tokens; heads in the wrong order would read something else."""
    sizes = {(0, 0): (2, 14), (0, 1): (2, 3), (1, 0): (0, 9), (1, 1): (1, 20)}

    def fold(held, new, at):
        sink, recent = sizes[at.layer, at.head]
        return twins.pipe(twins.sink(sink), twins.recent(recent))(held, new, at)

    twin = naive(llama, fold, pools=2, chunk=4)
    reads_as(weir.Stream(llama, CUT, chunk=4), twin, ids(1, 90))


@pytest.mark.parametrize("heads", [[0], [0, 2], [1, 2], [0, 1, 3]])
def test_far_heads_may_lie_anywhere(heads, ids, naive, twins, fresh_llama):
    model = fresh_llama(num_key_value_heads=4)
    sizes = [12 if head in heads else 5 for head in range(4)]

    def fold(held, new, at):
        return twins.pipe(twins.recent(sizes[at.head]))(held, new, at)

    policy = f"[{', '.join(['[' + ', '.join(f'recent({n})' for n in sizes) + ']'] * 2)}]"
    reads_as(weir.Stream(model, policy, chunk=3), naive(model, fold, chunk=3), ids(1, 40))


def test_rows_are_padded_and_streams_restored_as_ever(llama, ids, tmp_path):
    rows_read_alone(llama, CUT, ids(3, 70), [0, 5, 21], [33, 1, 1, 35], chunk=4)
    assert len(restored_goes_on(llama, CUT, ids(2, 90), 61, tmp_path, 4)) == 1


def test_draws_do_not_depend_on_how_heads_are_cut(llama, ids):
    """Compared in the first layer, whose inputs do not depend on any cache."""
    drawing = "recent(4) | reservoir(8)"
    text = ids(1, 80)
    whole, cut, other = (
        weir.Stream(llama, policy, chunk=4, seed=3)
        for policy in (
            drawing,
            f"[[recent(12), {drawing}], {drawing}]",
            f"[[{drawing}, recent(12)], {drawing}]",
        )
    )
    for stream in (whole, cut, other):
        stream.feed(text)
    assert torch.equal(cut.slots(0).position[0, 1], whole.slots(0).position[0, 1])
    assert torch.equal(other.slots(0).position[0, 0], whole.slots(0).position[0, 0])


def test_reports_and_sizes_are_of_heads(llama, ids, naive):
    stream = weir.Stream(llama, CUT, chunk=4)
    stream.feed(ids(1, 50))
    held = stream.slots(0)
    assert held.position.shape == (1, 2, 18) and held.pools == ("sink", "recent", "new")
    assert (held.position[0, 1] < 0).sum() == 11 and not held.keys[0, 1, 7:].any()
    first = stream.report()["layers"][0]
    assert [one["of"] for one in first["heads"]] == [[0], [1]]
    assert first["held"] == 2 + (14 + 3) // 2 + 2
    assert stream.cache.slots_by_layer == [16, 21] and stream.capacity == 21
    size = size_of(llama, CUT, chunk=4)
    assert size.stream == stream.nbytes and size.slots == (10, 15)
    seen = stream.holding()
    assert seen.pairs == 4 and (seen.head[seen.layer == 0] == 1).sum() == 7


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            "[[window(4)], window(4)]",
            "layer 0 of this model: .* has policies for 1 KV heads, but the layer has 2",
        ),
        ("[[recent(4) | gated(4), recent(8)], recent(8)]", "gated reads all KV heads"),
    ],
)
def test_heads_that_cannot_be_are_refused(llama, policy, said):
    with pytest.raises(WeirError, match=said):
        weir.StreamingCache(llama, policy)


def test_a_layer_with_other_heads_is_named_by_its_number_in_the_model():
    """Sliding layers keep their own window, and the policy is for the other layers."""
    model = make("gemma2")
    windows = [layer.positions.window for layer in describe(model).layers]
    held = windows.index(None)
    assert held > 0 and windows.count(None) == 1
    with pytest.raises(WeirError, match=f"layer {held} of this model: "):
        weir.StreamingCache(model, "[[window(4), window(4), window(4)]]")


def test_lists_are_two_deep():
    found = weir.policy(CUT)
    assert weir.policy(found.stands_for) == found and len(found.pipes) == 4
    assert weir.policy(f"pinned({CUT}, 3, 2)").for_heads(1, 2, 2)[0] == weir.policy(
        "pinned(recent(9), 3, 2)"
    ).for_layer(0, 1)
    with pytest.raises(PolicyError, match="at most two deep"):
        weir.policy("[[[window(4)]]]")
    with pytest.raises(WeirError, match="is for the KV heads of a layer"):
        found.for_layer(0, 2)
