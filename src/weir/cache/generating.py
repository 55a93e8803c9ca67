"""`generate()` of transformers in a cache of weir, asked for by name: `custom_generate=generate`.

transformers prepares all that it would prepare for its own decoding and then calls this, which puts
a cache of weir in the place of the one it made and hands back to transformers' decoding. Knows
nothing about how tokens are chosen.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from weir.cache.cache import Positions, Prefill, StreamingCache
from weir.errors import WeirError
from weir.policies import Policy

_DECODING = {
    GenerationMode.GREEDY_SEARCH: "_sample",
    GenerationMode.SAMPLE: "_sample",
    GenerationMode.BEAM_SEARCH: "_beam_search",
    GenerationMode.BEAM_SAMPLE: "_beam_search",
}
"""Which method of a model decodes, as `model.generate` would choose it."""


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    generation_config: GenerationConfig,
    policy: str | Policy | None = None,
    chunk: int | None = None,
    seed: int | None = None,
    positions: Positions | None = None,
    prefill: Prefill | None = None,
    **prepared: Any,
) -> Any:
    """Decode as `model.generate` does, in a cache of fixed size.

    Not called by anybody but transformers:
    `model.generate(**inputs, custom_generate=weir.generate, policy="h2o(256)")`.

    Args:
        model: the model whose `generate` was called.
        input_ids: the prompt [batch, length], one row for each beam or sample, as prepared.
        generation_config: what `generate` was asked for.
        policy, chunk, seed, positions, prefill: of the cache, as for `StreamingCache`.
        prepared: what else transformers hands to its own decoding, handed on; `past_key_values`
            is a `StreamingCache` to go on in, or an empty cache that transformers made, which is
            left. A streamer is not among them: transformers gives none to a function.

    Returns:
        What `model.generate` returns. With `return_dict_in_generate=True` the cache is in it, as
        `past_key_values`.

    Raises:
        WeirError: the policy or the model cannot be served, a cache is given that is not weir's or
            comes with a policy, or the way of decoding is not one of sampling and beam search.
    """
    mode = generation_config.get_generation_mode()
    if mode not in _DECODING:
        raise WeirError(
            f"weir.generate takes the likeliest token, samples, or searches with beams, and this "
            f"asks for {mode.value.replace('_', ' ')}; leave its options out"
        )
    # Not in the signature: transformers would then hand it over twice.
    there = prepared.pop("past_key_values", None)
    asked = {"chunk": chunk, "seed": seed, "positions": positions, "prefill": prefill}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if isinstance(there, StreamingCache):
        if policy is not None or given:
            raise WeirError(
                f"{'a policy' if policy is not None else next(iter(given))} was given together "
                "with a StreamingCache, which has its own; leave out one of them"
            )
        cache = there
    elif there is not None and there.get_seq_length():
        raise WeirError(
            f"weir.generate was given a {type(there).__name__} that holds tokens; weir "
            "goes on in a StreamingCache only"
        )
    else:
        cache = StreamingCache(model, policy, **given)
    decode = getattr(model, _DECODING[mode])
    prepared |= {"past_key_values": cache, "use_cache": True}
    return decode(input_ids, generation_config=generation_config, **prepared)
