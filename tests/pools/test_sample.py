"""Samples in a model: attention over them, prompts, batches, sessions and bytes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from reference.reservoir import Arrivals
from reference.uniform import by_budget, by_rate
from roundings import close_runs

import weir
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams

pytestmark = pytest.mark.thinned(3, least=2)

PROMPT, MORE, CHUNK, SEED = 23, 16, 4, 7
PADDING = (0, 3, 9)


def draws_of(at, per_head: bool):
    """A function from a token to its random number, in the third pool of a pipe."""
    place = torch.arange(PROMPT + MORE).expand(1, 2, -1)
    table = CounterRNG(SEED, at.layer, 2).uniform(0, place)[0, at.head if per_head else 0]
    return table.tolist().__getitem__


def weighed(tokens, log_weight: float):
    for token in tokens:
        token.a = token.b = log_weight
    return tokens


def reservoir_twin(n: int, weighted: bool, per_head: bool):
    """A naive pool over lists of tokens, one reservoir for each layer and head."""
    loops: dict = {}

    def fold(mine, new, at):
        where = (at.layer, at.head)
        loop = loops.setdefault(where, Arrivals(n, draws_of(at, per_head)))
        known = {token.position: token for token in [*mine, *new]}
        for token in new:
            loop.add(token.position)
        kept = [known[place] for place in loop.sample]
        return weighed(kept, math.log(max(1, loop.came / n)) if weighted else 0.0), []

    return fold


def uniform_twin(weighted: bool, n: int = 0, rate: float = 0.0):
    """A naive pool over lists of tokens that remembers every token that ever arrived."""
    came: dict = {}

    def fold(mine, new, at):
        known = came.setdefault((at.layer, at.head), {})
        known.update({token.position: token for token in new})
        draw = draws_of(at, True)
        places = by_budget(list(known), n, draw) if n else by_rate(list(known), rate, draw)
        weight = math.log(max(1, len(known) / n)) if n else -math.log(rate)
        return weighed([known[place] for place in places], weight if weighted else 0.0), []

    return fold


START = "sink(2) | recent(5) | "
PIPES = {
    "reservoir(6)": lambda: reservoir_twin(6, False, False),
    "reservoir(6, weighted=true, per_head=true)": lambda: reservoir_twin(6, True, True),
    "uniform(6)": lambda: uniform_twin(False, n=6),
    "uniform(6, weighted=true)": lambda: uniform_twin(True, n=6),
    "uniform(rate=0.5, weighted=true)": lambda: uniform_twin(True, rate=0.5),
}
LIMITED = [text for text in PIPES if "rate" not in text]


@pytest.mark.parametrize(
    ("prefill", "positions"),
    [
        pytest.param("chunked", "original", marks=pytest.mark.slow),
        ("full", "rolling"),
    ],
)
@pytest.mark.parametrize("text", PIPES)
def test_a_padded_batch_gives_what_each_row_gives_alone_token_by_token(
    llama, naive, twins, ids, text, prefill, positions
):
    tokens, cuts = ids(3, PROMPT + MORE), [0, PROMPT, *range(PROMPT + 1, PROMPT + MORE + 1)]
    mask = torch.ones_like(tokens)
    for row, pads in enumerate(PADDING):
        mask[row, :pads] = 0
    cache = weir.StreamingCache(
        llama, START + text, chunk=CHUNK, seed=SEED, positions=positions, prefill=prefill
    )
    with torch.no_grad():
        parts = [
            llama(tokens[:, i:j], attention_mask=mask[:, :j], past_key_values=cache).logits
            for i, j in pairwise(cuts)
        ]
    got = torch.cat(parts, dim=1)
    for row, pads in enumerate(PADDING):
        pools = twins.pipe(twins.sink(2), twins.recent(5), PIPES[text]())
        loop = naive(llama, pools, 3, CHUNK, rolling=positions == "rolling")
        mine = tokens[row, pads:].tolist()
        wanted = [loop.feed(mine[: PROMPT - pads], at_once=prefill == "full")]
        wanted.append(loop.feed(mine[PROMPT - pads :]))
        close_runs(got[row, pads:], torch.cat(wanted), llama)
        for layer in range(2):
            held = cache.slots(layer)
            for head in range(2):
                here = held.position[row, head]
                assert sorted(here[here >= 0]) == sorted(
                    t.position for t in loop.slots(layer, head)
                )


@pytest.mark.parametrize("text", PIPES)
def test_a_restored_stream_goes_on_bit_for_bit(llama, ids, tmp_path, text):
    tokens = ids(2, 150)
    stream = weir.Stream(llama, START + text, chunk=CHUNK, seed=SEED)
    stream.feed(tokens[:, :70])
    stream.save(tmp_path / "session")
    wanted = stream.feed(tokens[:, 70:], all_logits=True)
    restored = weir.Stream.restore(llama, tmp_path / "session")
    assert torch.equal(restored.feed(tokens[:, 70:], all_logits=True), wanted)
    for layer in range(len(stream.cache.stack)):
        mine, theirs = stream.slots(layer), restored.slots(layer)
        for name in ("position", "keys", "values", "a", "b"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name


@pytest.mark.parametrize("text", LIMITED)
def test_rows_take_what_their_pools_remember_along(llama, ids, text):
    tokens = ids(3, 120)
    together = weir.StreamingCache(llama, START + text, chunk=CHUNK, seed=SEED)
    alone = weir.StreamingCache(llama, START + text, chunk=CHUNK, seed=SEED)
    with torch.no_grad():
        llama(tokens[:, :61], past_key_values=together)
        together.batch_select_indices(torch.tensor([2, 0, 2]))
        order = torch.stack([tokens[2, 61:], tokens[0, 61:], tokens[1, 61:]])
        got = llama(order, past_key_values=together).logits
        wanted = llama(tokens[:1], past_key_values=alone).logits[:, 61:]
    close_runs(got[1:2], wanted, llama)


@pytest.mark.parametrize("text", LIMITED)
def test_bytes_never_change_after_the_first_token(llama, ids, text):
    stream = weir.Stream(llama, START + text, chunk=CHUNK)
    tokens = ids(1, 300)
    stream.feed(tokens[:, :1])
    first = stream.cache.nbytes
    for piece in tokens[:, 1:].split(50, dim=1):
        stream.feed(piece)
        assert stream.cache.nbytes == first
    slab = stream.cache.stack[0].state.slab
    assert len(slab) == 2 + 5 + 6 + CHUNK
    assert first == sum(layer.state.slab.nbytes for layer in stream.cache.stack)


@pytest.mark.slow
def test_a_sample_without_a_limit_grows_with_the_stream(llama, ids):
    stream = weir.Stream(llama, START + "uniform(rate=0.25, per_head=false)", chunk=CHUNK)
    stream.feed(ids(1, 2000))
    slots = stream.report()["layers"][0]["slots"]
    assert abs(slots["uniform"] - 0.25 * 1993) < 5 * math.sqrt(1993 * 0.25 * 0.75)


def test_full_prefill_and_chunks_hold_the_same_sample(llama, ids):
    # A sample depends only on places. Once the same tokens have left the window, it is the same.
    tokens, held = ids(1, 96), {}
    for prefill in ("chunked", "full"):
        for chunk in (1, 8, 32):
            stream = weir.Stream(
                llama, START + "reservoir(6, per_head=true)", chunk=chunk, prefill=prefill
            )
            stream.feed(tokens)
            slots = stream.slots(1)
            held[prefill, chunk] = slots.position[0].tolist()
    assert len({str(positions) for positions in held.values()}) == 1


@pytest.mark.parametrize("text", ["reservoir(6, weighted=true)", "uniform(6, weighted=true)"])
def test_weights_are_exact_however_long_the_stream(text):
    # Weights are computed again at each fold. If they were summed token by token in float32, they
    # would stop growing.
    pool = weir.policy(START + text).pools[2]
    none = torch.empty(1, 1, 0)
    like = weir.slab.Slots(none[..., None], none[..., None], none, none, none.long())
    fold = weir.pools.Fold(
        CounterRNG(0), torch.tensor([0]), AttentionParams(1.0), state=pool.state(like)
    )
    held, came = like, 0
    for size in (6, *[1] * 20):
        position = torch.arange(came, came + size)[None, None]
        keys, weights = torch.zeros(1, 1, size, 1), torch.full((1, 1, size), 0.3)
        new = weir.slab.Slots(keys, keys, weights, weights.clone(), position)
        if came == 6:
            fold.state["came"] += 4_000_000 - 6
        came = came + size if came != 6 else 4_000_000 + size
        held, _ = pool.fold(held, new, fold)
        wanted = 0.3 + math.log(int(fold.state["came"]) / 6)
        assert held.a[0, 0].tolist() == pytest.approx([wanted] * 6, rel=2**-23)
