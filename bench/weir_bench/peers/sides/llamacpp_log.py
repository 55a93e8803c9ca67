"""Messages of llama.cpp: errors alone."""

from __future__ import annotations

import ctypes
import sys

import llama_cpp

WARNING = 3
"""Level of llama.cpp's warnings; errors are above it."""


def _say(level: int, text: bytes, _: object) -> None:
    if level > WARNING:
        sys.stderr.write(text.decode(errors="replace"))


_LOG = llama_cpp.llama_log_callback(_say)
"""The callback, which llama.cpp holds by address only."""


def start() -> None:
    """Start llama.cpp, and print its errors on standard error and nothing else."""
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(_LOG, ctypes.c_void_p(0))
