"""How far two runs of one computation may differ, derived from the roundings in between.

Two machines, or two kernels on one machine, add the same terms in different orders, and no test may
depend on the order. So tolerances are not numbers with which a test once passed. They are what
rounding allows for the precision, the number of terms, and the size of the compared numbers.
Results of the same operations in the same order on every machine are compared with `torch.equal`
and need nothing from this file.

Rounding changes a number by up to half an eps of its size, which is a standard deviation of
eps / sqrt(12). A sum of n terms is rounded n times, and no partial sum exceeds the sum of the
terms' sizes. Some roundings go up and some down, so that they partly cancel (Higham and Mary 2019,
"A New Approach to Probabilistic Rounding Error Analysis", section 3). So a sum in any order is off
by eps * sqrt(n / 12) of that size, and two sums differ by eps * sqrt(n / 6) of it. Five of these
standard deviations are exceeded once in 1.7 million numbers: 5 / sqrt(6) = 2.04, hence `SUM`.

This file does not use weir.
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

SUM = 2
"""Two sums of n terms differ by at most this many eps * sqrt(n) of the sum of the terms' sizes."""
STEP = 2.0**-14
"""The share by which weights are changed to measure the effect: far more than by rounding."""
TOKENS, DRAWS = 1024, 3
"""How many tokens are read, and how often the weights are changed, to find the largest effect."""
_found: WeakKeyDictionary[PreTrainedModel, dict[int, tuple[float, float]]] = WeakKeyDictionary()


def off(terms: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """How far two sums of `terms` terms may differ, relative to the sum of the terms' sizes."""
    return SUM * torch.finfo(dtype).eps * math.sqrt(terms)


def softmax_off(terms: int, logit: float, dtype: torch.dtype = torch.float32) -> float:
    """How far two softmax weights may differ, relative to themselves.

    Each is the exponential of a logit, so its relative error is the absolute error of the logit.
    The errors of the logit and of the largest logit, which is subtracted from it, add up.

    Args:
        terms: number of terms of a logit: the dimension of a head.
        logit: the sum of these terms' sizes, at most |query| |key| scale.
        dtype: the precision.
    """
    return 2 * off(terms, dtype) * logit


def weights_off(total: float, additions: int = 16) -> float:
    """How far a sum of weights may be off, relative to itself, if weights are stored as logarithms.

    The relative error of a weight e^a is the absolute error of `a`.

    Args:
        total: the sum of the weights. No weight's logarithm exceeds the sum's.
        additions: number of float32 additions, one after the other, in the largest logarithm.
    """
    return off(additions) * (1 + math.log(max(1.0, total)))


def run_off(model: PreTrainedModel, length: int = 64) -> float:
    """How far two runs' logits may differ, relative to the largest of them.

    A run with roundings is an exact run with other weights (backward error analysis): a product in
    a sum of n is off by eps * sqrt(n / 12) of itself, as if its weight were off by that much. So
    every weight is changed at random by `STEP` of itself, and the change of the logits is measured.
    Rotary frequencies are changed less, because a plain model rounds angles only twice. The bound
    is the largest change of any logit, per unit of change of the weights, times the difference of
    two runs' products, eps * sqrt(n / 6). It is wide for deep models and steep attention and narrow
    for flat ones, and it does not depend on any kernel.

    Args:
        model: any causal language model.
        length: number of tokens of a row. Angles are less exact in longer rows.
    """
    return _measured(model, length)[0]


def nll_off(model: PreTrainedModel, tokens: int, length: int = 64) -> float:
    """How far two runs' means of `tokens` negative log-likelihoods may differ, in nats.

    Each likelihood's logarithm is the difference of two numbers of the size of logits. The errors
    of tokens are independent, so the error of their mean is smaller by the square root of their
    number. It is also the relative error of a perplexity.
    """
    relative, size = _measured(model, length)
    return 2 * relative * size / math.sqrt(tokens)


def _measured(model: PreTrainedModel, length: int) -> tuple[float, float]:
    """(how far logits may differ, relative to the largest of a random text; this largest one)."""
    mine = _found.setdefault(model, {})
    if length not in mine:
        # Terms of the model's longest sum of products with weights.
        longest = max(weight.shape[-1] for weight in model.parameters() if weight.ndim > 1)
        moves, size = _sensitivity(model, length, math.sqrt(2 / longest))
        if not math.isfinite(moves) or not size:
            raise ValueError("measure a model before it is made to go wrong: call run_off(model)")
        mine[length] = moves * torch.finfo(model.dtype).eps * math.sqrt(longest / 6), size
    return mine[length]


@torch.no_grad()
def _sensitivity(model: PreTrainedModel, length: int, turn: float) -> tuple[float, float]:
    """(change of logits per unit of change of weights, relative to the largest logit; this logit).

    Args:
        model: any causal language model.
        length: tokens of a row.
        turn: change of rotary frequencies per unit of change of the weights.
    """
    draw = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (max(1, TOKENS // length), length), generator=draw)
    frequencies = {name: t for name, t in model.named_buffers() if name.endswith("inv_freq")}

    def logits(tensors: dict[str, Tensor]) -> Tensor:
        given = {"input_ids": ids.to(model.device), "use_cache": False}
        return functional_call(model, tensors, kwargs=given).logits.float()

    was, far = logits({}), 0.0
    for _ in range(DRAWS):
        moved = {name: t * (1 + STEP * turn) for name, t in frequencies.items()}
        for name, t in model.named_parameters():
            moved[name] = t * (1 + STEP * torch.randn(t.shape, generator=draw).to(t.device))
        far = max(far, float((logits(moved) - was).abs().max()))
    size = float(was.abs().max())
    return far / STEP / size, size


def close(got: Tensor, wanted: Tensor, terms: int = 1, size: float | Tensor | None = None) -> None:
    """Assert that both are the same sums of `terms` numbers, but for rounding.

    Args:
        got: what weir computed; its dtype is the precision.
        wanted: what it should be, in the same shape, in that precision or in float64.
        terms: number of terms that were added up; if sums follow one another, of all sums.
        size: the sum of the terms' sizes, for each entry or the largest of all; by default the
            largest entry of `wanted`, which is right if no terms cancel.
    """
    within(got, wanted, off(terms, got.dtype) * (largest(wanted) if size is None else size))


def close_runs(got: Tensor, wanted: Tensor, model: PreTrainedModel, length: int = 64) -> None:
    """Assert that both are what one model computes from the same tokens, but for rounding.

    They can be logits, or numbers from which logits are computed and which were rounded less often:
    keys, values, queries, the attention that a slot received.
    """
    within(got, wanted, run_off(model, length) * largest(wanted))


def within(got: Tensor, wanted: Tensor, bound: float | Tensor) -> None:
    """Assert that no entry is off by more than its bound, and that infinite entries are equal."""
    assert got.shape == wanted.shape
    got, wanted = got.double(), wanted.double()
    apart = (got - wanted).abs().where(got != wanted, 0.0)  # infinities are equal, too
    over = apart - bound
    assert bool((over <= 0).all()), (
        f"{float(apart.max()):.3g} apart, {float(over.max()):.3g} more than roundings allow"
    )


def largest(numbers: Tensor) -> float:
    """The size of the largest finite number; 0 if there is none."""
    there = numbers.detach()[numbers.isfinite()]
    return float(there.abs().max()) if there.numel() else 0.0
