"""Memory that a forward frees stays with the process, for the next one.

glibc asks the system for each large tensor anew and gives it back when it is freed, until one of a
size was freed once: from then on it keeps such memory. A forward makes and frees the same tensors
in every layer, so without that each of their pages is handed out, and cleared, again and again.
"""

from __future__ import annotations

from functools import lru_cache

import torch

MOST = 2**25 - 2**16
"""Bytes of the largest tensor of which glibc learns that, and of its own notes beside it."""


@lru_cache
def keep_what_is_freed() -> None:
    """Let the C library keep what is freed up to `MOST` bytes at once, once in a process.

    Nothing is written to the tensor, so it takes no memory. Twice as much may stay with a process
    that has no use for it any more, as in every one that has freed something so large. Other
    libraries than glibc, and devices, do as they did.
    """
    torch.empty(MOST, dtype=torch.uint8, device="cpu")
