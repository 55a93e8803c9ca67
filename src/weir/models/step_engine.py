"""What runs a decode step in the model's place, and says why it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class StepEngine(Protocol):
    """Runs steps of one token a row over a cache's slots, where it is proved to compute the same.

    `models.native_step.NativeStep` is one.
    """

    def prepare(self) -> str | None:
        """Prove the model's form; returns why its steps are the model's own, None if they are not.

        The attention of the model's configuration is weir's, as during a call.
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
        """Return why steps over a cache's layers are the model's own; None if they are not.

        Args:
            stack: the layers, `cache.forward.LayerStack`.
        """
