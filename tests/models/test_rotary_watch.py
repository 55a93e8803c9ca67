"""A cache refuses a rotary embedding that has changed since the cache was made, and a new cache
uses the changed one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference.models import make, tokens
from roundings import close_runs
from torch import nn

from weir import StreamingCache, WeirError, compile_steps


def _of_other_frequencies(model: Any) -> None:
    made = make("llama", rope_parameters={"rope_type": "default", "rope_theta": 50.0})
    model.model.rotary_emb = made.model.rotary_emb


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda model: model.model.rotary_emb.inv_freq.mul_(1.1),
    "past the version": lambda model: model.model.rotary_emb.inv_freq.data.mul_(1.1),
    "a tensor": lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 2),
    "a factor": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.1),
    "a module": _of_other_frequencies,
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_change_is_refused_and_a_new_cache_follows_it(change: str, compiled: bool) -> None:
    model, ids = make("llama"), tokens(1, 12)
    compile_steps(model, on=compiled, torch_compile=False)
    cache = StreamingCache(model, "window(20)")
    before = [model(input_ids=part, past_key_values=cache).logits for part in ids.split(6, dim=1)]
    CHANGES[change](model)
    with pytest.raises(WeirError, match="rotary embedding of this model has changed since"):
        model(input_ids=ids[:, :1], past_key_values=cache)
    assert cache.seen == [12]
    plain = model(input_ids=ids, use_cache=False).logits
    new = StreamingCache(model, "window(20)")
    after = [model(input_ids=part, past_key_values=new).logits for part in ids.split(1, dim=1)]
    close_runs(torch.cat(after, dim=1), plain, model)
    apart = (torch.cat(before, dim=1) - plain).abs().max()
    assert apart > 1e-3, "the change has no effect"


def _smaller(module: nn.Module, given: Any, output: Any) -> Any:
    return output[0] * 0.9, output[1] * 0.9


def _later(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
    return given, {**named, "position_ids": named["position_ids"] + 1}


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "after its forward": lambda rotary: rotary.register_forward_hook(_smaller),
    "before its forward": lambda rotary: rotary.register_forward_pre_hook(_later, with_kwargs=True),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("place", HOOKS)
@torch.no_grad()
def test_a_hook_is_refused_in_mid_stream_and_a_new_cache_follows_it(
    place: str, compiled: bool, kernel_compiled: None
) -> None:
    model, ids = make("llama"), tokens(1, 12)
    compile_steps(model, on=compiled, torch_compile=False)
    cache = StreamingCache(model, "window(20)")

    def read(cache: StreamingCache) -> Any:
        parts = ids.split([6, 1, 1, 1, 1, 1, 1], dim=1)
        return torch.cat([model(input_ids=part, past_key_values=cache).logits for part in parts], 1)

    before = read(cache)
    handle = HOOKS[place](model.model.rotary_emb)
    with pytest.raises(WeirError, match="hooks on the rotary embedding of this model have changed"):
        model(input_ids=ids[:, :1], past_key_values=cache)
    assert cache.seen == [12]
    new = StreamingCache(model, "window(20)")
    close_runs(read(new), model(input_ids=ids, use_cache=False).logits, model)
    handle.remove()
    with pytest.raises(WeirError, match="hooks on the rotary embedding of this model have changed"):
        model(input_ids=ids[:, :1], past_key_values=new)
    cache.reset()
    close_runs(read(cache), before, model)


@torch.no_grad()
def test_the_same_embedding_in_another_module_goes_on() -> None:
    model, ids = make("llama"), tokens(1, 12)
    cache = StreamingCache(model, "window(20)")
    first = model(input_ids=ids[:, :6], past_key_values=cache).logits
    model.model.rotary_emb = make("llama").model.rotary_emb
    last = model(input_ids=ids[:, 6:], past_key_values=cache).logits
    close_runs(torch.cat([first, last], 1), model(input_ids=ids, use_cache=False).logits, model)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_embedding_that_computes_something_else_is_refused(name: str) -> None:
    model = make(name)
    StreamingCache(model, "window(4)")
    rotary: nn.Module = model.get_decoder().rotary_emb

    class Faster(type(rotary)):  # type: ignore[misc]
        def forward(self, x: Any, position_ids: Any, *more: Any, **others: Any) -> Any:
            return super().forward(x, 2 * position_ids, *more, **others)

    rotary.__class__ = Faster
    with pytest.raises(WeirError, match="a Faster, computes other cosines and sines than those"):
        StreamingCache(model, "window(4)")


def _twice(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
    return given, {**named, "position_ids": 2 * named["position_ids"]}


def _nearer(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
    return given, {**named, "position_ids": named["position_ids"].clamp(max=500)}


def _gone(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
    return given, {}


@pytest.mark.parametrize("hook", [_twice, _nearer, _gone])
def test_a_hook_that_changes_positions_is_refused_before_a_cache_is_made(hook: Any) -> None:
    """weir computes positions itself, so the hook would have no effect."""
    model = make("llama")
    handle = model.model.rotary_emb.register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.raises(WeirError, match="a forward pre-hook on the rotary embedding of this model"):
        StreamingCache(model, "window(4)")
    handle.remove()
    StreamingCache(model, "window(4)")


def test_a_hook_that_only_looks_is_no_reason_to_refuse() -> None:
    model, seen = make("llama"), []
    rotary = model.model.rotary_emb
    rotary.register_forward_pre_hook(lambda module, given: seen.append(given))
    rotary.register_forward_pre_hook(_later, with_kwargs=True)
    StreamingCache(model, "window(4)")
    assert seen
