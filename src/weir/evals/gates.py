"""Trains gates, which predict KVzip's scores by a linear map of keys and values.

The text is read in passages. Each passage is read twice in one sequence, so that every layer's
attention from the second copy to the first gives the scores (Kim et al. 2025, arXiv:2505.23416,
section 3). Ridge regression of their logarithm gives one map per layer (KVzap, arXiv:2601.07891,
does the same with hidden states).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.cache import Attention
from weir.errors import WeirError
from weir.evals.capture import LayerInputs, capture_each, in_place, unrotated_keys
from weir.models import Gate, features, window_of
from weir.stream import read_stream

PASSAGE = 1024
"""Tokens of a passage, or half of the model's window if that is less."""
TOKENS = 16 * PASSAGE
LEAST = 1e-4
"""The lowest score. Lower scores are raised to it before the logarithm is taken."""
RIDGE = 1e-2
"""The penalty on weights, relative to the mean square of their inputs."""


@dataclass(frozen=True)
class TrainedGates:
    """Gates by layer, and how well they predict. `tokens` were read: about three quarters of them
    for training, and the rest for testing.

    `explained` is the share of the variance of log scores that a gate explains in passages it was
    not trained on (R squared, mean of the heads); `copying` is the largest mean score of a layer's
    heads, near 1 in a head that copies.
    """

    gates: dict[int, Gate]
    explained: dict[int, float]
    copying: dict[int, float]
    tokens: int


def train_gates(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    tokens: int = TOKENS,
    on_step: Callable[[float], None] = lambda share: None,
) -> TrainedGates:
    """Train the gates of a model on a text; every fourth passage is used only for testing.

    Layers with a sliding window get no gate. Raises WeirError if all layers have one, or if the
    text is too short.
    """
    window = window_of(model.config)
    size = PASSAGE if window is None else min(PASSAGE, window // 2)
    ids = read_stream(tokenizer, text, tokens).ids
    passages = [part for part in ids.split(size) if len(part) == size]
    if len(passages) < 4:
        raise WeirError(
            f"{len(ids):,} tokens are too few to train gates on. Use at least {4 * size:,}."
        )
    sums: dict[int, list[_Sums]] = {}
    for number, passage in enumerate(passages):
        found = capture_each(model, torch.cat([passage, passage]), _lesson)
        for layer, lesson in found.items():
            if lesson is not None:
                mine = sums.setdefault(layer, [_Sums(), _Sums()])
                mine[number % 4 == 3].add(*lesson)
        on_step((number + 1) / len(passages))
    if not sums:
        raise WeirError(
            "all layers of this model have a sliding window, and such layers get no gate. Use a "
            "pool without gates, such as snap."
        )
    gates = {layer: Gate(learnt.solve()) for layer, (learnt, _) in sums.items()}
    return TrainedGates(
        gates,
        {layer: held.explained(gates[layer].weight) for layer, (_, held) in sums.items()},
        {layer: learnt.copying() for layer, (learnt, _) in sums.items()},
        len(passages) * size,
    )


def _lesson(inputs: LayerInputs) -> tuple[Tensor, Tensor] | None:
    """Return the inputs of a layer's gate for the first half of a text, and the true scores; None
    for a layer with a sliding window.
    """
    if inputs.positions.window is not None:
        return None
    half = len(inputs) // 2
    keys = unrotated_keys(inputs)
    keys = inputs.keys if keys is None else keys
    x = features(keys[:, :, :half], inputs.values[:, :, :half])[0]
    return x, repeat_scores(inputs, half)


def repeat_scores(inputs: LayerInputs, half: int) -> Tensor:
    """Return the largest share of attention that each of `half` tokens gets when all are read
    again.

    The result is [half, kv_heads]. The maximum is over the queries of the second half, in all query
    heads that read a KV head.
    """
    heads = inputs.keys.shape[1]
    queries = in_place(inputs, inputs.queries).unflatten(1, (heads, -1))[..., half:, :]
    keys = in_place(inputs, inputs.keys)
    places = torch.arange(keys.shape[2], device=keys.device)
    again = Attention(inputs.layer, queries, keys, half, places, inputs.params, inputs.positions)
    return again.largest_shares(0, half).T


class _Sums:
    """Sums over tokens, in float64, from which a linear map is computed."""

    def __init__(self) -> None:
        # These zeros get the shapes of the first sums that are added to them.
        self.xx, self.xy, self.yy, self.score = torch.zeros(4, dtype=torch.float64)
        self.count = 0

    def add(self, x: Tensor, scores: Tensor) -> None:
        """Add tokens: their inputs [n, numbers], and scores [n, kv_heads]."""
        x, y = x.double().cpu(), scores.double().cpu().clamp_min(LEAST).log()
        self.xx, self.xy = self.xx + x.T @ x, self.xy + x.T @ y
        self.yy, self.score = self.yy + y.square().sum(0), self.score + scores.double().cpu().sum(0)
        self.count += len(x)

    def solve(self) -> Tensor:
        """Return the least-squares map [numbers, kv_heads], float32; its constant is not
        penalized.
        """
        penalty = RIDGE * self.xx.diagonal().mean().repeat(len(self.xx))
        penalty[-1] = 0.0
        return torch.linalg.solve(self.xx + penalty.diag(), self.xy).float()

    def explained(self, weight: Tensor) -> float:
        """Return the share of the variance that a map explains, averaged over the heads."""
        w = weight.double()
        wrong = self.yy - 2 * (w * self.xy).sum(0) + (w * (self.xx @ w)).sum(0)
        around = self.yy - self.xy[-1].square() / self.count
        return float((1 - wrong / around).mean())

    def copying(self) -> float:
        """Return the largest mean score of a head."""
        return float(self.score.max()) / self.count
