"""weir keeps the tokens that NVIDIA's kvpress keeps, given the same tensors.

What kvpress keeps was recorded once, in a separate environment, by
tests/data/kvpress/make_scores.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pools.streams import places
from reference.numbers import numbers

from weir.models import OutputProjection
from weir.pools import (
    Chunks,
    CounterRNG,
    Critical,
    CurDKV,
    Expected,
    Fold,
    KeyDiff,
    KNorm,
    LagKV,
    ObservedAttention,
    Pool,
    QFilters,
    Snap,
    Tova,
)
from weir.pools.scores import qfilters
from weir.slab import AttentionParams, Heads, LayerPositions, Rotary, Slots

DATA = Path(__file__).parents[2] / "data" / "kvpress" / "scores.json"
TOLD: dict[str, Any] = json.loads(DATA.read_text("utf-8"))
GROUP, DIM, N, KEPT = 2, 8, TOLD["tokens"], TOLD["kept"]
ROTARY = Rotary(torch.tensor(TOLD["frequencies"], dtype=torch.float64))


def kept(
    pool: Pool, heads: int = 2, rotary: Rotary | None = None, projection: Any = None
) -> list[list[int]]:
    """Return the positions that a pool keeps, by head, if all tokens are folded at once."""
    queries = 1.5 * numbers(1, N, heads, GROUP, DIM).permute(1, 2, 0, 3)[None]
    keys, values = 1.5 * numbers(2, 1, heads, N, DIM), numbers(3, 1, heads, N, DIM)
    place = torch.arange(N)
    if rotary is not None:
        queries = rotary.rotate(queries.flatten(1, 2), place[None, None]).view(queries.shape)
    weight = torch.zeros(1, heads, N)
    slots = Slots(keys, values, weight, weight, place.expand(1, heads, -1))
    seen, form = torch.tensor([N]), AttentionParams(DIM**-0.5)
    none = slots.position[:, :, :0]
    read = ObservedAttention(
        lambda: slots, lambda: none, queries, seen, form, LayerPositions(rotary), projection
    )
    state = pool.state(slots.part(0, 0))
    fold = Fold(CounterRNG(0), seen, form, queries, read, state=state)
    stays, _ = pool.fold(slots.part(0, 0), slots, fold)
    return places(stays)


@pytest.mark.parametrize(
    ("name", "pool"),
    [
        ("knorm", KNorm(KEPT)),
        ("keydiff", KeyDiff(KEPT)),
        ("lagkv", LagKV(KEPT, lag=16)),
        ("snap", Snap(KEPT, window=8, kernel=5, average=True)),
        ("curdkv", CurDKV(KEPT)),
        ("curdkv whole", CurDKV(KEPT, window=None)),
    ],
)
def test_scores_keep_what_its_presses_keep(name, pool):
    assert kept(pool) == TOLD[name]


def test_tova_keeps_what_its_press_keeps_beside_the_newest_token_which_that_always_keeps():
    assert [[*head, N - 1] for head in kept(Tova(KEPT - 1))] == TOLD["tova"]


def test_critical_keeps_what_its_press_keeps_of_the_same_attention():
    attention = torch.nn.Module()
    attention.o_proj = torch.nn.Linear(2 * GROUP * DIM, 24, bias=False)
    attention.o_proj.weight.data = numbers(5, 24, 2 * GROUP * DIM)
    projection = OutputProjection(attention, Heads(2, GROUP, DIM, DIM, torch.float32))
    assert kept(Critical(KEPT), projection=projection) == TOLD["critical"]


@pytest.mark.parametrize(
    ("name", "pool"),
    [
        ("expected", Expected(KEPT, ahead=16, queries=N)),
        ("expected mean", Expected(KEPT, 64, N, covariance=False, floor=0.02)),
    ],
)
def test_expected_attention_keeps_what_its_press_keeps(name, pool):
    assert kept(pool, rotary=ROTARY) == TOLD[name]


def test_along_given_filters_the_same_keys_stay(monkeypatch):
    """kvpress's filters point in the opposite direction. weir computes its filters, so the test
    replaces them by the negated filters that kvpress was given.
    """
    filters = -numbers(4, 1, 2, DIM)[:, :, None].expand(-1, -1, GROUP, -1).double()
    monkeypatch.setattr(qfilters, "common_direction", lambda queries: filters)
    assert kept(QFilters(KEPT)) == TOLD["qfilters"]


def test_whole_spans_stay_where_its_chunks_stay():
    """kvpress chooses the same chunks for all heads, so this test has only one head."""
    assert kept(Chunks(KNorm(KEPT), size=8), heads=1) == TOLD["chunks knorm"]
