"""Models on which tests try tasks from files: nano, and a random model whose answers all differ."""

from __future__ import annotations

from typing import Any

import weir
from reference.models import make
from weir.evals.task import Subject


def nano(policy: str = "dense", **options: Any) -> Subject:
    """nano under a policy. It is loaded again, so that a test can change it."""
    model, tokenizer = weir.load("nano", device="cpu")
    return Subject("nano", model, tokenizer, weir.policy(policy), **options)


def stranger(policy: str = "dense", **options: Any) -> Subject:
    """A model of random weights with nano's tokenizer and window."""
    _, tokenizer = weir.load("nano", device="cpu")
    model = make("llama", vocab_size=4096, max_position_embeddings=512)
    return Subject("stranger", model, tokenizer, weir.policy(policy), **options)


def quiet(done: float) -> None:
    """Check the progress, and show nothing."""
    assert 0 < done <= 1
