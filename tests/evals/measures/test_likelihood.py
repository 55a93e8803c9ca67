"""Continuations in a batch get what each would get alone, from a plain forward of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference.models import shared, tokens
from roundings import nll_off
from transformers import PreTrainedModel

from weir import Stream
from weir.evals.harness import likelihoods

pytestmark = pytest.mark.thinned(3, least=2)

LENGTHS = [(1, 3), (40, 1), (7, 12), (90, 5), (3, 70)]
"""Numbers of tokens (context, continuation). Some are longer than a piece, and fold."""


def pairs() -> tuple[list[list[int]], list[list[int]]]:
    rows = [tokens(1, c + a, seed=c)[0].tolist() for c, a in LENGTHS]
    return (
        [row[:c] for row, (c, _) in zip(rows, LENGTHS, strict=True)],
        [row[c:] for row, (c, _) in zip(rows, LENGTHS, strict=True)],
    )


def sum_off(model: PreTrainedModel, continuation: list[int]) -> float:
    """How far the sums of log-likelihoods of two runs may differ."""
    return len(continuation) * nll_off(model, len(continuation))


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.evals.harness.PIECE", 16)


def test_dense_gives_what_a_plain_forward_gives() -> None:
    model = shared("llama")
    contexts, asked = pairs()
    # Add the likeliest continuation, so that one answer is greedy.
    plain = model.generate(torch.tensor([contexts[2]]), max_new_tokens=4, do_sample=False)
    contexts.append(contexts[2])
    asked.append(plain[0, len(contexts[2]) :].tolist())
    said = likelihoods(lambda: Stream(model, "dense", chunk=8), contexts, asked)
    for one, context, continuation in zip(said, contexts, asked, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        right = torch.tensor(continuation)
        total = logits.log_softmax(-1).gather(-1, right[:, None]).sum()
        assert one[0] == pytest.approx(float(total), abs=sum_off(model, continuation))
        assert one[1] == bool((logits.argmax(-1) == right).all())
    assert [one[1] for one in said].count(True) == 1


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("streaming_llm(budget=12)", {"chunk": 4}),
        ("h2o(budget=12)", {"chunk": 4}),
        ("snapkv(budget=12, window=4)", {"prefill": "full"}),
        ("recompute(budget=12)", {}),
    ],
)
def test_a_row_of_a_batch_gets_what_it_gets_alone(policy: str, options: dict[str, Any]) -> None:
    model = shared("llama")
    contexts, asked = pairs()

    def stream() -> Stream:
        return Stream(model, policy, **options)

    together = likelihoods(stream, contexts, asked)
    for one, context, continuation in zip(together, contexts, asked, strict=True):
        alone = stream()
        alone.feed(context)
        nll = alone.score(continuation)
        assert one[0] == pytest.approx(-float(nll.sum()), abs=sum_off(model, continuation))
