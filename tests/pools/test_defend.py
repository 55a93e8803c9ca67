"""The pool `defend`: tokens stay by the largest attention that any query gave them, which fades
with time, times the length of their values.
"""

from __future__ import annotations

import math

import pytest
import torch
from model_runs import reads_as
from reference.defend import defend_of
from torch import Tensor

import weir
from weir.pools import Defend, Fold, ObservedAttention
from weir.pools.counter_rng import CounterRNG
from weir.pools.ranked import TALLY
from weir.slab import AttentionParams, LayerPositions, Slots


@pytest.mark.parametrize(
    ("chunk", "whole", "half_life", "wide", "average"),
    [
        pytest.param(1, 0, "none", 0, False, marks=pytest.mark.slow),
        (5, 0, "20", 3, False),
        pytest.param(5, 60, "20", 0, True, marks=pytest.mark.slow),
    ],
)
def test_a_model_reads_as_with_a_naive_pool(
    llama, ids, naive, twins, chunk, whole, half_life, wide, average
):
    window = min(chunk, 4)

    def logits_of(at, place, token, read_at):
        key = at.rotate(token.key[None], [read_at])[0]
        scale = llama.model.layers[at.layer].self_attn.scaling
        return (at.queries[place] @ key * scale).tolist()

    def length_of(at, token):
        weight = llama.model.layers[at.layer].self_attn.o_proj.weight.detach()
        parts = weight.unflatten(1, (2, -1, token.value.shape[0]))[:, at.head]
        return float(
            torch.stack([part @ token.value for part in parts.unbind(1)]).norm(dim=1).mean()
        )

    life = math.inf if half_life == "none" else float(half_life)
    fold = defend_of(16, window, life, 5, wide, average, logits_of=logits_of, length_of=length_of)
    twin = naive(llama, twins.pipe(fold), 1, chunk)
    stream = weir.Stream(
        llama,
        f"defend(16, {window}, {half_life}, wide={wide}, average={str(average).lower()})",
        chunk=chunk,
        prefill="full" if whole else "chunked",
    )
    reads_as(stream, twin, ids(1, 150), whole)


# --- one pool without a model: keys are numbers, and each query attends mostly to some of them


def tokens(keys: list[float], first: int = 0, values: list[float] | None = None) -> Slots:
    """Tokens from place `first` on in one row and head."""
    position = torch.arange(first, first + len(keys))[None, None]
    weights = torch.zeros(position.shape)
    numbers = torch.tensor(values or [1.0] * len(keys))
    value = torch.stack([numbers, 0.2 * numbers], dim=-1)[None, None]
    key = torch.tensor(keys)[None, None, :, None]
    return Slots(key, value, weights, weights.clone(), position)


def folded(pool: Defend, held: Slots, new: Slots, query: float, state: dict[str, Tensor]) -> Slots:
    """The slots that stay after a fold in which one query attends to everything."""
    whole = held.join(new)
    seen = torch.tensor([int(new.position.max()) + 1])
    queries = torch.full((1, 1, 1, 1, 1), query)
    nowhere = whole.position[:, :, :0]
    read = ObservedAttention(
        lambda: whole, lambda: nowhere, queries, seen, AttentionParams(1.0), LayerPositions()
    )
    return pool.fold(
        held, new, Fold(CounterRNG(0), seen, AttentionParams(1.0), queries, read, state=state)
    )[0]


def stays(half_life: int | None) -> list[int]:
    """The places of the tokens that stay: one query attended most to token 1, the next three to
    newer tokens.
    """
    pool = Defend(2, window=1, half_life=half_life, kernel=1, wide=0)
    empty = tokens([])
    state = pool.state(empty)
    held = folded(pool, empty, tokens([0.0, 4.0]), 1.0, state)
    for place in (2, 3, 4):
        held = folded(pool, held, tokens([-3.0 + 0.01 * place], place), -1.0, state)
    return held.position[0, 0].tolist()


def test_what_one_query_wanted_survives_others_until_its_peak_has_faded():
    assert 1 in stays(None)
    assert 1 not in stays(1)


def test_a_value_that_says_nothing_is_not_defended():
    pool = Defend(1, window=1, kernel=1, wide=0)
    new = tokens([1.0, 0.9], values=[0.01, 1.0])
    for value, wanted in ((True, [1]), (False, [0])):
        pool = Defend(1, window=1, kernel=1, wide=0, value=value)
        assert (
            folded(pool, tokens([]), new, 1.0, pool.state(new)).position.flatten().tolist()
            == wanted
        )


def test_the_widest_values_stay_though_nobody_looks():
    new = tokens([5.0, 5.0, -9.0, 5.0], values=[1.0, 1.0, 50.0, 1.0])
    for wide, wanted in ((1, [0, 2]), (0, [0, 1])):
        pool = Defend(2, window=1, kernel=1, wide=wide, value=False)
        found = folded(pool, tokens([]), new, 1.0, pool.state(new))
        assert found.position.flatten().tolist() == wanted


def test_peaks_that_no_query_can_have_given_are_not_restored():
    pool = Defend(3)
    state = {TALLY: torch.zeros(1, 1, 3), "seen": torch.zeros(1, 1, dtype=torch.int64)}
    assert pool.wrong_state(state, 3, 10) is None
    assert "at least 0" in pool.wrong_state({**state, TALLY: state[TALLY] - 1}, 3, 10)
    assert "finite" in pool.wrong_state({**state, TALLY: state[TALLY] + math.inf}, 3, 10)
    assert "seen" in pool.wrong_state({**state, "seen": state["seen"] + 11}, 3, 10)
