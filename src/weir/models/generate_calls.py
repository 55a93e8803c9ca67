"""Calls of `model.generate` with a weir cache, on their way to transformers.

While a model has hooks, its `generate` looks for a weir cache among the arguments. For such a call:

- the cache may be given as `cache` or as `past_key_values`, with any release of transformers;
- what the model's generation configuration says of caches is overruled: `cache_implementation`,
  which asks for one of transformers' own, and `use_cache=False`, as MPT's configurations say;
- the cache is shown the stopping criteria, which say which rows of a batch have ended.

Every other call is passed on as it is.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from packaging.version import Version
from torch import Tensor, nn

from weir.errors import WeirError, quote
from weir.models.cache_name import CACHE, NAMES, with_one_name
from weir.models.interception import MethodPatch

CRITERIA = "_get_stopping_criteria"
"""transformers' method that makes the stopping criteria of a call from all of its arguments."""

_CALL: contextvars.ContextVar[Any] = contextvars.ContextVar("weir_generate_call", default=None)
"""The `EndedRows` of the call of `generate` under way in this thread."""


class GenerateHook:
    """The hook on one model's `generate`.

    Only the model refers to the patches: a cache does not keep the model that it serves alive.

    Args:
        model: the model that callers call `generate` of; one that has none is left alone.
        is_ours: tells whether an argument is a cache of this model's decoder.
    """

    def __init__(self, model: nn.Module, is_ours: Callable[[Any], bool]) -> None:
        self._model = weakref.ref(model)
        self._is_ours = is_ours
        self._patches: list[weakref.ref[MethodPatch]] = []
        if not callable(getattr(model, "generate", None)):
            return
        for name, around in (("generate", self._generate), (CRITERIA, _watched)):
            if hasattr(model, name):
                self._patches.append(weakref.ref(MethodPatch(model, name, around)))

    def serves(self, model: nn.Module) -> bool:
        """Return whether this hook is on a model."""
        return self._model() is model

    def remove(self) -> None:
        """Restore the model's methods."""
        for reference in self._patches:
            patch = reference()
            if patch is not None:
                patch.remove()

    def _generate(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `generate`, with or without a weir cache among its arguments."""
        cache = next((kwargs[name] for name in NAMES if kwargs.get(name) is not None), None)
        model: Any = self._model()
        if cache is None or model is None or not self._is_ours(cache):
            return own(*args, **kwargs)
        given = with_one_name(kwargs)
        if given.get("cache_implementation") is not None:
            raise WeirError(
                f"cache_implementation={quote(given['cache_implementation'])} asks transformers "
                f"for a cache of its own, and {CACHE} is a StreamingCache; leave out one of them"
            )
        if not hasattr(model, CRITERIA) and _has_rows(args, given):
            raise WeirError(
                f"transformers {transformers.__version__} has no {CRITERIA}, by which weir learns "
                "which rows of a batch have ended; generate row by row, or install an older one"
            )
        config = args[1] if len(args) > 1 else given.get("generation_config")
        given |= _overruled(model.generation_config, config, given, cache)
        with cache.generating(given) as call:
            token = _CALL.set(call)
            try:
                return own(*args, **given)
            finally:
                _CALL.reset(token)


def _watched(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the stopping criteria of a call, which the cache of the call watches."""
    criteria, call = own(*args, **kwargs), _CALL.get()
    config = args[0] if args else kwargs.get("generation_config")
    return criteria if call is None or config is None else call.watch(config, criteria)


def _overruled(own: Any, given: Any, asked: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """Return arguments in place of what generation configurations say of caches.

    `own` is the model's configuration, `given` the call's, or None.
    """
    more: dict[str, Any] = {}
    configs = [config for config in (given, own) if config is not None]
    if any(getattr(config, "cache_implementation", None) is not None for config in configs):
        more["cache_implementation"] = None
    if "use_cache" not in asked and any(config.use_cache is False for config in configs):
        more["use_cache"] = True
    old = cache.is_initialized and Version(transformers.__version__) < _CONTINUES_IN_CHUNKS
    if old or asked.get("inputs_embeds") is not None:  # which transformers does not cut
        chunked = [asked.get("prefill_chunk_size")]
        chunked += [getattr(config, "prefill_chunk_size", None) for config in configs]
        if any(chunked):
            more["prefill_chunk_size"] = None
    return more


_CONTINUES_IN_CHUNKS = Version("5.23")
"""The first release that is known to leave out what was fed before where `prefill_chunk_size` is
given; 5.12 feeds the whole text again. In weir a long prompt needs no more slots in one piece."""


def _has_rows(args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    """Return whether a call generates several rows."""
    names = ("inputs", "input_ids", "inputs_embeds")
    fed = [*args[:1], *(given.get(name) for name in names)]
    rows = max((len(tokens) for tokens in fed if isinstance(tokens, Tensor)), default=1)
    return max(rows, given.get("num_return_sequences") or 1) > 1
