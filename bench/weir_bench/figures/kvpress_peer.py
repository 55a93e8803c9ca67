"""kvpress's side of a figure: run by the Python of its own environment, which has no weir.

Lines of JSON come in: first what to build, then how many decode steps to do, again and again. For
each a line goes out: true once everything is built, then the seconds of each step.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from kvpress import DecodingPress, KnormPress, SnapKVPress, StreamingLLMPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

PRESSES = {"StreamingLLM": StreamingLLMPress, "Knorm": KnormPress}


def main() -> None:
    """Build what the first line asks for, then step as the others ask."""
    wanted: dict[str, Any] = json.loads(sys.stdin.readline())
    torch.set_num_threads(wanted["threads"])
    torch.manual_seed(0)
    config = LlamaConfig(**wanted["config"])
    model = LlamaForCausalLM(config).eval().to(getattr(torch, wanted["dtype"]))
    press = DecodingPress(
        base_press=press_of(wanted["press"], wanted["chunk"]),
        compression_interval=wanted["chunk"],
        target_size=wanted["slots"],
    )
    cache = DynamicCache()
    seen = 0

    def feed(ids: torch.Tensor) -> None:
        nonlocal seen
        places = torch.arange(seen, seen + ids.shape[1])
        model(input_ids=ids, past_key_values=cache, cache_position=places, logits_to_keep=1)
        seen += ids.shape[1]

    token = torch.ones(1, 1, dtype=torch.int64)
    with torch.no_grad(), press(model):
        feed(torch.randint(config.vocab_size, (1, wanted["slots"])))
        for _ in range(wanted["chunk"]):  # until it has compressed for the first time
            feed(token)
        _say(True)
        for line in sys.stdin:
            taken = []
            for _ in range(json.loads(line)):
                start = time.perf_counter()
                feed(token)
                taken.append(time.perf_counter() - start)
            _say(taken)


def press_of(name: str, chunk: int) -> Any:
    """A press; SnapKV's window is to be shorter than what comes between two compressions."""
    return SnapKVPress(window_size=chunk // 2) if name == "SnapKV" else PRESSES[name]()


def _say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
