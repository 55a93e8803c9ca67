"""The kernel for a whole piece of a prompt equals a loop over its queries."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weir.errors import WeirError
from weir.kernels import WindowChunk

window = pytest.importorskip(
    "weir.kernels.cpu.window",
    reason="not installed: pip install '.[fast]'",
    exc_type=ImportError,
)
EPS = 2.0**-24
Pair = tuple[Tensor, Tensor]


def loop(
    queries: Tensor, exact: Pair, coded: Pair, front: Pair, chunks: list[WindowChunk], scale: float
) -> tuple[Tensor, Tensor]:
    """Answers in float64, query by query, and the same for absolute values, for the bound."""
    found = []
    for index, chunk in enumerate(chunks):
        for query in range(chunk.queries):
            end = chunk.own + query + 1
            parts = (front[0][:, :, index], front[1]), coded, exact
            spans = (0, chunk.front), (chunk.start, chunk.boundary), (chunk.boundary, end)
            keys, values = (
                torch.cat(
                    [part[i][:, :, a:b] for part, (a, b) in zip(parts, spans, strict=True)], 2
                )
                for i in (0, 1)
            )
            asked = queries[:, :, :, chunk.first + query].double()
            shares = (asked @ keys.double().mT * scale).softmax(dim=3)
            found.append([shares @ values.double(), shares @ values.double().abs()])
    answers, sizes = (torch.stack(each, dim=3) for each in zip(*found, strict=True))
    return answers, sizes


def make(
    sizes: list[int],
    before: int,
    held: int,
    newest: int,
    fronts: int,
    dims: tuple[int, int],
    seed: int,
) -> tuple[Tensor, Pair, Pair, Pair, list[WindowChunk]]:
    """A piece of two rows with 2 KV heads of 3 queries each, over a window of `held` tokens."""
    draw = torch.Generator().manual_seed(seed)

    def pair(*shape: int) -> Pair:
        return tuple(torch.randn(2, 2, *shape, dim, generator=draw) for dim in dims)  # type: ignore[return-value]

    queries = torch.randn(2, 2, 3, sum(sizes), dims[0], generator=draw)
    chunks: list[WindowChunk] = []
    for index, count in enumerate(sizes):
        done = sum(sizes[:index])
        start = max(0, before + done - held)
        boundary = max(start, before + done - newest)
        chunks.append(WindowChunk(done, count, min(fronts, index), start, boundary, before + done))
    front = pair(len(sizes), fronts)[0], pair(fronts)[1]
    return queries, pair(before + sum(sizes)), pair(chunks[-1].boundary), front, chunks


@settings(max_examples=30)
@given(
    sizes=st.lists(st.sampled_from([1, 3, 15, 16, 17, 32, 33, 64]), min_size=1, max_size=4),
    before=st.integers(0, 60),
    held=st.integers(0, 80),
    newest=st.integers(0, 20),
    fronts=st.integers(0, 5),
    dims=st.sampled_from([(64, 64), (40, 24), (24, 40), (3, 17)]),
    lanes=st.sampled_from([8, 16]),
    seed=st.integers(0, 2**32),
)
def test_it_is_a_loop_over_queries(sizes, before, held, newest, fronts, dims, lanes, seed):
    queries, exact, coded, front, chunks = make(sizes, before, held, newest, fronts, dims, seed)
    scale = dims[0] ** -0.5
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(window, "lanes", lambda: lanes)
        found = window.attend_window(queries, exact, coded, front, chunks, scale)
    wanted, sizes_of = loop(queries, exact, coded, front, chunks, scale)
    most = max(t.norm(dim=-1).amax().item() for t in (exact[0], front[0]) if t.numel())
    # As in `test_causal`: an error of the logits changes each share, and the sum of shares.
    logits_off = (dims[0] + 8) * EPS * (queries.norm(dim=-1, keepdim=True) * most * scale + 30)
    off = 2 * (2 * logits_off + (exact[0].shape[2] + fronts + 8) * EPS)
    assert ((found - wanted).abs() <= off * sizes_of + EPS * wanted.abs()).all()


def test_bfloat16_is_read_as_it_is():
    given = make([16, 5], 9, 20, 4, 2, (32, 32), 0)
    narrow = [
        t.bfloat16() if isinstance(t, Tensor) else tuple(n.bfloat16() for n in t) for t in given[:4]
    ]
    wide = [t.float() if isinstance(t, Tensor) else tuple(n.float() for n in t) for t in narrow]
    found, wanted = (window.attend_window(*each, given[4], 0.2) for each in (narrow, wide))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_stays_none_for_those_who_see_it(number):
    queries, exact, coded, front, chunks = make([16, 16], 4, 10, 0, 0, (16, 16), 1)
    queries = queries.abs()
    exact[0][0, 0, 9, 2] = number  # the sixth query's key; the second chunk reads it from `coded`
    found = window.attend_window(queries, exact, coded, front, chunks, 1.0)
    assert found[0, 0, :, :5].isfinite().all() and found[0, 0, :, 16:].isfinite().all()
    assert found[0, 0, :, 5:16].isnan().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(threads, monkeypatch):
    given = make([64, 64, 20], 100, 90, 16, 4, (64, 64), 2)
    alone = window.attend_window(*given, 0.1)
    monkeypatch.setattr(window, "threads_for", lambda *_: threads)
    assert torch.equal(window.attend_window(*given, 0.1), alone)


@pytest.mark.parametrize(
    "wrong",
    [
        {"queries": 17},
        {"own": 60},
        {"boundary": 30},
        {"start": -1},
        {"front": 3},
        {"boundary": 0},
        {"first": 5},
    ],
)
def test_what_lies_outside_of_memory_is_refused(wrong):
    *given, chunks = make([16], 30, 25, 10, 2, (16, 16), 3)
    with pytest.raises(WeirError, match="must cover the piece in order"):
        window.attend_window(*given, [chunks[0]._replace(**wrong)], 0.1)
