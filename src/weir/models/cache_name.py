"""The argument name that the installed transformers uses for a cache.

Up to 5.23 the argument of a model's forward and the field of its output are called
`past_key_values`; from 5.24 on they are called `cache`, and the old name is deprecated. Everything
in weir that calls a model, or reads what it returned, uses the names decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

NAMES = ("cache", "past_key_values")
"""The names that any supported release of transformers uses, the newest first."""

CACHE = next(name for name in NAMES if name in {f.name for f in fields(BaseModelOutputWithPast)})
"""The name that the installed release uses, as an argument and as a field of outputs."""


def with_one_name(given: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a call's arguments with the cache under the installed release's name.

    A caller may use either name with any release. transformers before 5.24 would pass an argument
    `cache` on to the decoder, which would silently ignore it.
    """
    named = dict(given)
    found = [named.pop(name) for name in (CACHE, *NAMES) if name in named]
    if found:
        named[CACHE] = next((cache for cache in found if cache is not None), None)
    return named


def cache_of(output: Any, default: Any = None) -> Any:
    """Return the cache that a model's output has; `default` where the output has no such field."""
    return getattr(output, CACHE, default)
