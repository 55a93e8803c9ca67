"""The named policies, except `weir` and the wrappers `pinned`, `pyramid` and `quantized`.

A named policy such as `streaming_llm(budget=256)` is a function that returns a policy, usually a
pipe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from weir.errors import WeirError
from weir.policies.pipe import Pipe, Policy
from weir.policies.registry import named
from weir.pools import (
    Balance,
    Bounds,
    Count,
    Defend,
    Frame,
    Halves,
    Heavy,
    Hive,
    KCenter,
    KeyDiff,
    Keyformer,
    Ladder,
    Match,
    Outliers,
    Pool,
    Recent,
    Reservoir,
    Residue,
    Sink,
    Snap,
    SubGen,
    Sums,
    Tail,
    Tova,
    Uniform,
    best_window,
)


@dataclass(frozen=True, repr=False)
class Recompute(Policy):
    """Sliding window with re-computation: keys and values of the window are computed again for each
    token.

    For every new token, the model reads the last `budget` tokens from scratch. This is very slow.
    StreamingLLM (Xiao et al. 2024, Figure 1c) compares its own quality with it.

    Attributes:
        budget: tokens of the window.
        sinks: how many of them are the first tokens of the stream; the others are its last.
    """

    budget: int
    sinks: int = 0
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise WeirError(f"budget of recompute must be at least 1, got {self.budget}")
        if not 0 <= self.sinks < self.budget:
            raise WeirError(
                f"sinks of recompute must be from 0 to {self.budget - 1} with a budget of "
                f"{self.budget}, got {self.sinks}"
            )
        if not self.text:
            object.__setattr__(self, "text", self.stands_for)

    @property
    def stands_for(self) -> str:
        """The policy with its size."""
        sinks = f", sinks={self.sinks}" if self.sinks else ""
        return f"recompute(budget={self.budget}{sinks})"

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Raise an error, because nothing is cached."""
        raise WeirError(
            "recompute computes the whole window again for every token, which a cache cannot do. "
            "Use weir.Stream or `weir stream`."
        )


@dataclass(frozen=True, repr=False)
class KVzip(Policy):
    """The tokens of one text that a model needs to repeat it, and the newest after the text.

    A `Stream` reads the text whole into a full cache, has the model repeat it, and then holds the
    tokens that got the most attention from the repetition.

    Attributes:
        budget: slots of each KV head, in each layer.
        newest: how many of them are for tokens after the text.
        part: number of tokens in each part in which the model repeats the text.
        asks: whether the model is asked in words to repeat it.
    """

    budget: int
    newest: int
    part: int = 2048
    asks: bool = True
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_room(self.budget, 0, kept_tokens=self.budget - self.newest, newest_tokens=self.newest)
        if self.part < 1:
            raise WeirError(f"part of kvzip must be at least 1 token, got {self.part}")
        if not self.text:
            object.__setattr__(self, "text", self.stands_for)

    @property
    def stands_for(self) -> str:
        """The policy itself, with its sizes."""
        part = f", part={self.part}" if self.part != KVzip.part else ""
        asks = "" if self.asks else ", asks=false"
        return f"kvzip(budget={self.budget}, newest={self.newest}{part}{asks})"

    @property
    def kept(self) -> int:
        """Slots for tokens of the text, in each KV head."""
        return self.budget - self.newest

    @property
    def after(self) -> Pipe:
        """The pipe of a cache that holds the kept tokens of the text, and continues."""
        pools = Sink(self.kept), Recent(self.newest)
        return KeptText(pools, text=self.text, chosen_by=self.stands_for)

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Raise an error, because the whole text must be read before tokens are chosen."""
        raise WeirError(
            "kvzip chooses what to keep once a whole text has been read, so only weir.Stream can "
            "run it, and it cannot be part of another policy. Use Stream(model, 'kvzip(256)', "
            "tokenizer=tokenizer). For generate() and the server, use the pool gated, which "
            "predicts the same scores."
        )


@dataclass(frozen=True, repr=False)
class KeptText(Pipe):
    """The pipe of a cache under `kvzip` once its text has been read.

    Attributes:
        chosen_by: the policy that chose the tokens, with its sizes.
    """

    chosen_by: str = ""

    @property
    def stands_for(self) -> str:
        """The policy that chose the tokens, because the pools alone would hold the first tokens of
        a stream.
        """
        return self.chosen_by


def ends(sinks: int, recent: int) -> tuple[Pool, ...]:
    """Return the pools of the first and the newest tokens. Without sinks, only that of the
    newest.
    """
    return (Sink(sinks), Recent(recent)) if sinks else (Recent(recent),)


def check_room(budget: int, sinks: int, **slots: int) -> None:
    """Refuse a budget that leaves no slot for one of a policy's parts.

    `sinks` is the number of sinks, which may be 0, and `slots` has the slots of each other part.
    """
    parts = {name.replace("_", " "): count for name, count in slots.items()}
    lacking = " and ".join(name for name, count in parts.items() if count < 1)
    if lacking:
        there = {"sinks": sinks, **parts}
        beside = " and ".join(f"{count} {name}" for name, count in there.items() if count > 0)
        beside = f" after {beside}" if beside else ""
        raise WeirError(
            f"a budget of {budget} leaves no slots for {lacking}{beside}. Use a larger budget."
        )


def split_budget(budget: int, sinks: int, **parts: tuple[int, Callable[[int], Pool]]) -> Pipe:
    """Return a pipe of sinks, pools with given numbers of slots, and the newest tokens in the
    rest.
    """
    newest = budget - sinks - sum(n for n, _ in parts.values())
    check_room(budget, sinks, recent_tokens=newest, **{name: n for name, (n, _) in parts.items()})
    return Pipe((*ends(sinks, newest), *(make(n) for n, make in parts.values())))


@named("plain attention over everything; memory grows with the stream")
def dense() -> Policy:
    """Keep every token exactly, without a limit."""
    return Pipe((Recent(None),))


@named("Beltagy et al. 2020, Longformer; StreamingLLM's Figure 1b")
def window(budget: Count = 256) -> Policy:
    """Keep only the newest tokens. Most models fail once the first token is gone."""
    return Pipe((Recent(budget),))


@named("Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks")
def streaming_llm(budget: int = 256, sinks: int = 4) -> Policy:
    """Keep the first tokens and the newest, with positions counted in the cache."""
    return split_budget(budget, sinks)


@named("Xiao et al. 2024, Figure 1c: sliding window with re-computation")
def recompute(budget: int = 256, sinks: int = 0) -> Policy:
    """Recompute the last tokens for every new token: a slow reference for comparisons.

    The paper's form is `sinks=0`. A model that was trained with a start token at the beginning of
    every text needs one: `sinks=1` puts the first token of the stream before every window,
    `sinks=n` the first n.

    Args:
        budget: number of tokens that are read for every new one; nothing is cached.
        sinks: how many of them are the first tokens of the stream.
    """
    return Recompute(budget, sinks)


@named(
    'Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", '
    "arXiv:2505.23416"
)
def kvzip(
    budget: int = 256, newest: int | None = None, part: Count = 2048, asks: bool = True
) -> Policy:
    """Keep the tokens of a text that the model needs to repeat it, and the newest after the text.

    The first text that a `Stream` is fed is read whole, in memory that grows with it. Then the
    model repeats it, and each KV head keeps the tokens with the largest share of attention from the
    repetition. What is fed later is held by a window.

    Args:
        newest: slots for what is fed after the text; none for a quarter of the budget.
        part: number of tokens in each part in which the model repeats the text.
        asks: whether the model is asked in words to repeat the text, which needs the stream's
            tokenizer; otherwise the model is only shown the text again.
    """
    return KVzip(budget, max(1, budget // 4) if newest is None else newest, part, asks)


@named("Zhang et al. 2023, H2O: Heavy-Hitter Oracle for Efficient Generative Inference")
def h2o(budget: int = 256) -> Policy:
    """Keep the newest tokens and, of the others, those that received the most attention."""
    return split_budget(budget, 0, heavy_hitters=(budget // 2, Heavy))


@named("Zhao et al. 2024, BUZZ: Beehive-structured Sparse KV Cache with Segmented Heavy Hitters")
def buzz(
    budget: int = 350,
    stride: int = 5,
    sinks: int = 4,
    window: int | None = None,
    swapped: bool = False,
    local_max: bool = True,
    log_n: bool = False,
) -> Policy:
    """Keep the first tokens, the newest, and local maxima of the attention between them.

    The budget is the most that the cache can hold. The slots after the sinks are divided between
    window and hive as in the paper's Theorem 3.1, unless `window` sets the number of newest tokens.
    The other parameters are those of the hive.

    Args:
        window: number of newest tokens that are kept; none for the share of the paper's Theorem
            3.1.
    """
    if window is None:
        window = best_window(budget - sinks, stride)
    threshold = budget - sinks - window
    if threshold < stride:
        raise WeirError(
            f"a budget of {budget} is too small for {sinks} sinks, a window of {window} and a "
            f"hive with one stride of {stride}. Use a budget of at least "
            f"{sinks + window + stride}."
        )
    return Pipe((*ends(sinks, window), Hive(threshold, stride, swapped, local_max, log_n)))


@named("An Experiment of Implementing Reservoir Sampling to StreamingLLM, section 4")
def reservoir(
    budget: int = 256,
    samples: int | None = None,
    sinks: int = 4,
    weighted: bool = False,
    per_head: bool = False,
) -> Policy:
    """Keep the first tokens, the newest, and a uniform sample of all tokens between them.

    The other parameters are those of the pool.

    Args:
        samples: number of tokens in the sample; none for a quarter of the budget.
        weighted: whether the tokens of the sample represent all tokens it was drawn from.
    """
    samples = budget // 4 if samples is None else samples
    return split_budget(
        budget, sinks, samples=(samples, lambda n: Reservoir(n, weighted, per_head))
    )


@named("Kochetkova et al. 2025, BalanceKV, section 4.1: independent uniform sampling, the baseline")
def uniform(
    budget: int | None = None,
    rate: float | None = None,
    sinks: int | None = None,
    recent: int | None = None,
    weighted: bool = True,
    per_head: bool = True,
) -> Policy:
    """Keep the first tokens, the newest, and a random sample of the tokens between them.

    The sample has a fixed number of tokens or, with `rate`, a fixed share of the tokens that it is
    drawn from.

    Without a budget and a rate, the budget is 256. Unless they are given, sinks and recent tokens
    get an eighth of the budget each: 32 and 32 of 256, as in BalanceKV's runs. With a rate, they
    get 32 and 32. The other parameters are those of the pool.

    Args:
        budget: number of slots of each KV head in each layer; none for 256, or for no limit if
            `rate` is given.
        sinks: number of first tokens that are kept; none for an eighth of the budget.
        recent: number of newest tokens that are kept; none for an eighth of the budget.
        weighted: whether the tokens of the sample represent all tokens it was drawn from.
    """
    if budget is not None and rate is not None:
        raise WeirError(
            f"uniform takes either a budget or a rate, got both: budget={budget} and rate={rate}. "
            "Leave one out."
        )
    total = 256 if budget is None else budget
    eighth = max(1, total // 8)
    sinks = eighth if sinks is None else sinks
    recent = eighth if recent is None else recent
    n = None if rate is not None else total - sinks - recent
    if n is not None:
        check_room(total, sinks, recent_tokens=recent, samples=n)
    return Pipe((*ends(sinks, recent), Uniform(n, rate, weighted, per_head)))


@named("Zandieh et al. 2024, SubGen, section 3.2: greedy k-center")
def kcenter(budget: int = 256) -> Policy:
    """Keep the newest tokens and, of the others, those whose keys are farthest apart.

    Half of the budget is for the newest tokens, and half for the others, the centers. The first
    token of the stream is always a center.
    """
    return split_budget(budget, 0, centers=(budget // 2, KCenter))


@named("Li et al. 2024, SnapKV: LLM Knows What You Are Looking for Before Generation")
def snapkv(
    budget: int = 256,
    window: int = 32,
    kernel: int = 7,
    average: bool = False,
    frame: Frame = "read",
) -> Policy:
    """Keep the newest tokens and, of the others, those that the last queries attend to.

    In the paper, the whole prompt is read with exact attention, and then its last queries choose
    once which tokens stay. For this, create the cache with `prefill="full"`. The other parameters
    are those of the pool.
    """
    return Pipe((Snap(budget, window, kernel, average, frame),))


@named("Feng et al. 2025, Taming the Fragility of KV Cache Eviction in LLM Inference, as a stream")
def defensivekv(budget: int = 256, sinks: int = 4, half_life: int | None = 2048) -> Policy:
    """Keep sinks, the newest tokens and, of the others, those that any query has needed.

    A quarter of the budget is for the last kind.
    """
    defended = (budget // 4, lambda n: Defend(n, half_life=half_life))
    return split_budget(budget, sinks, defended_tokens=defended)


@named("error certificates, arXiv:2607.21475; Duffield et al. 2007, priority sampling")
def certified(budget: int = 256, sinks: int = 4, floor: float = 0.1, watch: int = 8) -> Policy:
    """Keep sinks, the newest tokens, heavy hitters and a weighted sample of the rest.

    The last two get a quarter of the budget each, or less if the budget is too small for that. The
    sample makes sums over all tokens unbiased, and allows a bound on the error (`Stream.report`).
    """
    # A small budget must leave a slot for a newest token.
    quarter = min(budget // 4, (budget - sinks - 1) // 2)
    samples = (quarter, lambda n: Tail(n, floor=floor, watch=watch))
    return split_budget(budget, sinks, heavy_hitters=(quarter, Heavy), samples=samples)


@named("ResKV, arXiv:2607.29591")
def reskv(budget: int = 256, sinks: int = 4, half_life: int | None = 256) -> Policy:
    """Keep sinks and the newest tokens, and merge older tokens into means.

    An eighth of the budget is for means. A merged token counts half as much after `half_life` more
    tokens.
    """
    return split_budget(
        budget, sinks, means=(budget // 8, lambda n: Residue(n, half_life=half_life))
    )


@named('Zweiger et al. 2026, "Fast KV Compaction via Attention Matching", arXiv:2602.16284')
def attention_matching(budget: int = 256, sinks: int = 4, half_life: int | None = 64) -> Policy:
    """Keep sinks, the newest tokens and, with new weights, tokens that the last queries chose.

    Experimental. A quarter of the budget is for the chosen tokens. Their weights make up for
    evicted tokens. Log-weights halve after `half_life` more tokens.
    """
    middle = budget // 4
    newest = budget - sinks - middle
    if newest < Snap.window:
        raise WeirError(
            f"a budget of {budget} leaves too few slots for the {Snap.window} recent tokens whose "
            f"queries choose, after {sinks} sinks and {middle} chosen tokens. Use a larger budget."
        )
    return Pipe((*ends(sinks, newest), Match(Snap(middle), half_life=half_life)))


@named("Oren et al. 2024, TOVA: Transformers are Multi-State RNNs")
def tova(budget: int = 256) -> Policy:
    """Keep the tokens that the last query attends to most, the same in all heads of a layer."""
    return Pipe((Tova(budget),))


@named("Park et al. 2025, KeyDiff: Key Similarity-Based KV Cache Eviction")
def keydiff(budget: int = 256) -> Policy:
    """Keep the tokens whose keys point least in the average direction of all keys."""
    return Pipe((KeyDiff(budget),))


@named("Adnan et al. 2024, Keyformer: KV Cache Reduction through Key Tokens Selection")
def keyformer(budget: int = 256) -> Policy:
    """Keep the newest tokens (three tenths of the budget) and, of the others, those with the most
    attention plus noise.
    """
    return split_budget(budget, 0, key_tokens=(budget - max(1, 3 * budget // 10), Keyformer))


@named("Shi et al. 2025, LaCache: Ladder-Shaped KV Caching for Efficient Long-Context Modeling")
def lacache(budget: int = 256, sinks: int = 4, keep: int = 1, of: int = 2) -> Policy:
    """Keep the first tokens, the newest (a quarter of the budget), and some of the others: fewer
    the older they are, and different ones in each layer.

    The other parameters are those of the ladder.
    """
    recent = max(1, budget // 4)
    n = budget - sinks - recent
    if n < of:
        raise WeirError(
            f"a budget of {budget} leaves no slots for a group of {of} after {sinks} sinks and "
            f"{recent} recent tokens. Use a larger budget."
        )
    return Pipe((*ends(sinks, recent), Ladder(n, keep, of)))


@named("Zandieh et al. 2024, SubGen: Token Generation in Sublinear Time and Memory, Algorithm 1")
def subgen(
    budget: int = 256,
    sinks: int = 4,
    recent: int | None = None,
    clusters: int | None = None,
    per_cluster: int = 4,
    delta: float | Literal["auto"] = "auto",
    exact: bool = True,
) -> Policy:
    """Keep the first tokens, the newest, and samples of all tokens between them that represent the
    rest.

    Slots that are left by sinks, recent tokens and clusters are for the samples of the numerator.
    The other parameters are those of the pool.

    Args:
        recent: number of newest tokens that are kept; none for two fifths of the budget, minus the
            sinks.
        clusters: the most clusters, each with `per_cluster` slots; none for as many as fit in two
            fifths of the budget.
    """
    recent = max(1, 2 * budget // 5 - sinks) if recent is None else recent
    if clusters is None:
        clusters = max(1, 2 * budget // 5 // max(1, per_cluster))
    samples = budget - sinks - recent - clusters * per_cluster
    slots = clusters * per_cluster
    check_room(budget, sinks, samples=samples, recent_tokens=recent, slots_of_clusters=slots)
    return Pipe((*ends(sinks, recent), SubGen(samples, clusters, per_cluster, delta, exact)))


@named(
    "Kochetkova et al. 2025, BalanceKV: Streaming Attention Approximation via Discrepancy Theory"
)
def balancekv(
    budget: int = 256,
    sinks: int | None = None,
    recent: int | None = None,
    block: int | None = None,
    halves: Halves = "pairs",
    gamma: float | None = 4.0,
    temperature: float = 0.1,
    constant: float = 0.025,
    sets: Sums = "shared",
    precision: float = 0.1,
    eager: bool = False,
    outliers: Annotated[float, Bounds(0, 1, without=1)] = 0.0,
) -> Policy:
    """Keep the first tokens, the newest, and balanced halves of all tokens between them, weighted
    to represent the rest.

    Sinks and recent tokens are an eighth of the budget each unless they are given: 32 and 32 of 256
    as in the authors' code, 256 and 256 of 2,048 as in the paper. Of the other slots, the share
    `outliers` keeps tokens whose keys point away from the others: the paper's variant for
    needle-in-a-haystack tests. The other parameters are those of the pool.

    Args:
        sinks: number of first tokens that are kept; none for an eighth of the budget.
        recent: number of newest tokens that are kept; none for an eighth of the budget.
        outliers: of the other slots, the share for keys that point away from the others.
    """
    eighth = max(1, budget // 8)
    sinks = eighth if sinks is None else sinks
    recent = eighth if recent is None else recent
    away = max(0, int(outliers * (budget - sinks - recent)))
    n = budget - sinks - recent - away
    if n < 4:
        raise WeirError(
            f"a budget of {budget} leaves fewer than 4 slots for balance after sink({sinks}), "
            f"recent({recent}) and outliers({away}). Use a larger budget."
        )
    pool = Balance(n, block, halves, gamma, temperature, constant, sets, precision, eager)
    return Pipe((*ends(sinks, recent), *([Outliers(away)] if away else []), pool))
