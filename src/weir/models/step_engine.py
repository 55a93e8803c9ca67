"""Interface of engines that run decode steps in place of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from weir.models.model_spec import ModelSpec

UNFINISHED = "the kernel is still being compiled; steps are native once it is"
"""Reason why steps are not native yet."""


class StepEngine(Protocol):
    """Runs steps of one token a row over a cache's slots, where it is proved to compute the same.

    `weir.native` has one for CPUs.
    """

    def is_prepared(self) -> bool:
        """Return whether `prepare` was called, and nothing of the model was replaced since."""

    def prepare(self) -> None:
        """Prove that the engine computes what the model computes, as far as modules go.

        The attention of the model's configuration is weir's, as during a call, and no other thread
        calls the model.
        """

    def step(self, rows: Any, given: dict[str, Any], usual: Callable[[], Any]) -> Any:
        """Run a step.

        Args:
            rows: the cache's rows, `cache.forward.StepRows`; `largest` is set where the step took
                effect in the slots.
            given: the decoder's arguments by name.
            usual: the model's own step.

        Returns:
            The decoder's output; None where the step has to be the model's own.
        """

    def why_not(self, stack: Any) -> str | None:
        """Return why steps over a cache's layers are the model's own now, as far as is known since
        `prepare` and the last step; None if nothing speaks against the engine's.

        Args:
            stack: the layers, `cache.forward.LayerStack`.
        """


MakeEngine = Callable[[ModelSpec, bool], StepEngine | None]
"""Makes the engine of a model, None where this machine has none; the flag says whether the first
step waits for its kernel."""
