"""Which tokens end a text, as a model's generation configuration names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Endings:
    """The tokens that end a row in `generate`, and the one it is then fed."""

    stops: tuple[int, ...]
    pad: int | None

    @classmethod
    def of(cls, config: Any) -> Endings:
        """As a generation configuration names them; none without one, as base models have it."""
        if config is None:
            return cls((), None)
        stops = config.eos_token_id
        stops = (stops,) if isinstance(stops, int) else tuple(stops or ())
        # Where no padding token is named, generate() takes the first of those that end a row.
        pad = next((p for p in (config.pad_token_id, *stops) if p is not None), None)
        return cls(stops, pad)
