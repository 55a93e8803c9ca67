"""Figures beside re-computation: the last tokens read anew for every token (StreamingLLM's oracle).

The paper reports up to 22.2 times at 4,096 slots, on a GPU (Xiao et al. 2024, section 4.5).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from weir.stream import Stream
from weir_bench.bounds import of_step
from weir_bench.caches import Weir, as_it_is_and_compiled
from weir_bench.figure import Row, Setting, figure
from weir_bench.model import model_of
from weir_bench.timing import Doing, in_turns, middle


@figure("recompute", "a token beside re-computation of the window", bound="bytes")
def recompute(setting: Setting) -> Iterator[Row]:
    """`streaming_llm` against `recompute`, per token, folds included."""
    sizes, model = setting.sizes, model_of(setting)
    # What the targets were set for; in half precision the matrices of a prompt are much faster.
    asked = setting.dtype == torch.float32
    for slots, target in ((sizes.slots, 32.0), (sizes.many_slots, 80.0)):
        setting.say(f"re-computation of {slots:,} tokens")
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(sizes.vocabulary, (slots,), generator=generator)
        peer = Stream(model, f"recompute({slots})")
        peer.feed(ids)
        ours = as_it_is_and_compiled(setting, "streaming_llm", slots)
        # A round of ours is all tokens between two folds, and the fold.
        rounds = {name: Doing(partial(_steps, each, sizes.chunk)) for name, each in ours.items()}
        feeding = Doing(partial(peer.feed, ids[:1]))
        times = middle(in_turns({**rounds, "peer": feeding}, sizes.slow, warm=1))
        for name in ours:
            own = times[name] / sizes.chunk
            bound = of_step(setting, own, ours[name])
            yield Row(
                f"`recompute` ÷ `streaming_llm`{name}, per token at {slots:,} slots",
                own * 1e3,
                times["peer"] * 1e3,
                "ms",
                times["peer"] / own,
                target if asked else None,
                least=True,
                **bound._asdict(),
            )


def _steps(cache: Weir, count: int) -> None:
    for _ in range(count):
        cache.step()
