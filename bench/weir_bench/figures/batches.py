"""Figures of batches: from which number of rows on a step is a matter of arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import torch
from transformers import PreTrainedModel

from weir_bench.bounds import of_step
from weir_bench.caches import Weir
from weir_bench.figure import Row, Setting, figure
from weir_bench.model import model_of
from weir_bench.timing import in_turns

POLICY = "streaming_llm"
ROWS = (2, 4, 8, 16, 32, 64)
SLOTS = 256
"""Slots of a row: with more, 64 rows in step and as many ragged ones take many gigabytes."""
STEPS = 8
"""Steps that are timed of each batch: none of them folds."""


@figure("batches", "decode steps of 2 to 64 rows, in step and ragged, beside one row's")
def batches(setting: Setting) -> Iterator[Row]:
    """Time a token, beside that of a row alone; what bounds it, and how near it comes."""
    model, slots = model_of(setting), min(SLOTS, setting.sizes.slots)
    rounds = min(STEPS, setting.sizes.steps)
    for rows in ROWS:
        setting.say(f"{rows} rows")
        ways = {
            "alone": Batch(model, slots, setting.sizes.chunk, 1),
            "in step": Batch(model, slots, setting.sizes.chunk, rows),
            "ragged": Batch(model, slots, setting.sizes.chunk, rows, ragged=True),
        }
        times = {name: median(taken) for name, taken in in_turns(ways, rounds, warm=2).items()}
        for name in ("in step", "ragged"):
            bound = of_step(setting, times[name], ways[name], rows)
            yield Row(
                f"tokens per second of {rows} rows {name} ÷ of one row, {slots:,} slots",
                times[name] * 1e3 / rows,
                times["alone"] * 1e3,
                "ms a token",
                rows * times["alone"] / times[name],
                least=True,
                note=f"{rows / times[name]:,.0f} tokens a second",
                **bound._asdict(),
            )


class Batch(Weir):
    """A step of some rows past their budget, none of which folds in the next steps.

    Args:
        model: of the rows.
        slots: of each.
        chunk: tokens between two folds.
        rows: how many.
        ragged: rows stand in different places of their tails.
    """

    def __init__(
        self, model: PreTrainedModel, slots: int, chunk: int, rows: int, *, ragged: bool = False
    ) -> None:
        super().__init__(model, f"{POLICY}(budget={slots})", chunk)
        self.fill(slots + chunk)
        self.start_afresh()
        # Rows of the same stream: to read a prompt for each would take minutes, and change nothing.
        self.cache.batch_repeat_interleave(rows)
        self.token = torch.ones(rows, 1, dtype=torch.int64)
        most = chunk // 2
        if ragged and most > 1:
            count = torch.arange(rows) * 5 % most
            real = torch.arange(most) >= most - count[:, None]
            with torch.no_grad():
                model(
                    input_ids=self.token.expand(rows, most),
                    attention_mask=real.long(),
                    past_key_values=self.cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
