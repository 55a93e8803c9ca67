"""weir's side, and that of transformers' DynamicCache: both run in weir's environment."""

from __future__ import annotations

import platform
from typing import Any

import torch
import transformers
from protocol import serve, timed
from transformers import DynamicCache

import weir
from weir.models import CACHE, stored_bytes


class TransformersSide:
    """A model with `DynamicCache`.

    Args:
        wanted: "file", "threads", "dtype" and "weights" of the model, "ids" to read.
    """

    def __init__(self, wanted: dict[str, Any]) -> None:
        torch.set_num_threads(wanted["threads"])
        torch.set_grad_enabled(False)
        given = {"weights": wanted["weights"]} if wanted.get("weights") else {}
        self.model: Any
        self.model, self.tokenizer = weir.load(wanted["file"], dtype=wanted["dtype"], **given)
        self.ids = torch.tensor([wanted.get("ids", [])], dtype=torch.int64)
        self.held = 0
        self.cache: Any = None

    def facts(self) -> dict[str, Any]:
        """Versions, and which way weir's kernels go."""
        versions = f"PyTorch {torch.__version__}, transformers {transformers.__version__}"
        return {"version": versions, "built": torch.backends.cpu.get_cpu_capability()}

    def first(self) -> None:
        """Make the first token of an answer."""
        given = self.tokenizer("Once there was a river", return_tensors="pt")
        self.model.generate(**given, max_new_tokens=1)

    def read(self, tokens: int) -> float:
        """Seconds of a prompt, read from its beginning."""
        self.cache, self.held = DynamicCache(config=self.model.config), tokens
        return timed(lambda: self._feed(self.ids[:, :tokens]))

    def steps(self, behind: int, count: int) -> list[float]:
        """Seconds of some steps behind so many tokens."""
        if self.held != behind:
            self.cache, self.held = self._full(1, behind), behind
        times = [timed(lambda: self._feed(self.ids[:, :1])) for _ in range(count + 1)]
        self.cache.crop(-count - 1)
        return times[1:]

    def rows(self, rows: int, behind: int, count: int) -> list[float]:
        """Seconds of each call that decodes a token of several conversations."""
        self.cache, self.held = self._full(rows, behind), 0
        token = self.ids[:, :1].expand(rows, 1)
        return [timed(lambda: self._feed(token)) for _ in range(count + 2)][2:]

    def sizes(self) -> dict[str, int]:
        """Bytes of weights and of the cache."""
        layers = self.cache.layers
        cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        return {"weights": stored_bytes(self.model), "cache": cache}

    def _feed(self, ids: torch.Tensor) -> None:
        told = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE: self.cache})
        told.logits[:, -1].argmax(dim=-1).tolist()

    def _full(self, rows: int, tokens: int) -> DynamicCache:
        """A cache that holds so many random tokens."""
        config = self.model.config
        shape = (rows, config.num_key_value_heads, tokens, config.head_dim)
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            keys, values = torch.randn(2, *shape).to(self.model.dtype)
            cache.update(keys, values, layer)
        return cache


class WeirSide(TransformersSide):
    """A model with a stream of weir.

    Args:
        wanted: as of `TransformersSide`, and "policy".
    """

    def __init__(self, wanted: dict[str, Any]) -> None:
        super().__init__(wanted)
        self.policy = wanted["policy"]
        self.stream = weir.Stream(self.model, self.policy)
        if wanted.get("compiled"):
            self.compile()

    def facts(self) -> dict[str, Any]:
        """Versions of weir, PyTorch and Python."""
        facts = super().facts()
        versions = (
            f"weir {weir.__version__}, {facts['version']}, Python {platform.python_version()}"
        )
        return {**facts, "version": versions}

    def compile(self) -> None:
        """Compile steps from here on; the first waits, and fails where it cannot be compiled."""
        weir.compile_steps(self.model, strict=True)

    def first(self) -> None:
        """Make the first token of an answer, and the second: a compiled step is one."""
        given = self.tokenizer("Once there was a river", return_tensors="pt")
        self.stream.feed(given.input_ids)
        list(self.stream.generate(max_new_tokens=1, stop=[]))

    def read(self, tokens: int) -> float:
        """Seconds of a prompt, read from its beginning."""
        self.stream, self.held = weir.Stream(self.model, self.policy), tokens
        return timed(lambda: self.stream.feed(self.ids[:, :tokens]))

    def steps(self, behind: int, count: int) -> list[float]:
        """Seconds of some tokens behind so many; folds fall on one in 64 of them."""
        if self.held > behind:
            self.stream, self.held = weir.Stream(self.model, self.policy), 0
        if self.held < behind:
            self.stream.feed(self.ids[:, self.held : behind])
            self.held = behind
        tokens = self.stream.generate(max_new_tokens=count + 1, stop=[])
        return [timed(lambda: next(tokens)) for _ in range(count + 1)][1:]

    def rows(self, rows: int, behind: int, count: int) -> list[float]:
        """Seconds of each call that decodes a token of several conversations."""
        self.cache, self.held = weir.StreamingCache(self.model, self.policy), 1 << 30
        for piece in self.ids[:, :behind].split(512, dim=1):
            self._feed(piece)
        self.cache.batch_repeat_interleave(rows)
        token = self.ids[:, :1].expand(rows, 1)
        return [timed(lambda: self._feed(token)) for _ in range(count + 2)][2:]

    def sizes(self) -> dict[str, int]:
        """Bytes of weights and of the cache."""
        return {"weights": stored_bytes(self.model), "cache": self.stream.nbytes}


if __name__ == "__main__":
    serve(lambda wanted: (WeirSide if wanted.get("policy") else TransformersSide)(wanted))
