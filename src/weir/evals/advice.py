"""Advice on a policy and its size, from trials on the user's text within the user's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.cache import check_origin, size_of
from weir.errors import WeirError
from weir.evals.fitting import fit_to_memory
from weir.evals.notation import read_policies, takes_budget, with_budget
from weir.evals.perplexity import PerplexityMeter, read
from weir.models import window_of
from weir.policies import is_file, parse_policy
from weir.stream import Stream, read_stream

CANDIDATES = (
    "weir",
    "quantized(streaming_llm, newest=16)",
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
"""The policies that are tried by default."""
SMALLEST = 96
"""The smallest budget that is tried for `CANDIDATES` if the memory is given; all of these policies
accept it.
"""
TIMES = 4
"""Length of a sample as a multiple of the largest budget, so that tokens have to be evicted."""
LEAST = 4096


@dataclass(frozen=True)
class Trial:
    """The figures of one policy on the sample. The policy is written with its budget, or as a file
    name.

    `budget` is slots per KV head; if heads differ, those of the largest. If nothing was
    `evicted`, the perplexity is that of `dense`, except for the rounding of quantized slots, and
    says nothing about which tokens the policy keeps.
    """

    policy: str
    budget: int
    kv_bytes: int
    ppl: float
    tokens_per_s: float
    evicted: bool


@dataclass(frozen=True)
class Advice:
    """The trials of all policies, best first.

    Attributes:
        tries: trials sorted by perplexity; only `dense` if everything fits.
        tokens: length of the sample.
        available: length of the text in tokens.
        window: tokens the model was trained with; None if its configuration does not say.
        everything: whether the whole text fits the window and the memory or budget, so that nothing
            is evicted.
        left_out: by policy, the reason why it was not tried. Policies that are tried by default,
            within a given memory, are not listed here if they do not fit.
    """

    tries: tuple[Trial, ...]
    tokens: int
    available: int
    window: int | None
    everything: bool
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Trial:
        """The trial of the recommended policy."""
        return self.tries[0]


def advise(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    memory: int | None = None,
    *,
    budget: int | None = None,
    policies: str | None = None,
    tokens: int | None = None,
    chunk: int = 64,
    seed: int = 0,
    on_step: Callable[[str, float], None] = lambda policy, share: None,
) -> Advice:
    """Try policies on the beginning of a text, each as large as the memory allows or with the same
    budget.

    If `memory` determines the budget, budget and chunk together never exceed the model's window. If
    the whole text fits (`Advice.everything`), it is read whole, and only `dense` is tried.

    Args:
        model, tokenizer: the model and its tokenizer.
        text: the path of a text file in UTF-8, plain or compressed (.xz).
        memory: bytes that the cache of one stream can take.
        budget: instead of memory, slots of each KV head, for policies that are given without a
            budget.
        policies: comma-separated policies and policy files; None for `CANDIDATES`. A policy that
            takes a budget and has none gets `budget`, or the largest that fits. A policy that does
            not fit, or fails while it is tried, is left out.
        tokens: length of the sample; by default four times the largest budget, but at least 4,096,
            or the whole text if it is shorter than that.
        chunk, seed: tokens between two folds, and the seed of all random draws.
        on_step: called with the policy under trial and the share of all work that is done.

    Raises:
        WeirError: neither or both of `memory` and `budget` are given, no policy fits, the text has
            fewer tokens than `tokens`, or all policies fail.
    """
    if (memory is None) == (budget is None):
        which = "neither" if memory is None else "both"
        raise WeirError(
            f"the size of a cache must be given by either memory or budget, got {which}"
        )
    named = None if policies is None else _list_policies(model, policies)
    ids = read_stream(tokenizer, text).ids
    if tokens is not None and tokens > len(ids):
        raise WeirError(f"the text has only {len(ids):,} tokens, but {tokens:,} are needed")
    window = window_of(model.config)

    def attempt(policy: str, budget: int, some: Tensor, number: int = 0, of: int = 0) -> Trial:
        def tell(now: PerplexityMeter) -> None:
            if of:
                on_step(policy, (number + now.tokens / len(some)) / of)

        stream = Stream(model, policy, chunk=chunk, seed=seed)
        found = read(stream, some, on_step=tell)
        found.check()
        held = [layer["held"] for layer in stream.report()["layers"]]
        evicted = min(held) < found.tokens
        return Trial(policy, budget, found.kv_bytes, found.ppl, found.tokens_per_s, evicted)

    if (window is None or len(ids) <= window) and (budget is None or len(ids) <= budget):
        whole = attempt("dense", len(ids), ids)
        if memory is None or whole.kv_bytes <= memory:
            return Advice((whole,), len(ids), len(ids), window, everything=True)
    left_out: dict[str, str] = {}
    if named is None and memory is not None:
        fits = _candidates(model, memory, chunk, window)
    else:
        fits, left_out = _fitting(model, named or CANDIDATES, memory, budget, chunk)
        if not fits:
            raise WeirError(next(iter(left_out.values())))
    length = max(LEAST, TIMES * max(fits.values())) if tokens is None else tokens
    sample = ids[:length]
    tries: list[Trial] = []
    failures: list[WeirError] = []
    for number, (policy, slots) in enumerate(fits.items()):
        try:
            tries.append(attempt(policy, slots, sample, number, len(fits)))
        except WeirError as error:
            left_out[policy] = f"{policy}: {error}"
            failures.append(error)
    if not tries:
        raise failures[0]
    tries.sort(key=lambda one: one.ppl)
    return Advice(tuple(tries), len(sample), len(ids), window, everything=False, left_out=left_out)


def _list_policies(model: PreTrainedModel, policies: str) -> list[str]:
    """Split a list into policies without duplicates; policy files keep their names."""
    files = {}
    for file in filter(is_file, policies.split(",")):
        wanted = parse_policy(file)
        check_origin(wanted, model)
        files[str(wanted)] = file.strip()
    return [files.get(policy, policy) for policy in dict.fromkeys(read_policies(policies))]


def _fitting(
    model: PreTrainedModel, named: Sequence[str], memory: int | None, budget: int | None, chunk: int
) -> tuple[dict[str, int], dict[str, str]]:
    """Return the policies that fit, with their slots (their own, `budget`, or the most that fit),
    and the other policies, with the reason why each is left out.
    """
    fits: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for policy in named:
        try:
            if is_file(policy) or not takes_budget(policy):
                takes = size_of(model, policy, chunk=chunk)
                if memory is not None and takes.stream > memory:
                    raise WeirError(f"{policy} takes {takes.stream:,} bytes, more than {memory:,}")
                sized, slots = policy, takes.head_slots[1]
            elif memory is not None:
                sized, slots = fit_to_memory(model, policy, memory, chunk)
            else:
                assert budget is not None
                sized, slots = with_budget(policy, budget), budget
                size_of(model, sized, chunk=chunk)  # raises if the model's layers cannot hold it
            fits[sized] = slots
        except WeirError as error:
            left_out[policy] = str(error)
    return fits, left_out


def _candidates(
    model: PreTrainedModel, memory: int, chunk: int, window: int | None
) -> dict[str, int]:
    """Return the policies of `CANDIDATES` that fit, with their budgets."""
    if window is not None and window - chunk < SMALLEST:
        raise WeirError(
            f"a chunk of {chunk} and a budget of {SMALLEST}, the smallest that is tried, exceed "
            f"the model's window of {window}. Use a smaller chunk."
        )
    every, _ = _fitting(model, CANDIDATES, memory, None, chunk)
    fits = {policy: budget for policy, budget in every.items() if budget >= SMALLEST}
    if not fits:
        takes = size_of(model, f"window(budget={SMALLEST})", chunk=chunk).stream
        raise WeirError(
            f"{memory:,} bytes are too few. The smallest budget that is tried is {SMALLEST} slots, "
            f"and window(budget={SMALLEST}) takes {takes:,} bytes. Use more memory or a smaller "
            "chunk, or name policies with fewer slots."
        )
    return fits
