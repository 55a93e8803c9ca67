"""Contenders that time a decode step with weir's cache or with a cache of transformers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from weir.cache import StreamingCache
from weir.errors import WeirError
from weir.models import CACHE
from weir.native import choose_products, compile_steps
from weir.stream import PIECE
from weir_bench.figure import Setting
from weir_bench.model import model_of, twin_of
from weir_bench.timing import Contender


class Decoding(Contender):
    """A contender whose step passes one token of each row through a model with a cache."""

    def __init__(self, model: PreTrainedModel, cache: object, rows: int = 1) -> None:
        self.model = model
        self.cache = cache
        self.token = torch.ones(rows, 1, dtype=torch.int64)

    def step(self) -> None:
        """Call the model with one token of each row."""
        self.feed(self.token)

    def feed(self, ids: Tensor, **more: Tensor) -> None:
        """Call the model with `ids` [rows, n]."""
        held = {CACHE: self.cache, "use_cache": True, "logits_to_keep": 1}
        self.model(input_ids=ids, **held, **more)

    def feed_masked(self, ids: Tensor, real: Tensor) -> None:
        """Call the model with `ids` [rows, n]. `real` [rows, n] is False for padding."""
        with torch.no_grad():
            self.feed(ids, attention_mask=real.long())


class Dynamic(Decoding):
    """A step with a `DynamicCache` that holds `tokens` tokens, including the new one."""

    cache: DynamicCache

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        super().__init__(model, DynamicCache(config=model.config))
        _fill(model, self.cache, tokens - 1)

    def rewind(self) -> None:
        """Remove the new token from the cache."""
        self.cache.crop(-1)


class Static(Decoding):
    """A step that fills a `StaticCache` of `tokens` tokens."""

    cache: StaticCache

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        super().__init__(model, StaticCache(config=model.config, max_cache_len=tokens))
        _fill(model, self.cache, tokens - 1)

    def rewind(self) -> None:
        """Move the cache back by one token, so that the next token overwrites this one."""
        for layer in self.cache.layers:
            assert isinstance(layer, StaticLayer)
            layer.cumulative_length.sub_(1)


class CompiledStatic(Static):
    """A step with a `StaticCache`, compiled as one graph.

    With the backend inductor, `weir.choose_products` first chooses the matrix products.
    """

    def __init__(self, model: PreTrainedModel, tokens: int, backend: str) -> None:
        super().__init__(model, tokens)
        if backend == "inductor":
            choose_products(model)
        # Compiling the bound method leaves the model itself unchanged for other contenders.
        self._forward = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=backend)
        try:
            with torch.no_grad():
                self.step()
        except TorchDynamoException as error:
            raise WeirError(f"StaticCache cannot be compiled here: {error}") from error
        self.rewind()

    def feed(self, ids: Tensor, **more: Tensor) -> None:
        """Call the compiled model with `ids` [1, n]."""
        held = {CACHE: self.cache, "use_cache": True, "logits_to_keep": 1}
        self._forward(input_ids=ids, **held)


class Weir(Decoding):
    """A step with a `StreamingCache`. The seconds of its folds are recorded.

    Attributes:
        folds: the seconds of each fold, over all layers.
    """

    cache: StreamingCache

    def __init__(self, model: PreTrainedModel, policy: str, chunk: int = 64, rows: int = 1) -> None:
        super().__init__(model, StreamingCache(model, policy, chunk=chunk, batch=rows), rows)
        self.folds: list[float] = []
        self.cache.on_fold = lambda folded: self.folds.append(folded.seconds)

    def step(self) -> None:
        """Decode one token of each row in the same way as streams and servers."""
        if self.cache.run_step(self.token[:, 0].tolist()) is None:
            super().step()

    def fill(self, tokens: int) -> None:
        """Feed `tokens` random tokens."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.model.config.vocab_size, (1, tokens), generator=generator)
        with torch.no_grad():
            for piece in ids.split(PIECE, dim=1):
                self.feed(piece)

    def start_afresh(self) -> None:
        """Feed tokens until the tail is empty, and clear `folds`."""
        if self.waiting:
            self.fill(self.cache.chunk - self.waiting)
        self.folds.clear()

    @property
    def waiting(self) -> int:
        """The number of tokens in the tail, summed over rows."""
        return sum(self.cache.waiting)

    @property
    def read_bytes(self) -> int:
        """The bytes of keys and values that a step reads when the tail is half full."""
        total = 0
        for layer in self.cache.stack:
            assert layer.state.slab is not None
            slots = sum(layer.state.lengths[0]) + self.cache.chunk // 2
            for t in (layer.state.slab.keys, layer.state.slab.values):
                total += t[:, :, :slots].nbytes
        return total


def feed_prompt(ours: Weir, ids: Tensor) -> None:
    """Reset the cache and feed a prompt `ids` [1, n] in pieces, as a stream does."""
    ours.cache.reset()
    for part in ids.split(PIECE, dim=1):
        ours.feed(part)


def hold_prompt(exact: Decoding, ids: Tensor) -> None:
    """Feed a prompt `ids` [1, n] in one call to a new `DynamicCache`, which keeps all of it."""
    exact.cache = DynamicCache(config=exact.model.config)
    exact.feed(ids)


def full(setting: Setting, model: PreTrainedModel, policy: str, slots: int, more: str = "") -> Weir:
    """Return a full cache of a named policy, with an empty tail.

    `more` is appended to the policy's arguments, after the budget.
    """
    cache = Weir(model, f"{policy}(budget={slots}{more})", setting.sizes.chunk)
    cache.fill(slots + setting.sizes.chunk)
    cache.start_afresh()
    return cache


def as_it_is_and_compiled(
    setting: Setting, policy: str, slots: int, more: str = ""
) -> dict[str, Weir]:
    """Return a full cache and, if steps can be compiled here, another one with compiled steps.

    The keys of the result are what to add to the name of a row: "" and ", compiled".
    """
    caches = {"": full(setting, model_of(setting), policy, slots, more)}
    compiled = full_compiled(setting, twin_of(setting), policy, slots, more)
    return caches if compiled is None else {**caches, ", compiled": compiled}


def full_compiled(
    setting: Setting, model: PreTrainedModel, policy: str, slots: int, more: str = ""
) -> Weir | None:
    """Return a full cache with compiled steps, or None if they cannot be compiled here.

    One step has already been run, so that compiling is not timed.
    """
    setting.say(f"compiling a step of {policy}")
    compile_steps(model, strict=True)
    cache = full(setting, model, policy, slots, more)
    try:
        with torch.no_grad():
            cache.step()
    except WeirError as error:
        setting.say(str(error))
        return None
    cache.start_afresh()
    return cache


def _fill(model: PreTrainedModel, cache: DynamicCache | StaticCache, tokens: int) -> None:
    """Put random keys and values of `tokens` tokens into every layer."""
    config = model.config
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    generator = torch.Generator().manual_seed(0)
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, generator=generator).to(model.dtype) for _ in range(2))
        cache.update(keys, values, layer)
