"""Who the tasks over files are tried on: nano, and a random model whose answers all differ."""

from __future__ import annotations

from typing import Any

import weir
from reference.models import make
from weir.evals.task import Subject


def nano(policy: str = "dense", **options: Any) -> Subject:
    """nano under a policy, loaded anew, so that a test may change it."""
    model, tokenizer = weir.load("nano", device="cpu")
    return Subject("nano", model, tokenizer, weir.policy(policy), **options)


def stranger(policy: str = "dense", **options: Any) -> Subject:
    """A model of random weights with nano's tokenizer and window."""
    _, tokenizer = weir.load("nano", device="cpu")
    model = make("llama", vocab_size=4096, max_position_embeddings=512)
    return Subject("stranger", model, tokenizer, weir.policy(policy), **options)


def quiet(done: float) -> None:
    """Progress, told to nobody."""
    assert 0 < done <= 1
