"""How far two runs of one computation may lie apart, derived from the roundings on the way.

Two machines, or two kernels of one, take the same sums in different orders, and no test may depend
on the order. So no tolerance is a number that once passed: it is what rounding allows, for the
precision, the number of terms and the size of what is compared. What is the same operations in the
same order on any machine is compared with `torch.equal`, and needs nothing from here.

A rounding to the nearest number is off by up to half an eps of it, as a standard deviation by
eps / sqrt(12). A sum of n terms is rounded n times, and no partial sum exceeds the sum of the
terms' sizes. Roundings fall either way and cancel (Higham and Mary 2019, "A New Approach to
Probabilistic Rounding Error Analysis", section 3), so a sum in any order is off by
eps * sqrt(n / 12) of that size, and two of them lie eps * sqrt(n / 6) apart. Five standard
deviations of that are exceeded once in 1.7 million numbers: 5 / sqrt(6) = 2.04, hence `SUM`.

This file knows nothing about weir.
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

SUM = 2
"""Two sums of n terms lie at most this many eps * sqrt(n) of the terms' sizes apart."""
STEP = 2.0**-14
"""By how much of itself a weight is moved to see what that does: far above its last place."""
TOKENS, DRAWS = 1024, 3
"""How many tokens are read, and how often the weights are moved, to find the worst of them."""
_found: WeakKeyDictionary[PreTrainedModel, dict[int, tuple[float, float]]] = WeakKeyDictionary()


def off(terms: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """How far apart two sums of so many terms may lie, relative to the sum of the terms' sizes."""
    return SUM * torch.finfo(dtype).eps * math.sqrt(terms)


def softmax_off(terms: int, logit: float, dtype: torch.dtype = torch.float32) -> float:
    """How far apart two softmax weights may lie, relative to themselves.

    Each is the exponential of a logit, so it is off, relatively, by what its logit is off
    absolutely. Both the logit and its largest neighbor, which is taken off, count.

    Args:
        terms: that a logit is the sum of: the heads' size.
        logit: the sum of those terms' sizes, |query| |key| scale at most.
        dtype: the precision.
    """
    return 2 * off(terms, dtype) * logit


def weights_off(total: float, additions: int = 16) -> float:
    """How far a sum of weights may be off, relative to itself, that are kept as logarithms.

    A weight e^a is off, relatively, by what `a` is off absolutely.

    Args:
        total: what the weights sum to; no logarithm exceeds its own.
        additions: in float32, one after the other, that the largest logarithm is made of.
    """
    return off(additions) * (1 + math.log(max(1.0, total)))


def run_off(model: PreTrainedModel, length: int = 64) -> float:
    """How far apart two runs' logits may lie, relative to the largest of them.

    A run that rounds is an exact run of other weights (backward error analysis): a product in a sum
    of n is off by eps * sqrt(n / 12) of itself, and so in effect is its weight. So every weight is
    moved at random by `STEP` of itself to see how far the logits move, and the rotary frequencies
    by as much less as the two roundings of a plain model's angles are fewer. The largest movement
    of any logit for each unit of `STEP`, times how far apart two runs' products are,
    eps * sqrt(n / 6), is the bound. Deep models and steep attention have a wide one, flat ones a
    narrow one, and no kernel has a say.

    Args:
        model: any causal language model.
        length: how many tokens a row has; angles are the less exact the more of them there are.
    """
    return _measured(model, length)[0]


def nll_off(model: PreTrainedModel, tokens: int, length: int = 64) -> float:
    """How far apart two runs' means of so many negative log-likelihoods may lie, in nats.

    Each is the difference of two numbers of the size of logits, and each token is off by itself:
    of a mean, roundings leave one part in the root of the number of tokens. A perplexity is off
    by as much relatively.
    """
    relative, size = _measured(model, length)
    return 2 * relative * size / math.sqrt(tokens)


def _measured(model: PreTrainedModel, length: int) -> tuple[float, float]:
    """How far apart logits of a model may lie, relative to the largest of random text; and that."""
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
    """How far the logits move for each unit that the weights move, relative to the largest one.

    Args:
        model: any causal language model.
        length: tokens of a row.
        turn: how far rotary frequencies move for each unit that the weights move.
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
    """Both are the same sums of `terms` numbers, but for rounding.

    Args:
        got: what weir computed; its dtype is the precision.
        wanted: what it should be, in the same shape, in that precision or in float64.
        terms: that were added up; where sums follow one another, of all of them.
        size: what the terms' sizes sum to, entry by entry or the largest of all; by default the
            largest entry of `wanted`, which is right where nothing cancels.
    """
    within(got, wanted, off(terms, got.dtype) * (largest(wanted) if size is None else size))


def close_runs(got: Tensor, wanted: Tensor, model: PreTrainedModel, length: int = 64) -> None:
    """Both are what one model made of the same tokens, but for rounding.

    Logits, or what was computed on the way to them and so was rounded less often: keys, values,
    queries, the attention a slot received.
    """
    within(got, wanted, run_off(model, length) * largest(wanted))


def within(got: Tensor, wanted: Tensor, bound: float | Tensor) -> None:
    """No entry is off by more than its bound, and those that are not finite are the same."""
    assert got.shape == wanted.shape
    got, wanted = got.double(), wanted.double()
    apart = (got - wanted).abs().where(got != wanted, 0.0)  # infinities are equal, too
    over = apart - bound
    assert bool((over <= 0).all()), (
        f"{float(apart.max()):.3g} apart, {float(over.max()):.3g} more than roundings allow"
    )


def largest(numbers: Tensor) -> float:
    """The size of the largest finite number, 0 where there is none."""
    there = numbers.detach()[numbers.isfinite()]
    return float(there.abs().max()) if there.numel() else 0.0
