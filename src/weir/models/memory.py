"""How much memory is free on a device, and to a container that has a limit."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

GROUP = Path("/sys/fs/cgroup")
"""Where a container sees its control group (version 2)."""
_LIMITED = ("max", "current")


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device; None where nobody says so."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    of_machine = _of_machine()
    if of_machine is None:
        return None
    with suppress(OSError, ValueError):  # "max", or no control groups
        limit, taken = (int((GROUP / f"memory.{name}").read_text("ascii")) for name in _LIMITED)
        return max(0, min(of_machine, limit - taken))
    return of_machine


def _of_machine() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
