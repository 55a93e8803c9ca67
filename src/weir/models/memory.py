"""Measures free memory and the size of a model."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

GROUP = Path("/sys/fs/cgroup")
"""Control group of a container (version 2)."""
_LIMITED = ("max", "current")


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device; None if the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    of_machine = _of_machine()
    if of_machine is None:
        return None
    with suppress(OSError, ValueError):  # the limit is "max", or there are no control groups
        return max(0, min(of_machine, _of_container()))
    return of_machine


def _of_container() -> int:
    """Return the bytes that a control group has left, including file pages, which can be
    reclaimed.
    """
    limit, taken = (int((GROUP / f"memory.{name}").read_text("ascii")) for name in _LIMITED)
    lines = (GROUP / "memory.stat").read_text("ascii").splitlines()
    parts = dict(line.split() for line in lines)
    return limit - taken + sum(int(parts.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))


def _of_machine() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights and buffers as stored, quantized ones included."""
    found = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(map(_stored, found.values()))


def _stored(t: Tensor) -> int:
    if not is_traceable_wrapper_subclass(t):
        return t.numel() * t.dtype.itemsize
    inner = (getattr(t, name) for name in t.__tensor_flatten__()[0])
    return sum(_stored(part) for part in inner if isinstance(part, Tensor))
