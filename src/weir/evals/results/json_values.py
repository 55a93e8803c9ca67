"""Figures as JSON can hold them."""

from __future__ import annotations

import math
from typing import Any


def for_json(value: Any) -> Any:
    """A value as JSON can hold it: numbers that JSON does not have become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: for_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(item) for item in value]
    return value
