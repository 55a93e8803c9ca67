"""Plain transformers: what a model writes after a prompt, without anything of weir in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def plain_answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    most: int,
    stop: str | None = None,
) -> str:
    """Decode greedily, token by token with an ordinary cache; cut the answer before `stop`."""
    ids: Sequence[int] = tokenizer(prompt)["input_ids"]
    fed, past, written = torch.tensor([ids]), None, []
    with torch.no_grad():
        for _ in range(most):
            out = model(fed, past_key_values=past, use_cache=True)
            past, fed = out.past_key_values, out.logits[:, -1:].argmax(-1)
            written.append(int(fed))
    text = tokenizer.decode(written, skip_special_tokens=True)
    return text.split(stop)[0] if stop else text
