"""weir(budget): how a budget is shared out, and until when nothing is lost.

That rows, cuts, files and bytes are as they must be is tested of its pipe in
`tests/cache/test_quantized_slots.py`.
"""

from __future__ import annotations

import pytest
import torch
from model_runs import fed
from roundings import close_runs

import weir
from weir.errors import PolicyError
from weir.evals.notation import takes_budget, with_budget

CENTERS = "quiet=2, half_life=4096"


@pytest.mark.parametrize(
    ("text", "pipe"),
    [
        ("weir", f"sink(4) | recent(16) | recent(151):int8 | kcenter(85, {CENTERS}):int8"),
        ("weir(100)", f"sink(4) | recent(16) | recent(47):int8 | kcenter(33, {CENTERS}):int8"),
        ("weir(budget=7)", f"sink(4) | recent(1) | kcenter(2, {CENTERS}):int8"),
        ("weir(40, newest=0)", f"sink(4) | recent(23):int8 | kcenter(13, {CENTERS}):int8"),
        ("weir(40, sinks=0, slots=fp8)",
         f"recent(16) | recent(11):fp8 | kcenter(13, {CENTERS}):fp8"),
        ("weir(40, slots=exact)", f"sink(4) | recent(23) | kcenter(13, {CENTERS})"),
        ("weir(40, quiet=0, half_life=none)",
         "sink(4) | recent(16) | recent(7):int8 | kcenter(13):int8"),
        ("pinned(weir(40), 3, 2)", "beginning(3) | sink(4) | recent(16) | recent(7):int8 | "
         f"header(2) | kcenter(13, {CENTERS}):int8"),
    ],
)  # fmt: skip
def test_a_third_is_for_centers_and_the_newest_stay_exact(text, pipe):
    assert weir.policy(text).for_layer(0, 1) == weir.policy(pipe)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weir(5)", "a budget of 5 leaves no room for recent tokens beside 4 sinks and 1 centers"),
        ("weir(20, sinks=15)", "a budget of 20 leaves no room for recent tokens"),
        ("weir(64, newest=-1)", "newest tokens that stay exact are 0 or more, not -1"),
        ("weir(64, slots=int2)", "slots can be int8"),
        ("quantized(weir(64))", "says by itself how its slots are quantized"),
    ],
)
def test_what_makes_no_sense_is_refused(text, said):
    with pytest.raises(PolicyError, match=said):
        weir.policy(text)


def test_bytes_can_be_put_in_as_of_any_policy():
    assert takes_budget("weir(slots=exact)")
    assert with_budget("weir(slots=exact)", 40) == "weir(slots=exact, budget=40)"


def test_below_its_budget_exact_slots_are_dense_and_of_8_bits_until_a_token_is_16_behind(
    llama, ids
):
    text = ids(2, 40)
    dense, exact, eight = (
        fed(llama, weir.StreamingCache(llama, policy, chunk=4), text, [9, 31])
        for policy in ("dense", "weir(60, slots=exact)", "weir(60)")
    )
    close_runs(exact, dense, llama)
    # Four sinks and 16 tokens, and those that are read at once with the first that leaves them.
    assert torch.equal(eight[:, :20], exact[:, :20])
    assert not torch.equal(eight, exact)
