"""Time decode steps with kvpress, in the separate environment that it needs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from kvpress import DecodingPress, KnormPress, SnapKVPress, StreamingLLMPress
from protocol import serve, timed
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

PRESSES = {"StreamingLLM": StreamingLLMPress, "Knorm": KnormPress}


class KvpressSide:
    """A model under a press with a full cache, which has just been compressed.

    Args:
        wanted: the settings "config", "dtype" and "threads" of the model, "press", the press's
            target size "slots", and "chunk", the number of tokens between two compressions.
    """

    def __init__(self, wanted: dict[str, Any]) -> None:
        torch.set_num_threads(wanted["threads"])
        torch.set_grad_enabled(False)
        torch.manual_seed(0)
        config = LlamaConfig(**wanted["config"])
        self._model = LlamaForCausalLM(config).eval().to(getattr(torch, wanted["dtype"]))
        chunk, self._seen, self._cache = wanted["chunk"], 0, DynamicCache()
        press = DecodingPress(
            base_press=press_of(wanted["press"], chunk),
            compression_interval=chunk,
            target_size=wanted["slots"],
        )
        self._hooks = ExitStack()
        self._hooks.enter_context(press(self._model))
        self._feed(torch.randint(config.vocab_size, (1, wanted["slots"])))
        self.steps(chunk)  # until it has compressed for the first time

    def steps(self, count: int) -> list[float]:
        """Run `count` decode steps, and return the seconds of each."""
        token = torch.ones(1, 1, dtype=torch.int64)
        return [timed(lambda: self._feed(token)) for _ in range(count)]

    def _feed(self, ids: torch.Tensor) -> None:
        places = torch.arange(self._seen, self._seen + ids.shape[1])
        self._model(
            input_ids=ids, past_key_values=self._cache, cache_position=places, logits_to_keep=1
        )
        self._seen += ids.shape[1]


def press_of(name: str, chunk: int) -> Any:
    """Return a press. SnapKV's window must be shorter than the chunk between two compressions."""
    return SnapKVPress(window_size=chunk // 2) if name == "SnapKV" else PRESSES[name]()


if __name__ == "__main__":
    serve(KvpressSide)
