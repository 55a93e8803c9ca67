"""Models with a built-in sink, compared with a loop over tokens that adds the sink to each sum.

Two families with a Zero Sink, and gpt-oss, whose heads have learned sink logits.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from interpreter import need_triton
from reference.heavy import heavy_of
from reference.models import make
from reference.naive import Fold, Naive, Token, make_llama, pipe_of, recent_of, sink_of
from reference.snap import snap_of
from roundings import close_runs, run_off
from torch import Tensor
from transformers import PreTrainedModel

import weir

pytestmark = pytest.mark.thinned(4, least=2)

ZERO = {"weir_sink": {"kind": "zero"}, "attn_implementation": "weir_zero_sink"}
LENGTH = 45


def zero_llama() -> PreTrainedModel:
    return make_llama(**ZERO)


def gpt_oss() -> PreTrainedModel:
    """A gpt-oss whose sinks receive much of the attention."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = make("gpt-oss", layer_types=["full_attention"] * 2, rope_parameters=rope)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.add_(1.5)
    return model


MODELS = {
    "llama": zero_llama,
    "qwen2": lambda: make("qwen2", **ZERO),
    "gpt-oss": gpt_oss,
}
models = pytest.mark.parametrize("name", MODELS)


def sinks_of(model: Any) -> list[Tensor]:
    """The sink logits of each layer's query heads."""
    return [
        getattr(layer.self_attn, "sinks", torch.zeros(4)).detach() for layer in model.model.layers
    ]


def text_of(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(1, 60, (batch, length), generator=generator)


def read(model: Any, cache: Any, ids: Tensor, cuts: list[int]) -> Tensor:
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split(cuts, dim=1)]
    return torch.cat(parts, dim=1)


def snap_fold(model: Any) -> Any:
    def logits_of(at: Any, place: int, token: Token, queries: Tensor) -> list[float]:
        key = at.rotate(token.key[None], [token.position])[0]
        return (queries @ key * model.model.layers[at.layer].self_attn.scaling).tolist()

    sinks = [layer.view(2, 2).tolist() for layer in sinks_of(model)]
    return snap_of(
        16,
        4,
        5,
        logits_of=logits_of,
        sinks_of=lambda at: sinks[at.layer][at.head],
        others_of=lambda at: [],
    )


FOLDS = {
    "streaming_llm(budget=16, sinks=4)": lambda model: (sink_of(4), recent_of(12)),
    "recent(6) | heavy(7)": lambda model: (recent_of(6), heavy_of(7)),
    "snap(16, 4, 5)": lambda model: (snap_fold(model),),
}
"""Policies, and the same pools for the loop. In scores by attention, the sink gets its share."""


def same_slots(cache: Any, loop: Naive, model: Any) -> None:
    for layer, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        held = cache.slots(layer)
        position = held.position[0, head]
        wanted = sorted(t.position for t in loop.slots(layer, head))
        assert sorted(position[position >= 0].tolist()) == wanted
        if held.mass is not None:
            received = loop.received(layer, head)
            bound = run_off(model) * max(received.values())
            mine = dict(zip(position.tolist(), held.mass[0, head].tolist(), strict=True))
            mine.pop(-1, None)
            assert mine == pytest.approx(received, abs=bound)


@models
@pytest.mark.parametrize("policy", FOLDS)
@pytest.mark.parametrize(("chunk", "whole"), [(1, 0), (5, 30)])
@pytest.mark.thinned(8, repeats="one loop for each model with a sink, policy and chunk")
def test_a_stream_past_its_budget_is_the_naive_loop(name, policy, chunk, whole):
    model, ids = MODELS[name](), text_of(1, LENGTH)
    folds = FOLDS[policy](model)
    loop = Naive(model, pipe_of(*folds), len(folds), chunk, sinks=sinks_of(model))
    wanted = [loop.feed(ids[0, :whole].tolist(), at_once=True)] if whole else []
    wanted.append(loop.feed(ids[0, whole:].tolist()))
    prefill = "full" if whole else "chunked"
    cache = weir.StreamingCache(model, policy, chunk=chunk, prefill=prefill)
    got = read(model, cache, ids, [whole or 30, *[1] * 10, LENGTH - 10 - (whole or 30)])
    close_runs(got[0], torch.cat(wanted), model)
    same_slots(cache, loop, model)


WEIGHED = {
    "sink(2) | recent(6) | subgen(8, 4, 2)": 3,
    "sink(2) | recent(6) | balance(8, block=4)": 3,
    "recent(6) | balance(12, block=4, sets=separate)": 2,
    "recent(6) | kcenter(10)": 2,
    "buzz(budget=16, stride=3)": 3,
}
"""Policies with their number of pools. The loop is told which tokens stay, and with which weights.

That the policies keep the right tokens is shown by their own tests. Here, only the attention with
the sink is compared.
"""


@models
@pytest.mark.parametrize("policy", WEIGHED)
def test_slots_with_two_weights_are_read_with_the_sink(name, policy):
    model, ids = MODELS[name](), text_of(1, LENGTH)
    cache = weir.StreamingCache(model, policy, chunk=5, positions="original")
    told: dict[tuple[int, int, int], list[tuple[int, float, float]]] = {}
    parts = []
    for seen in range(5, LENGTH + 1, 5):
        parts.append(read(model, cache, ids[:, seen - 5 : seen], [2, 1, 2]))
        for layer in range(2):
            held = cache.slots(layer)
            for head in range(2):
                slots = (t[0, head].tolist() for t in (held.position, held.a, held.b))
                told[seen, layer, head] = [it for it in zip(*slots, strict=True) if it[0] >= 0]
    loop = Naive(model, told_by(told), 1, 5, rolling=False, sinks=sinks_of(model))
    close_runs(torch.cat(parts, dim=1)[0], loop.feed(ids[0].tolist()), model)


def told_by(told: dict[tuple[int, int, int], list[tuple[int, float, float]]]) -> Fold:
    known: dict[tuple[int, int, int], Token] = {}

    def fold(held: Any, new: list[Token], at: Any) -> list[list[Token]]:
        known.update({(at.layer, at.head, t.position): t for t in new})
        stay = []
        for position, a, b in told[at.seen, at.layer, at.head]:
            token = copy.copy(known[at.layer, at.head, position])
            token.a, token.b = a, b
            stay.append(token)
        return [stay]

    return fold


@models
@pytest.mark.parametrize("sinks", [0, 4])
def test_recompute_reads_its_windows_with_the_sink(name, sinks):
    model, ids = MODELS[name](), text_of(1, 24)
    got = weir.Stream(model, f"recompute(budget=10, sinks={sinks})").feed(ids, all_logits=True)
    for end in range(1, 25, 5):
        window = ids[0, :end].tolist()
        if end > 10:
            window = window[:sinks] + window[end - (10 - sinks) :]
        loop = Naive(model, pipe_of(recent_of()), 1, sinks=sinks_of(model))
        close_runs(got[0, end - 1], loop.feed(window)[-1], model)


def test_recompute_wants_the_attention_the_model_was_trained_with():
    model = zero_llama()
    model.set_attn_implementation("sdpa")
    with pytest.raises(weir.WeirError, match="Zero Sink, but its attention is 'sdpa'"):
        weir.Stream(model, "recompute(budget=10)")


@models
@pytest.mark.parametrize("policy", [*FOLDS, "sink(2) | recent(6) | subgen(8, 4, 2)"])
@pytest.mark.thinned(5)
def test_rows_read_what_each_reads_alone(name, policy):
    model, ids, pads = MODELS[name](), text_of(3, 50), [0, 7, 21]
    mask = torch.ones_like(ids)
    for row, n in enumerate(pads):
        mask[row, :n] = 0
    together = weir.StreamingCache(model, policy, chunk=5)
    with torch.no_grad():
        first = model(ids[:, :45], attention_mask=mask[:, :45], past_key_values=together).logits
        steps = [
            model(
                ids[:, n : n + 1], attention_mask=mask[:, : n + 1], past_key_values=together
            ).logits
            for n in range(45, 50)
        ]
    both = torch.cat([first, *steps], dim=1)
    for row, n in enumerate(pads):
        alone = weir.StreamingCache(model, policy, chunk=5)
        close_runs(both[row, n:], read(model, alone, ids[row : row + 1, n:], [50 - n])[0], model)


@models
def test_a_saved_stream_goes_on_bit_for_bit(name, tmp_path):
    model, ids = MODELS[name](), text_of(1, LENGTH)
    stream = weir.Stream(model, "sink(2) | recent(6) | heavy(4) | subgen(8, 4, 2)", chunk=5)
    stream.feed(ids[:, :33])
    stream.save(tmp_path / "session.safetensors")
    again = weir.Stream.restore(model, tmp_path / "session.safetensors")
    rest = ids[:, 33:]
    assert torch.equal(stream.feed(rest, all_logits=True), again.feed(rest, all_logits=True))


@models
@pytest.mark.slow
def test_through_the_kernel_of_a_gpu_it_says_the_same(name, monkeypatch):
    need_triton()
    model, ids = MODELS[name](), text_of(2, 30)
    found = []
    for library in ("reference", "triton"):
        monkeypatch.setenv("WEIR_KERNELS", library)
        cache = weir.StreamingCache(model, "sink(2) | recent(6) | subgen(4, 2, 2)", chunk=4)
        found.append(read(model, cache, ids, [20, *[1] * 10]))
    close_runs(found[1], found[0], model)
