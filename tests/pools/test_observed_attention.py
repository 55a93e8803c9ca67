"""What a fold tells pools about the last queries: which tokens they attended to, and how much."""

from __future__ import annotations

import gc
import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from pools.probe import Probe
from reference.models import CONFIGS, MIXED, make, shared, tokens
from reference.reading import frame_of, query_place, share_of
from reference.seeing import BEGIN, IMAGE, prompt, seeing
from roundings import close, close_runs, largest, softmax_off
from torch import Tensor

import weir
from weir.cache.layer.layer import Layer
from weir.cache.layer.layer_state import LayerSpec
from weir.errors import WeirError
from weir.models.model_spec import describe
from weir.policies.pipe import Pipe
from weir.pools import Fold, ObservedAttention, Recent, Sink
from weir.slab import Alibi, AttentionParams, LayerPositions, Rotary, Slots

DIM, HEADS, GROUP, LENGTH = 8, 2, 3, 75
FORM = AttentionParams(0.4, softcap=4.0, sinks=torch.tensor([[0.3, -1.0, 2.0], [0.0, 1.0, 0.5]]))
ROTARY = Rotary(torch.tensor([0.7, 0.11, 0.013], dtype=torch.float64), scaling=1.25)
"""A partial rotary embedding: six of eight dimensions are rotated."""
ALIBI = Alibi(torch.tensor([0.5, 0.3, 0.2, 0.1, 0.05, 0.02]))
EVERY = {
    "rotary": LayerPositions(ROTARY),
    "alibi": LayerPositions(alibi=ALIBI),
    "rounded alibi": LayerPositions(alibi=replace(ALIBI, rounding=torch.bfloat16, factor=0.5)),
    "none": LayerPositions(),
    "in the stream": LayerPositions(ROTARY, rolling=False),
}
PIPES = {
    "behind": lambda probe: Pipe((Sink(2), Recent(9), probe)),
    "alone": lambda probe: Pipe((probe,)),
    "twice": lambda probe: Pipe((Recent(4), Probe(5), probe)),
}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


Q, K = random(2, HEADS * GROUP, LENGTH, DIM), random(2, HEADS, LENGTH, DIM)
V = random(2, HEADS, LENGTH, 5)


def fed(pipe: Pipe, positions: LayerPositions, chunk: int = 6, **spec: Any) -> Layer:
    """A layer that has read `LENGTH` tokens in two forwards."""
    layer = Layer(LayerSpec(pipe, positions, chunk, **spec))
    for start, stop in ((0, 31), (31, LENGTH)):
        q, k, v = (t[:, :, start:stop] for t in (Q, K, V))
        layer.feed(q, k, v, FORM, seen=start, waiting=start % chunk)
    return layer


def lists(slots: Slots) -> list[list[list[int]]]:
    return [[[p for p in head if p >= 0] for head in row] for row in slots.position.tolist()]


@pytest.mark.parametrize("pipe", PIPES)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("window", [pytest.param(3, marks=pytest.mark.slow), 20])
def test_shares_are_those_of_a_naive_loop_over_the_rolled_slab(name, pipe, window):
    """The share of each token, asked for in any order, equals that of a softmax over all slots.

    The longer window contains queries whose tokens have left the run (the newest tokens without a
    gap). In the rolling frame, the positions of these queries move up as well.
    """
    positions = EVERY[name]
    every: list[tuple[list, Tensor, Tensor, Tensor, int]] = []

    def look(slots: Slots, fold: Fold) -> None:
        some = slots.take(torch.arange(len(slots) - 1, -1, -2).expand(2, HEADS, -1))
        read = fold.read
        shares = read.attention(some)
        assert shares.shape == (2, HEADS, GROUP, read.read_queries.shape[3], len(some))
        every.append((lists(read.whole), some.position, shares, read.lse, int(fold.seen[0])))

    fed(PIPES[pipe](Probe(7, window, look)), positions)
    assert len(every) == LENGTH // 6
    gaps, older = 0, 0
    for whole, position, shares, lse, seen in every[5::2]:
        for row, head in ((0, 0), (1, 1)):
            there = sorted(set(whole[row][head]))
            frame = frame_of(there, seen) if positions.rolling else {p: p for p in there}
            gaps += frame[there[0]] != there[0]
            for back in (1, window // 2 + 1, window):
                number = shares.shape[3] - back
                query = seen - back
                if positions.rolling:
                    query = query_place(there, frame, query)
                older += query != seen - back
                for one in range(GROUP):
                    wanted, below = share_of(
                        Q[row, head * GROUP + one, seen - back].tolist(),
                        {p: K[row, head, p].tolist() for p in there},
                        frame,
                        seen - back,
                        query,
                        positions,
                        FORM,
                        head * GROUP + one,
                        newest=seen - 1,
                    )
                    bound = softmax_off(DIM, 40)
                    assert float(lse[row, head, one, number]) == pytest.approx(below, abs=bound)
                    for at, place in enumerate(position[row, head].tolist()):
                        share = float(shares[row, head, one, number, at])
                        its = 0.0 if place < 0 else wanted[place]
                        assert share == pytest.approx(its, rel=bound, abs=1e-30)
    assert gaps or not positions.rolling
    assert bool(older) == (positions.rolling and window == 20)


ANSWERED: list[Any] = [
    pytest.param(name, "behind", "rolling", "chunked", marks=[pytest.mark.slow] * (place % 2))
    for place, name in enumerate(CONFIGS)
]
for name in ("llama-yarn", "gemma2", "gpt-oss", "falcon-alibi", "bloom"):
    ANSWERED += [(name, "alone", "rolling", "chunked"), (name, "alone", "original", "full")]


@pytest.mark.parametrize(("name", "pipe", "mode", "prefill"), ANSWERED)
def test_what_a_fold_says_is_what_every_family_has_answered(name, pipe, mode, prefill, monkeypatch):
    """A layer's outputs for its newest tokens are those that the model got. If the pool is alone in
    its pipe, they are computed from the shares of its slots.
    """
    model, chunk = shared(name), 8
    found: dict[int, list[Tensor]] = {0: [], 1: []}
    answers: dict[int, list[Tensor]] = {0: [], 1: []}

    def look(slots: Slots, fold: Fold) -> None:
        out = fold.read.answers
        if pipe == "alone":  # there are no slots but its own
            out = torch.einsum("bhgln,bhnd->bhgld", fold.read.attention(slots), slots.values)
        found[fold.draws.layer].append(out)

    own = Layer.attend

    def attend(layer: Layer, *args: Any) -> Tensor:
        answers[layer.spec.index].append(own(layer, *args))
        return answers[layer.spec.index][-1]

    monkeypatch.setattr(Layer, "attend", attend)
    pools = PIPES[pipe](Probe(17, chunk, look))
    cache = weir.StreamingCache(model, pools, chunk=chunk, positions=mode, prefill=prefill)
    with torch.no_grad():
        for part in tokens(2, 68).split([20, 32, 16], dim=1):
            model(input_ids=part, past_key_values=cache)
    ends = [20, 28, 36, 44, 52, 60, 68] if prefill == "full" else list(range(chunk, 68, chunk))
    served = [layer.spec.index for layer in cache.stack if layer.spec.pipe == pools]
    assert served == ([1] if name in MIXED else [0, 1])
    for layer in served:
        whole = torch.cat(answers[layer], dim=2)
        assert len(found[layer]) == len(ends)
        for end, out in zip(ends, found[layer], strict=True):
            wanted = whole[:, :, end - chunk : end].unflatten(1, out.shape[1:3])
            close_runs(out, wanted, model)


def test_images_on_three_axes_are_read_where_attention_reads_them(monkeypatch):
    model = seeing("qwen2-vl")
    found: list[Tensor] = []

    def look(slots: Slots, fold: Fold) -> None:
        if fold.draws.layer == 0:
            found.append(torch.cat([fold.read.answers, by_shares(slots, fold)]))

    def by_shares(slots: Slots, fold: Fold) -> Tensor:
        return torch.einsum("bhgln,bhnd->bhgld", fold.read.attention(slots), slots.values)

    cache = weir.StreamingCache(model, Pipe((Probe(17, 8, look),)), chunk=8)
    first, answers, own = cache.stack[0], [], Layer.attend

    def attend(layer: Layer, *args: Any) -> Tensor:
        out = own(layer, *args)
        if layer is first:
            answers.append(out)
        return out

    monkeypatch.setattr(Layer, "attend", attend)
    asked = prompt("qwen2-vl", [9, 0, 3, 0, 0, 11, 0, 4])
    with torch.no_grad():
        model(**asked.given, past_key_values=cache)
    whole = torch.cat(answers, dim=2)
    assert len(found) == whole.shape[2] // 8 > 5
    for number, out in enumerate(found):
        wanted = whole[:, :, 8 * number : 8 * number + 8].unflatten(1, out.shape[1:3])
        close_runs(out, wanted.expand_as(out), model)


@pytest.mark.parametrize("pipe", PIPES)
@pytest.mark.parametrize("name", EVERY)
def test_without_rotation_keys_and_queries_are_what_the_model_said(name, pipe):
    """Except for the factor of a scaled embedding, which only rotated dimensions have."""
    seen = []

    def look(slots: Slots, fold: Fold) -> None:
        seen.append((slots.position, fold.read.unrotated(slots), fold.read.unrotated_queries))

    positions = EVERY[name]
    fed(PIPES[pipe](Probe(7, 20, look)), positions)
    factor = torch.ones(DIM)
    if positions.rotary is not None:
        factor[:6] = ROTARY.scaling
    for fold, (position, keys, queries) in enumerate(seen[3:], start=4):
        held = position >= 0
        wanted = (K * factor).gather(2, position.clamp_min(0)[..., None].expand(-1, -1, -1, DIM))
        close(keys[held], wanted[held], 4)
        asked = (Q * factor)[:, :, 6 * fold - 20 : 6 * fold].unflatten(1, (HEADS, GROUP))
        close(queries, asked, 4)


@pytest.mark.parametrize("name", EVERY)
def test_keys_find_back_to_where_they_were_said_and_queries_are_as_strong_anywhere(name):
    def look(slots: Slots, fold: Fold) -> None:
        read = fold.read
        again = read.rotate_to(read.unrotated(slots), slots.position)
        close(again[slots.held], slots.keys[slots.held], 8)
        power = fold.queries[:, :, :, -3:].square().mean(dim=(2, 3))
        if EVERY[name].rotary is not None:
            pairs = (power[..., :3] + power[..., 3:6]) / 2
            power = torch.cat([pairs, pairs, power[..., 6:]], dim=2)
        close(read.power(3), power, 3 * 3 * GROUP)
        close(read.would_attend(slots), read.attention(slots), 2 * DIM, size=1.0)
        seen.append(len(slots))

    seen: list[int] = []
    fed(PIPES["behind"](Probe(7, 6, look)), EVERY[name])
    assert max(seen) > 7


def test_behind_images_too_the_same_word_has_the_same_key_without_rotation():
    """This is tested in the first layer, whose keys depend on the token alone."""
    model, asked = seeing("qwen2-vl"), prompt("qwen2-vl", [5, 0, 3, 0, 0, 7])
    keys: dict[int, list[Tensor]] = {}
    ids = asked.ids[0].tolist()

    def look(slots: Slots, fold: Fold) -> None:
        turned = fold.read.unrotated(slots)
        for at, place in enumerate(slots.position[0, 0].tolist()):
            if place >= 0 and ids[place] != IMAGE and fold.draws.layer == 0:
                keys.setdefault(ids[place], []).append(turned[0, 0, at])

    cache = weir.StreamingCache(model, Pipe((Probe(40, 4, look),)), chunk=1)
    with torch.no_grad():
        model(**asked.given, past_key_values=cache)
    assert len(keys[BEGIN]) > len(ids)  # the beginnings of three images, at each fold
    for each in keys.values():
        close_runs(torch.stack(each), each[0].expand(len(each), -1), model)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "phi3", "gpt-neox", "phi", "falcon", "falcon-new", "mpt", "bloom"]
)
def test_values_are_as_long_as_the_layer_s_own_projection_makes_them(name):
    model, lengths, values = shared(name), [], []

    def look(slots: Slots, fold: Fold) -> None:
        lengths.append((fold.read.lengths(slots.values), fold.read.projected_sizes(slots.values)))
        values.append((fold.draws.layer, slots.values))

    pipe = Pipe((Probe(17, 1, look),))
    cache = weir.StreamingCache(model, pipe, chunk=8, positions="rolling")
    with torch.no_grad():
        model(input_ids=tokens(2, 16), past_key_values=cache)
    modules = describe(model).attentions
    names = ("o_proj", "out_proj", "dense")
    for (its, sizes), (layer, value) in zip(lengths, values, strict=True):
        projection = next(getattr(modules[layer], n) for n in names if hasattr(modules[layer], n))
        batch, kv_heads, n, dim = value.shape
        group = its.shape[2]
        assert its.shape == (batch, kv_heads, group, n)
        head = kv_heads * group - 1
        size, mean = projection.weight.shape[0], 0.0
        for one in range(group):
            given = torch.zeros(batch, n, kv_heads, group, dim)
            given[:, :, -1, one] = value[:, -1]
            with torch.no_grad():
                still = projection(torch.zeros(1, 1, head * dim + dim))
                moved = projection(given.flatten(2)) - still
            mean = mean + moved.abs().sum(dim=-1) / group
        wanted = moved.norm(dim=-1)
        close(its[:, -1, -1], wanted, size, size=largest(wanted) * math.sqrt(size))
        close(sizes[:, -1], mean, size, size=largest(mean) * math.sqrt(size))


def test_where_the_projection_cannot_be_read_values_are_as_long_as_they_are():
    model = make("llama")
    for module in describe(model).attentions:
        module.o_proj = torch.nn.Sequential(module.o_proj)
    seen = []

    def look(slots: Slots, fold: Fold) -> None:
        assert fold.read.output is None
        seen.append((fold.read.lengths(slots.values), slots.values))

    cache = weir.StreamingCache(model, Pipe((Probe(9, 1, look),)), chunk=8)
    with torch.no_grad():
        model(input_ids=tokens(1, 8), past_key_values=cache)
    for lengths, values in seen:
        assert torch.equal(lengths, values.norm(dim=3)[:, :, None].expand_as(lengths))
        assert lengths.shape[2] == 2


def test_nothing_is_worked_out_unless_a_pool_asks():
    asked, given = [], {f.name for f in fields(ObservedAttention)}
    fed(PIPES["behind"](Probe(7, 0, lambda slots, fold: asked.append(fold.read))), EVERY["rotary"])
    assert all(vars(read).keys() == given for read in asked)
    with pytest.raises(WeirError, match="needs_queries"):
        asked[-1].lse  # noqa: B018


def test_a_window_of_more_queries_than_pools_declared_is_refused():
    def look(slots: Slots, fold: Fold) -> None:
        fold.read.received(slots, 8)
        for ask in (fold.read.received, fold.read.attention):
            with pytest.raises(
                WeirError, match=r"last 9 queries.*more than 8\. Set needs_queries = 9"
            ):
                ask(slots, 9)
        asked.append(slots)

    asked: list[Slots] = []
    fed(PIPES["behind"](Probe(7, 8, look)), EVERY["rotary"])
    assert asked


def test_the_output_projection_is_not_kept_alive_by_a_cache():
    model = make("llama")
    cache = weir.StreamingCache(model, "window(8)")
    output = cache.plans[0].spec.output
    del cache, model
    gc.collect()
    assert output(8, torch.device("cpu")) is None
