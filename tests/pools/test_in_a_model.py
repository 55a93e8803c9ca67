"""Pools in a model: attention is dense below the budget, rows do not affect each other, and a
restored stream goes on bit for bit.
"""

from __future__ import annotations

import pytest
from model_runs import has_one_size, reads_exactly, restored_goes_on, rows_read_alone

pytestmark = pytest.mark.thinned(4, least=2)

ROWS = {
    "two of four": {"pads": [0, 3, 11], "sizes": [30, 60]},
    "long": {"pads": [0, 13, 40]},
    "by the token": {"pads": [0, 13], "sizes": [30, 1, 59]},
}
"""Ways to pad a batch of 90 tokens and to cut it into calls of the model."""
POLICIES = {
    "sink(2) | recent(6) | balance(16, block=4)": "by the token",
    "sink(2) | recent(6) | balance(16, 8, halves=authors, sets=flat)": "by the token",
    "sink(2) | recent(6) | balance(24, block=4, sets=separate)": "by the token",
    "sink(2) | recent(6) | outliers(8, dilate=1) | balance(16, block=4)": "by the token",
    "sink(2) | recent(6) | subgen(samples=6, clusters=4, per_cluster=2)": "by the token",
    "sink(2) | recent(6) | subgen(samples=6, clusters=none, per_cluster=2, delta=1.5)": "long",
    "kcenter(budget=12)": "by the token",
    "recent(6) | kcenter(6, quiet=1.5, half_life=16)": "by the token",
    "h2o(budget=12)": "two of four",
    "buzz(budget=20, stride=3)": "two of four",
    "sink(2) | recent(6) | ladder(12, keep=2, of=4)": "two of four",
    "sink(2) | recent(6) | chunks(keyformer(12, over=30), size=4)": "two of four",
    "sink(2) | recent(8) | defend(14, window=4, wide=2)": "long",
    "recent(8) | heavy(6) | defend(10, window=12, half_life=40)": "long",
    "defend(24, window=9, value=false)": "long",
    "sink(2) | recent(8) | match(kcenter(6), window=4)": "by the token",
    "recent(8) | match(heavy(8), half_life=none, pull=0.1)": "by the token",
    "match(snap(16, window=3), window=9)": "by the token",
    "sink(2) | recent(8) | residue(6, window=4)": "by the token",
    "recent(8) | kcenter(6) | residue(8, half_life=none)": "by the token",
    "residue(16, window=9, spread=false)": "by the token",
    "snapkv(budget=24, window=6, kernel=5)": "long",
    "snap(24, 6, 5, true)": "long",
    "sink(2) | recent(8) | snap(14, window=4, kernel=3)": "long",
    "sink(2) | recent(8) | snap(14, window=4, kernel=3, frame=stream)": "long",
}
"""Policies, each with the entry of `ROWS` that says how its rows are fed."""
GROWS = [text for text in POLICIES if "none, per" in text]


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.thinned(8)
def test_rows_read_as_they_would_alone(llama, ids, text):
    how = ROWS[POLICIES[text]]
    rows_read_alone(llama, text, ids(len(how["pads"]), 90), **how, chunk=7)


@pytest.mark.parametrize("text", [text for text in POLICIES if "snap" in text])
def test_rows_of_prompts_that_are_folded_whole_do_too(llama, ids, text):
    rows_read_alone(llama, text, ids(3, 90), [0, 13, 40], chunk=7, prefill="full")


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.thinned(6)
def test_a_restored_stream_goes_on_bit_for_bit_in_the_same_bytes(llama, ids, text, tmp_path):
    sizes = restored_goes_on(llama, text, ids(2, 130), 63, tmp_path, chunk=5)
    assert len(sizes) == 1 or text in GROWS


@pytest.mark.parametrize(
    ("text", "length"),
    [
        *((text, 16) for text in POLICIES if "residue" in text or "match" in text),
        *((text, 24) for text in POLICIES if "defend" in text),
        *((text, 24) for text in POLICIES if "snap" in text and "match" not in text),
        ("h2o(64)", 64),
        ("sink(4) | recent(20) | heavy(40)", 64),
        ("heavy(64)", 64),
        ("buzz(budget=64)", 64),
        ("recent(30) | hive(34, 4)", 64),
        ("kcenter(budget=64)", 60),
        ("recent(30) | kcenter(30, quiet=3)", 60),
        ("balancekv(budget=64)", 64),
        ("sink(2) | recent(6) | balance(24, block=4, sets=separate)", 20),
        ("subgen(budget=64)", 64),
        ("sink(2) | recent(6) | outliers(8, dilate=1) | balance(16, block=4)", 32),
        ("recent(6) | outliers(8)", 14),
        ("reservoir(budget=64)", 64),
        ("reservoir(budget=64, weighted=true, per_head=true)", 64),
        ("uniform(budget=64)", 64),
        ("uniform(budget=64, weighted=false, per_head=false)", 64),
        ("uniform(rate=1)", 64),
    ],
)
@pytest.mark.parametrize("prefill", ["chunked", "full"])
def test_below_its_budget_it_is_dense(llama, ids, text, length, prefill):
    reads_exactly(llama, text, ids(2, length), prefill=prefill)


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("h2o(budget=20)", 20),
        ("buzz(budget=30, stride=3)", 30),
        ("sink(2) | recent(6) | ladder(12, keep=2, of=4)", 20),
    ],
)
def test_a_slab_has_one_size(llama, ids, text, slots):
    has_one_size(llama, text, [ids(2, 11)] * 12, slots, chunk=6)
