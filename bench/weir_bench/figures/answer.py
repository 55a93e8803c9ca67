"""Figures of a long prompt and its answer: `balancekv` at a quarter of it beside exact attention.

Kochetkova et al. 2025 report 1.21 times the exact prefill and 1.01 times the exact decoding for
16,384 tokens and 1,024 generated (BalanceKV, Table 5).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median

import torch
from transformers import DynamicCache

from weir_bench.bounds import of_prompt, of_step
from weir_bench.caches import Decoding, Weir, feed_prompt, hold_prompt
from weir_bench.figure import Row, Setting, figure
from weir_bench.model import model_of, walk_path
from weir_bench.timing import Doing, in_turns, middle

CHUNKS = 8
"""How many times the usual chunk is taken in between two folds."""
ROUNDS = 3
"""How often the prompt is fed to each."""
STEPS = 32
"""Decode steps timed in one turn, spread over the tokens that are generated."""


@figure("answer", "balancekv at rate 1/4 beside exact attention: a long prompt and its answer")
def answer(setting: Setting) -> Iterator[Row]:
    """Prefill in pieces and decode of `balancekv`, against exact ones."""
    sizes, model = setting.sizes, model_of(setting)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(sizes.vocabulary, (1, sizes.prompt), generator=generator)
    budget = sizes.prompt // 4
    policy = f"balancekv(budget={budget})"
    # Few folds of many tokens: the slab is large, so the tail may be.
    chunk = CHUNKS * sizes.chunk
    ours = Weir(model, policy, chunk)
    exact = Decoding(model, DynamicCache(config=model.config))
    setting.say(f"prefill of {sizes.prompt:,} tokens")
    both = {
        "ours": Doing(partial(feed_prompt, ours, ids)),
        "exact": Doing(partial(hold_prompt, exact, ids)),
    }
    times = middle(in_turns(both, min(ROUNDS, sizes.slow), warm=0))
    fed, exactly = times["ours"], times["exact"]
    what = f"`{policy}`, {sizes.prompt:,} tokens, {sizes.generated:,} generated"
    note = f"chunk {chunk}; walk: {walk_path()}"
    by_prompt = of_prompt(setting, fed, model, sizes.prompt)
    yield Row(
        f"{what}: prefill ÷ exact prefill",
        fed,
        exactly,
        "s",
        fed / exactly,
        1.05,
        note=note,
        **by_prompt._asdict(),
    )
    own, peer = _generate(ours, exact, sizes.generated)
    yield Row(
        f"{what}: decode ÷ exact decode, folds included",
        own * 1e3,
        peer * 1e3,
        "ms",
        own / peer,
        0.6,
        note=note,
        **of_step(setting, own, ours)._asdict(),
    )


def _generate(ours: Weir, exact: Decoding, tokens: int) -> tuple[float, float]:
    """Seconds per token of either while `tokens` are generated."""
    between: dict[str, list[float]] = {"ours": [], "exact": []}
    ours.folds.clear()
    done = 0
    skipped = max(1, tokens // STEPS)
    both = {"ours": ours, "exact": exact}
    while done < tokens:
        for name, taken in in_turns(both, 1, warm=0).items():
            between[name] += taken
        more = torch.ones(1, min(skipped, tokens - done) - 1, dtype=torch.int64)
        with torch.no_grad():
            for each in both.values():
                if more.numel():
                    each.feed(more)
        done += 1 + more.shape[1]
    folds = sum(ours.folds) / tokens
    return median(between["ours"]) + folds, median(between["exact"])
