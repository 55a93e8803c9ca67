"""Time llama.cpp through its own server, which the package xllamacpp runs in this process.

The time of a step is the time between two streamed tokens. A long context is read once and saved in
a slot file. All precisions of a model share this file, one for each kind of attention, because
times do not depend on the values in the cache.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xllamacpp
from gguf import GGUFReader
from protocol import gaps, serve


class LlamaCpp:
    """A model in llama.cpp's server.

    Args:
        wanted: the server's settings "file", "threads", "flash", "context", "slots" and "shift",
            the "ids" to read, and "kept", a folder for slot files.
    """

    def __init__(self, wanted: dict[str, Any]) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = self._file = wanted["file"]
        params.n_parallel = wanted.get("slots", 1)
        params.n_ctx = wanted["context"] * params.n_parallel
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = wanted["threads"]
        kinds = xllamacpp.llama_flash_attn_type
        on, off = kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED, kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = on if wanted["flash"] else off
        params.ctx_shift = bool(wanted.get("shift"))
        params.n_cache_reuse = 16 if wanted.get("shift") else 0
        params.n_keep = -1
        params.endpoint_slots = True
        params.slot_save_path = f"{wanted['kept']}/"
        params.verbosity = 1
        self._ids, self._kept = wanted.get("ids", []), Path(wanted["kept"])
        self._token = _bytes_of_token(self._file)
        self._flash, self._held = wanted["flash"], 0
        self._server = xllamacpp.Server(params)

    def facts(self) -> dict[str, Any]:
        """Return the version, and the processor instructions that the build uses."""
        built = xllamacpp.get_system_info().partition("CPU :")[2]
        names = [word.partition("=")[0].strip() for word in built.split("|") if "= 1" in word]
        return {"version": f"xllamacpp {version('xllamacpp')}", "built": " ".join(names)}

    def url(self) -> str:
        """Return the server's address."""
        return str(self._server.listening_address)

    def first(self) -> None:
        """Generate the first token of an answer."""
        self._server.handle_completions({"prompt": "Once there was a river", "n_predict": 1})

    def read(self, tokens: int) -> float:
        """Return the seconds to read a prompt of `tokens` tokens without cached tokens."""
        body = {"prompt": self._ids[:tokens], "n_predict": 1, "cache_prompt": False}
        self._held = tokens
        return float(self._ask(body)["timings"]["prompt_ms"]) / 1e3

    def steps(self, behind: int, count: int) -> list[float]:
        """Return the seconds of each of `count` decode steps after `behind` tokens."""
        model = Path(self._file).stem.partition("-")[0]
        file = f"{model}-{'flash' if self._flash else 'plain'}-{behind}"
        if self._held != behind and (self._kept / file).exists():
            self._slot("restore", file)
        elif self._held != behind:
            self._ask({"prompt": self._ids[:behind], "n_predict": 1, "cache_prompt": True})
            self._slot("save", file)
        self._held = behind
        return gaps(self._stream(self._ids[:behind], count + 2)[1:])

    def rows(self, rows: int, behind: int, count: int) -> list[float]:
        """Return the mean seconds to decode a token of each of `rows` concurrent conversations."""
        begin = len(self._ids) // (rows + 1)
        asked = [self._ids[begin * row : begin * row + behind] for row in range(rows)]
        times: list[list[float]] = [[] for _ in asked]

        def answer(row: int) -> None:
            times[row] = self._stream(asked[row], count + 8 + 2 * rows)

        threads = [threading.Thread(target=answer, args=(row,)) for row in range(rows)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        since, until = max(each[0] for each in times), min(each[-1] for each in times)
        inside = sum(since < when <= until for each in times for when in each)
        self._held = 0
        return [(until - since) * rows / inside]

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the weights, and of the part of the cache that is in use."""
        return {"weights": Path(self._file).stat().st_size, "cache": self._token * self._held}

    def _stream(self, prompt: list[int], tokens: int) -> list[float]:
        times: list[float] = []

        def take(event: Any) -> None:
            if event and event.get("choices") and not event["choices"][0].get("finish_reason"):
                times.append(time.perf_counter())

        body = {"prompt": prompt, "n_predict": tokens, "cache_prompt": True, "stream": True}
        self._ask(body, take)
        return times

    def _ask(self, body: dict[str, Any], *take: Any) -> Any:
        answer = self._server.handle_completions(
            {**body, "ignore_eos": True, "temperature": 0}, *take
        )
        if isinstance(answer, dict) and "error" in answer:
            raise ValueError(answer["error"].get("message"))
        return answer

    def _slot(self, action: str, file: str) -> None:
        url = f"{self.url()}/slots/0?action={action}"
        data = json.dumps({"filename": file}).encode()
        asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            answer.read()


def _bytes_of_token(file: str) -> int:
    """Return the bytes of a token in a Llama model's cache, with 16-bit keys and values."""
    fields = GGUFReader(file).fields
    named = "block_count", "embedding_length", "attention.head_count", "attention.head_count_kv"
    layers, width, heads, kv_heads = (int(fields[f"llama.{name}"].contents()) for name in named)
    return 2 * 2 * layers * kv_heads * (width // heads)


if __name__ == "__main__":
    serve(LlamaCpp)
