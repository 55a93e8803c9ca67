"""Start llama.cpp so that it prints errors only."""

from __future__ import annotations

import ctypes
import sys

import llama_cpp

WARNING = 3
"""The level of llama.cpp's warnings. Errors have a higher level."""


def _say(level: int, text: bytes, _: object) -> None:
    if level > WARNING:
        sys.stderr.write(text.decode(errors="replace"))


_LOG = llama_cpp.llama_log_callback(_say)
"""The callback. This reference keeps it alive, because llama.cpp stores only its address."""


def start() -> None:
    """Start llama.cpp, and print its errors on standard error and nothing else."""
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(_LOG, ctypes.c_void_p(0))
