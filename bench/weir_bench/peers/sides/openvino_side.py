"""Time OpenVINO GenAI: an LLMPipeline of a GGUF file, with paged attention.

OpenVINO GenAI reads GGUF files directly (Q4_0, Q4_1, Q8_0 and more, but not 32-bit floats). With
eviction, it reads every prompt from its beginning, because it cannot cache prefixes then.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import gaps, serve, timed

START, RECENT, MOST = 32, 256, 1024
"""Numbers of tokens that eviction keeps: the first, the newest, and all together."""


class Times(openvino_genai.StreamerBase):  # type: ignore[misc]
    """A listener that records when tokens arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def write(self, token: Any) -> Any:
        """Record the time of a token, or of several that arrive together."""
        self.times += [time.perf_counter()] * (len(token) if isinstance(token, list) else 1)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Do nothing, because all tokens were recorded."""


class OpenVINO:
    """A model in OpenVINO GenAI.

    Args:
        wanted: the settings "file" and "threads", whether to "evict", the "ids" to read, and
            "kept", a folder for compiled models.
    """

    def __init__(self, wanted: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.enable_prefix_caching = not wanted["evict"]
        if wanted["evict"]:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = openvino_genai.CacheEvictionConfig(
                START, RECENT, MOST, openvino_genai.AggregationMode.NORM_SUM, True
            )
        self._ids, self._file = wanted.get("ids", []), wanted["file"]
        self._pipe = openvino_genai.LLMPipeline(
            self._file,
            "CPU",
            scheduler_config=scheduler,
            INFERENCE_NUM_THREADS=wanted["threads"],
            CACHE_DIR=wanted["kept"],
        )
        self._evicts = wanted["evict"]

    def facts(self) -> dict[str, Any]:
        """Return the version, and the optimizations that it can use on this processor."""
        core = openvino.Core()
        able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        return {"version": f"openvino-genai {openvino_genai.__version__}", "built": " ".join(able)}

    def first(self) -> None:
        """Generate the first token of an answer."""
        self._pipe.generate("Once there was a river", max_new_tokens=1)

    def read(self, tokens: int) -> float:
        """Return the seconds to read a prompt of `tokens` tokens.

        The first token is different in each call, so that no cached prefix can be used.
        """
        self._ids[0] += 1
        return timed(lambda: self._generate([self._ids[:tokens]], 1))

    def steps(self, behind: int, count: int) -> list[float]:
        """Return the seconds of each of `count` decode steps after `behind` tokens."""
        listener = Times()
        self._generate([self._ids[:behind]], count + 2, listener)
        return gaps(listener.times[1:])

    def rows(self, rows: int, behind: int, count: int) -> list[float]:
        """Return the mean seconds to decode a token of each of `rows` concurrent conversations."""
        begin = len(self._ids) // (rows + 1)
        asked = [self._ids[begin * row : begin * row + behind] for row in range(rows)]
        self._generate(asked, 1)
        short = timed(lambda: self._generate(asked, 2))
        return [(timed(lambda: self._generate(asked, count + 2)) - short) / count]

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the model's file. The pipeline does not report its cache's size."""
        return {"weights": Path(self._file).stat().st_size}

    def _generate(self, asked: list[list[int]], tokens: int, *listener: Any) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = tokens, True
        ids = np.array(asked, dtype=np.int64)
        given = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        self._pipe.generate(given, config, *listener)


if __name__ == "__main__":
    serve(OpenVINO)
