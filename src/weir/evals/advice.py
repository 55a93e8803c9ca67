"""Which policy, and how large: tried on the user's own text within the user's own memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.cache import size_of
from weir.errors import WeirError
from weir.evals.fitting import budget_in
from weir.evals.measures import STEP, PerplexityMeter
from weir.evals.notation import with_budget
from weir.models import window_of
from weir.stream import Stream, read_stream

CANDIDATES = (
    "streaming_llm",
    "reservoir",
    "h2o",
    "buzz",
    "kcenter",
    "snapkv",
    "pyramidkv",
    "uniform",
    "subgen",
    "balancekv",
    "window",
)
"""What is tried."""
SMALLEST = 96
"""No smaller budget is tried; every candidate can be made with it."""
TIMES = 4
"""A sample is so many times as long as the largest budget, so that something has to go."""
LEAST = 4096


@dataclass(frozen=True)
class Try:
    """What one policy came to on the sample.

    Attributes:
        policy: with its budget.
        budget: slots per KV head.
        kv_bytes: of its cache.
        ppl: perplexity of the sample.
        tokens_per_s: of reading it.
        evicted: whether anything had to go; if not, the perplexity is that of `dense` and says
            nothing of the policy.
    """

    policy: str
    budget: int
    kv_bytes: int
    ppl: float
    tokens_per_s: float
    evicted: bool


@dataclass(frozen=True)
class Advice:
    """What was tried, the best first.

    Attributes:
        tries: by perplexity; `dense` alone where everything fits.
        tokens: of the sample.
        available: tokens of the text.
        window: tokens the model was trained with; None where it does not say.
        everything: whether the whole text fits the window and the memory, so nothing need go.
    """

    tries: tuple[Try, ...]
    tokens: int
    available: int
    window: int | None
    everything: bool

    @property
    def best(self) -> Try:
        """The policy to take."""
        return self.tries[0]


def advise(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    memory: int,
    *,
    tokens: int | None = None,
    chunk: int = 64,
    seed: int = 0,
    on_step: Callable[[str, float], None] = lambda policy, share: None,
) -> Advice:
    """Try policies with all the slots that fit a memory on the beginning of a text.

    A budget and a chunk together stay within the model's window, however much memory there is.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        text: a file, UTF-8, plain or .xz.
        memory: bytes that the cache of one stream may have.
        tokens: of the sample; by default four times the largest budget, 4,096 at least.
        chunk: tokens between two folds.
        seed: of all random draws.
        on_step: told which policy is tried, and how much of everything is done.

    Raises:
        WeirError: the text cannot be read or is shorter than the sample, the model cannot be
            served, or the memory or the window is too small.
    """
    ids = read_stream(tokenizer, text).ids
    if tokens is not None and tokens > len(ids):
        raise WeirError(f"the text has {len(ids):,} tokens, so it cannot be tried on {tokens:,}")
    window = window_of(model.config)
    if window is None or len(ids) <= window:
        whole = _try(model, "dense", len(ids), ids, chunk, seed, lambda share: None)
        if whole.kv_bytes <= memory:
            return Advice((whole,), len(ids), len(ids), window, everything=True)
    most = None if window is None else window - chunk
    if most is not None and most < SMALLEST:
        raise WeirError(
            f"a chunk of {chunk} and a budget of {SMALLEST}, the smallest that is tried, are more "
            f"than the model's window of {window}; take a smaller chunk"
        )
    budgets = {name: budget_in(model, name, memory, chunk) for name in CANDIDATES}
    fits = {name: n for name, n in budgets.items() if n is not None and n >= SMALLEST}
    if not fits:
        takes = size_of(model, f"window(budget={SMALLEST})", chunk=chunk).stream
        raise WeirError(
            f"{memory:,} bytes are too few for the budgets that are tried, of {SMALLEST} slots or "
            f"more: window(budget={SMALLEST}) takes {takes:,}. A smaller cache may fit, with a "
            "budget and a chunk of your own; see weir eval"
        )
    length = max(LEAST, TIMES * max(fits.values())) if tokens is None else tokens
    sample = ids[:length]
    tries = []
    for number, (name, budget) in enumerate(fits.items()):
        policy = with_budget(name, budget)

        def told(share: float, policy: str = policy, number: int = number) -> None:
            on_step(policy, (number + share) / len(fits))

        tries.append(_try(model, policy, budget, sample, chunk, seed, told))
    tries.sort(key=lambda one: one.ppl)
    return Advice(tuple(tries), len(sample), len(ids), window, everything=False)


def _try(
    model: PreTrainedModel,
    policy: str,
    budget: int,
    sample: Tensor,
    chunk: int,
    seed: int,
    told: Callable[[float], None],
) -> Try:
    meter = PerplexityMeter(Stream(model, policy, chunk=chunk, seed=seed))
    for piece in sample.split(STEP):
        meter.take(piece)
        told(meter.reading.tokens / len(sample))
    found = meter.reading
    held = [layer["held"] for layer in meter.stream.report()["layers"]]
    evicted = min(held) < found.tokens
    return Try(policy, budget, found.kv_bytes, found.ppl, found.tokens_per_s, evicted)
