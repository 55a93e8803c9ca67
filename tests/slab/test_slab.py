"""The slab works with pools that weir does not have, without changes to cache or attention.

Each toy pool here has a twin, a few lines of Python that work on lists. A Llama that is read token
by token with the twins (`Naive` in reference/naive.py) must give the same logits as weir.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from roundings import close_runs, largest, run_off, within
from torch import Tensor

import weir
from weir.errors import WeirError
from weir.policies.pipe import Pipe, Policy
from weir.pools import POOLS, Fold, Pool, Recent, Sink, pool
from weir.pools.counter_rng import CounterRNG
from weir.slab.attention import split_weights
from weir.slab.slab import Slab
from weir.slab.slots import Slots
from weir.slab.spec import Heads, SlabSpec

pytestmark = pytest.mark.thinned(3, least=2)

PROMPT, MORE, CHUNK = 19, 14, 4
PADDING = (0, 3, 9)
SEED = 11


def parted(slots: Slots, keep: Tensor) -> tuple[Slots, Slots]:
    """Return the slots that a mask keeps, and the others. Heads with fewer have empty slots."""

    return slots.only(keep), slots.only(~keep)


def newest(slots: Slots, keep: Tensor, n: int) -> Tensor:
    """Narrow a mask to the newest n of the slots that it keeps."""
    rank = slots.position.masked_fill(~keep, -1).argsort(dim=2, descending=True).argsort(dim=2)
    return keep & (rank < n)


def most(slots: Slots, score: Tensor, n: int) -> Tensor:
    """Return a mask of the n slots with the highest score."""
    score = score.masked_fill(~slots.held, -torch.inf)
    return slots.held & (score.argsort(dim=2, descending=True).argsort(dim=2) < n)


class Toy(Pool):
    """What all toy pools have: n slots, and a twin that applies the same rule to lists."""

    n: int

    def slots(self) -> int:
        return self.n


@dataclass(frozen=True)
class Ragged(Toy):
    """Head h keeps every (h + 2)th token, so heads hold different tokens, and not equally many."""

    n: int

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        both = held.join(new)
        head = torch.arange(both.position.shape[1])[None, :, None]
        wanted = both.held & ((both.position + head) % (head + 2) == 0)
        return parted(both, newest(both, wanted, self.n))

    def twin(self, mine, new, at):
        both = mine + new
        wanted = [t for t in both if (t.position + at.head) % (at.head + 2) == 0]
        stay = sorted(wanted, key=lambda t: t.position)[-self.n :]
        return [t for t in both if t in stay], [t for t in both if t not in stay]


@dataclass(frozen=True)
class Heaviest(Toy):
    """Keeps the tokens that received the most attention."""

    needs_mass = True

    n: int

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        both = held.join(new)
        assert both.mass is not None
        return parted(both, most(both, both.mass, self.n))

    def twin(self, mine, new, at):
        both = mine + new
        stay = sorted(both, key=lambda t: -t.mass)[: self.n]
        return stay, [t for t in both if t not in stay]


HEARD: dict[int, list[Tensor]] = {}
"""The queries that `Asked` received, by layer."""


@dataclass(frozen=True)
class Asked(Toy):
    """Keeps the tokens that match the last three queries best."""

    n: int

    @property
    def needs_queries(self) -> int:
        return 3

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        assert fold.queries is not None
        HEARD.setdefault(fold.draws.layer, []).append(fold.queries)
        both = held.join(new)
        score = torch.einsum("bhgld,bhnd->bhn", fold.queries.float(), both.keys.float())
        return parted(both, most(both, score, self.n))

    def twin(self, mine, new, at):
        both = mine + new
        asked = torch.stack(at.queries[-3:]).sum(dim=(0, 1))
        places = [t.position for t in both]
        score = (at.rotate(torch.stack([t.key for t in both]), places) @ asked).tolist()
        order = sorted(range(len(both)), key=lambda i: -score[i])[: self.n]
        return [both[i] for i in order], [t for i, t in enumerate(both) if i not in order]


@dataclass(frozen=True)
class Weighted(Toy):
    """Keeps every third token, which stands for three."""

    n: int

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        both = held.join(replace(new, a=new.a + math.log(3), b=new.b + math.log(3)))
        wanted = both.held & (both.position % 3 == 0)
        kept, rest = parted(both, newest(both, wanted, self.n))
        return kept, replace(rest, a=torch.zeros_like(rest.a), b=torch.zeros_like(rest.b))

    def twin(self, mine, new, at):
        both = mine + new
        stay = [t for t in both if t.position % 3 == 0][-self.n :]
        for t in stay:
            t.a = t.b = math.log(3)
        return stay, []


@dataclass(frozen=True)
class Apart(Toy):
    """Keeps tokens of the numerator only, of the denominator only, and with two weights."""

    two_weights = True

    n: int

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        both = held.join(new)
        kept, _ = parted(both, newest(both, both.held, self.n))
        kind, empty = kept.position % 3, ~kept.held
        above = torch.tensor([math.log(2), -math.inf, 0.5])[kind]
        below = torch.tensor([-math.inf, math.log(5), -1.0])[kind]
        above, below = above.masked_fill(empty, -torch.inf), below.masked_fill(empty, -torch.inf)
        return replace(kept, a=above, b=below), both.part(0, 0)

    def twin(self, mine, new, at):
        stay = (mine + new)[-self.n :]
        for t in stay:
            t.a = (math.log(2), -math.inf, 0.5)[t.position % 3]
            t.b = (-math.inf, math.log(5), -1.0)[t.position % 3]
        return stay, []


@dataclass(frozen=True)
class Lucky(Toy):
    """Keeps a sample: the tokens with the smallest random numbers."""

    n: int

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        both = held.join(new)
        return parted(both, most(both, -fold.draws.uniform(0, both.position), self.n))

    def twin(self, mine, new, at):
        def draw(t) -> float:
            draws = CounterRNG(SEED, at.layer, 1).uniform(0, torch.full((1, 2, 1), t.position))
            return float(draws[0, at.head, 0])

        both = mine + new
        stay = sorted(both, key=draw)[: self.n]
        return stay, [t for t in both if t not in stay]


@dataclass(frozen=True)
class Counting(Toy):
    """Keeps every third token that arrives, by a count that is saved from fold to fold."""

    n: int

    def state(self, like: Slots) -> dict[str, Tensor]:
        return {"met": like.position.new_zeros((*like.position.shape[:2], 1))}

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        ordinal = fold.state["met"] + new.held.cumsum(dim=2) - 1
        fold.state["met"] = fold.state["met"] + new.held.sum(dim=2, keepdim=True)
        chosen, rest = parted(new, ordinal % 3 == 0)
        both = held.join(chosen)
        kept, dropped = parted(both, newest(both, both.held, self.n))
        return kept, dropped.join(rest)

    def twin(self, mine, new, at):
        # In an unbroken window, the count of arrivals is the position in the stream.
        chosen = [t for t in new if t.position % 3 == 0]
        both = mine + chosen
        return both[-self.n :], both[: -self.n] + [t for t in new if t not in chosen]


@dataclass(frozen=True)
class Tapered(Policy):
    """A policy with a different budget for each layer."""

    text: str = "tapered"

    def for_layer(self, layer: int, layers: int) -> Pipe:
        return Pipe((Sink(1), Recent(4), Ragged(8 - 5 * layer)))


_KINDS = (Ragged, Heaviest, Asked, Weighted, Apart, Lucky, Counting)
TOYS = {kind.__name__.lower(): kind for kind in _KINDS}


@pytest.fixture(autouse=True)
def toys() -> Iterator[None]:
    """Register the toy pools while a test runs."""
    for name, kind in TOYS.items():
        pool(name)(kind)
    yield
    for name in TOYS:
        del POOLS[name]


def batch(ids: Callable[..., Tensor], rows: int = 3) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Return left-padded prompts, their mask, and each row's tokens, with those decoded later."""
    tokens = ids(rows, PROMPT + MORE)
    mask = torch.ones_like(tokens)
    for row, pads in enumerate(PADDING[:rows]):
        mask[row, :pads] = 0
    return tokens, mask, [tokens[row, pads:].tolist() for row, pads in enumerate(PADDING[:rows])]


def read(model, cache, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the logits of a prompt and of single tokens after it [batch, length, vocabulary]."""
    parts, cuts = [], [0, PROMPT, *range(PROMPT + 1, PROMPT + MORE + 1)]
    with torch.no_grad():
        for start, stop in pairwise(cuts):
            out = model(tokens[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
            parts.append(out.logits)
    return torch.cat(parts, dim=1)


PIPES = {
    "recent(5) | ragged(6)": lambda t: (t.recent(5), Ragged(6).twin),
    "sink(2) | ragged(6) | recent(7)": lambda t: (t.sink(2), Ragged(6).twin, t.recent(7)),
    "recent(3) | heaviest(6)": lambda t: (t.recent(3), Heaviest(6).twin),
    "sink(2) | heaviest(5) | recent(4)": lambda t: (t.sink(2), Heaviest(5).twin, t.recent(4)),
    "recent(3) | asked(6)": lambda t: (t.recent(3), Asked(6).twin),
    "sink(1) | recent(4) | weighted(5)": lambda t: (t.sink(1), t.recent(4), Weighted(5).twin),
    "sink(1) | recent(4) | apart(7)": lambda t: (t.sink(1), t.recent(4), Apart(7).twin),
    "recent(3) | lucky(6)": lambda t: (t.recent(3), Lucky(6).twin),
    "recent(3) | counting(5)": lambda t: (t.recent(3), Counting(5).twin),
    "ragged(4) | lucky(4) | recent(4)": lambda t: (Ragged(4).twin, Lucky(4).twin, t.recent(4)),
}


@pytest.mark.parametrize("prefill", ["chunked", "full"])
@pytest.mark.parametrize("text", PIPES)
@pytest.mark.thinned(8, repeats="one claim about the slab for pipes of every shape")
def test_a_pool_that_weir_has_never_heard_of_gives_what_its_lists_give(
    llama, naive, twins, ids, text, prefill
):
    tokens, mask, rows = batch(ids)
    mode = "rolling" if prefill == "chunked" else "original"
    cache = weir.StreamingCache(
        llama, text, chunk=CHUNK, seed=SEED, positions=mode, prefill=prefill
    )
    got = read(llama, cache, tokens, mask)
    for row, pads in enumerate(PADDING):
        pools = PIPES[text](twins)
        loop = naive(llama, twins.pipe(*pools), len(pools), CHUNK, rolling=mode == "rolling")
        prompt = PROMPT - pads
        wanted = [loop.feed(rows[row][:prompt], at_once=prefill == "full")]
        wanted.append(loop.feed(rows[row][prompt:]))
        close_runs(got[row, pads:], torch.cat(wanted), llama)
        held = cache.slots(layer=1)
        for head in range(2):
            positions_held = sorted(held.position[row, head][held.position[row, head] >= 0])
            assert positions_held == sorted(t.position for t in loop.slots(1, head))
    alone = weir.StreamingCache(
        llama, text, chunk=CHUNK, seed=SEED, positions=mode, prefill=prefill
    )
    close_runs(read(llama, alone, tokens[:1], mask[:1]), got[:1], llama)


def test_original_positions_serve_a_new_pool_too(llama, naive, twins, ids):
    tokens, mask, rows = batch(ids)
    cache = weir.StreamingCache(llama, "recent(5) | ragged(6)", chunk=3, positions="original")
    got = read(llama, cache, tokens, mask)
    for row, pads in enumerate(PADDING):
        fold = twins.pipe(twins.recent(5), Ragged(6).twin)
        wanted = naive(llama, fold, 2, 3, rolling=False).feed(rows[row])
        close_runs(got[row, pads:], wanted, llama)


@pytest.mark.parametrize("prefill", ["chunked", "full"])
def test_accumulated_attention_is_the_sum_of_softmax_from_arrival_to_the_last_fold(
    llama, naive, twins, ids, prefill
):
    tokens, mask, rows = batch(ids)
    cache = weir.StreamingCache(llama, "recent(3) | heaviest(6)", chunk=CHUNK, prefill=prefill)
    read(llama, cache, tokens, mask)
    for row, pads in enumerate(PADDING):
        loop = naive(llama, twins.pipe(twins.recent(3), Heaviest(6).twin), 2, CHUNK)
        loop.feed(rows[row][: PROMPT - pads], at_once=prefill == "full")
        loop.feed(rows[row][PROMPT - pads :])
        for layer in range(2):
            held = cache.slots(layer)
            for head in range(2):
                places = held.position[row, head].tolist()
                mass = held.mass[row, head].tolist()
                got = {p: m for p, m in zip(places, mass, strict=True) if p >= 0}
                wanted = loop.received(layer, head)
                assert got == pytest.approx(wanted, abs=run_off(llama) * max(wanted.values()))


@pytest.mark.parametrize("prefill", ["chunked", "full"])
def test_a_pool_hears_the_last_queries_as_attention_saw_them(llama, naive, twins, ids, prefill):
    tokens = ids(1, PROMPT + MORE)
    HEARD.clear()
    cache = weir.StreamingCache(llama, "recent(3) | asked(6)", chunk=CHUNK, prefill=prefill)
    read(llama, cache, tokens, torch.ones_like(tokens))
    loop = naive(llama, twins.pipe(twins.recent(3), Asked(6).twin), 2, CHUNK)
    loop.feed(tokens[0, :PROMPT], at_once=prefill == "full")
    loop.feed(tokens[0, PROMPT:])
    fold_points = range(CHUNK, PROMPT + MORE + 1, CHUNK)
    if prefill == "full":
        fold_points = range(PROMPT, PROMPT + MORE + 1, CHUNK)
    for layer in range(2):
        assert len(HEARD[layer]) == len(fold_points)
        for heard, seen in zip(HEARD[layer], fold_points, strict=True):
            for head in range(2):
                wanted = torch.stack(loop.queries[layer, head][seen - 3 : seen], dim=1).float()
                close_runs(heard[0, head], wanted, llama)


def test_half_precision_does_not_end_before_two_weights_do(fresh_llama, ids):
    # float16 ends at 65504, and exponentials can be larger. Logits of a few units in float16 carry
    # about a hundred roundings of 2^-11.
    tokens = ids(1, 40)
    exact, half = fresh_llama(), fresh_llama().half()
    got = []
    for model in (exact, half):
        cache = weir.StreamingCache(model, "recent(4) | apart(7)", chunk=4)
        with torch.no_grad():
            got.append(model(tokens, past_key_values=cache).logits.float())
    assert got[1].isfinite().all()
    bound = 100 * 2**-11 * largest(got[0])
    within(got[1], got[0], bound)


def test_every_layer_may_have_a_budget_of_its_own(llama, naive, twins, ids):
    tokens, mask, rows = batch(ids)
    cache = weir.StreamingCache(llama, Tapered(), chunk=CHUNK)
    got = read(llama, cache, tokens, mask)

    def fold(held, new, at):
        pools = (twins.sink(1), twins.recent(4), Ragged(8 - 5 * at.layer).twin)
        return twins.pipe(*pools)(held, new, at)

    for row, pads in enumerate(PADDING):
        wanted = naive(llama, fold, 3, CHUNK).feed(rows[row])
        close_runs(got[row, pads:], wanted, llama)
    assert [len(layer.state.slab) for layer in cache.stack] == [13 + CHUNK, 8 + CHUNK]


def test_draws_decide_alike_however_the_stream_is_cut_or_batched(llama, ids):
    tokens = ids(3, PROMPT + MORE)
    together = weir.StreamingCache(llama, "recent(3) | lucky(6)", chunk=CHUNK, seed=5)
    read(llama, together, tokens, torch.ones_like(tokens))
    alone = weir.StreamingCache(llama, "recent(3) | lucky(6)", chunk=CHUNK, seed=5)
    with torch.no_grad():
        llama(tokens[1:2], past_key_values=alone)
    other = weir.StreamingCache(llama, "recent(3) | lucky(6)", chunk=CHUNK, seed=6)
    with torch.no_grad():
        llama(tokens[1:2], past_key_values=other)
    for layer in range(2):
        both = [c.slots(layer).position for c in (together, alone, other)]
        assert torch.equal(both[0][1], both[1][0])
        assert not torch.equal(both[1], both[2])


@pytest.mark.parametrize("text", ["recent(3) | asked(6)", "recent(3) | heaviest(6)", "counting(5)"])
def test_what_a_pool_reads_outlives_inference_mode(llama, ids, text):
    tokens, mask, _ = batch(ids)
    cache = weir.StreamingCache(llama, text, chunk=CHUNK)
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad]
    parts = []
    for start in range(0, PROMPT + MORE, 3):
        stop = start + 3
        with modes[start % 5 % 3]():
            out = llama(tokens[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
            cache.reorder_cache(torch.tensor([0, 1, 2]))
        parts.append(out.logits.detach().clone())
    wanted = read(llama, weir.StreamingCache(llama, text, chunk=CHUNK), tokens, mask)
    got = torch.cat(parts, dim=1)
    for row, pads in enumerate(PADDING):
        close_runs(got[row, pads:], wanted[row, pads:], llama)


def test_a_pool_that_keeps_more_than_it_may_is_named(llama, ids):
    @pool("greedy")
    @dataclass(frozen=True)
    class Greedy(Toy):
        n: int

        def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
            both = held.join(new)
            return both, both.part(0, 0)

    try:
        cache = weir.StreamingCache(llama, "recent(4) | greedy(3)", chunk=2)
        with pytest.raises(WeirError, match="greedy kept 4 slots, and its limit is 3"):
            llama(ids(1, 20), past_key_values=cache)
    finally:
        del POOLS["greedy"]


# --- slots and slabs alone


def some_slots(places: list[list[int]], seed: int = 0) -> Slots:
    """Return random slots of one row at the given positions of each head; -1 is an empty slot."""
    position = torch.tensor([places])
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(position.shape).masked_fill(position < 0, -torch.inf)
    keys, values = torch.randn((2, *position.shape, 4), generator=generator)
    mass = torch.rand(position.shape, generator=generator)
    return Slots(keys, values, weights, weights.clone(), position, mass)


def a_slab() -> Slab:
    """Return an empty slab of eight slots, one row and two heads, with every buffer."""
    heads = Heads(2, 1, 4, 4, torch.float32)
    return Slab(SlabSpec(heads, 8, masters=3, mass=True, two_weights=True, frames=True), 1)


def test_a_slab_knows_the_sizes_it_was_made_for():
    heads = Heads(2, 3, 8, 4, torch.bfloat16)
    assert Slab(SlabSpec(heads, 5), 7).heads(3) == heads


def test_taking_slots_leaves_what_was_not_named_empty():
    taken = some_slots([[5, 6, 7], [8, 9, -1]]).take(torch.tensor([[[2, -1], [0, 1]]]))
    assert taken.position.tolist() == [[[7, -1], [8, 9]]]
    assert taken.held.tolist() == [[[True, False], [True, True]]]
    for weights in (taken.a, taken.b):
        assert weights[0, 0].tolist() == [0.0, -math.inf]
    assert taken.mass[0, 0, 1] == 0


def test_slots_in_order_have_the_empty_ones_first():
    slots = some_slots([[7, -1, 3], [2, 9, 1]]).by_position()
    assert slots.position.tolist() == [[[-1, 3, 7], [1, 2, 9]]]
    assert slots.a[0, 0].tolist() == [-math.inf, 0.0, 0.0]


def test_neighbors_in_a_slab_join_without_a_copy():
    slab = a_slab()
    joined = slab.run(1, 3).join(slab.run(3, 6))
    assert joined.keys.data_ptr() == slab.keys[:, :, 1:].data_ptr()
    assert (joined.slab, joined.place, len(joined)) == (slab, 1, 5)
    apart = slab.run(1, 3).join(slab.run(4, 6))
    assert (apart.slab, len(apart)) == (None, 4)


def test_slots_whose_weights_were_replaced_no_longer_lie_in_the_slab():
    slab = a_slab()
    view = slab.run(0, 2)
    changed = replace(view, a=torch.ones_like(view.a))
    assert changed.slab is None
    assert changed.join(slab.run(2, 4)).a[..., :2].eq(1).all()


def test_a_tail_that_waits_lies_in_the_future():
    slab = a_slab()
    slab.open_tail(2, torch.tensor([40]), 3)
    assert slab.position[0, 0].tolist() == [-1, -1, 40, 41, 42, -1, -1, -1]
    assert slab.b[0, 0, 2:].tolist() == [0.0] * 3 + [-math.inf] * 3
    assert slab.frame[0, 0, 2:5].tolist() == [40, 41, 42]


def test_the_bytes_of_a_slab_are_those_of_its_buffers():
    slab = a_slab()
    assert slab.nbytes == sum(t.untyped_storage().nbytes() for t in slab.tensors().values())
    assert set(slab.tensors()) == {f for f, t in vars(slab).items() if isinstance(t, Tensor)}


def test_growing_a_slab_keeps_what_it_holds_and_adds_empty_slots():
    slab = a_slab()
    slab.write(0, some_slots([[3, 4], [5, 6]]), front=False)
    before = {name: t.clone() for name, t in slab.tensors().items()}
    slab.grow(12)
    assert len(slab) == 12
    assert slab.position[..., 8:].eq(-1).all() and slab.b[..., 8:].isneginf().all()
    for name, t in before.items():
        assert torch.equal(getattr(slab, name)[:, :, : t.shape[2]], t)


def test_rows_come_and_go_by_their_index():
    slab = Slab(SlabSpec(Heads(1, 1, 2, 2, torch.float32), 4), 3)
    slab.keys += torch.arange(3.0)[:, None, None, None]
    part = slab.rows(torch.tensor([2, 0]))
    assert part.keys[:, 0, 0, 0].tolist() == [2.0, 0.0]
    part.keys += 10
    slab.put_rows(torch.tensor([2, 0]), part)
    assert slab.keys[:, 0, 0, 0].tolist() == [10.0, 1.0, 12.0]


def test_a_slab_keeps_its_weights_split_through_all_that_is_written():
    slab = a_slab()

    def check():
        assert slab.split is not None
        for found, wanted in zip(slab.split, split_weights(slab.a, slab.b), strict=True):
            assert torch.equal(found, wanted)

    check()
    slots = some_slots([[3, 4, 9], [5, 6, -1]])
    slots.a[0, 0] = torch.tensor([1.0, -math.inf, 2.0])
    slots.b[0, 0] = torch.tensor([3.0, 4.0, -math.inf])
    slab.write(0, slots, front=False)
    check()
    slab.open_tail(3, torch.tensor([10]), 2)
    check()
    slab.append(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 3)
    slab.grow(12)
    check()
    slab = slab.rows(torch.tensor([0, 0]))
    check()
    slab.open_tail(1, torch.tensor([12, 12]), 4)
    check()


def test_tokens_are_finite_whatever_their_sum_and_empty_slots_do():
    position = torch.tensor([[[0, 1, -1]]])
    weight = torch.zeros(1, 1, 3)

    def slots(*numbers: float) -> Slots:
        keys = torch.tensor(numbers)[None, None, :, None]
        return Slots(keys, torch.ones_like(keys), weight, weight, position)

    assert slots(1.0, 2.0, 3.0).finite
    assert slots(3e38, 3e38, 3.0).finite
    assert slots(1.0, 2.0, math.nan).finite
    assert not slots(1.0, math.inf, 3.0).finite
    assert not slots(math.nan, 2.0, 3.0).finite
    assert not slots(math.inf, -math.inf, 3.0).finite
