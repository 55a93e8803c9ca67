"""Rotary embeddings at any position of an endless stream, and the rolling frame."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from roundings import close, largest, off, within
from torch import Tensor

from weir.cache.layer import lay_out
from weir.cache.layer.fold import roll
from weir.cache.layer.layer_state import LayerSpec
from weir.policies.grammar import policy
from weir.slab.positions import LayerPositions, Rotary, roll_positions, rotation_tables, shift_spans
from weir.slab.slab import Slab
from weir.slab.spec import Heads

FAR = 4_000_000
DIM = 16
ROTATION = 5
"""Roundings of a rotation: of a cosine and a sine, their two products, and the sum."""


def rotary(dim: int = DIM, base: float = 10_000.0, scaling: float = 1.0) -> Rotary:
    """Return a rotary embedding with the usual frequencies."""
    return Rotary(base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim), scaling)


def by_numpy(x: Tensor, places: Tensor, scaling: float = 1.0, base: float = 10_000.0) -> np.ndarray:
    """Rotate all dimensions of x as in textbooks, in float64."""
    half = x.shape[-1] // 2
    angles = places.numpy().astype(np.float64)[..., None] * base ** -(np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x.double().numpy()[..., :half], x.double().numpy()[..., half:]
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned * scaling


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return random numbers of this shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 2**40), st.integers(0, 99), st.sampled_from([1.0, 0.7, 1.3]))
def test_a_rotation_is_exact_however_far_out(start, seed, scaling):
    x = normal(1, 2, 5, DIM, seed=seed)
    # In float64, an angle of 2^40 is exact to 2^-12, and the frequency and product are rounded.
    places = torch.arange(start, start + 5)[None, None]
    angle = 2 * 2.0**-52 * (start + 5)
    wanted = by_numpy(x, places.expand(1, 2, 5), scaling)
    got = rotary(scaling=scaling).rotate(x, places)
    bound = (off(ROTATION) + angle) * 2 * scaling * largest(x)
    within(got, torch.from_numpy(wanted), bound)


@pytest.mark.parametrize("pairs", [1, 2])
def test_tables_are_for_models_that_rotate_by_themselves(pairs):
    x, its = normal(2, 3, 5, DIM), rotary(scaling=1.25)
    places = torch.tensor([[0, 3, 511, 4096, FAR]]).expand(2, -1)
    cos, sin = its.tables(places, pairs * DIM // 2)
    assert cos.shape == sin.shape == (2, 5, pairs * DIM // 2)
    cos, sin = (t[:, None].repeat(1, 1, 1, 2 // pairs) for t in (cos, sin))
    one, two = x.chunk(2, dim=-1)
    got = x * cos + torch.cat([-two, one], dim=-1) * sin
    close(got, its.rotate(x, places[:, None]), ROTATION, size=2 * 1.25 * largest(x))


def test_each_type_of_layers_gets_its_own_tables_and_one_without_any_the_first():
    wide, narrow = Rotary(torch.tensor([1.0, 0.5])), Rotary(torch.tensor([0.25, 0.125]))
    rotaries = {"full": wide, "sliding": narrow}
    places = torch.arange(3)
    for kind, own in (("sliding", narrow), ("full", wide), (None, wide), ("other", wide)):
        made = rotation_tables(rotaries, kind, places, 4)
        assert made is not None
        for mine, wanted in zip(made, own.tables(places, 4), strict=True):
            assert torch.equal(mine, wanted), kind
    assert rotation_tables({}, None, places, 4) is None


def test_logits_at_four_million_are_those_at_zero():
    queries, keys = normal(1, 4, 64, DIM), normal(1, 4, 64, DIM, seed=1)
    places = torch.arange(64)[None, None]
    near, far = (
        torch.einsum("bhqd,bhkd->bhqk", rotary().rotate(queries, at), rotary().rotate(keys, at))
        for at in (places, places + FAR)
    )
    size = queries.norm(dim=-1)[..., :, None] * keys.norm(dim=-1)[..., None, :]
    close(far, near, DIM + 2 * ROTATION, size)


def test_only_the_first_dimensions_turn_in_a_partial_rotation():
    x = normal(1, 1, 3, DIM)
    got = rotary(8).rotate(x, torch.tensor([[[0, 7, FAR]]]))
    assert torch.equal(got[..., 8:], x[..., 8:])
    wanted = torch.from_numpy(by_numpy(x[..., :8], torch.tensor([[[0, 7, FAR]]])))
    close(got[..., :8], wanted, ROTATION, size=2 * largest(x))


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 99))
def test_moving_a_rotated_key_is_rotating_it_there(start, to, seed):
    keys = normal(1, 2, 3, DIM, seed=seed)
    here = torch.full((1, 2, 3), start)
    there = torch.full((1, 2, 3), to)
    turned = rotary(scaling=1.2)
    moved = turned.move(turned.rotate(keys, here), there - here)
    # The factor of YaRN is applied once, when a key arrives, and not again when it moves.
    close(moved, turned.rotate(keys, there), 3 * ROTATION, size=2 * 1.2 * largest(keys))


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=12))
def test_moves_add_up(steps):
    keys = normal(1, 1, 2, DIM)
    moved = keys
    for step in steps:
        moved = rotary().move(moved, torch.full((1, 1, 2), step))
    wanted = rotary().move(keys, torch.full((1, 1, 2), sum(steps)))
    close(moved, wanted, (len(steps) + 1) * ROTATION, size=2 * largest(keys))


# --- the rolling frame


def by_counting(places: list[int], first_of_run: int) -> list[int | None]:
    """Return each token's frame: the run's start minus the distinct front tokens from it on."""
    frames: list[int | None] = []
    for place in places:
        later = {p for p in places if p >= place >= 0}
        frames.append(first_of_run - len(later) if place >= 0 else None)
    return frames


@given(
    st.integers(1, 3).flatmap(
        lambda heads: st.integers(1, 7).flatmap(
            lambda slots: st.lists(
                st.lists(
                    st.lists(st.integers(-1, 9), min_size=slots, max_size=slots),
                    min_size=heads,
                    max_size=heads,
                ),
                min_size=1,
                max_size=3,
            )
        )
    ),
    st.integers(10, 10**12),
)
def test_the_frame_counts_what_stands_between_a_token_and_the_run(rows, first):
    starts = [first + 3 * n for n in range(len(rows))]
    got = roll_positions(torch.tensor(rows), torch.tensor(starts))
    for row, start, framed in zip(rows, starts, got.tolist(), strict=True):
        for places, frames in zip(row, framed, strict=True):
            for frame, wanted in zip(frames, by_counting(places, start), strict=True):
                assert wanted is None or frame == wanted


def test_an_unbroken_stream_stays_where_it_is():
    places = torch.arange(100, 107)[None, None]
    assert torch.equal(roll_positions(places, torch.tensor([107])), places)


@given(st.data())
def test_on_three_axes_the_front_is_as_far_as_what_is_left_reaches(data):
    # Words and images one after the other. Some of their tokens are left, in any order, some twice.
    reaches = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    begins = [sum(reaches[:n]) for n in range(len(reaches))]
    slots = data.draw(st.integers(1, 8))
    # The index of the word or image with which the run begins.
    last = data.draw(st.integers(0, len(reaches) - 1))
    of = data.draw(st.lists(st.integers(-1, last), min_size=slots, max_size=slots))
    position = torch.tensor([[[10 * n if n >= 0 else -1 for n in of]]])
    spans = torch.tensor([[[(100 + begins[n], reaches[n]) for n in of]]])
    shift = shift_spans(position, spans, torch.tensor([100 + begins[last]]))[0, 0].tolist()
    for n, by in zip(of, shift, strict=True):
        left = {m for m in of if n <= m < last}
        assert n < 0 or begins[n] + by == begins[last] - sum(reaches[m] for m in left)


def test_words_alone_are_packed_as_they_are_rolled():
    places = torch.tensor([[[0, 3, 4, -1, 9], [4, 2, 2, 7, 8]]])
    spans = torch.stack([places, torch.ones_like(places)], dim=-1)
    first = torch.tensor([12])
    shift, frame = shift_spans(places, spans, first), roll_positions(places, first)
    assert torch.equal((places + shift)[places >= 0], frame[places >= 0])


def test_tables_of_three_axes_take_each_pair_by_its_axis():
    turned = Rotary(torch.tensor([1.0, 0.5, 0.25, 0.1]), sections=(2, 1, 1))
    cos, sin = turned.tables(torch.tensor([[[3, 5, 7], [4, 4, 4]]]), 4)
    wanted = torch.tensor([[3.0, 1.5, 1.25, 0.7], [4.0, 2.0, 1.0, 0.4]])[None]
    close(cos, wanted.cos(), 2, size=8)
    close(sin, wanted.sin(), 2, size=8)
    words = turned.tables(torch.tensor([[4]]), 4)
    assert torch.equal(words[0][0, 0], cos[0, 1])


# --- survivors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thousand_folds_cost_a_survivor_no_more_precision_than_one(dtype):
    # At each fold, the keys that attention reads are computed again from the masters. So after any
    # number of folds, a sink's key is its master rotated once, bit-identical to a single move.
    spec = LayerSpec(policy("sink(2) | recent(3)"), LayerPositions(rotary()), 4)
    slab = Slab(spec.slab(Heads(1, 1, DIM, DIM, dtype)), 1)
    sinks = normal(1, 1, 2, DIM).to(dtype)
    slab.masters[:] = sinks
    slab.position[..., :2] = torch.tensor([0, 1])
    for folds in range(1, 1001):
        run = 2 + 4 * folds
        roll(spec, slab, lay_out(spec.pipe, [2, 3]), torch.tensor([run + 3]))
    assert torch.equal(slab.masters, sinks)
    by = torch.tensor([[[run - 2, run - 2]]])
    assert torch.equal(slab.keys[:, :, :2], rotary().move(sinks, by))
    wanted = torch.from_numpy(by_numpy(sinks, by))
    # A rotation in float32, then one rounding to the dtype.
    bound = off(ROTATION) * 2 * largest(sinks) + torch.finfo(dtype).eps / 2 * wanted.abs()
    within(slab.keys[:, :, :2], wanted, bound)


def test_turning_a_key_a_thousand_times_in_place_would_lose_it():
    # This is why there are masters: the same thousand moves, each from the last result, in
    # bfloat16.
    key = normal(1, 1, 1, DIM).bfloat16()
    moved = key
    for _ in range(1000):
        moved = rotary().move(moved, torch.tensor([[[4]]]))
    once = rotary().move(key, torch.tensor([[[4000]]]))
    assert float((moved - once).abs().max()) > 0.05
