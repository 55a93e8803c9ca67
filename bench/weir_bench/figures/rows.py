"""Figures of many streams at once: sixteen rows beside one, and rows that are not in step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

import torch
from transformers import PreTrainedModel

from weir.errors import WeirError
from weir.models import compile_steps, load
from weir_bench.caches import Weir
from weir_bench.figure import Row, Setting, figure
from weir_bench.model import model_of, twin_of
from weir_bench.timing import in_turns

POLICY = "streaming_llm"
ROWS = 16
ASKED = 1.5
"""Milliseconds that a compiled step of `nano` may take."""


@figure(
    "rows",
    "a decode step of sixteen streams, in step and ragged, beside one stream's",
    bound="bytes",
)
def rows(setting: Setting) -> Iterator[Row]:
    """`streaming_llm` on the model of the figures and on `nano`, as it is and compiled."""
    sizes = setting.sizes
    models: dict[str, tuple[list[PreTrainedModel], int]] = {
        "": ([model_of(setting), twin_of(setting)], sizes.slots),
    }
    if sizes.nano:
        packaged = [load("nano", dtype=setting.dtype)[0] for _ in range(2)]
        models[" of `nano`"] = packaged, min(256, sizes.slots)
    for whose, ((plain, twin), slots) in models.items():
        yield from _rows(plain, f"{whose}, {slots:,} slots", slots, setting)
        compile_steps(twin, strict=True, backend=setting.sizes.backend)
        setting.say(f"compiling steps of {ROWS} rows")
        try:
            found = list(_rows(twin, f"{whose}, {slots:,} slots, compiled", slots, setting))
            yield from found
            if whose:
                yield _one(found[-1].peer, f"{whose}, {slots:,} slots, compiled")
        except WeirError as error:
            setting.say(str(error))


def _rows(model: PreTrainedModel, where: str, slots: int, setting: Setting) -> Iterator[Row]:
    policy, chunk = f"{POLICY}(budget={slots})", setting.sizes.chunk
    # Rows that begin later by a number coprime to the chunk fold at different steps, all of them.
    later = [row * 37 % chunk for row in range(ROWS)]
    contenders = {
        "one": Rows(model, policy, chunk, [0], slots),
        "in step": Rows(model, policy, chunk, [0] * ROWS, slots),
        "ragged": Rows(model, policy, chunk, later, slots),
    }
    # Whole rounds of the tails, so that each is seen as full as it gets and as empty.
    rounds = max(2, setting.sizes.steps // chunk) * chunk
    times = in_turns(contenders, rounds, warm=3)
    plain = _without_folds(times, contenders, warm=3)
    one, many, ragged = (plain[name] for name in contenders)
    yield Row(
        f"decode call of {ROWS} ragged rows ÷ of {ROWS} rows in step{where}",
        ragged * 1e3,
        many * 1e3,
        "ms",
        ragged / many,
        1.05,
        note="medians of the calls in which none of the caches folds",
    )
    yield Row(
        f"tokens per second of {ROWS} rows in step ÷ of one row{where}",
        many * 1e3 / ROWS,
        one * 1e3,
        "ms a token",
        ROWS * one / many,
        8.0,
        least=True,
        note="the same calls",
    )


def _one(one: float, where: str) -> Row:
    """One row's step beside what was asked of it."""
    return Row(f"decode step of one row{where} ÷ {ASKED:g} ms", one, ASKED, "ms", one / ASKED, 1.0)


class Rows(Weir):
    """A step of a batch, each row past its budget.

    Attributes:
        folding: for every step, whether it folded.
    """

    def __init__(
        self, model: PreTrainedModel, policy: str, chunk: int, later: list[int], slots: int
    ) -> None:
        super().__init__(model, policy, chunk, rows=len(later))
        self.folding: list[bool] = []
        length = slots + 2 * chunk
        generator = torch.Generator().manual_seed(0)
        shape = (len(later), length)
        ids = torch.randint(model.config.vocab_size, shape, generator=generator)
        real = torch.arange(length) >= torch.tensor(later)[:, None]
        with torch.no_grad():
            model(
                input_ids=ids,
                attention_mask=real.long(),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self.folds.clear()

    def step(self) -> None:
        """One forward of one token of each row."""
        before = len(self.folds)
        super().step()
        self.folding.append(len(self.folds) > before)


def _without_folds(
    times: Mapping[str, list[float]], contenders: Mapping[str, Rows], warm: int
) -> dict[str, float]:
    """The median of each contender's steps in rounds in which no cache folded."""
    folding = zip(*(contender.folding[warm:] for contender in contenders.values()), strict=True)
    quiet = [not any(turn) for turn in folding]
    kept = {
        name: [took for took, free in zip(taken, quiet, strict=True) if free]
        for name, taken in times.items()
    }
    # Where every round folds, as with very short tails, all of them are what there is.
    return {name: median(kept[name] or times[name]) for name in times}
