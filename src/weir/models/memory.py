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
        return max(0, min(of_machine, _of_container()))
    return of_machine


def _of_container() -> int:
    """What a control group has left, pages of files with it, which the system takes back."""
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
