"""Read the tasks of `quality` with kvpress's presses.

Each press is in a DecodingPress that compresses every 64 tokens. A DecodingPress counts calls with
one token each, so texts are read token by token. Positions are those of the text, as in kvpress's
own pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from kvpress import (
    DecodingPress,
    KeyDiffPress,
    KnormPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from protocol import serve
from reading import NANO, PIECE, Begin, Reader, size_of
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache


class OrderedStreamingLLMPress(StreamingLLMPress):  # type: ignore[misc]
    """A StreamingLLMPress whose tokens stay in the order of the text.

    kvpress stores kept tokens in the order of `topk`. From the second compression on, presses that
    judge tokens by their place in the cache then mistake other tokens for the first or the newest.
    """

    def compress(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Any,
        kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        kept = int(keys.shape[2] * (1 - self.compression_ratio))
        places = scores.topk(kept, dim=-1).indices.sort(dim=-1).values[..., None]
        places = places.expand(-1, -1, -1, module.head_dim)
        return keys.gather(2, places), values.gather(2, places)


PRESSES: Mapping[str, Callable[[], Any]] = {
    "StreamingLLMPress": StreamingLLMPress,
    "SnapKVPress": partial(SnapKVPress, window_size=PIECE // 2),
    "KnormPress": KnormPress,
    "KeyDiffPress": KeyDiffPress,
    "TOVAPress": TOVAPress,
    "StreamingLLMPress, in order": OrderedStreamingLLMPress,
}


class Pressed:
    """nano under a press. The press's hooks stay in place until the next `Pressed` is made."""

    _hooks = ExitStack()

    def __init__(self, model: Any, press: Callable[[], Any], rows: int, slots: int) -> None:
        torch.manual_seed(0)
        self._hooks.close()
        self.model, self.rows, self.seen = model, rows, 0
        self.press = DecodingPress(press(), compression_interval=PIECE, target_size=slots)
        self.cache: Any = DynamicCache()
        self._hooks.enter_context(self.press(model))

    def feed(self, ids: Tensor) -> Tensor:
        return torch.cat([self._step(token) for token in ids.split(1, dim=1)], dim=1)

    def _step(self, token: Tensor) -> Tensor:
        place = torch.tensor([self.seen])
        self.seen += 1
        return self.model(
            input_ids=token,
            past_key_values=self.cache,
            cache_position=place,
            position_ids=place[None],
        ).logits

    def nbytes(self) -> int:
        layers = [(layer.keys, layer.values) for layer in self.cache.layers]
        waiting = list(self.press.hidden_states_buffer.values())
        return size_of(layers, waiting) // self.rows


def offers() -> Mapping[str, Begin]:
    """Return functions that make nano under each press, by name."""
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()
    return {name: partial(Pressed, model, press) for name, press in PRESSES.items()}


if __name__ == "__main__":
    serve(partial(Reader, ("kvpress", "transformers", "torch"), offers))
