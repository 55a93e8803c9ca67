"""Measures the relative error of a layer's attention under a policy.

BalanceKV (Kochetkova et al. 2025), section 4.1 and B.1: ‖z - Attn‖_F / ‖Attn‖_F over the last
queries of a text, where z is the attention output under the policy, and Attn the exact output. Each
layer gets the queries, keys and values of the exact model, so errors of lower layers do not add up.
In the paper the first and the last tokens are exact and the text between is compressed once; here a
policy can also read the text as a stream, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache.layer import Layer, LayerSpec
from weir.errors import PolicyError, WeirError
from weir.evals.capture import LayerInputs, capture
from weir.evals.report import line_style
from weir.models import window_of
from weir.policies import Pipe, Policy, Recompute, check_folder, parse_call, parse_policy
from weir.pools import CounterRNG, Recent

RATES = (1 / 2, 1 / 4, 1 / 8, 1 / 16)
"""The rates of the paper's Figure 1."""
MOST_TOKENS = 4096
MOST = 256
"""The number of queries, and of first tokens that stay exact, in the paper."""


@dataclass(frozen=True)
class ErrorSetup:
    """The split of a text into exact, compressed and query tokens.

    Attributes:
        tokens: length of the text.
        queries: number of last tokens whose queries are evaluated. With `whole`, their keys and
            values are exact.
        exact: number of first tokens that stay exact under policies whose budget is computed from a
            rate, if they have the parameters `sinks` and `recent` and neither is given.
        whole, chunk: fold the text before the queries at once, as in the paper; otherwise stream
            the text and fold every `chunk` tokens.
    """

    tokens: int
    queries: int
    exact: int
    whole: bool = True
    chunk: int = 64

    def __post_init__(self) -> None:
        if self.tokens < 4 and not self.queries:
            raise WeirError(
                f"{self.tokens} tokens are too few. The error is measured on the attention of the "
                "last quarter of the tokens to the earlier ones. Use a longer text."
            )
        if not 0 < self.queries < self.tokens:
            raise WeirError(
                f"queries must be at least 1 and fewer than the {self.tokens} tokens, got "
                f"{self.queries}. Use a longer text or another number of queries."
            )
        if not 0 <= self.exact < self.tokens - self.queries:
            raise WeirError(
                f"exact must be at least 0 and fewer than the {self.tokens - self.queries} tokens "
                f"before the queries, so that some are compressed, got {self.exact}. Use a longer "
                "text, or another number of queries or exact tokens."
            )

    @property
    def middle(self) -> int:
        """Number of tokens between the exact ones and the queries."""
        return self.tokens - self.queries - self.exact


@dataclass(frozen=True)
class SizedPolicy:
    """A policy with its budget.

    Attributes:
        name: the policy as it was given.
        policy: the policy with its budget.
        rate: the share of the middle from which the budget was computed; None if the policy was
            given with its size.
    """

    name: str
    policy: Policy
    rate: float | None = None


@dataclass(frozen=True)
class LayerError:
    """The error of one layer under one policy, over several seeds.

    Attributes:
        policy, name: the policy with its budget, and as it was given.
        rate: the share of the middle from which the policy's budget was computed; None if the
            policy was given with its size.
        layer: index of the layer.
        errors: the error for each seed.
        kept: number of tokens in slots of the pools at the end, as a share of the tokens before the
            queries.
        seconds: seconds spent folding (median over the seeds).
    """

    policy: str
    name: str
    rate: float | None
    layer: int
    errors: list[float]
    kept: float
    seconds: float

    @property
    def error(self) -> float:
        """The mean over the seeds."""
        return fmean(self.errors)

    @property
    def deviation(self) -> float:
        """The standard deviation over the seeds."""
        return pstdev(self.errors)

    def as_json(self) -> dict[str, Any]:
        """All figures by name, for JSON."""
        return {**asdict(self), "error": self.error, "deviation": self.deviation}


def set_up(
    model: PreTrainedModel,
    available: int,
    tokens: int | None = None,
    queries: int | None = None,
    exact: int | None = None,
    *,
    whole: bool = True,
    chunk: int = 64,
) -> ErrorSetup:
    """Build the paper's setup, as far as the model and the text allow.

    Args:
        model: the model. By default, as many tokens are used as fit in its window, at most 4,096.
        available: number of tokens of the text.
        tokens, queries, exact: as in `ErrorSetup`. By default, `queries` and `exact` are the
            paper's 256, but at most a quarter (`queries`) and an eighth (`exact`) of the tokens.
        whole, chunk: as in `ErrorSetup`.

    Raises:
        WeirError: the text is too short.
    """
    if tokens is None:
        window = window_of(model.config) or MOST_TOKENS
        tokens = min(available, window, MOST_TOKENS)
    elif tokens > available:
        raise WeirError(f"the text has only {available} tokens, but {tokens} are needed")
    queries = min(MOST, tokens // 4) if queries is None else queries
    exact = min(MOST, tokens // 8) if exact is None else exact
    return ErrorSetup(tokens, queries, exact, whole, chunk)


def size_policies(
    names: Sequence[str], setup: ErrorSetup, rates: Sequence[float] = ()
) -> tuple[list[SizedPolicy], list[str]]:
    """Give policies a budget for every rate.

    Args:
        names: policies as texts. With `rates`, these must be named policies without a budget.
        rates: shares of the middle to keep, each of which gives every policy a budget; if empty,
            the policies stay as they are.

    Returns:
        The policies that can be measured, and sentences that say which policies are left out at
        which rates because the budget would be too small.

    Raises:
        WeirError: a rate is not between 0 and 1, there are rates but a policy takes no budget, a
            policy caches nothing, or nothing can be measured.
        PolicyError: a policy cannot be parsed.
    """
    sized, missing = [], []
    for name, rate in product(names, rates or (None,)):
        text = name if rate is None else _with_rate(name, rate, setup)
        try:
            policy = parse_policy(text)
        except PolicyError as error:
            if rate is None:
                raise
            missing.append(f"{name} is left out at a rate of {rate:g}: {error}")
            continue
        if isinstance(policy, Recompute):
            raise WeirError(
                "recompute caches no keys, so there is no attention to compare. Use another policy."
            )
        sized.append(SizedPolicy(name, policy, rate))
    if not sized:
        raise WeirError(missing[0] if missing else "no policy was given")
    return sized, missing


@torch.no_grad()
def measure_error(
    model: PreTrainedModel,
    ids: Tensor,
    sized: Sequence[SizedPolicy],
    setup: ErrorSetup,
    *,
    layers: Sequence[int] | None = None,
    seeds: Sequence[int] = (0,),
    on_step: Callable[[int, int], bool | None] = lambda done, total: None,
) -> list[LayerError]:
    """Measure the error of every layer under every policy.

    Args:
        ids: the text [length], int64; the first `setup.tokens` are read.
        sized: the policies, from `size_policies`.
        layers, seeds: indices of layers, by default all that attend to the whole text; and random
            seeds, each of which is measured.
        on_step: called after each row with the number done and the total; True stops early.

    Returns:
        Rows by policy, rate and layer.

    Raises:
        WeirError: the model is not supported, or there is no such layer.
    """
    heard = capture(model, ids[: setup.tokens], layers)
    every = [_stream_layer(inputs, Pipe((Recent(None),)), 0, setup)[0] for inputs in heard]
    rows: list[LayerError] = []
    for one, (inputs, exact) in product(sized, zip(heard, every, strict=True)):
        pipe = one.policy.for_layer(inputs.layer, inputs.layers)
        answers = [_stream_layer(inputs, pipe, seed, setup) for seed in seeds]
        outs, kept, seconds = zip(*answers, strict=True)
        errors = [float((out - exact).norm() / exact.norm()) for out in outs]
        which = str(one.policy), one.name, one.rate, inputs.layer
        rows.append(LayerError(*which, errors, fmean(kept), median(seconds)))
        if on_step(len(rows), len(sized) * len(heard)):
            break
    return rows


def mean_over_layers(rows: Sequence[LayerError]) -> list[dict[str, Any]]:
    """Average the errors over the layers and the seeds, for each policy and rate.

    "deviation" is the deviation over the seeds of the mean over layers. "seconds" is for all layers
    together.
    """
    found = []
    for name, policy, rate in dict.fromkeys((row.name, row.policy, row.rate) for row in rows):
        which = (name, policy, rate)
        group = [row for row in rows if (row.name, row.policy, row.rate) == which]
        by_seed = [fmean(errors) for errors in zip(*(row.errors for row in group), strict=True)]
        found.append(
            {
                "name": name,
                "policy": policy,
                "rate": rate,
                "error": fmean(by_seed),
                "deviation": pstdev(by_seed),
                "kept": fmean(row.kept for row in group),
                "seconds": sum(row.seconds for row in group),
            }
        )
    return found


def _with_rate(name: str, rate: float, setup: ErrorSetup) -> str:
    """Give a policy a budget for the exact tokens and this share of the middle."""
    if not 0 < rate < 1:
        raise WeirError(f"a rate must be between 0 and 1, got {rate:g}")
    call = parse_call(name)
    if call is None or not call.takes_budget:
        raise WeirError(
            f"a rate needs a policy that takes a budget, and {name} does not. Use a named policy "
            "without a budget, such as uniform, or leave out the rate."
        )
    budget = setup.exact + max(1, round(rate * setup.middle))
    ends = {"sinks", "recent"}
    if ends <= set(call.parameters) and not ends & call.given.keys():
        # The sinks are the exact first tokens. One slot for recent tokens is enough. If the text is
        # folded at once, the newest tokens are those of the queries, which no pool receives.
        return call.with_arguments(budget=budget + 1, sinks=setup.exact, recent=1)
    return call.with_arguments(budget=budget)


def _stream_layer(
    inputs: LayerInputs, pipe: Pipe, seed: int, setup: ErrorSetup
) -> tuple[Tensor, float, float]:
    """Stream a layer's keys and values through a pipe, and attend with the last queries.

    Returns the outputs of these queries [1, heads, queries, value_dim], the number of tokens in
    slots of the pools at the end as a share of the tokens before the queries, and the seconds spent
    folding.
    """
    chunk = setup.queries + 1 if setup.whole else setup.chunk
    draws = CounterRNG(seed, inputs.layer)
    layer = Layer(LayerSpec(pipe, inputs.positions, chunk, draws, inputs.layer, inputs.layers))
    before = setup.tokens - setup.queries

    def feed(start: int, stop: int, **how: bool) -> Tensor:
        q, k, v = (t[:, :, start:stop] for t in (inputs.queries, inputs.keys, inputs.values))
        return layer.feed(q, k, v, inputs.params, seen=start, **how)

    if setup.whole:
        feed(0, before, prefill=True, answers=False)
        out = feed(before, setup.tokens)
    else:
        out = feed(0, setup.tokens)[:, :, before:]
    assert layer.state.slab is not None
    held = layer.state.slab.position[0, :, : layer.state.used[0]] >= 0
    return out.float(), float(held.sum(dim=1).float().mean()) / before, layer.take_fold_seconds()


KINDS = (".svg", ".png", ".pdf")
ACROSS = 4
"""Number of panels side by side."""


def check_plot(path: Path) -> None:
    """Check that a plot can be written to a file, before anything is measured."""
    if path.suffix.lower() not in KINDS:
        raise WeirError(f"the name of a plot must end with {' or '.join(KINDS)}, got {path}")
    check_folder(path.expanduser(), "the plot")


def write_plot(rows: Sequence[LayerError], path: Path) -> None:
    """Draw the errors, with bars of one standard deviation, as BalanceKV's Figure 1.

    Without rates, each policy is one point.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    layers = sorted({row.layer for row in rows})
    names = list(dict.fromkeys(row.name for row in rows))
    rates = sorted({row.rate for row in rows if row.rate is not None})
    across = min(ACROSS, len(layers))
    down = -(-len(layers) // across)
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "attention-error", "font.size": 9}
    with mpl.rc_context(style):
        figure = Figure(figsize=(2.6 * across + 0.6, 2.4 * down + 0.8), layout="constrained")
        panels = figure.subplots(down, across, sharey=True, squeeze=False).flatten()
        for axes, layer in zip(panels, layers, strict=False):
            for number, name in enumerate(names):
                mine = [row for row in rows if row.layer == layer and row.name == name]
                places = [names.index(name) if row.rate is None else row.rate for row in mine]
                errors, bars = [row.error for row in mine], [row.deviation for row in mine]
                how = {"ms": 4, "lw": 1.5, "capsize": 2, "label": name, **line_style(number)}
                axes.errorbar(places, errors, yerr=bars, **how)
            axes.set_title(f"layer {layer}", fontsize=9)
            if rates:
                axes.set_xscale("log", base=2)
                labels = [str(Fraction(rate).limit_denominator(1000)) for rate in rates]
                axes.set_xticks(rates, labels)
                axes.set_xlabel("rate")
            else:
                axes.set_xticks([])
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in panels[len(layers) :]:
            axes.set_visible(False)
        panels[0].set_ylabel("relative error")
        look = {"loc": "outside lower center", "ncols": min(6, len(names)), "frameon": False}
        figure.legend(*panels[0].get_legend_handles_labels(), **look)
        # Without a date, the same figures produce the same file.
        dateless = {"Date": None} if path.suffix.lower() == ".svg" else None
        try:
            figure.savefig(path.expanduser(), metadata=dateless)
        except OSError as error:
            raise WeirError(f"cannot write {path}: {error.strerror or error}") from None
