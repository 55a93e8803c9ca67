"""What `weir serve --deterministic` costs: rows decoded one by one, beside all of them together."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from weir.models import load
from weir.serve import Engine, MemoryStore, SampledToken, Sampler, SamplingParams, Sequence
from weir.stream import Sampling
from weir_bench.figure import Row, Setting, figure
from weir_bench.model import model_of
from weir_bench.timing import Contender, in_turns, middle

POLICY = "streaming_llm"
ROWS = (1, 4, 16)
MOST = 1 << 20
"""Tokens of an answer: more than are ever timed."""


@figure(
    "deterministic",
    "a step of an engine that decodes each row by itself, beside one that decodes all together",
    asked=True,
    bound="bytes",
)
def deterministic(setting: Setting) -> Iterator[Row]:
    """`streaming_llm` on the model of the figures and on `nano`, for 1, 4 and 16 answers."""
    sizes = setting.sizes
    models = {"": model_of(setting), " of `nano`": load("nano", dtype=setting.dtype)[0]}
    for whose, model in models.items():
        slots = min(256, sizes.slots)
        for rows in ROWS:
            setting.say(f"{rows} answers{whose}")
            contenders = {
                name: Answering(model, f"{POLICY}(budget={slots})", sizes.chunk, rows, apart=apart)
                for name, apart in (("apart", True), ("together", False))
            }
            took = middle(in_turns(contenders, min(sizes.steps, 24), warm=2))
            yield Row(
                f"a step of {rows} answers, each row by itself ÷ all together{whose}",
                took["apart"] * 1e3,
                took["together"] * 1e3,
                "ms",
                took["apart"] / took["together"],
            )


class Answering(Contender):
    """A step of an engine, all of whose rows answer.

    Args:
        model: of the engine.
        policy, chunk, rows: of it.
        apart: each row is decoded by itself.
    """

    def __init__(
        self, model: PreTrainedModel, policy: str, chunk: int, rows: int, *, apart: bool
    ) -> None:
        self._engine = Engine(model, policy, rows, MemoryStore(), chunk=chunk, deterministic=apart)
        generator = torch.Generator().manual_seed(0)
        for row in range(rows):
            ids = torch.randint(model.config.vocab_size, (32 + row,), generator=generator)
            chooser = Sampler(SamplingParams(Sampling(temperature=0)))
            turn = Sequence(
                str(row), None, ids.tolist(), MOST, frozenset(), chooser, NullListener()
            )
            self._engine.submit(turn)
        for _ in range(rows):  # a step reads one prompt or more
            self._engine.step()

    def step(self) -> None:
        """A token of each answer."""
        self._engine.step()


class NullListener:
    """Listener that ignores what it is told."""

    def on_token(self, token: SampledToken) -> str | None:
        """Go on."""
        return None

    def on_finish(self, reason: str) -> None:
        """Do nothing."""

    def on_failure(self, error: Exception) -> None:
        """Raise the error: what is timed has to work.

        Raises:
            Exception: the turn's error.
        """
        raise error
