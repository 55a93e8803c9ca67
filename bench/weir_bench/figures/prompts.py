"""Figures of prompts: reading one under each policy beside exact attention, and beside arithmetic.

A prompt is multiplied with every weight, which no policy can spare it; what is left is attention,
which grows with the prompt unless a policy holds it back, and folds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from statistics import median

import torch
from torch import Tensor
from transformers import DynamicCache

from weir.stream import PIECE
from weir_bench.bounds import of_prompt
from weir_bench.caches import Decoding, Weir, feed_prompt, hold_prompt
from weir_bench.figure import Row, Setting, figure
from weir_bench.figures.policies import budgeted, wanted
from weir_bench.model import model_of
from weir_bench.timing import Doing, in_turns, middle
from weir_bench.tracing import trace

TARGETS = {8192: 0.75, 32768: 0.3}
ROUNDS = 3
"""How often each prompt is read; of one policy a prompt has taken a fifth longer than the next."""


@figure("prompts", "a prompt under each policy, beside exact attention", asked=True)
def prompts(setting: Setting) -> Iterator[Row]:
    """Short and long prompts, and what they say of one that is far longer."""
    sizes, model = setting.sizes, model_of(setting)
    policies = {
        name: Weir(model, f"{name}(budget={sizes.slots})", sizes.chunk)
        for name in wanted(setting, budgeted())
    }
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(sizes.vocabulary, (1, max(sizes.prompts)), generator=generator)
    exact = Decoding(model, DynamicCache(config=model.config))
    found: dict[str, list[float]] = {name: [] for name in ("exact", *policies)}
    for tokens in sizes.prompts:
        setting.say(f"prompts of {tokens:,} tokens")
        ways = {
            name: partial(feed_prompt, cache, ids[:, :tokens]) for name, cache in policies.items()
        }
        ways["exact"] = partial(hold_prompt, exact, ids[:, :tokens])
        rounds = min(ROUNDS, sizes.slow)
        took = in_turns({name: Doing(do) for name, do in ways.items()}, rounds, warm=0)
        for name, taken in took.items():
            found[name].append(median(taken))
        yield from _beside_exact(setting, tokens, {name: each[-1] for name, each in found.items()})
    yield from _in_pieces(setting, ids[:, : min(sizes.prompts)])
    for name, cache in policies.items():
        trace(f"the next {sizes.chunk} tokens, {name}", partial(cache.feed, ids[:, : sizes.chunk]))
    far = {name: _beyond(sizes.prompts, taken, sizes.far) for name, taken in found.items()}
    far["exact"] = _beyond_squared(sizes.prompts, found["exact"], sizes.far)
    measured = " and ".join(f"{tokens:,}" for tokens in sizes.prompts)
    yield from _beside_exact(setting, sizes.far, far, f"worked out from {measured} tokens")


def _beside_exact(
    setting: Setting, tokens: int, took: Mapping[str, float], note: str = ""
) -> Iterator[Row]:
    """A row for each policy; `took` has its seconds, and those of exact attention."""
    model = model_of(setting)
    for name, own in took.items():
        if name == "exact":
            continue
        bound = of_prompt(setting, own, model, tokens)
        yield Row(
            f"prompt of {tokens:,} tokens, `{name}` at {setting.sizes.slots:,} slots ÷ exact "
            "attention",
            own,
            took["exact"],
            "s",
            own / took["exact"],
            TARGETS.get(tokens),
            note=note,
            **bound._asdict(),
        )


def _in_pieces(setting: Setting, ids: Tensor) -> Iterator[Row]:
    """Forwards of another length than a stream's, for a policy whose folds are cheap."""
    sizes = setting.sizes
    cache = Weir(model_of(setting), f"streaming_llm(budget={sizes.slots})", sizes.chunk)
    ways = {
        piece: Doing(partial(feed_prompt, cache, ids, piece))
        for piece in (PIECE // 4, PIECE // 2, PIECE, 2 * PIECE)
    }
    took = middle(in_turns({str(piece): do for piece, do in ways.items()}, sizes.slow, warm=0))
    plain = took[str(PIECE)]
    for piece in ways:
        if piece != PIECE:
            own = took[str(piece)]
            yield Row(
                f"prompt of {ids.shape[1]:,} tokens in pieces of {piece} ÷ in pieces of {PIECE}",
                own,
                plain,
                "s",
                own / plain,
                **of_prompt(setting, own, model_of(setting), ids.shape[1])._asdict(),
            )


def _beyond(tokens: tuple[int, ...], took: list[float], far: int) -> float:
    """What a longer prompt takes where every token past the budget takes as long as the last."""
    pace = (took[-1] - took[-2]) / (tokens[-1] - tokens[-2])
    return took[-1] + (far - tokens[-1]) * pace


def _beyond_squared(tokens: tuple[int, ...], took: list[float], far: int) -> float:
    """What it takes where time is p n + q n², as that of exact attention is."""
    first, second = (seconds / n for n, seconds in zip(tokens[-2:], took[-2:], strict=True))
    growth = max(0.0, (second - first) / (tokens[-1] - tokens[-2]))
    return far * (second + growth * (far - tokens[-1]))
