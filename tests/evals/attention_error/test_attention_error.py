"""The error of a layer's attention under a policy, against naive loops in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from reference.models import make, tokens
from roundings import close_runs, run_off
from torch import Tensor, nn
from transformers import PreTrainedModel

from weir.errors import WeirError
from weir.evals.attention_error import (
    RATES,
    ErrorSetup,
    _stream_layer,
    mean_over_layers,
    measure_error,
    set_up,
    size_policies,
)
from weir.evals.capture import capture, capture_each
from weir.models.model_spec import attention_modules
from weir.policies.pipe import Pipe
from weir.pools import POOLS, Fold, Pool, Recent, pool
from weir.slab.slots import Slots

LENGTH, QUERIES = 60, 12
BEFORE = LENGTH - QUERIES


@pytest.fixture
def every_other() -> Iterator[str]:
    """A pool that keeps every second token, weighted 2 in the numerator, 3 in the denominator."""

    @pool("every_other")
    @dataclass(frozen=True)
    class EveryOther(Pool):
        n: int = 100
        two_weights = True

        def slots(self) -> int:
            return self.n

        def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
            kept = new.only(new.position % 2 == 0)
            two, three = torch.tensor([2.0, 3.0]).log()
            kept = replace(kept, a=kept.a + two, b=kept.b + three)
            return held.join(kept), new.part(0, 0)

    yield "every_other(100)"
    del POOLS["every_other"]


def heads_of(model: PreTrainedModel, ids: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """A Llama's queries, keys and values of a layer, rotated by the plain formula, in float64.

    All are [heads, length, dim], with each KV head repeated for every query head that reads it.
    """
    attention: Any = model.model.layers[layer].self_attn
    got: dict[str, Tensor] = {}
    hooks = [
        getattr(attention, name).register_forward_hook(
            lambda module, args, out, name=name: got.update({name: out[0].double()})
        )
        for name in ("q_proj", "k_proj", "v_proj")
    ]
    with torch.no_grad():
        model(ids[None])
    for hook in hooks:
        hook.remove()
    q, k, v = (got[name].unflatten(-1, (-1, 16)).transpose(0, 1) for name in got)
    angle = torch.arange(len(ids))[:, None] / 10000 ** (torch.arange(8) / 8)

    def turned(x: Tensor) -> Tensor:
        one, two = x[..., :8], x[..., 8:]
        cos, sin = angle.double().cos(), angle.double().sin()
        return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)

    group = q.shape[0] // k.shape[0]
    return turned(q), turned(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)


def naive_error(
    heads: tuple[Tensor, Tensor, Tensor], seen: Callable[[int], list[tuple[int, float, float]]]
) -> float:
    """The relative error if the query at place i sees the tokens that `seen(i)` lists, each as
    (place, weight in the numerator, weight in the denominator).
    """
    far = near = 0.0
    for q, k, v in zip(*heads, strict=True):
        for i in range(BEFORE, LENGTH):
            kernel = ((k @ q[i]) / 4).exp()
            exact = (kernel[: i + 1, None] * v[: i + 1]).sum(0) / kernel[: i + 1].sum()
            above = sum(m * kernel[j] * v[j] for j, m, _ in seen(i))
            below = sum(n * kernel[j] for j, _, n in seen(i))
            far += float((above / below - exact).square().sum())
            near += float(exact.square().sum())
    return (far / near) ** 0.5


def once(places: Any) -> list[tuple[int, float, float]]:
    return [(place, 1.0, 1.0) for place in places]


def error_off(model: PreTrainedModel, error: float) -> float:
    """How far a relative error may be off: by its two answers, and by the norm that divides it."""
    return run_off(model) * (2 + error)


def errors(model: PreTrainedModel, ids: Tensor, policy: str, setup: ErrorSetup) -> list[float]:
    return [
        row.error for row in measure_error(model, ids, size_policies([policy], setup)[0], setup)
    ]


@pytest.mark.parametrize("layer", [0, 1])
def test_the_text_before_the_queries_is_compressed_once_and_they_see_their_own(llama, ids, layer):
    text = ids(1, LENGTH)[0]
    heads = heads_of(llama, text, layer)
    found = errors(llama, text, "sink(2) | recent(8)", ErrorSetup(LENGTH, QUERIES, 0))[layer]
    wanted = naive_error(heads, lambda i: once([0, 1, *range(BEFORE - 8, i + 1)]))
    assert wanted > 0.01
    assert found == pytest.approx(wanted, abs=error_off(llama, wanted))


def test_a_stream_is_folded_chunk_by_chunk(llama, ids):
    text = ids(1, LENGTH)[0]
    heads = heads_of(llama, text, 0)
    setup = ErrorSetup(LENGTH, QUERIES, 0, whole=False, chunk=5)
    found = errors(llama, text, "recent(8)", setup)[0]
    wanted = naive_error(heads, lambda i: once(range(i - i % 5 - 8, i + 1)))
    assert found == pytest.approx(wanted, abs=error_off(llama, wanted))


def test_both_weights_count(llama, ids, every_other):
    text = ids(1, LENGTH)[0]
    heads = heads_of(llama, text, 1)
    setup = ErrorSetup(LENGTH, QUERIES, 0)
    found = errors(llama, text, f"recent(4) | {every_other}", setup)[1]
    half = [(j, 2.0, 3.0) for j in range(0, BEFORE - 4, 2)]
    wanted = naive_error(heads, lambda i: half + once(range(BEFORE - 4, i + 1)))
    assert found == pytest.approx(wanted, abs=error_off(llama, wanted))


def test_what_has_room_for_everything_has_no_error(llama, ids):
    setup = ErrorSetup(LENGTH, QUERIES, 4)
    for policy in ("dense", "streaming_llm(60)", "balancekv(budget=64)", "h2o(128)"):
        assert max(errors(llama, ids(1, LENGTH)[0], policy, setup)) < error_off(llama, 0)


LAST_LINEAR = {"gpt-neox": "dense", "falcon": "dense", "mpt": "out_proj", "bloom": "dense"}


@pytest.mark.parametrize(
    "name", ["llama", "gpt-neox", "falcon", "mpt", "bloom", "gemma2", "gpt-oss", "qwen3", "phi3"]
)
def test_what_is_captured_makes_the_answers_that_the_model_makes(name):
    model = make(name)
    text = tokens(1, 40)[0]
    modules = attention_modules(model.get_decoder())
    seen: dict[int, Tensor] = {}
    hooks = []
    for layer, module in enumerate(modules):
        last: nn.Module = getattr(module, LAST_LINEAR.get(name, "o_proj"))

        def take(module: Any, args: Any, layer: int = layer) -> None:
            seen[layer] = args[0]

        hooks.append(last.register_forward_pre_hook(take))
    heard = capture(model, text)
    for hook in hooks:
        hook.remove()
    assert heard
    for it in heard:
        out = _stream_layer(it, Pipe((Recent(None),)), 0, ErrorSetup(40, 39, 0))[0]
        wanted = seen[it.layer].view(40, -1)[1:]
        got = out[0].transpose(0, 1).reshape(39, -1)
        close_runs(got, wanted, model)


def test_layers_that_slide_are_left_out_and_not_to_be_had():
    model = make("gemma3")
    heard = capture(model, tokens(1, 20)[0])
    layers = [it.layer for it in heard]
    assert 0 < len(layers) < heard[0].layers
    slides = next(n for n in range(heard[0].layers) if n not in layers)
    with pytest.raises(WeirError, match=f"layer {slides} has its own sliding window"):
        capture(model, tokens(1, 20)[0], [slides])
    for layer in (-1, 99):
        with pytest.raises(WeirError, match=r"does not exist\. The layers are 0 to"):
            capture(model, tokens(1, 20)[0], [layer])


def test_layer_by_layer_every_layer_is_heard_sliding_or_not():
    model, text = make("gemma3"), tokens(1, 40)[0]
    seen: list[int] = []

    def take(it):
        seen.append(it.layer)
        return it.keys

    keys = capture_each(model, text, take)
    assert seen == sorted(keys) == list(range(model.config.num_hidden_layers))
    assert all(t.shape[2] == len(text) for t in keys.values())
    for it in capture(model, text):
        assert torch.equal(keys[it.layer], it.keys)
    with pytest.raises(WeirError, match=r"layer 99 does not exist\. The layers are 0 to"):
        capture_each(model, text, take, [99])


def test_a_model_is_as_it_was_after_it_was_listened_to(fresh_llama, ids):
    model = fresh_llama()
    with torch.no_grad():
        before = model(ids(1, 20)).logits
        capture(model, ids(1, 20)[0])
        assert torch.equal(model(ids(1, 20)).logits, before)
    assert not model.model._forward_hooks and not model.model._forward_pre_hooks


# --- rates, settings and seeds


def test_a_rate_is_a_share_of_the_middle():
    setup = ErrorSetup(1000, 200, 100)
    sized, missing = size_policies(["uniform", "streaming_llm", "balancekv(block=8)"], setup, RATES)
    assert missing == []
    assert [one.policy.slots for one in sized[:4]] == [
        101 + 700 // 2,
        101 + 175,
        101 + 88,
        101 + 44,
    ]
    assert str(sized[0].policy.pools[0]) == str(sized[8].policy.pools[0])  # sinks stay exact
    assert sized[0].policy.pools[0].n == sized[8].policy.pools[0].n == 100
    assert [one.policy.slots for one in sized[4:8]] == [100 + 350, 100 + 175, 100 + 88, 100 + 44]


def test_what_is_too_small_is_left_out_with_the_reason():
    setup = ErrorSetup(60, 12, 8)
    sized, missing = size_policies(["streaming_llm", "subgen"], setup, [0.5, 0.01])
    assert [one.name for one in sized].count("streaming_llm") == 2
    assert any("subgen is left out at a rate of 0.01" in reason for reason in missing)
    with pytest.raises(WeirError, match="subgen is left out"):
        size_policies(["subgen"], setup, [0.01])


@pytest.mark.parametrize(
    ("names", "rates", "reason"),
    [
        (
            ["dense"],
            [0.5],
            "^a rate needs a policy that takes a budget, and dense does not.*leave out the rate",
        ),
        (["uniform(budget=20)"], [0.5], "that takes a budget, and .* does not"),
        (["recent(4) | uniform(8)"], [0.5], "that takes a budget, and .* does not"),
        (["uniform"], [1.0], "between 0 and 1, got 1"),
        (["recompute"], [], "recompute"),
        (["unifrom"], [], "did you mean 'uniform'"),
        ([], [], "no policy was given"),
    ],
)
def test_what_cannot_be_measured_is_refused(names, rates, reason):
    with pytest.raises(WeirError, match=reason):
        size_policies(names, ErrorSetup(60, 12, 8), rates)


def test_the_setting_is_the_papers_where_there_is_room(llama):
    assert set_up(llama, 10_000) == ErrorSetup(512, 128, 64)  # the model knows 512 positions
    assert set_up(llama, 10_000, 4096) == ErrorSetup(4096, 256, 256)
    assert set_up(llama, 100) == ErrorSetup(100, 25, 12)
    assert set_up(llama, 100, 80, 10, 0, whole=False) == ErrorSetup(80, 10, 0, whole=False)
    for given, reason in (
        ((100, 200), "the text has only 100 tokens, but 200 are needed"),
        ((100, 50, 50), "queries must be at least 1 and fewer than the 50 tokens, got 50"),
        ((100, 50, 10, 40), "exact must be at least 0 and fewer than the 40 tokens .* got 40"),
    ):
        with pytest.raises(WeirError, match=reason):
            set_up(llama, *given)


def test_sink_logits_that_could_be_trained_are_only_read(recwarn):
    setup = ErrorSetup(LENGTH, QUERIES, 0)
    sized, _ = size_policies(["recent(20)"], setup)
    text = torch.randint(1, 90, (LENGTH,), generator=torch.Generator().manual_seed(0))
    measure_error(make("gpt-oss"), text, sized, setup)
    assert not [it for it in recwarn if "requires_grad" in str(it.message)]


def test_seeds_make_means_and_deviations(llama, ids):
    setup = ErrorSetup(LENGTH, QUERIES, 0)
    sized, _ = size_policies(["uniform(budget=20, sinks=4, recent=4)", "recent(20)"], setup)
    steps: list[tuple[int, int]] = []
    text = ids(1, LENGTH)[0]
    rows = measure_error(
        llama, text, sized, setup, seeds=range(3), on_step=lambda *n: steps.append(n) or False
    )
    again = measure_error(llama, text, sized, setup, seeds=range(3))
    assert [row.errors for row in rows] == [row.errors for row in again]
    assert steps == [(n, 4) for n in range(1, 5)]
    assert len(set(rows[0].errors)) == 3 and rows[0].deviation > 0
    assert rows[2].deviation == 0
    assert rows[2].kept == pytest.approx(20 / BEFORE)
    means = mean_over_layers(rows)
    assert [mean["policy"] for mean in means] == [rows[0].policy, rows[2].policy]
    by_seed = [(one + other) / 2 for one, other in zip(rows[0].errors, rows[1].errors, strict=True)]
    assert means[0]["error"] == pytest.approx(sum(by_seed) / 3)
    spread = torch.tensor(by_seed, dtype=torch.float64).std(correction=0)
    assert means[0]["deviation"] == pytest.approx(float(spread))


def test_it_can_be_ended_early(llama, ids):
    setup = ErrorSetup(LENGTH, QUERIES, 0)
    sized, _ = size_policies(["recent(20)", "recent(10)"], setup)
    text = ids(1, LENGTH)[0]
    rows = measure_error(llama, text, sized, setup, on_step=lambda done, total: done == 3)
    assert len(rows) == 3
