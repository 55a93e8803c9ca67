"""transformers' `generate()` with a cache of weir: `custom_generate=weir.generate`.

transformers prepares its inputs and then calls weir's `generate`. This replaces the cache that
transformers prepared with a cache of weir, and calls transformers' decoding.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from weir.cache.cache import ASSISTED, Positions, Prefill, StreamingCache
from weir.errors import WeirError, quote
from weir.models import CACHE, with_one_name
from weir.policies import Policy

_DECODING = {
    GenerationMode.GREEDY_SEARCH: "_sample",
    GenerationMode.SAMPLE: "_sample",
    GenerationMode.BEAM_SEARCH: "_beam_search",
    GenerationMode.BEAM_SAMPLE: "_beam_search",
}
"""The method of a model that decodes in each mode, as `model.generate` would choose it."""
PREPARED = {"logits_processor", "stopping_criteria"}
"""Arguments that only transformers passes together. If one is missing, the call is direct."""


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    generation_config: GenerationConfig | None = None,
    policy: str | Policy | None = None,
    chunk: int | None = None,
    seed: int | None = None,
    positions: Positions | None = None,
    prefill: Prefill | None = None,
    **prepared: Any,
) -> Any:
    """Decode as `model.generate` does, in a cache of fixed size.

    Pass it to transformers:
    `model.generate(**inputs, custom_generate=weir.generate, policy="h2o(256)")`. Called directly,
    `weir.generate(model, **inputs, policy="h2o(256)")`, it calls `model.generate` with a new cache,
    or with the `StreamingCache` among the arguments.

    Args:
        model: the model whose `generate` was called.
        input_ids: the prompt [batch, length], one row for each beam or sample, as prepared.
        generation_config: the options of `generate`.
        policy, chunk, seed, positions, prefill: of the cache, as for `StreamingCache`. The seed is
            for the policy's random draws; set the seed of sampling with `torch.manual_seed`.
        prepared: the other arguments of transformers' decoding, passed on. `cache` (before
            transformers 5.24: `past_key_values`) is a `StreamingCache` to continue, or an empty
            cache that transformers made, which is ignored. transformers passes no tokenizer to a
            function, so `stop_strings` work in a direct call only.

    Returns:
        The result of `model.generate`. With `return_dict_in_generate=True` it has the cache, under
        the name that the installed transformers has for it.

    Raises:
        WeirError: `model` is not a model, `input_ids` is not a tensor of tokens, the policy or the
            model is not supported, a given cache holds tokens but is not weir's, a `StreamingCache`
            comes with arguments for a new cache, a streamer is given for beam search, or the
            decoding mode is not greedy, sampling or beam search.
    """
    asked: dict[str, Any] = {"policy": policy, "chunk": chunk, "seed": seed}
    asked |= {"positions": positions, "prefill": prefill}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if generation_config is None or not prepared.keys() >= PREPARED:
        whole = getattr(model, "generate", None)
        if not callable(whole):
            raise WeirError(
                "the first argument of weir.generate(model, input_ids, ...) must be a model, got "
                f"{quote(model)}"
            )
        _check_tokens(input_ids)
        prepared = with_one_name(prepared)
        prepared[CACHE] = _cache_of(model, prepared.get(CACHE), given)
        if generation_config is not None:
            prepared["generation_config"] = generation_config
        return whole(input_ids, **prepared)
    mode = generation_config.get_generation_mode()
    if mode not in _DECODING:
        raise WeirError(
            "weir.generate supports greedy search, sampling and beam search, but the options ask "
            f"for {mode.value.replace('_', ' ')}. Leave out the options for that."
        )
    # The cache is not a parameter of this function, because transformers would then pass it twice.
    cache = _cache_of(model, prepared.pop(CACHE, None), given)
    around = _arguments_of_caller()
    if around.get("assistant_model") is not None:
        raise WeirError(ASSISTED)
    streamer = around.get("streamer")
    if streamer is not None and _DECODING[mode] != "_sample":
        raise WeirError(
            "a streamer gets each token as it is chosen, but beam search chooses at the end. "
            "Leave out the streamer, or num_beams."
        )
    if streamer is not None:
        prepared["streamer"] = streamer
    decode = getattr(model, _DECODING[mode])
    prepared |= {CACHE: cache, "use_cache": True}
    prepared["stopping_criteria"] = cache.watch(generation_config, prepared["stopping_criteria"])
    return decode(input_ids, generation_config=generation_config, **prepared)


def _cache_of(model: PreTrainedModel, there: Any, given: dict[str, Any]) -> StreamingCache:
    """Return the cache of a call: the existing one, or a new one made from `given`."""
    if isinstance(there, StreamingCache):
        if given:
            raise WeirError(
                f"{'a policy' if 'policy' in given else next(iter(given))} was given together "
                "with a StreamingCache, which already has its own. Leave out one of them."
            )
        return there
    if there is not None and there.get_seq_length():
        raise WeirError(
            f"weir.generate got a {type(there).__name__} that holds tokens, but it can continue "
            "only a StreamingCache"
        )
    return StreamingCache(model, **given)


def _arguments_of_caller() -> Mapping[str, Any]:
    """Return the arguments of the `model.generate` that has called `generate`, by name.

    transformers passes a streamer and an assistant only to its own decoding. A
    `TextIteratorStreamer` that gets no tokens would wait forever.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "generate" and module.startswith("transformers.generation"):
            return frame.f_locals
        frame = frame.f_back
    return {}


def _check_tokens(input_ids: Any) -> None:
    """Refuse a prompt that is not a tensor of token ids (WeirError)."""
    tokens = isinstance(input_ids, Tensor) and input_ids.ndim == 2
    if not tokens or input_ids.is_floating_point():
        raise WeirError(
            "weir.generate(model, input_ids, ...) needs tokens as a tensor [batch, length], such "
            "as tokenizer(text, return_tensors='pt').input_ids"
        )
