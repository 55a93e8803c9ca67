"""Decode steps under `torch.compile`, the engine for GPUs.

`torch.compile` compiles the decoder's forward, with a stand-in for the cache. The cache's slots are
buffers that keep their shape and their memory, so one program serves an endless stream.
PyTorch's guards notice when a part of the model is replaced. PyTorch compiles a program for each
size of batch and cache, up to its own limit; other sizes run uncompiled.

The positions of the stream and the mask function must run in Python. They are marked with
`torch.compiler.disable` where they are defined (`hooks.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from weir.errors import WeirError, first_line
from weir.models.cache_name import CACHE
from weir.models.maskless_cache import MasklessCache
from weir.models.notices import say, say_once
from weir.models.step_engine import Given, OwnForward
from weir.slab import AttentionParams, HeadSplit, HeldPart, Step, StepSlots

WAITING = (
    "torch.compile compiles the decode step of this model, which takes from seconds to minutes for "
    "each size of batch and cache"
)
"""Notice written before a model's first compiled step."""


RunDecoder = Callable[[OwnForward, Given], BaseModelOutputWithPast]
"""Calls a decoder's forward with its arguments."""


class CompiledStep:
    """A decoder's steps under `torch.compile`: a `StepEngine`.

    Args:
        options: keyword arguments for `torch.compile`.
        strict: raise a WeirError if a step cannot be compiled, and write no notices.

    Raises:
        WeirError: `torch.compile` does not accept these options.
    """

    run: Literal["native", "compiled"] = "compiled"

    def __init__(self, options: Mapping[str, Any], strict: bool = False) -> None:
        self._strict = strict
        self._failed: str | None = None
        # PyTorch keeps and counts programs by the code of a function. With a copy of the code, the
        # sizes of one model do not use up the limit of the others.
        code = _run_decoder.__code__.replace()
        function: Any = FunctionType(code, globals(), "decoder")
        try:  # `torch.compile` changes the options in place
            self._run: RunDecoder = torch.compile(
                function, dynamic=False, **copy.deepcopy(dict(options))
            )
        except Exception as error:  # of several types, one of them private
            raise WeirError(
                f"torch.compile does not accept these options: {first_line(error)}"
            ) from None

    def prepare(self) -> None:
        """Do nothing, because PyTorch's guards notice replaced modules."""

    def step(self, step: Step, given: Given, own: OwnForward) -> BaseModelOutputWithPast | None:
        """Run a step; see `StepEngine.step`."""
        if self._failed is not None or torch.compiler.is_compiling():
            return None
        if not self._strict:
            say_once(WAITING)
        cache = StepCache(step)
        try:
            output = self._run(own, {**given, CACHE: cache})
        except WeirError:
            raise
        except Exception as error:
            self._failed = f"the steps of this model cannot be compiled here: {_reason(error)}"
            if self._strict:
                raise WeirError(self._failed) from error
            say(f"{self._failed}; they run uncompiled")
            return None
        step.largest = cache.largest
        return output

    def whole_step(self, model: nn.Module, slots: StepSlots) -> None:
        """Return None, because a compiled step covers only the decoder."""

    def why_not(self, slots: StepSlots, rows: int) -> str | None:
        """Return why the model runs its own steps; see `StepEngine.why_not`."""
        return self._failed if slots.reason is None else slots.reason


def _run_decoder(own: OwnForward, given: Given) -> BaseModelOutputWithPast:
    """Call a decoder's forward. Each engine has a copy of this function, with separate programs."""
    return own(**given)


class StepCache(MasklessCache):
    """Stands for the cache in a compiled forward of one token for each row.

    Attributes:
        largest: receives the largest absolute key or value of each part and row (`Step.largest`).
    """

    def __init__(self, step: Step) -> None:
        super().__init__()
        layers = step.held()
        device = layers[0][0].slots.keys.device
        ends = torch.from_numpy(step.spans[:, 1:]).to(device)
        self._waiting = torch.from_numpy(step.waiting).to(device)
        self.largest = torch.zeros(ends.shape, device=device)
        self._layers: list[_CompiledLayer] = []
        stop = 0
        for parts in layers:
            start, stop = stop, stop + len(parts)
            rows = ends[start:stop].unbind(), self.largest[start:stop].unbind()
            self._layers.append(_CompiledLayer(parts, *rows))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensor]:
        """Pass new keys and values on to weir's attention, which calls `attend`."""
        return (self, layer_idx, key_states), value_states

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """Store one token of each row and answer its queries [batch, heads, 1, key_dim]."""
        return self._layers[layer].decode(queries, keys, values, params, self._waiting)


class _CompiledLayer:
    """The parts of one layer in a compiled step.

    Args:
        parts: the parts of the layer.
        ends: for each part, the slot of each row's token [batch], int64.
        largest: for each part, the tensor that receives the largest absolute key or value of each
            row [batch], float32.
    """

    def __init__(
        self, parts: Sequence[HeldPart], ends: Sequence[Tensor], largest: Sequence[Tensor]
    ) -> None:
        self._parts = [part.slots for part in parts]
        self._ends, self._largest = ends, largest
        self._split = HeadSplit.of([part.heads for part in parts], ends[0].device)

    def decode(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        params: AttentionParams,
        waiting: Tensor,
    ) -> Tensor:
        calls = [
            partial(part.decode, ends=ends, waiting=waiting, largest=largest)
            for part, ends, largest in zip(self._parts, self._ends, self._largest, strict=True)
        ]
        if self._split is None:
            return calls[0](queries, keys, values, params)
        return self._split.join_answers(calls, queries, keys, values, params)


def _reason(error: Exception) -> str:
    """Return the reason of an error in one line. If the first line only names the backend that
    raised it, this is the second line.
    """
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return others[0] if others and first.endswith("raised:") else first
