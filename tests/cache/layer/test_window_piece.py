"""A window that reads a piece of a prompt at once gives what it gives chunk by chunk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weir import kernels
from weir.cache.layer import Layer, LayerSpec
from weir.cache.layer import transaction as module
from weir.cache.plan import plan_forward
from weir.policies.grammar import policy
from weir.slab import AttentionParams, LayerPositions, Rotary

pytest.importorskip("numba", reason="not installed: pip install '.[fast]'")
DIM = 32
PARAMS = AttentionParams(DIM**-0.5)


def make(text: str, chunk: int, rolling: bool = True) -> Layer:
    rotary = Rotary(10000.0 ** -(torch.arange(0, DIM, 2) / DIM))
    positions = LayerPositions(rotary, rolling=rolling, placed=True)
    return Layer(LayerSpec(policy(text).for_layer(0, 1), positions, chunk))


def tokens(count: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    heads = (6, 2, 2)
    return tuple(torch.randn(2, n, count, DIM, generator=draw).to(dtype) for n in heads)


def feed(layer: Layer, pieces: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Feed random tokens piece by piece; the answers to all. Tokens depend on a piece's place."""
    seen, found = 0, []
    for count in pieces:
        waiting = seen % layer.spec.chunk
        given = tokens(count, seen, dtype)
        found.append(layer.feed(*given, PARAMS, seen=seen, waiting=waiting))
        seen += count
    return torch.cat(found, dim=2)


def assert_same(one: Layer, other: Layer, seen: int) -> None:
    """Slots in use are bit-identical. Slots that wait for a token may still hold an older one."""
    held = one.spec.held(one.state.lengths[0])
    unused = one.spec.chunk - seen % one.spec.chunk
    mine, theirs = (layer.state.slab.tensors() for layer in (one, other))
    for name, t in theirs.items():
        for part in held.get(name, (slice(None),)):
            stop = part.stop - unused if name in ("keys", "values") else part.stop
            some = slice(part.start, stop)
            assert torch.equal(mine[name][:, :, some], t[:, :, some]), name


def by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "attend_window", lambda *_: None)


@pytest.mark.parametrize("rolling", [True, False])
@pytest.mark.parametrize("chunk", [2, 16])
@pytest.mark.parametrize(
    "text",
    [
        "streaming_llm(36)",
        "recent(30)",
        "sink(3)",
        "sink(4) | recent(6) | recent(50):int4",
        "sink(4) | recent(40):int8",
        "sink(1) | recent(5) | recent(30):k8v4",
        "sink(300) | recent(20)",
    ],
)
@pytest.mark.parametrize("pieces", [[100], [5, 70, 41], [33, 1, 1, 90, 64]])
@pytest.mark.thinned(8)
def test_it_answers_and_holds_what_chunks_do(text, chunk, pieces, rolling, monkeypatch):
    together, one_by_one = make(text, chunk, rolling), make(text, chunk, rolling)
    asked = []
    kernel = kernels.attend_window
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "attend_window", lambda *a: asked.append(a) or kernel(*a))
        found = feed(together, pieces)
    assert asked
    by_chunks(monkeypatch)
    wanted = feed(one_by_one, pieces)
    # Both add up some hundred numbers of about 1, in different orders, so they round differently.
    assert torch.allclose(found, wanted, rtol=0, atol=2.0**-17)
    assert together.state.lengths == one_by_one.state.lengths
    assert together.state.plain == one_by_one.state.plain
    assert_same(together, one_by_one, sum(pieces))


def test_bfloat16_is_as_near_as_by_chunks(monkeypatch):
    text = "sink(4) | recent(6) | recent(50):int4"
    layers = [make(text, 16) for _ in range(2)]
    found = feed(layers[0], [90, 77], torch.bfloat16)
    by_chunks(monkeypatch)
    wanted = feed(layers[1], [90, 77], torch.bfloat16)
    assert found.dtype == torch.bfloat16
    # Answers are about 1. The kernel rounds each of them once, PyTorch rounds more often.
    assert (found.float() - wanted.float()).abs().max() <= 2.0**-6
    assert_same(*layers, 167)


def test_a_forward_that_fails_leaves_no_trace():
    layer, other = (make("sink(4) | recent(6) | recent(50):int4", 16) for _ in range(2))
    feed(layer, [90])
    feed(other, [90])
    plan = plan_forward(None, 2, 70, [90, 90], [10, 10], 16, torch.device("cpu"))
    layer.attend(*tokens(70, 5), PARAMS, plan)
    layer.abandon()
    assert layer.state.lengths == other.state.lengths
    found, wanted = (
        each.feed(*tokens(50, 7), PARAMS, seen=90, waiting=10) for each in (layer, other)
    )
    assert torch.equal(found, wanted)


def count_folds(text, length, monkeypatch):
    """How often a layer folds while it reads one forward."""
    folds, fold = [], module.fold_rows
    monkeypatch.setattr(module, "fold_rows", lambda *a: folds.append(1) or fold(*a))
    feed(make(text, 16), [length])
    return len(folds)


@pytest.mark.parametrize("text", ["h2o(40)", "snap(16, 4, 5)", "sink(4) | uniform(30)"])
def test_other_pools_fold_behind_each_chunk(text, monkeypatch):
    assert count_folds(text, 64, monkeypatch) == 4


@pytest.mark.own_kernels
def test_a_window_folds_once(monkeypatch):
    assert count_folds("streaming_llm(40)", 70, monkeypatch) == 1
