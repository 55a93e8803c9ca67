"""Checks that every policy must pass in a model. The tests of pools and policies call them.

They check that each row of a batch gives the results it gives alone, that a restored stream
continues bit for bit, and that a model gives the logits it gives with the naive pools. Nothing here
depends on a particular pool.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from reference.naive import Naive
from roundings import close_runs
from torch import Tensor
from transformers import PreTrainedModel

import weir


@torch.no_grad()
def fed(
    model: PreTrainedModel,
    cache: weir.StreamingCache,
    tokens: Tensor,
    sizes: list[int] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Feed tokens in forwards of the given sizes, and return the logits of all of them [batch,
    length, vocabulary].
    """
    start, parts = 0, []
    for size in sizes or [tokens.shape[1]]:
        stop = start + size
        seen = None if mask is None else mask[:, :stop]
        piece = tokens[:, start:stop]
        parts.append(model(piece, attention_mask=seen, past_key_values=cache).logits)
        start = stop
    assert start == tokens.shape[1]
    return torch.cat(parts, dim=1)


def holds_as(held: weir.StreamingCache | weir.Stream, twin: Naive) -> None:
    """Check that every head of every layer holds the same tokens as in the naive loop. Only the
    first row is compared.
    """
    config = twin.model.config
    heads = range(config.num_key_value_heads)
    for layer, head in itertools.product(range(config.num_hidden_layers), heads):
        wanted = sorted(t.position for t in twin.slots(layer, head))
        assert _tokens(held.slots(layer).position[0])[head] == wanted


def reads_as(stream: weir.Stream, twin: Naive, tokens: Tensor, whole: int = 0) -> None:
    """Check that the stream and the naive loop return the same logits for tokens [1, length] and
    hold the same tokens at the end. The naive loop reads the first `whole` tokens at once.
    """
    parts = [stream.feed(tokens[:, :whole], all_logits=True)] if whole else []
    parts.append(stream.feed(tokens[:, whole:], all_logits=True))
    told = [twin.feed(tokens[0, :whole].tolist(), at_once=True)] if whole else []
    told.append(twin.feed(tokens[0, whole:].tolist()))
    close_runs(torch.cat(parts, dim=1)[0], torch.cat(told), twin.model)
    holds_as(stream, twin)


@torch.no_grad()
def reads_exactly(model: PreTrainedModel, policy: str, tokens: Tensor, **options: Any) -> None:
    """Check that logits of tokens [batch, length] that fit in the budget are the plain model's."""
    stream = weir.Stream(model, policy, chunk=5, **options)
    close_runs(stream.feed(tokens, all_logits=True), model(tokens).logits, model)


def rows_read_alone(
    model: PreTrainedModel,
    policy: str,
    tokens: Tensor,
    pads: list[int],
    sizes: list[int] | None = None,
    **options: Any,
) -> None:
    """Check that each row of a batch has the logits, and holds the tokens, that it would have and
    hold in a batch of its own.

    Args:
        model: the model.
        policy: the policy.
        tokens: [batch, length].
        pads: for each row, how many tokens at its beginning are padding.
        sizes: how many tokens of the batch are fed in each forward. A row alone is fed at once.
        options: options of the caches.
    """
    mask = torch.ones_like(tokens)
    for row, padding in enumerate(pads):
        mask[row, :padding] = 0
    together = weir.StreamingCache(model, policy, **options)
    got = fed(model, together, tokens, sizes, mask)
    for row, padding in enumerate(pads):
        alone = weir.StreamingCache(model, policy, **options)
        wanted = fed(model, alone, tokens[row : row + 1, padding:])
        close_runs(got[row, padding:], wanted[0], model)
        for layer in range(len(alone)):
            mine, its = together.slots(layer), alone.slots(layer)
            assert _tokens(mine.position[row]) == _tokens(its.position[0])


def _tokens(position: Tensor) -> list[list[int]]:
    """Return the sorted positions of the tokens that each head holds, from positions [kv_heads,
    slots] that are negative for empty slots.
    """
    return [sorted(place for place in head if place >= 0) for head in position.tolist()]


def restored_goes_on(
    model: PreTrainedModel, policy: str, tokens: Tensor, saved_at: int, folder: Path, chunk: int
) -> set[int]:
    """Check that a stream that was saved and restored goes on bit for bit like the original one:
    with the same logits, and the same contents of slots.

    Args:
        model: the model.
        policy: the policy.
        tokens: [batch, length].
        saved_at: after how many tokens the stream is saved.
        folder: a folder for the file.
        chunk: tokens between folds.

    Returns:
        The sizes in bytes of the stream's cache when it was saved, and of both streams' caches at
        the end.
    """
    stream = weir.Stream(model, policy, chunk=chunk)
    stream.feed(tokens[:, :saved_at])
    sizes = {stream.nbytes}
    stream.save(folder / "session.safetensors")
    again = weir.Stream.restore(model, folder / "session.safetensors")
    one, other = (s.feed(tokens[:, saved_at:], all_logits=True) for s in (stream, again))
    assert torch.equal(one, other)
    for layer in range(len(stream.cache)):
        mine, theirs = stream.slots(layer), again.slots(layer)
        for name in ("position", "a", "b", "keys", "values", "pool"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
        assert (mine.mass is None) == (theirs.mass is None)
        assert mine.mass is None or torch.equal(mine.mass, theirs.mass)
    return sizes | {stream.nbytes, again.nbytes}


def has_one_size(
    model: PreTrainedModel, policy: str, pieces: list[Tensor], slots: int, chunk: int
) -> weir.Stream:
    """Check that each slab has `slots` slots and those of the tail, and that the cache has the same
    size in bytes after every piece. Return the stream.
    """
    stream = weir.Stream(model, policy, chunk=chunk)
    sizes = set()
    for piece in pieces:
        stream.feed(piece)
        sizes.add(stream.nbytes)
    assert len(sizes) == 1
    assert {len(layer.state.slab) for layer in stream.cache.stack} == {slots + chunk}
    return stream
