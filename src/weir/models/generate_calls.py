"""Intercepts calls of `model.generate` with a weir cache.

While a model has hooks, three of its methods do more in a call with a weir cache:

- `generate` takes the cache as `cache` or as `past_key_values`, with any release of transformers;
- `PREPARE` overrides the cache options of generation configurations: `cache_implementation`, which
  asks for one of transformers' own caches, and `use_cache=False`, which MPT's configurations have;
- `CRITERIA` gives the cache the stopping criteria, which know which rows of a batch have ended.

`PREPARE` also does the work of the hook on `generate`, which may be installed too late: in
`model.generate(cache=weir.StreamingCache(model))`, Python looks up `model.generate` before the
cache and the hooks exist. A call without a weir cache is passed on as it is, except that `generate`
gets its cache under the name that the installed release uses.
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

PREPARE = "_prepare_generation_config"
"""transformers' method that splits a call's arguments into a configuration and the model's own."""
CRITERIA = "_get_stopping_criteria"
"""transformers' method that makes the stopping criteria of a call from all of its arguments."""

_CACHE: contextvars.ContextVar[Any] = contextvars.ContextVar("weir_generate_cache", default=None)
"""Reference to the weir cache of the running call of `generate` in this thread; None if there is
none.
"""


class GenerateHook:
    """The hooks on one model's `generate`.

    Only the model refers to the patches, so a cache does not keep its model alive.

    Args:
        model: the model whose `generate` is called; a model without `generate` is left unchanged.
        is_ours: tells whether an argument is a cache of this model's decoder.
    """

    def __init__(self, model: nn.Module, is_ours: Callable[[Any], bool]) -> None:
        self._model = weakref.ref(model)
        self._is_ours = is_ours
        self._patches: list[weakref.ref[MethodPatch]] = []
        if not callable(getattr(model, "generate", None)):
            return
        hooks = {"generate": self._generate, PREPARE: self._prepare, CRITERIA: self._watch}
        self._missing = [name for name in hooks if not hasattr(model, name)]
        for name, around in hooks.items():
            if name not in self._missing:
                self._patches.append(weakref.ref(MethodPatch(model, name, around)))

    def serves(self, model: nn.Module) -> bool:
        """Return whether these hooks are on a model."""
        return self._model() is model

    def remove(self) -> None:
        """Restore the model's methods."""
        for reference in self._patches:
            patch = reference()
            if patch is not None:
                patch.remove()

    def _cache_in(self, given: Mapping[str, Any]) -> Any:
        """Return the weir cache among a call's arguments; None if there is none."""
        cache = next((given[name] for name in NAMES if given.get(name) is not None), None)
        return cache if cache is not None and self._is_ours(cache) else None

    def _generate(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `generate`, with the cache under the name that the installed release uses."""
        ours = self._cache_in(kwargs) is not None
        if ours and self._missing and _has_rows(args, kwargs):
            raise WeirError(
                f"transformers {transformers.__version__} has no {self._missing[0]}, which weir "
                "needs to know which rows of a batch have ended. Generate row by row, or install "
                "an older transformers."
            )
        # Do this for any cache: weir passes the call on, and transformers' warning about an old
        # name would point at weir.
        return own(*args, **with_one_name(kwargs))

    def _prepare(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return a call's configuration and the model's arguments, as a weir cache needs them."""
        cache = self._cache_in(kwargs)
        _CACHE.set(None if cache is None else weakref.ref(cache))
        if cache is None:
            return own(*args, **kwargs)
        asked = kwargs.get("cache_implementation")
        if asked is not None:
            raise WeirError(
                f"cache_implementation={quote(asked)} asks transformers to make a cache, but "
                f"{CACHE} already is a StreamingCache. Leave out one of them."
            )
        config, more = own(*args, **with_one_name(kwargs))
        config.cache_implementation = None
        if kwargs.get("use_cache") is None:
            config.use_cache = True
        cache.only_new = _only_new(cache, kwargs)
        old = cache.is_initialized and Version(transformers.__version__) < _CONTINUES_IN_CHUNKS
        if old or kwargs.get("inputs_embeds") is not None:  # transformers cannot cut these prompts
            config.prefill_chunk_size = None
        return config, more

    def _watch(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the stopping criteria of a call, which the cache of the call watches."""
        criteria, reference = own(*args, **kwargs), _CACHE.get()
        _CACHE.set(None)
        cache = None if reference is None else reference()
        config = args[0] if args else kwargs.get("generation_config")
        return criteria if cache is None else cache.watch(config, criteria)


def _only_new(cache: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a call's embeddings are those of new tokens only, judging by its mask.

    transformers assumes that embeddings are those of the whole text, and leaves out those that were
    fed before.
    """
    vectors, mask = given.get("inputs_embeds"), given.get("attention_mask")
    if not isinstance(vectors, Tensor) or not isinstance(mask, Tensor) or not cache.is_initialized:
        return False
    columns = cache.rows.columns
    return bool(mask.shape[-1] == columns + vectors.shape[1])


_CONTINUES_IN_CHUNKS = Version("5.23")
"""The first release of transformers that is known to leave out tokens that were fed before if
`prefill_chunk_size` is given; 5.12 feeds the whole text again. weir does not need this option,
because a long prompt in one piece takes no more slots.
"""


def _has_rows(args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    """Return whether a call generates several rows."""
    names = ("inputs", "input_ids", "inputs_embeds")
    fed = [*args[:1], *(given.get(name) for name in names)]
    rows = max((len(tokens) for tokens in fed if isinstance(tokens, Tensor)), default=1)
    return max(rows, given.get("num_return_sequences") or 1) > 1
