"""A rotary embedding that is not what a cache took it for is refused; a new cache follows it."""

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
    with pytest.raises(WeirError, match="a Faster, computes other cosines and sines than its"):
        StreamingCache(model, "window(4)")
