"""The policy `weir`: how its budget is divided among pools, layers and heads, and how long its
logits are those of the plain model.

`tests/cache/test_quantized_slots.py` tests batches, forwards of any size, session files and memory
for the same kind of pipe.
"""

from __future__ import annotations

import pytest
import torch
from model_runs import fed
from roundings import close_runs

import weir
from weir.errors import PolicyError
from weir.evals.notation import takes_budget, with_budget
from weir.policies import fit_budgets


@pytest.mark.parametrize(
    ("text", "pipe"),
    [
        ("weir", "sink(4) | recent(16) | recent(1004):int4"),
        ("weir(100)", "sink(4) | recent(16) | recent(80):int4"),
        ("weir(budget=7)", "sink(4) | recent(3)"),
        ("weir(40, newest=0)", "sink(4) | recent(36):int4"),
        ("weir(40, sinks=0, slots=fp8)", "recent(16) | recent(24):fp8"),
        ("weir(40, slots=exact)", "sink(4) | recent(36)"),
        ("centers", "sink(4) | recent(16) | recent(151):int8 | "
         "kcenter(85, quiet=2, half_life=4096):int8"),
        ("centers(40, slots=exact)", "sink(4) | recent(23) | "
         "kcenter(13, quiet=2, half_life=4096)"),
        ("pinned(weir(40), 3, 2)",
         "beginning(3) | sink(4) | recent(16) | recent(20):int4 | header(2) | kept(3)"),
    ],
)  # fmt: skip
def test_the_first_and_the_newest_stay_exact(text, pipe):
    assert weir.policy(text).for_layer(0, 1) == weir.policy(pipe)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weir(4)", "a budget of 4 leaves no slots for recent tokens after 4 sinks"),
        ("weir(64, newest=-1)", "newest must be at least 0, got -1"),
        ("weir(64, slots=int2)", "unknown format of slots 'int2'"),
        ("weir(64, heads=some)", "heads of weir must be measured or alike, got 'some'"),
        ("quantized(weir(64))", "already sets the format of its slots"),
    ],
)
def test_what_makes_no_sense_is_refused(text, said):
    with pytest.raises(PolicyError, match=said):
        weir.policy(text)


@pytest.mark.parametrize(
    ("text", "lookup", "most", "slots"),
    [
        ("weir", [[0, 1], [1, 0]], None, [[512, 1536], [1536, 512]]),
        ("weir", [[0, 1], [1, 0]], 1500, [[548, 1500], [1500, 548]]),
        ("weir", [[0, 0], [0, 0]], None, [[1024] * 2] * 2),
        ("weir", [[1, 1], [1, 1]], None, [[1024] * 2] * 2),
        ("weir", [[0, 1]], 448, [[448] * 2]),
        ("weir", [], None, [[1024] * 2]),
        ("weir(heads=alike)", [[0, 1]], None, [[1024] * 2]),
        ("weir(2000, heads=measured)", [[0, 1]], None, [[1000, 3000]]),
        ("weir(2000)", [[0, 1]], 1000, [[2000] * 2]),  # more than the window, as it was asked for
        ("weir(400)", [[0, 0], [1, 1], [0, 0]], None, [[256] * 2, [688] * 2, [256] * 2]),
        ("weir(100)", [[0, 0, 1]], None, [[100] * 3]),
    ],
)
def test_heads_that_look_things_up_get_what_the_others_leave(text, lookup, most, slots):
    fitted = fit_budgets(weir.policy(text), lookup, 0.1, most)
    again = weir.policy(str(fitted))
    for policy in (fitted, again if "[" in str(fitted) else fit_budgets(again, lookup, 0.1, most)):
        pipes = [policy.for_heads(n, len(slots), len(layer)) for n, layer in enumerate(slots)]
        assert [[pipe.slots for pipe in layer] for layer in pipes] == slots
        wanted = weir.policy(f"weir({slots[0][0]}, heads=alike)")
        assert pipes[0][0] == wanted.for_layer(0, 1)
    eight = fit_budgets(weir.policy(text), lookup, 0.7, most)
    assert eight.pipes[0].format.name == "int8"
    four = text.replace(")", ", slots=int4)") if ")" in text else f"{text}(slots=int4)"
    assert fit_budgets(weir.policy(four), lookup, 0.7, most).pipes == fitted.pipes


def test_bytes_can_be_put_in_as_of_any_policy():
    assert takes_budget("weir(slots=exact)")
    assert with_budget("weir(slots=exact)", 40) == "weir(slots=exact, budget=40)"


def test_below_its_budget_exact_slots_are_dense_and_of_4_bits_until_a_token_is_16_behind(
    llama, ids
):
    text = ids(2, 40)
    dense, exact, four = (
        fed(llama, weir.StreamingCache(llama, policy, chunk=4), text, [9, 31])
        for policy in ("dense", "weir(60, slots=exact)", "weir(60)")
    )
    close_runs(exact, dense, llama)
    # The first token that is rounded is neither one of 4 sinks nor one of the newest 16 tokens.
    assert torch.equal(four[:, :20], exact[:, :20])
    assert not torch.equal(four, exact)


@pytest.mark.slow
def test_with_longer_windows_in_some_heads_it_is_dense_until_the_shortest_are_full():
    """The shortest windows are full before the stream is as long as the budget. With
    `heads=alike`, the policy is dense up to the budget.
    """
    model, _ = weir.load("nano")
    text = torch.arange(1, 301)[None]
    dense, measured, alike = (
        fed(model, weir.StreamingCache(model, policy, chunk=2), text, [200, 78, 22])
        for policy in ("dense", "weir(300, slots=exact)", "weir(300, slots=exact, heads=alike)")
    )
    close_runs(alike, dense, model)
    # One of eight heads gets the context window (512 tokens) less a chunk of 2. The others share
    # what is left of the budget.
    shortest = (8 * 300 - (512 - 2)) // 7
    close_runs(measured[:, :shortest], dense[:, :shortest], model)
    assert not torch.allclose(measured[:, 285:], dense[:, 285:], atol=1e-3)
