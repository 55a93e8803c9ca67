"""Time weir, and transformers with a DynamicCache. Both run in weir's environment."""

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
    """A model with a `DynamicCache`.

    Args:
        wanted: the settings "file", "threads", "dtype" and "weights" of the model, and the "ids"
            to read.
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
        """Return versions, and the processor instructions that PyTorch uses."""
        versions = f"PyTorch {torch.__version__}, transformers {transformers.__version__}"
        return {"version": versions, "built": torch.backends.cpu.get_cpu_capability()}

    def first(self) -> None:
        """Generate the first token of an answer."""
        given = self.tokenizer("Once there was a river", return_tensors="pt")
        self.model.generate(**given, max_new_tokens=1)

    def read(self, tokens: int) -> float:
        """Return the seconds to read a prompt of `tokens` tokens with an empty cache."""
        self.cache, self.held = DynamicCache(config=self.model.config), tokens
        return timed(lambda: self._feed(self.ids[:, :tokens]))

    def steps(self, behind: int, count: int) -> list[float]:
        """Return the seconds of each of `count` decode steps after `behind` tokens."""
        if self.held != behind:
            self.cache, self.held = self._full(1, behind), behind
        times = [timed(lambda: self._feed(self.ids[:, :1])) for _ in range(count + 1)]
        self.cache.crop(-count - 1)
        return times[1:]

    def rows(self, rows: int, behind: int, count: int) -> list[float]:
        """Return the seconds of each of `count` calls that decode a token of each of `rows` rows.

        Every row has `behind` tokens before.
        """
        self.cache, self.held = self._full(rows, behind), 0
        token = self.ids[:, :1].expand(rows, 1)
        return [timed(lambda: self._feed(token)) for _ in range(count + 2)][2:]

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the weights and of the cache."""
        layers = self.cache.layers
        cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        return {"weights": stored_bytes(self.model), "cache": cache}

    def _feed(self, ids: torch.Tensor) -> None:
        told = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE: self.cache})
        told.logits[:, -1].argmax(dim=-1).tolist()

    def _full(self, rows: int, tokens: int) -> DynamicCache:
        """Return a cache with random keys and values of `tokens` tokens in each of `rows` rows."""
        config = self.model.config
        shape = (rows, config.num_key_value_heads, tokens, config.head_dim)
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            keys, values = torch.randn(2, *shape).to(self.model.dtype)
            cache.update(keys, values, layer)
        return cache


class WeirSide(TransformersSide):
    """A model with a weir stream.

    Args:
        wanted: the settings of `TransformersSide`, and "policy".
    """

    def __init__(self, wanted: dict[str, Any]) -> None:
        super().__init__(wanted)
        self.policy = wanted["policy"]
        self.stream = weir.Stream(self.model, self.policy)
        if wanted.get("compiled"):
            self.compile()

    def facts(self) -> dict[str, Any]:
        """Return the versions of weir and Python, in addition to those of `TransformersSide`."""
        facts = super().facts()
        versions = (
            f"weir {weir.__version__}, {facts['version']}, Python {platform.python_version()}"
        )
        return {**facts, "version": versions}

    def compile(self) -> None:
        """Compile steps from now on. The first step raises an error if it cannot be compiled."""
        weir.compile_steps(self.model, strict=True)

    def first(self) -> None:
        """Generate the first token of an answer and feed it, which runs one decode step."""
        given = self.tokenizer("Once there was a river", return_tensors="pt")
        self.stream.feed(given.input_ids)
        list(self.stream.generate(max_new_tokens=1, stop=[]))

    def read(self, tokens: int) -> float:
        """Return the seconds to read a prompt of `tokens` tokens with an empty cache."""
        self.stream, self.held = weir.Stream(self.model, self.policy), tokens
        return timed(lambda: self.stream.feed(self.ids[:, :tokens]))

    def steps(self, behind: int, count: int) -> list[float]:
        """Return the seconds of each of `count` tokens after `behind` tokens.

        One token in 64 includes a fold.
        """
        if self.held > behind:
            self.stream, self.held = weir.Stream(self.model, self.policy), 0
        if self.held < behind:
            self.stream.feed(self.ids[:, self.held : behind])
            self.held = behind
        tokens = self.stream.generate(max_new_tokens=count + 1, stop=[])
        return [timed(lambda: next(tokens)) for _ in range(count + 1)][1:]

    def rows(self, rows: int, behind: int, count: int) -> list[float]:
        """Return the seconds of each of `count` calls that decode a token of each of `rows` rows.

        Every row has `behind` tokens before.
        """
        self.cache, self.held = weir.StreamingCache(self.model, self.policy), 1 << 30
        for piece in self.ids[:, :behind].split(512, dim=1):
            self._feed(piece)
        self.cache.batch_repeat_interleave(rows)
        token = self.ids[:, :1].expand(rows, 1)
        return [timed(lambda: self._feed(token)) for _ in range(count + 2)][2:]

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the weights and of the cache."""
        return {"weights": stored_bytes(self.model), "cache": self.stream.nbytes}


if __name__ == "__main__":
    serve(lambda wanted: (WeirSide if wanted.get("policy") else TransformersSide)(wanted))
