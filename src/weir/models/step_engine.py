"""Interface of engines that run decode steps instead of the model.

Each kind of device has one engine: a CPU has native steps, in a room above this one, and a GPU has
steps under `torch.compile`. Hooks and caches use only this interface. `weir.compile_steps` chooses
the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from weir.models.model_spec import ModelSpec
from weir.slab import Step, StepSlots

Given = dict[str, Any]
"""A decoder's arguments by name; transformers decides what they are."""
OwnForward = Callable[..., BaseModelOutputWithPast]
"""A decoder's own forward."""
RunWhole = Callable[[Step, list[int]], Tensor | None]
"""Runs a step like `StepEngine.step`, but from the token id of each row (a list) to logits [batch,
vocabulary], which it returns. Returns None without any effect if the model has to be called.
"""


class StepEngine(Protocol):
    """Runs steps of one token for each row over a cache's slots, if it computes the same as the
    model.
    """

    run: Literal["native", "compiled"]
    """How its steps run, as `StreamingCache.steps` reports it."""

    def prepare(self) -> None:
        """Find out from the model's modules whether the engine computes the same as the model. This
        does nothing if the answer is known and no module has been replaced since.

        While this runs, the model's configuration selects weir's attention, as during a call, and
        no other thread calls the model.
        """

    def step(self, step: Step, given: Given, own: OwnForward) -> BaseModelOutputWithPast | None:
        """Run a step.

        Args:
            step: the token of each row; the engine sets its `largest` if it has changed the slots.
            given: the decoder's arguments by name.
            own: the decoder's own forward.

        Returns:
            The decoder's output; None if the model has to run the step.
        """

    def whole_step(self, model: nn.Module, slots: StepSlots) -> RunWhole | None:
        """Return a function that runs steps of a model from token ids to logits; None if the model
        has to be called, for example for the first step over some slots.

        Args:
            model: the causal language model around the decoder.
            slots: the slots of the cache.
        """

    def why_not(self, slots: StepSlots, rows: int) -> str | None:
        """Return why the model runs its own steps now, as far as `prepare` and the last step could
        tell; None if there is no reason against the engine.

        Args:
            slots: the slots of the cache.
            rows: number of rows of the cache.
        """


MakeEngine = Callable[[ModelSpec], StepEngine]
"""Makes the engine of a model."""
