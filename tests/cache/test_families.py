"""Every family of models: weir's attention equals the model's own, and leaves no trace."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from reference.models import (
    FAMILIES,
    MIXED,
    OWN_ATTENTION,
    UNROTATED,
    WIDE_WINDOW,
    WINDOW,
    make,
    shared,
    tokens,
)
from reference.streaming import streaming_logits
from roundings import close_runs, largest, run_off, within
from torch import Tensor
from transformers import PreTrainedModel

from weir import StreamingCache, WeirError
from weir.models.model_spec import describe

pytestmark = pytest.mark.thinned(3, least=2)

POLICIES = ("dense", "window(64)", "streaming_llm(64)", "recent(64) | recent(64)")

families = pytest.mark.parametrize("name", FAMILIES)
own_attention = pytest.mark.parametrize("name", OWN_ATTENTION)


def logits(model: PreTrainedModel, ids: Tensor, **given: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, **given).logits
    return found


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@families
@pytest.mark.parametrize("policy", POLICIES)
def test_below_its_budget_every_policy_is_the_plain_model(name: str, policy: str) -> None:
    model, ids = shared(name), tokens(2, 60)
    cache = StreamingCache(model, policy, chunk=8)
    parts = [logits(model, part, past_key_values=cache) for part in ids.split(45, dim=1)]
    close_runs(torch.cat(parts, dim=1), logits(model, ids), model)


@families
def test_streaming_llm_is_the_loop_that_drops_the_middle(name: str) -> None:
    model, ids = shared(name), tokens(2, 50)
    cache = StreamingCache(model, "streaming_llm(budget=16, sinks=4)", chunk=1)
    ours = logits(model, ids, past_key_values=cache)
    close_runs(ours, streaming_logits(model, ids, 4, 16, UNROTATED.get(name, ())), model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bloom"])  # with rotated keys, and with ALiBi
def test_streaming_llm_is_the_loop_over_a_thousand_tokens(name: str) -> None:
    model, ids = shared(name), tokens(1, 1024)
    cache = StreamingCache(model, "streaming_llm(budget=64, sinks=4)", chunk=1)
    ours = logits(model, ids, past_key_values=cache)
    close_runs(ours, streaming_logits(model, ids, 4, 64), model)


@families
def test_one_forward_is_as_many_forwards_of_one_token(name: str) -> None:
    model, ids = shared(name), tokens(2, 45)
    at_once = StreamingCache(model, "streaming_llm(budget=20)", chunk=6)
    one_by_one = StreamingCache(model, "streaming_llm(budget=20)", chunk=6)
    together = logits(model, ids, past_key_values=at_once)
    steps = [logits(model, part, past_key_values=one_by_one) for part in ids.split(1, dim=1)]
    close_runs(together, torch.cat(steps, dim=1), model)
    for layer in range(2):
        held, other = at_once.slots(layer), one_by_one.slots(layer)
        assert torch.equal(held.position, other.position)
        close_runs(held.keys, other.keys, model)


@families
def test_a_left_padded_row_gives_what_it_gives_alone(name: str) -> None:
    model, ids = shared(name), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    cache = StreamingCache(model, "streaming_llm(budget=12)", chunk=4)
    before = logits(model, ids[:, :39], attention_mask=mask[:, :39], past_key_values=cache)
    after = logits(model, ids[:, 39:], attention_mask=mask, past_key_values=cache)
    for row, start in ((0, 0), (1, 11)):
        alone = StreamingCache(model, "streaming_llm(budget=12)", chunk=4)
        expected = logits(model, ids[row : row + 1, start:], past_key_values=alone)[0]
        close_runs(before[row, start:], expected[:-1], model)
        close_runs(after[row], expected[-1:], model)


def traces(model: PreTrainedModel) -> list[Any]:
    """All that weir changes in a model: hooks, methods of single objects, names of attentions."""
    found: list[Any] = [model.config.get_text_config()._attn_implementation]
    for module in model.modules():
        found += [*module._forward_pre_hooks, *module._forward_hooks]
        found += [name for name, value in vars(module).items() if callable(value)]
        config = getattr(module, "config", None)
        parts = [config] + [getattr(config, key) for key in getattr(config, "sub_configs", {})]
        found += [getattr(part, "_attn_implementation", None) for part in parts]
    return found


@families
@pytest.mark.parametrize("how", ["dropped", "detached"])
def test_a_model_is_bit_for_bit_as_before_once_its_cache_is_gone(name: str, how: str) -> None:
    model, ids = shared(name), tokens(2, 60)
    before, as_it_was = logits(model, ids), traces(model)
    cache = StreamingCache(model, "streaming_llm(budget=20)", chunk=8)
    assert traces(model) != as_it_was
    logits(model, ids, past_key_values=cache)
    with pytest.raises(WeirError, match="rows"):
        logits(model, ids[:1], past_key_values=cache)
    # With the hooks still there, a call without the cache uses the model's own attention.
    assert torch.equal(logits(model, ids), before)
    if how == "detached":
        cache.detach()
    del cache
    assert traces(model) == as_it_was
    assert torch.equal(logits(model, ids), before)


@families
def test_a_cache_goes_at_once_and_not_when_python_collects_circles(name: str) -> None:
    model, ids = shared(name), tokens(1, 12)
    gc.collect()
    as_it_was = traces(model)
    gc.disable()
    try:
        cache = StreamingCache(model, "streaming_llm(budget=20)", chunk=8)
        for part in ids.split([10, 1, 1], dim=1):
            logits(model, part, past_key_values=cache)
        del cache
        assert traces(model) == as_it_was
    finally:
        gc.enable()


@families
def test_in_bfloat16_weir_errs_no_more_than_the_plain_model(name: str) -> None:
    # Let E be the largest difference, over all logits, between the plain bfloat16 model and float32
    # with the same weights. Outside of attention, weir computes what the plain model computes. In
    # attention, it rounds rotated queries and keys and the output once each, while the plain model
    # rounds cosines, sines, their products and their sums. So weir is at most about E from float32
    # too, by other roundings, and by the triangle inequality at most 2 E from the plain model. E
    # itself comes from a few roundings of 2^-8 in two layers. If it were a tenth of the logits, the
    # bound would say nothing.
    plain = make(name, torch.bfloat16)
    exact = make(name)
    exact.load_state_dict(plain.state_dict())
    ids = tokens(2, 60)
    truth, theirs = logits(exact, ids), logits(plain, ids).float()
    error = difference(theirs, truth)
    assert error < 0.1 * float(truth.abs().max())
    for policy in POLICIES:
        cache = StreamingCache(plain, policy, chunk=8)
        assert difference(logits(plain, ids, past_key_values=cache).float(), theirs) < 2 * error


@families
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_tokens_that_count_for_several_do_so_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    exact, model = shared(name), make(name, dtype)
    model.load_state_dict(exact.state_dict())
    if dtype == torch.float64 and any("expert" in part for part, _ in model.named_parameters()):
        pytest.skip("PyTorch multiplies no experts in float64")
    ids, found = tokens(1, 45), []
    for one in (model, exact):
        # Which tokens stay does not depend on what is computed.
        cache = StreamingCache(one, "sink(2) | recent(6) | reservoir(8, weighted=true)", chunk=4)
        parts = [logits(one, part, past_key_values=cache) for part in ids.split([39, 1, 5], dim=1)]
        assert parts[0].dtype == one.dtype
        found.append(torch.cat(parts, dim=1).double())
    # To first order, the error of logits is proportional to the size of one rounding. So the bound
    # for float32 is multiplied by how much coarser the dtype is.
    coarser = max(1.0, torch.finfo(dtype).eps / torch.finfo(torch.float32).eps)
    within(*found, run_off(exact) * coarser * largest(found[1]))


@pytest.mark.parametrize("name", [*MIXED, "mistral-sliding"])
def test_sliding_layers_keep_their_own_window_exactly(name: str) -> None:
    window = WINDOW if name in MIXED else WIDE_WINDOW
    model, ids = shared(name), tokens(2, 2 * window + 30)
    cache = StreamingCache(model, "dense", chunk=8)
    parts = [logits(model, part, past_key_values=cache) for part in ids.split(window + 7, dim=1)]
    wanted = logits(model, ids)
    close_runs(torch.cat(parts, dim=1), wanted, model, length=ids.shape[1])
    slots = cache.slots(0).position.shape[2]
    assert window <= slots <= window + 8


def test_where_every_layer_slides_the_policy_serves_them_all_if_it_fits() -> None:
    model = shared("mistral-sliding")
    cache = StreamingCache(model, f"streaming_llm(budget={WIDE_WINDOW - 8})", chunk=8)
    logits(model, tokens(1, 400), past_key_values=cache)
    for layer in range(2):
        assert cache.slots(layer).position[0, 0, :4].tolist() == [0, 1, 2, 3]
    with pytest.raises(WeirError, match=f"sees only {WIDE_WINDOW} tokens.*smaller budget"):
        StreamingCache(model, f"streaming_llm(budget={WIDE_WINDOW - 7})", chunk=8)


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "bloom", "mpt", "falcon-alibi"])
def test_a_stream_may_begin_anywhere(name: str) -> None:
    model, ids = shared(name), tokens(1, 60)
    here = StreamingCache(model, "streaming_llm(budget=20)", chunk=4)
    far = StreamingCache(model, "streaming_llm(budget=20)", chunk=4, origin=4_000_000)
    ours, theirs = (logits(model, ids, past_key_values=cache) for cache in (here, far))
    close_runs(ours, theirs, model)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "bloom", "mpt", "falcon-alibi"])
def test_a_full_prefill_is_the_plain_model(name: str) -> None:
    model, ids = shared(name), tokens(2, 100)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    cache = StreamingCache(model, "streaming_llm(budget=20)", chunk=4, prefill="full")
    ours = logits(model, ids, attention_mask=mask, past_key_values=cache)
    close_runs(ours[0], logits(model, ids[:1])[0], model, length=100)
    close_runs(ours[1, 7:], logits(model, ids[1:, 7:])[0], model, length=100)
    assert cache.slots(1).position.shape[2] == 20


@pytest.mark.parametrize("name", ["llama", "gemma3-multimodal", "falcon-new", "mpt"])
def test_a_call_that_fails_half_way_leaves_the_model_whole(name: str) -> None:
    model, ids = shared(name), tokens(1, 20)
    before, as_it_was = logits(model, ids), traces(model)
    cache = StreamingCache(model, "window(64)")

    def fail(*_: Any) -> None:
        raise RuntimeError("half way")

    handle = describe(model).attentions[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="half way"):
        logits(model, ids, past_key_values=cache)
    handle.remove()
    assert torch.equal(logits(model, ids), before)
    del cache
    assert traces(model) == as_it_was


@own_attention
def test_greedy_generation_is_the_plain_model_below_the_budget(name: str) -> None:
    model, ids = shared(name), tokens(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    given = {"max_new_tokens": 20, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    cache = StreamingCache(model, "streaming_llm(64)", chunk=4)
    plain = model.generate(ids, attention_mask=mask, **given)
    ours = model.generate(ids, attention_mask=mask, past_key_values=cache, **given)
    assert torch.equal(ours, plain)


@own_attention
def test_nothing_as_long_as_the_stream_is_built(name: str) -> None:
    model, ids = shared(name), tokens(1, 300)
    cache = StreamingCache(model, "streaming_llm(budget=20)", chunk=4)
    logits(model, ids, past_key_values=cache)
    built: list[Tensor] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        given += [t for each in given if isinstance(each, tuple) for t in each]
        built.extend(t for t in given if isinstance(t, Tensor))

    handle = describe(model).attentions[1].register_forward_pre_hook(note, with_kwargs=True)
    mask = torch.ones(1, 301, dtype=torch.int64)
    logits(model, ids[:, :1], attention_mask=mask, past_key_values=cache)
    handle.remove()
    assert built
    assert max(t.numel() for t in built) <= model.config.hidden_size


def test_mpt_need_not_be_told_to_use_its_cache() -> None:
    model, ids = shared("mpt"), tokens(1, 5)
    cache = StreamingCache(model, "window(20)")
    model.generate(ids, past_key_values=cache, max_new_tokens=2)
    assert cache.seen == [6]
    again = StreamingCache(model, "window(20)")
    with pytest.raises(WeirError, match="Pass use_cache=True"):
        model.generate(ids, past_key_values=again, max_new_tokens=2, use_cache=False)


def test_a_cache_of_a_module_deep_inside_leaves_those_of_the_model_alone() -> None:
    model, ids = make("gemma3-multimodal"), tokens(1, 40)
    inside = model.base_model.language_model
    alone = logits(model, ids, past_key_values=StreamingCache(model, "window(12)", chunk=4))
    deep = StreamingCache(inside, "window(12)", chunk=4)
    cache = StreamingCache(model, "window(12)", chunk=4)
    with torch.no_grad():
        inside(ids[:, :20], past_key_values=deep)
    assert torch.equal(logits(model, ids, past_key_values=cache), alone)
    assert deep.seen == [20] and cache.seen == [40]


def test_mpt_streams_past_its_table_of_biases() -> None:
    model, ids = make("mpt", max_seq_len=40), tokens(1, 200)
    longer = shared("mpt")
    cache = StreamingCache(model, "streaming_llm(budget=24)", chunk=1)
    ours = logits(model, ids, past_key_values=cache)
    close_runs(ours, streaming_logits(longer, ids, 4, 24), longer)


@pytest.mark.parametrize(
    ("name", "kv_heads"), [("falcon", 1), ("falcon-heads", 6), ("falcon-new", 2)]
)
def test_falcon_caches_each_kv_head_once(name: str, kv_heads: int) -> None:
    model = shared(name)
    cache = StreamingCache(model, "window(20)", chunk=4)
    logits(model, tokens(1, 9), past_key_values=cache)
    assert cache.slots(0).keys.shape[1] == kv_heads


def test_falcon_with_eager_attention_is_served_as_it_is() -> None:
    # With eager attention, transformers adds Falcon's biases twice.
    model, ids = make("falcon-alibi", attn_implementation="eager"), tokens(2, 60)
    assert model.config._attn_implementation == "eager"
    cache = StreamingCache(model, "window(64)", chunk=8)
    plain = logits(model, ids)
    close_runs(logits(model, ids, past_key_values=cache), plain, model)
    assert difference(plain, logits(shared("falcon-alibi"), ids)) > 100 * run_off(model)


def test_phi3_keeps_its_cache_where_its_frequencies_would_change() -> None:
    # Phi-3's generate() drops any cache that is truthy when the text passes the original length,
    # which is 192 here.
    model, ids = shared("phi3-longrope"), tokens(1, 185)
    cache = StreamingCache(model, "streaming_llm(budget=64)", chunk=8)
    mask = torch.ones_like(ids)
    model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=20, eos_token_id=None
    )
    assert cache.seen == [185 + 19]


def test_frequencies_that_grow_with_positions_are_left_alone() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = make("llama", rope_parameters=rope, max_position_embeddings=64)
    before = logits(model, tokens(1, 64))
    cache = StreamingCache(model, "streaming_llm(budget=20)", chunk=4)
    logits(model, tokens(1, 200), past_key_values=cache)
    assert torch.equal(logits(model, tokens(1, 64)), before)


def test_images_are_refused() -> None:
    model, ids = shared("gemma3-multimodal"), tokens(1, 5)
    cache = StreamingCache(model, "window(20)")
    with pytest.raises(WeirError, match="image attend in both directions"):
        logits(model, ids, past_key_values=cache, token_type_ids=torch.ones_like(ids))
    kinds = torch.zeros_like(ids)
    assert logits(model, ids, past_key_values=cache, token_type_ids=kinds).shape[1] == 5
