"""Time llama.cpp as `pip install llama-cpp-python` compiles it for this machine.

The library is called in the same way as by llama.cpp's own programs. The next token is the one with
the largest logit.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from protocol import gaps, serve, timed

TOGETHER = 512
"""Tokens of a prompt that are read at a time, as by default in llama.cpp."""


class NativeLlamaCpp:
    """A model and a context of llama.cpp.

    Args:
        wanted: "file", "threads", "flash", "context" and "slots" of the context, "ids" to read.
    """

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._file, self._ids = wanted["file"], wanted.get("ids", [])
        model = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(self._file.encode(), model)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {self._file}")
        slots = wanted.get("slots", 1)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = wanted["context"] * slots, slots
        params.n_batch = params.n_ubatch = TOGETHER
        params.n_threads = params.n_threads_batch = wanted["threads"]
        on, off = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = on if wanted["flash"] else off
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._batch = llama_cpp.llama_batch_init(TOGETHER, 0, 1)
        self._held = 0

    def facts(self) -> dict[str, Any]:
        """Return the version, and the processor instructions that the build uses."""
        built = llama_cpp.llama_print_system_info().decode().partition("CPU :")[2]
        names = [word.partition("=")[0].strip() for word in built.split("|") if "= 1" in word]
        return {
            "version": f"llama-cpp-python {version('llama-cpp-python')}, compiled here",
            "built": " ".join(names),
        }

    def first(self) -> None:
        """Generate the first token of an answer."""
        text, found = b"Once there was a river", (ctypes.c_int32 * 64)()
        count = llama_cpp.llama_tokenize(self._vocab, text, len(text), found, 64, True, False)
        self._forget()
        self._feed(list(found[:count]), 0)
        self._largest()

    def read(self, tokens: int) -> float:
        """Return the seconds to read a prompt of `tokens` tokens with an empty cache."""
        self._forget()

        def prompt() -> int:
            self._feed(self._ids[:tokens], 0)
            return self._largest()

        took = timed(prompt)
        self._held = tokens
        return took

    def steps(self, behind: int, count: int) -> list[float]:
        """Return the seconds of each of `count` decode steps after `behind` tokens."""
        if self._held != behind:
            self.read(behind)
        token, times = self._ids[0], [time.perf_counter()]
        for step in range(count + 1):
            self._feed([token], behind + step)
            token = self._largest()
            times.append(time.perf_counter())
        llama_cpp.llama_memory_seq_rm(self._memory, 0, behind, -1)
        return gaps(times)[1:]

    def rows(self, rows: int, behind: int, count: int) -> list[float]:
        """Return the seconds of each of `count` calls that decode a token of each of `rows` rows.

        Every row has `behind` tokens before.
        """
        self._forget()
        self._feed(self._ids[:behind], 0)
        for row in range(1, rows):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, row, 0, -1)
        times = [time.perf_counter()]
        for step in range(count + 2):
            self._fill([(self._ids[0], behind + step, row, 1) for row in range(rows)])
            for row in range(rows):
                self._largest(row)
            times.append(time.perf_counter())
        self._forget()
        return gaps(times)[2:]

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the weights, and of the part of the cache that is in use."""
        cache = llama_cpp.llama_state_seq_get_size(self._context, 0)
        return {"weights": Path(self._file).stat().st_size, "cache": int(cache)}

    def _forget(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)
        self._held = 0

    def _feed(self, ids: list[int], start: int) -> None:
        """Read tokens of the first sequence. Only the last token gets logits."""
        places = [(token, start + n, 0, n == len(ids) - 1) for n, token in enumerate(ids)]
        for begin in range(0, len(places), TOGETHER):
            self._fill(places[begin : begin + TOGETHER])

    def _fill(self, places: Sequence[tuple[int, int, int, int]]) -> None:
        batch = self._batch
        batch.n_tokens = len(places)
        for n, (token, position, row, wanted) in enumerate(places):
            batch.token[n], batch.pos[n], batch.logits[n] = token, position, wanted
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, row
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise ValueError(f"llama_decode failed: {status}")

    def _largest(self, row: int = -1) -> int:
        """Return the token with the largest logit."""
        count = llama_cpp.llama_vocab_n_tokens(self._vocab)
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(count,)).argmax())


if __name__ == "__main__":
    serve(NativeLlamaCpp)
