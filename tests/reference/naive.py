"""A Llama read one token at a time: every slot a Python object, every pool a list.

The model is a small random one. Pools are functions of lists with the slots of one head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCABULARY = 61


def make_llama(layers: int = 2, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 Llama with four query heads and two KV heads, and logits of a few units."""
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
            **changes,
        }
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


@dataclass
class Token:
    """One slot of one KV head, with its key before rotation."""

    position: int
    key: Tensor
    value: Tensor
    a: float = 0.0
    b: float = 0.0
    mass: float = 0.0


@dataclass
class Where:
    """The facts that a naive fold can use."""

    layer: int
    head: int
    seen: int
    queries: list[Tensor]
    rotate: Callable[..., Tensor]


Held = list[list[Token]]
Fold = Callable[[Held, list[Token], Where], Held]


@dataclass
class Naive:
    """A Llama read token by token: lists, loops, float64 attention, positions by counting.

    Attributes:
        model: the model whose weights are used.
        fold: returns what each pool of one head holds after a fold, from what each held before and
            the new tokens.
        pools: number of pools.
        chunk: tokens between folds.
        rolling: whether positions are ranks in the cache; otherwise, they are places in the stream.
        sinks: for each layer, the sink logits of its query heads; None for a model without sinks.
        seen, waiting: tokens of the stream so far, and those that wait for a fold.
        held, new: by layer and head, what its pools hold, and the tokens that wait.
        queries: by layer and head, the queries of all tokens, rotated to their places.
        tallies: by layer and head, the attention of each slot up to the last fold.
    """

    model: Any
    fold: Fold
    pools: int = 1
    chunk: int = 1
    rolling: bool = True
    sinks: Sequence[Tensor] | None = None
    seen: int = 0
    waiting: int = 0
    held: dict[tuple[int, int], Held] = field(default_factory=dict)
    new: dict[tuple[int, int], list[Token]] = field(default_factory=dict)
    queries: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    tallies: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)

    def feed(self, tokens: Iterable[int], at_once: bool = False) -> Tensor:
        """Logits after each token [tokens, vocabulary]; `at_once` folds only after the last."""
        out = []
        for token in tokens:
            out.append(self._step(int(token)))
            self.seen, self.waiting = self.seen + 1, self.waiting + 1
            if self.waiting == self.chunk and not at_once:
                self._fold()
        if at_once:
            self._fold()
        return torch.stack(out)

    def slots(self, layer: int, head: int) -> list[Token]:
        """Every slot of a head: pool by pool, and then those that wait for a fold."""
        held = self.held.get((layer, head), [[] for _ in range(self.pools)])
        return [t for pool in held for t in pool] + self.new.get((layer, head), [])

    def received(self, layer: int, head: int) -> dict[int, float]:
        """The attention that each slot of a head received up to the last fold, by place."""
        new = {t.position: 0.0 for t in self.new.get((layer, head), [])}
        return {**self.tallies.get((layer, head), {}), **new}

    def rotate(self, x: Tensor, places: Any) -> Tensor:
        """`x` [n, dim] rotated to its places, or to one place, in float64."""
        frequencies = self.model.model.rotary_emb.inv_freq.double()
        angles = torch.tensor(places, dtype=torch.float64)[..., None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = x.double().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def placed(self, places: list[int]) -> list[Any]:
        """The positions in attention of tokens at these places of the stream."""
        if not self.rolling:
            return places
        order = sorted(set(places))
        return [order.index(place) for place in places]

    def _fold(self) -> None:
        for (layer, head), new in self.new.items():
            held = self.held.get((layer, head), [[] for _ in range(self.pools)])
            at = Where(layer, head, self.seen, self.queries[layer, head], self.rotate)
            self.held[layer, head] = self.fold(held, new, at)
            self.new[layer, head] = []
            tally = {t.position: t.mass for t in self.slots(layer, head)}
            self.tallies[layer, head] = tally
        self.waiting = 0

    @torch.no_grad()
    def _step(self, token: int) -> Tensor:
        decoder = self.model.model
        x = decoder.embed_tokens(torch.tensor([token]))
        for index, layer in enumerate(decoder.layers):
            attention = layer.self_attn
            inner = layer.input_layernorm(x)
            dim = attention.head_dim
            q = attention.q_proj(inner).view(-1, dim)
            k, v = (f(inner).view(-1, dim) for f in (attention.k_proj, attention.v_proj))
            group = q.shape[0] // k.shape[0]
            parts = []
            for head in range(k.shape[0]):
                self.new.setdefault((index, head), []).append(Token(self.seen, k[head], v[head]))
                mine = q[head * group : (head + 1) * group]
                remembered = self.queries.setdefault((index, head), [])
                remembered.append(self.rotate(mine, self.seen))
                parts.append(self._attend(index, head, mine, attention.scaling))
            mixed = torch.cat(parts).flatten()[None].to(x.dtype)
            x = x + attention.o_proj(mixed)
            made = layer.mlp(layer.post_attention_layernorm(x)[None])
            x = x + (made[0] if isinstance(made, tuple) else made)[0]  # experts return a pair
        return self.model.lm_head(decoder.norm(x))[0].float()

    def _attend(self, layer: int, head: int, q: Tensor, scale: float) -> Tensor:
        slots = self.slots(layer, head)
        places = self.placed([t.position for t in slots])
        q = self.rotate(q, places[-1])
        keys = self.rotate(torch.stack([t.key for t in slots]), places)
        values = torch.stack([t.value for t in slots]).double()
        logits = q @ keys.T * scale
        above = (logits + torch.tensor([t.a for t in slots])).exp()
        below = (logits + torch.tensor([t.b for t in slots])).exp()
        total = below.sum(dim=1, keepdim=True)
        if self.sinks is not None:
            group = len(q)
            its = self.sinks[layer][head * group : (head + 1) * group]
            total = total + its.double().exp()[:, None]
        for token, share in zip(slots, (below / total).sum(dim=0).tolist(), strict=True):
            token.mass += share
        return above @ values / total


def sink_of(n: int) -> Callable[..., Any]:
    """The first tokens stay."""

    def fold(mine: list[Token], new: list[Token], at: Where) -> tuple[list[Token], list[Token]]:
        free = n - len(mine)
        return mine + new[:free], new[free:]

    return fold


def recent_of(n: float = math.inf) -> Callable[..., Any]:
    """The newest tokens stay."""

    def fold(mine: list[Token], new: list[Token], at: Where) -> tuple[list[Token], list[Token]]:
        both = sorted(mine + new, key=lambda t: t.position)
        cut = int(max(0, len(both) - n))
        return both[cut:], both[:cut]

    return fold


def pipe_of(*pools: Callable[..., Any]) -> Fold:
    """Naive pools one after the other; what overflows the last is gone."""

    def fold(held: Held, new: list[Token], at: Where) -> Held:
        kept = []
        for pool, mine in zip(pools, held, strict=True):
            stays, new = pool(mine, new, at)
            kept.append(stays)
        return kept

    return fold
