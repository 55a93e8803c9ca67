"""Interface of engines that run decode steps in place of the model.

One kind of machine has one engine: a CPU native steps, of a room above these, a GPU steps under
`torch.compile`. Hooks and caches know this interface alone, and `weir.compile_steps` chooses.
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
"""Runs a step of a token of each row as `StepEngine.step` does, and returns logits [batch,
vocabulary]; None, with no effect, where the model has to be called."""


class StepEngine(Protocol):
    """Runs steps of one token a row over a cache's slots, where it computes what the model does."""

    run: Literal["native", "compiled"]
    """How its steps run, as `StreamingCache.steps` says it."""

    def prepare(self) -> None:
        """Find out whether the engine computes what the model computes, as far as modules go; does
        nothing where that is known, and nothing of the model was replaced since.

        The attention of the model's configuration is weir's, as during a call, and no other thread
        calls the model.
        """

    def step(self, step: Step, given: Given, own: OwnForward) -> BaseModelOutputWithPast | None:
        """Run a step.

        Args:
            step: the token of each row; `largest` is set where the step took effect in the slots.
            given: the decoder's arguments by name.
            own: the model's own forward.

        Returns:
            The decoder's output; None where the step has to be the model's own.
        """

    def whole_step(self, model: nn.Module, slots: StepSlots) -> RunWhole | None:
        """Return what runs steps of a model from token ids to logits; None where the model has to
        be called, as for the first step over some slots.

        Args:
            model: the causal language model around the decoder.
            slots: of the cache.
        """

    def why_not(self, slots: StepSlots, rows: int) -> str | None:
        """Return why steps are the model's own now, as far as is known since `prepare` and the last
        step; None if nothing speaks against the engine's.

        Args:
            slots: of the cache.
            rows: of the cache.
        """


MakeEngine = Callable[[ModelSpec], StepEngine]
"""Makes the engine of a model."""
