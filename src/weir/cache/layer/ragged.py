"""Rows that end in different slots, one token of each: where tokens go and who sees what.

Layers of equal lengths need the same, so it is made once for all of them; a step of a small model
is short enough for it to be seen. Knows nothing about weights or pools.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from weir.slab import slot_lines


class StepEnds:
    """The slots that one token of each row goes to.

    Attributes:
        slots: of each row.
        stop: slots of the longest row, with its token.
        in_step: whether all are the same.
    """

    def __init__(self, slots: tuple[int, ...], device: torch.device) -> None:
        self.slots = slots
        self.stop = max(slots) + 1
        self.in_step = slots.count(slots[0]) == len(slots)
        self._device = device
        self._lines: dict[tuple[int, int], Tensor] = {}
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    @cached_property
    def _tensor(self) -> Tensor:
        return torch.from_numpy(np.array(self.slots)).to(self._device)

    def lines(self, kv_heads: int, size: int) -> Tensor:
        """`slot_lines` of the slots in a buffer of `size` slots a row [batch * kv_heads]."""
        lines = self._lines.get((kv_heads, size))
        if lines is None:
            lines = self._lines[kv_heads, size] = slot_lines(self._tensor, kv_heads, size)
        return lines

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to logits over the first `stop` slots [batch, 1, 1, 1, stop].

        -inf behind a row's own token, and `window` or more tokens before it.
        """
        mask = self._masks.get((window, dtype))
        if mask is None:
            # By NumPy: on a CPU its calls take a third of the time of PyTorch's, and to another
            # device goes one copy in place of five kernels.
            slots, ends = np.arange(self.stop), np.array(self.slots)[:, None]
            unseen = slots > ends
            if window is not None:
                unseen |= slots <= ends - window
            numbers = np.where(unseen, np.float32(-np.inf), np.float32(0.0))
            mask = torch.from_numpy(numbers)[:, None, None, None].to(self._device, dtype)
            self._masks[window, dtype] = mask
        return mask
